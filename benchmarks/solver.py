"""The solver beside the 20 teams of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism, and XLA's solver.

    python benchmarks/solver.py asplos-2025-iopddl-*.json.gz        # writes docs/benchmarks/solver.md
    python benchmarks/solver.py FILE --rows rows.json               # adds to the rows of earlier runs; writes the page

The files are in the folder `benchmarks` of https://github.com/google/iopddl. Each is solved by a process of its own,
`python -m autoshard.solver`, in the contest's time limit and in a tenth of it. Seconds and memory are the whole
process's, start and reading included; costs are recomputed from the file and the options that the process wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rows import read_rows, write_rows

from autoshard.solver import Problem
from autoshard.solver.problem import relative_gap
from autoshard.solver.verify import fits, verify

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "solver.md"


class Published(NamedTuple):
    """What the contest found for an instance, on eight cores."""

    seconds: int  # the time limit
    best: int  # the lowest of the teams' costs
    xla: int | None  # the cost of XLA's solver


# Best: misc/iopddl_final_results.csv of https://github.com/asplos-contest/2025, the least of each column.
# XLA: iopddl_final_results.csv of https://github.com/ti2-group/iopddl_experiments, which adds a row to it; no number
# stands there for the other instances.
PUBLISHED = {
    "A": Published(60, 6548641531, 13214846074),
    "B": Published(60, 532843, 990205),
    "C": Published(60, 84102445260, 4195881092919),
    "D": Published(60, 313613524736, None),
    "E": Published(60, 338965335230, 6638829816582),
    "F": Published(120, 364364563561, 2788507105840),
    "G": Published(120, 217039, 1264777),
    "H": Published(120, 527715404257, 7746779635221),
    "I": Published(120, 583706456444, 6552890513792),
    "J": Published(120, 1360981630371, None),
    "K": Published(180, 2274276676, None),
    "L": Published(180, 1970993742, None),
    "M": Published(180, 49928460991, None),
    "N": Published(180, 202739586553, None),
    "O": Published(180, 222880199765, None),
    "P": Published(240, 662197407330, 651833115436),
    "Q": Published(240, 526776842042, 1995944800323),
    "R": Published(240, 371899551572, None),
    "S": Published(240, 1534613444, None),
    "T": Published(240, 682895254913, None),
    "U": Published(300, 2569342178, None),
    "V": Published(300, 1632051, None),
    "W": Published(300, 11818845467155, None),
    "X": Published(300, 280461191177, None),
    "Y": Published(300, 621176568278, None),
}
HEAD = """# The solver on the contest's instances

`python benchmarks/solver.py FILE...` on {machine}.
Each row is one process, `python -m autoshard.solver`, in the contest's time limit or a tenth of it, start and reading
of the file included. Costs are recomputed from the options that it wrote. *Best* is the lowest cost of the 20 teams of
the ASPLOS/EuroSys 2025 contest on intra-operator parallelism
([results](https://github.com/asplos-contest/2025/blob/main/misc/iopddl_final_results.csv)), on eight cores. *Ratio* is
cost over best. *XLA* is the cost of XLA's solver, where one is published
([source](https://github.com/ti2-group/iopddl_experiments/blob/main/iopddl_final_results.csv)). The instances are in the
folder `benchmarks` of https://github.com/google/iopddl.

| instance | limit, s | nodes | edges | cost | bound | gap | seconds | GiB | best | ratio | XLA |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""


@dataclass(frozen=True)
class Row:
    """One run on one file."""

    instance: str
    time_limit: float  # s
    nodes: int
    edges: int
    cost: float | None  # None: no choice was found
    bound: float | None
    seconds: float  # of the whole process
    peak_bytes: int  # of the whole process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for files that are not the contest's")
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.1], help="of the time limit, in turn")
    parser.add_argument("--rows", type=Path, help="a JSON file of rows, to do everything in several runs")
    options = parser.parse_args()
    kept = read_rows(options.rows, Row, lambda row: (row.instance, row.time_limit))
    for file in options.files:
        instance = instance_of(file)
        limit = PUBLISHED[instance].seconds if instance in PUBLISHED else options.time_limit
        problem = Problem.read(file)
        for share in options.shares:
            row = run(file, problem, share * limit)
            kept[row.instance, row.time_limit] = row
            print(line(row), flush=True)
            write_rows(options.rows, kept.values())
    PAGE.write_text(page(kept.values()))


def instance_of(file: Path) -> str:
    """
    >>> instance_of(Path("asplos-2025-iopddl-A.json.gz")), instance_of(Path("gpt-tpu.json.gz"))
    ('A', 'gpt-tpu')
    """
    return file.name.split(".")[0].removeprefix("asplos-2025-iopddl-")


def run(file: Path, problem: Problem, time_limit: float) -> Row:
    """Solves a file in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "choice.json"
        command = [sys.executable, "-m", "autoshard.solver", file, "--time-limit", str(time_limit), "--output", output]
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 1):  # 1: it says that it found no choice
            raise subprocess.CalledProcessError(process.returncode, command)
        choice = json.loads(output.read_text()) if output.exists() else None
    cost = bound = None
    if choice is not None:
        cost, peak = verify(problem, choice)
        assert cost < float("inf") and fits(peak, problem.limit), "the solver wrote a choice that is not allowed"
        bound = float(re.search(r"bound (\S+),", said).group(1))
    unit = 1 if platform.system() == "Darwin" else 1024
    sizes = len(problem.costs), len(problem.edges)
    return Row(instance_of(file), time_limit, *sizes, cost, bound, seconds, usage.ru_maxrss * unit)


def line(row: Row) -> str:
    """
    >>> line(Row("G", 12.0, 816, 1023, 217039.0, 216000.0, 3.21, 2**29))
    '| G | 12 | 816 | 1023 | 217039 | 216000 | 0.48% | 3.2 | 0.5 | 217039 | 1.0000 | 1264777 |'
    """
    published = PUBLISHED.get(row.instance)
    found = ["-"] * 3
    if row.cost is not None:
        found = [number(row.cost), number(row.bound), f"{relative_gap(row.cost, row.bound):.2%}"]
    others = ["-"] * 3
    if published:
        ratio = "-" if row.cost is None else f"{row.cost / published.best:.4f}"
        others = [str(published.best), ratio, str(published.xla or "-")]
    head = [row.instance, f"{row.time_limit:g}", str(row.nodes), str(row.edges)]
    return table_line([*head, *found, f"{row.seconds:.1f}", f"{row.peak_bytes / 2**30:.1f}", *others])


def number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.6g}"


def table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(rows: Iterable[Row]) -> str:
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    rows = sorted(rows, key=lambda row: (row.instance, -row.time_limit))
    return HEAD.format(machine=machine) + "\n".join(map(line, rows)) + "\n"


if __name__ == "__main__":
    main()
