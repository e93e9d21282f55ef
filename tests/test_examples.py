"""Every example runs, with few steps, and prints what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import compilation
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

RUNS = [  # command line, a pattern for each promised piece of output
    (
        "train_gpt.py --steps 3 --layers 1 --width 64 --context 32 --mesh 8 --memory 2MiB",
        [
            r"1\.\d MiB of 2\.0 MiB per device",
            r"all_reduce +data ",
            r"│ 3 +│ \d\.\d+",
            r"difference between the two: (\d\.\de-0[5-9]|0\.0e\+00)",
            r"model writes",
        ],
    ),
    ("cnn_digits.py --steps 3", [r"step   3  loss \d\.\d+", r"Accuracy on 360 images it has not seen: \d+\.\d%"]),
    (
        "pipeline_gpt.py --steps 2 --stages 2 --layers 2",
        [
            r"stage 1 .*data=4",
            r"Schedule 1f1b with 4 microbatches",
            r"step   1: loss (\d\.\d{3}), on one device \1",
            r"layers/up lies P.*'stages'",
        ],
    ),
    ("moe.py --steps 3", [r"\d+ x [\d,]+ bytes, from moe.py:\d+", r"step   3  loss (\d\.\d{4}).*on one device \1"]),
]


def run(command: str, patterns: list[str]) -> None:
    """Run an example and find every pattern in its output."""
    name, *options = command.split()
    cpu = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": compilation.CPU_ONLY}
    environment = {**os.environ, **cpu, "PYTHONIOENCODING": "utf-8", "COLUMNS": "120"}
    script = [sys.executable, EXAMPLES / name, *options]
    result = subprocess.run(script, env=environment, capture_output=True, encoding="utf-8", timeout=200)
    assert result.returncode == 0, result.stderr
    missing = [pattern for pattern in patterns if not re.search(pattern, result.stdout)]
    assert not missing, f"{missing} not in the output of {name}:\n{result.stdout}"


@pytest.mark.parametrize("command, patterns", RUNS, ids=[command.split()[0] for command, _ in RUNS])
def test_runs_and_prints(command, patterns):
    run(command, patterns)


def test_every_example_is_run():
    assert {command.split()[0] for command, _ in RUNS} == {path.name for path in EXAMPLES.glob("*.py")}


def test_the_check_can_fail(tmp_path):
    script = tmp_path / "example.py"
    script.write_text("import sys\nprint('all_gather')\nsys.exit(*sys.argv[1:])")
    run(str(script), ["all_gather"])
    with pytest.raises(AssertionError, match="not in the output"):
        run(str(script), ["all_reduce"])
    with pytest.raises(AssertionError, match="planted"):
        run(f"{script} planted", [])


def test_the_readme_gets_virtual_devices_where_there_are_no_accelerators():
    page = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    start = re.search(r"```python\n(import jax\n.*?)\n\n@autoshard", page, re.DOTALL)
    assert start is not None
    script = start[1].replace("# jax.config", "jax.config") + "\nprint(mesh.size, jax.device_count())"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["8", "8"]
