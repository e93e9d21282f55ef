"""Other libraries' tests, with what jits replaced by autoshard: which fail that pass as they are.

    python benchmarks/library_suites.py ~/flax/tests/nnx                            # all tests that jit something
    python benchmarks/library_suites.py ~/optax/optax --sample 200 --seed 1
    python benchmarks/library_suites.py ~/flax/tests/linen --only Fp8 --rows FILE   # adds to the results in the file

Takes folders of pytest tests, as flax, optax and equinox have them, from checkouts at the versions that are installed.
In them `jax.jit(fn)`, `nnx.jit(fn)` and `eqx.filter_jit(fn)`, called with arrays, are `autoshard(fn)`, as in
`jax_suites.py`, on eight CPU devices or as many as the tests ask for. Tests whose source says neither "jit" nor
"variant" are left out, but for `--all`.
A test that fails runs again as it is, in a process of its own; it is a fault if it passes then. Some of these are none:
tests that count traces, look for tracers' errors, or take Python numbers for static. The list has to be read.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from harnesses import FLAGS  # noqa: E402  (needs the path above)
from jax_suites import KEPT_TESTS, Replacement, Row, print_faults  # noqa: E402

TEST_SECONDS = 150
OUTCOMES = {"passed": "passes", "failed": "fails", "skipped": "skipped"}  # pytest's word -> that of a row
SETTINGS = "AUTOSHARD_LIBRARY_SUITES"  # environment variable: options of the process that runs tests, as JSON


class Plugin:
    """Replaces what jits, chooses tests and writes down what becomes of them."""

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.replacements, self.count = settings, list[Any](), 0
        if settings["replaces"]:
            self._replace()

    def _replace(self) -> None:
        """Before tests are imported, and libraries that jit as they are imported."""
        import equinox
        import jax
        from flax import nnx

        places = [(jax, "jit"), (nnx, "jit"), (equinox, "filter_jit")]
        self.replacements = [Replacement(getattr(module, name)) for module, name in places]
        for (module, name), replacement in zip(places, self.replacements, strict=True):
            setattr(module, name, replacement)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.settings["replaces"]:
            chosen = [item for item in items if self.settings["all"] or _jits(item)]
            random.Random(self.settings["seed"]).shuffle(chosen)
            items[:] = chosen[: self.settings["sample"]]
        else:
            failed = set(self.settings["tests"])
            items[:] = [item for item in items if item.nodeid in failed]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        import jax

        report = (yield).get_result()
        if report.when != "call" and report.passed:
            return
        self.count += 1
        if self.count % KEPT_TESTS == 0:
            jax.clear_caches()
        detail = ""
        if report.failed and call.excinfo is not None:
            ours = [str(entry.path) for entry in call.excinfo.traceback if "/autoshard/" in str(entry.path)]
            at = f" [{ours[-1].split('/')[-1]}]" if ours else ""
            detail = f"{call.excinfo.typename}: {str(call.excinfo.value)[:300]}{at}"
        calls = sum(made.calls for made in self.replacements)
        for made in self.replacements:
            made.calls = 0
        row = Row(item.nodeid, OUTCOMES[report.outcome], calls, detail=detail, seconds=call.duration)
        with open(self.settings["rows"], "a") as file:
            print(json.dumps(asdict(row)), file=file)


def _jits(item: pytest.Item) -> bool:
    try:
        source = inspect.getsource(item.function)  # type: ignore[attr-defined]
    except (AttributeError, OSError, TypeError):
        return True
    return "jit" in source or "variant" in source


def run(folder: Path, settings: dict[str, Any], only: str | None) -> None:
    """Tests of a folder in a process of its own, which adds its rows to a file."""
    command = [sys.executable, __file__, "--worker", str(folder), *(["--only", only] if only else [])]
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "PYTHONPATH": os.pathsep.join(paths)}
    seconds = TEST_SECONDS * max(1, settings["sample"] or 1000)
    subprocess.run(
        command, env=os.environ | environment | {SETTINGS: json.dumps(settings)}, timeout=seconds, check=False
    )


def rows_in(file: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def print_rows(rows: Sequence[Row]) -> None:
    called = [row for row in rows if row.calls]
    outcomes = collections.Counter(row.outcome for row in called)
    faults = [row for row in called if row.is_fault]
    print(f"{len(rows)} tests, {len(called)} call autoshard: {outcomes['passes']} pass, {len(faults)} fail alone there")
    print_faults(faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="tests of a library's checkout")
    parser.add_argument("--only", help="a part of the tests' names, as pytest's -k takes it")
    parser.add_argument("--sample", type=int, help="how many tests")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--all", action="store_true", help="also tests whose source does not say that they jit")
    parser.add_argument("--rows", type=Path, default=Path("library_suites.jsonl"), help="a file of results to add to")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        plugin = Plugin(json.loads(os.environ[SETTINGS]))
        only = ["-k", options.only] if options.only else []
        quiet = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "--import-mode=importlib"]
        quiet.append("--continue-on-collection-errors")  # of files that need what is not installed
        return int(pytest.main([str(options.folder), *quiet, *only], plugins=[plugin]))
    started = time.perf_counter()
    rows_file, plain_file = options.rows.resolve(), options.rows.resolve().with_suffix(".plain")
    settings = {"sample": options.sample, "seed": options.seed, "all": options.all, "rows": str(rows_file)}
    run(options.folder, settings | {"replaces": True}, options.only)
    found = rows_in(rows_file)
    failed = [row.test for row in found if row.outcome == "fails" and row.calls]
    run(options.folder, settings | {"replaces": False, "tests": failed, "rows": str(plain_file)}, options.only)
    plain = {row.test: row.outcome for row in rows_in(plain_file)}
    rows = [replace(row, plain=plain.get(row.test, "")) for row in found]
    print_rows(rows)
    print(f"{time.perf_counter() - started:.0f} s")
    return int(any(row.is_fault for row in rows))


if __name__ == "__main__":
    sys.exit(main())
