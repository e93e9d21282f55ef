"""The command line: what it prints where, what it hands to `solve`, and how it ends."""

from __future__ import annotations

import functools
import gc
import io
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from problems import hard_problem, random_problem

from autoshard.solver import Problem, Progress, Solution
from autoshard.solver import __main__ as command
from autoshard.solver.problem import Edge, Live
from autoshard.solver.verify import fits, verify

SMALL = Problem(
    costs=(np.array([0.0, 1.0]), np.array([0.0, 3.0])),
    edges=(Edge(0, 1, np.array([[5.0, 0.0], [0.0, 5.0]])),),
    lives=(Live(0, 0, 2, np.array([8, 4])), Live(1, 1, 2, np.array([4, 8]))),
    limit=12,
)
RESULT = r"{name}: cost (\S+), bound (\S+), gap (\S+)%, (optimal|feasible), \d+\.\d s: import \d+\.\d, read \d+\.\d.*\n"


@pytest.fixture
def file(tmp_path):
    SMALL.write(tmp_path / "small.json.gz")
    return tmp_path / "small.json.gz"


def run(*arguments: object) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "autoshard.solver", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_small_file(file, tmp_path):
    result = run(file, "--output", tmp_path / "choice.json")
    assert result.returncode == 0
    assert re.fullmatch(RESULT.format(name=file.name), result.stdout).groups() == ("1", "1", "0.000", "optimal")
    assert json.loads((tmp_path / "choice.json").read_text()) == [1, 0]


def test_the_collector_is_left_as_it_was(file, capsys):
    """Objects that stay frozen slow down all that the process does afterwards."""
    assert command.main([str(file)]) == 0
    assert not gc.get_freeze_count()


def test_silent_at_first(monkeypatch, file, capsys):
    monkeypatch.setattr(command, "SILENCE", 60.0)
    assert command.main([str(file)]) == 0
    assert capsys.readouterr().err == ""


def test_several_files(file, tmp_path):
    """Each that can be solved has its line; each that cannot has one on stderr."""
    never = tmp_path / "never.json"
    replace(SMALL, limit=7).write(never)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    result = run(never, file, broken)
    assert result.returncode == 1
    assert re.fullmatch(RESULT.format(name=file.name), result.stdout)
    first, second = (line for line in result.stderr.splitlines() if line.startswith("error"))  # others: progress
    assert re.match(rf"error: {never}: no choice fits in 7 bytes.*\b8\b", first), first
    assert second.startswith(f"error: {broken}: is not JSON")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: FILE"),
        (["{file}", "--time-limit", "0"], "0 is not above 0"),
        (["{file}", "--time-limit", "nan"], "nan is not above 0"),
        (["{file}", "--time-limit", "soon"], "invalid"),
        (["{file}", "--threads", "0"], "0 is not 1 or more"),
        (["{file}", "{file}", "--output", "choice.json"], "--output takes the choice for one file"),
        (["{file}", "--output", "{file}/none/choice.json"], "there is no folder"),
    ],
)
def test_wrong_arguments(file, capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        command.main([argument.format(file=file) for argument in arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_an_output_that_cannot_be_written(file, tmp_path, capsys):
    assert command.main([str(file), "--output", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {file}: {tmp_path} cannot be written")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("words, seconds", [([], 60), (["--iterations", "9"], np.inf), (["--time-limit", "7"], 7)])
def test_time_limits(monkeypatch, file, words, seconds):
    def quick_solve(problem, *, time_limit, **keywords):
        assert time_limit == pytest.approx(seconds - command.ENDING, abs=2)
        return Solution((1, 0), 3e6, 2e6, "feasible", {})

    monkeypatch.setattr(command, "solve", quick_solve)
    assert command.main([str(file), *words]) == 0


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_after_a_second(monkeypatch, file, capsys, terminal):
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(command, "SILENCE", 0.01)

    def slow_solve(problem, *, time_limit, iterations, seed, threads, progress):
        """A `solve` that goes on when what it tells has been written."""
        assert 0 < time_limit <= 7 - command.ENDING and iterations == 9 and seed == 3 and threads == 1
        for stage, cost, bound in (("simplify", np.inf, -np.inf), ("moves", 4e6, -np.inf), ("proof", 3e6, 2e6)):
            progress(Progress(stage, cost, bound, 1.0))
            for _ in range(1000):
                if f"{stage}: cost" in stderr.getvalue():
                    break
                time.sleep(0.01)
        return Solution((1, 0), 3e6, 2e6, "feasible", {"moves": 1.5})

    monkeypatch.setattr(command, "solve", slow_solve)
    assert command.main([str(file), "--time-limit", "7", "--iterations", "9", "--seed", "3", "--threads", "1"]) == 0
    assert re.fullmatch(RESULT.format(name=file.name), capsys.readouterr().out)
    said = stderr.getvalue()
    if terminal:  # one line, taken away in the end
        assert f"{file.name}: proof: cost 3000000, bound 2000000, gap 33.33%" in said and said.endswith("\x1b[2K")
    else:
        lines = [re.sub(r"\d+ s$", "n s", line) for line in said.splitlines()]
        assert [line for line in lines if ": read:" not in line] == [
            f"{file.name}: simplify: cost -, bound -, gap -, n s",
            f"{file.name}: moves: cost 4000000, bound -, gap -, n s",
            f"{file.name}: proof: cost 3000000, bound 2000000, gap 33.33%, n s",
        ]


def test_interrupted_before_any_choice(monkeypatch, file, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "solve", interrupted)
    assert command.main([str(file)]) == 130
    assert capsys.readouterr().err == f"error: {file}: interrupted before any choice was found\n"


def test_interrupted_with_a_choice(tmp_path):
    """Ctrl-C gives the best choice so far."""
    file, output = tmp_path / "hard.json", tmp_path / "choice.json"
    problem = hard_problem()
    problem.write(file)
    line = [sys.executable, "-m", "autoshard.solver", str(file), "--output", str(output), "--time-limit", "600"]
    hearing = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, **pipes, preexec_fn=hearing) as process:
        try:
            for said in process.stderr:
                if "cost -" not in said:  # some choice is known
                    process.send_signal(signal.SIGINT)
                    break
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    cost, peak = verify(problem, json.loads(output.read_text()))
    assert fits(peak, problem.limit)
    assert re.fullmatch(RESULT.format(name=file.name), out).group(1, 4) == (f"{cost:.6g}", "feasible")


def test_names_stay_as_they_are(tmp_path, capsys):
    """A file may be named like rich's markup."""
    file = tmp_path / "[red]odd.json"
    random_problem(1, nodes=2).write(file)
    command.main([str(file)])
    said = capsys.readouterr()
    assert "[red]odd.json: " in said.out + said.err
