"""Solves contest files: ``python -m autoshard.solver FILE... --time-limit 60``.

Prints one line per file: what the choice costs, what every choice costs at least, and where the time went. What is
known so far stands on stderr once that takes more than two seconds; Ctrl-C ends the search with the best so far.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from autoshard.errors import SolverError
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.progress import Progress
from autoshard.solver.runtime.garbage_collection import frozen
from autoshard.solver.solve import solve, usual_limit

SILENCE = 2.0  # s without a word, and between two lines where lines cannot be overwritten
PAUSE = 10.0  # s between two such lines of the same stage
ENDING = 0.3  # s of the time limit that are kept to write the choice and to end the process


def main(arguments: Sequence[str] | None = None, start: float | None = None) -> int:
    """Runs the command line; returns its exit status: 0, 1 if a file could not be solved, 130 after Ctrl-C.

    Args:
        start: when the time limit began to count, as `time.monotonic` says it; None: now.
    """
    start = time.monotonic() if start is None else start
    parser = argparse.ArgumentParser(
        "python -m autoshard.solver",
        description="Solves files of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", type=Path, help=".json or .json.gz")
    parser.add_argument("--time-limit", type=_seconds, help="seconds for each file, all included (60)")
    parser.add_argument("--iterations", type=_count, help="how much to search: the same in any run, if no time is set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=_count, help="all cores if left out")
    parser.add_argument("--output", type=Path, help="file for the chosen option of each node, as [0, 2, 1]")
    options = parser.parse_args(arguments)
    if options.time_limit is None:
        options.time_limit = usual_limit(options.iterations)
    if options.output and len(options.files) > 1:
        parser.error("--output takes the choice for one file")
    if options.output and not options.output.absolute().parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.absolute().parent}")
    failed = 0
    for file in options.files:
        try:
            print(_solve_file(file, start, options), flush=True)
        except SolverError as error:
            failed = 1
            message = " ".join(str(error).split())
            print(f"error: {message}" if str(file) in message else f"error: {file}: {message}", file=sys.stderr)
        except KeyboardInterrupt:
            print(f"error: {file}: interrupted before any choice was found", file=sys.stderr)
            return 130
        start = time.monotonic()
    return failed


def _solve_file(file: Path, start: float, options: argparse.Namespace) -> str:
    """Solves a file in the time that is left since `start`, and returns the line that says how it went."""
    begun = time.monotonic()
    with _ProgressLine(file.name, start) as line:
        problem = Problem.read(file)
        read = time.monotonic()
        with frozen():  # what was read stays until the problem is solved
            solution = solve(
                problem,
                time_limit=max(0.0, options.time_limit - (read - start) - ENDING),
                iterations=options.iterations,
                seed=options.seed,
                threads=options.threads,
                progress=line.show,
            )
    if options.output:
        try:
            options.output.write_text(json.dumps(solution.choice) + "\n")
        except OSError as error:
            raise SolverError(f"{options.output} cannot be written: {error}") from error
    stages = {"import": begun - start, "read": read - begun, **solution.seconds}
    return f"{file.name}: {result_text(solution, time.monotonic() - start, stages)}"


def result_text(solution: Solution, seconds: float, stages: dict[str, float]) -> str:
    """
    >>> result_text(Solution((0,), cost=217039.0, bound=217039.0, status="optimal"), 1.44, {"read": 0.3, "moves": 1.1})
    'cost 217039, bound 217039, gap 0.000%, optimal, 1.4 s: read 0.3, moves 1.1'
    """
    known = f"cost {_number(solution.cost)}, bound {_number(solution.bound)}, gap {solution.gap:.3%}"
    spent = ", ".join(f"{stage} {part:.1f}" for stage, part in stages.items())
    return f"{known}, {solution.status}, {seconds:.1f} s: {spent}"


def progress_text(progress: Progress, seconds: float) -> str:
    """
    >>> progress_text(Progress("sweeps", cost=math.inf, bound=2.5e9, seconds=1.0), 1.25)
    'sweeps: cost -, bound 2500000000, gap -, 1 s'
    """
    gap = f"{progress.gap:.2%}" if math.isfinite(progress.gap) else "-"
    known = f"cost {_number(progress.cost)}, bound {_number(progress.bound)}, gap {gap}"
    return f"{progress.stage}: {known}, {seconds:.0f} s"


class _ProgressLine:
    """What is known so far, on stderr: one line that changes on a terminal, else lines now and then.

    A thread of its own writes it, since some steps of the solver take long and tell nothing.
    """

    def __init__(self, name: str, start: float):
        self.name, self.start = name, start
        self.progress = Progress("read", math.inf, -math.inf, 0.0)
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> _ProgressLine:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.done.set()
        self.thread.join()

    def show(self, progress: Progress) -> None:
        self.progress = progress

    def _write(self) -> None:
        if self.done.wait(SILENCE):
            return
        if sys.stderr.isatty():
            self._overwrite()
        else:
            self._print()

    def _overwrite(self) -> None:
        from rich.console import Console  # takes longer to import than many files take to solve
        from rich.live import Live
        from rich.text import Text

        def line() -> Text:
            return Text(self._text(), no_wrap=True, overflow="ellipsis")

        with Live(console=Console(stderr=True), get_renderable=line, refresh_per_second=4, transient=True):
            self.done.wait()

    def _print(self) -> None:
        stage, waited = "", PAUSE
        while True:
            if waited >= PAUSE or (waited >= SILENCE and self.progress.stage != stage):
                stage, waited = self.progress.stage, 0.0
                print(self._text(), file=sys.stderr, flush=True)
            if self.done.wait(SILENCE):
                return
            waited += SILENCE

    def _text(self) -> str:
        return f"{self.name}: {progress_text(self.progress, time.monotonic() - self.start)}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return str(math.floor(value)) if abs(value) >= 1e6 else f"{value:.6g}"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return seconds


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return count


def _started() -> float:
    """When this process began, as `time.monotonic` would have said."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):  # no Linux
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine started
        return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return time.monotonic() - time.process_time()  # importing keeps one core busy


if __name__ == "__main__":
    status = main(start=_started())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what still runs in other threads, HiGHS or the compiler, would be waited for
