"""The published searches and the solver's own way, on the same problems, for the same time: cost over time.

    python benchmarks/searches.py                                      # all: 20 CPU minutes; writes docs/benchmarks/
    python benchmarks/searches.py --searches pase none --rows rows.json     # adds to the rows of earlier runs
    python benchmarks/searches.py --contest asplos-2025-iopddl-G.json.gz    # the contest's problems, too

Problems are those of `benchmarks/instances/` and files of the contest. Every search runs in this process, after what it
imports is loaded, and is ended by the CPU seconds that it has used. So a busy machine changes its seconds little. The
plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rows import read_rows, write_rows

from autoshard.errors import SolverError
from autoshard.solver import SEARCHES, Problem, Progress, solve
from autoshard.solver.problem import relative_gap
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.verify import OPTIMAL_GAP

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "searches.md"
INSTANCES = ("lstm-tpu", "moe-tpu-tight", "vit-gpu", "vit-gpu-tight", "gpt-scan-remat-gpu-tight", "resnet-tpu-tight")
FAR = 10.0  # times the best known cost: beyond it, how far does not count in the order of rows
OWN = "none"  # no search named: the solver's own way


@dataclass(frozen=True)
class Row:
    """One run of one search."""

    problem: str
    search: str
    seed: int
    limit: float  # CPU seconds
    cost: float | None  # None: no choice was found
    bound: float | None
    seconds: float  # CPU seconds until it ended
    curve: list[list[float]]  # CPU seconds and the best cost then, at each improvement


@dataclass(eq=False)
class CpuBudget(Budget):
    """One that counts the CPU seconds of the process instead of work."""

    start: float = field(default_factory=time.process_time)

    def spend(self, seconds: float) -> None:
        self.done = time.process_time() - self.start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", nargs="+", default=[OWN, *SEARCHES])
    parser.add_argument("--problems", nargs="*", default=list(INSTANCES))
    parser.add_argument("--contest", nargs="*", default=[], type=Path, metavar="FILE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU seconds of each run")
    parser.add_argument("--rows", type=Path, help="a JSON file of rows, to do everything in several runs")
    options = parser.parse_args()
    kept = read_rows(options.rows, Row, lambda row: (row.problem, row.search, row.seed))
    files = [ROOT / "benchmarks" / "instances" / f"{name}.json.gz" for name in options.problems] + options.contest
    for file in files:
        problem = Problem.read(file)
        solve(problem, time_limit=0.5)  # loads what is imported when it is first needed
        for search in options.searches:
            for seed in options.seeds:
                row = run(problem, name_of(file), search, seed, options.seconds)
                kept[row.problem, row.search, row.seed] = row
                print(row.problem, row.search, row.seed, row.cost, row.bound, f"{row.seconds:.1f} s", flush=True)
                write_rows(options.rows, kept.values())
    PAGE.write_text(page(list(kept.values())))
    plot(list(kept.values()), PAGE.with_suffix(".svg"))


def name_of(file: Path) -> str:
    """
    >>> name_of(Path("asplos-2025-iopddl-G.json.gz")), name_of(Path("moe-tpu.json.gz"))
    ('contest G', 'moe-tpu')
    """
    return file.name.split(".")[0].replace("asplos-2025-iopddl-", "contest ")


def run(problem: Problem, name: str, search: str, seed: int, seconds: float) -> Row:
    """One search for so many CPU seconds."""
    curve: list[list[float]] = []
    start = time.process_time()

    def tell(progress: Progress) -> None:
        if progress.cost < (curve[-1][1] if curve else math.inf):
            curve.append([time.process_time() - start, progress.cost])

    budget = CpuBudget(seconds, until=math.inf)
    try:
        how = None if search == OWN else search
        solution = solve(problem, search=how, seed=seed, budget=budget, threads=1, progress=tell)
        cost, bound = solution.cost, solution.bound
    except SolverError:
        cost = bound = None
    return Row(name, search, seed, seconds, cost, bound, time.process_time() - start, curve)


def page(rows: Sequence[Row]) -> str:
    """The head, a table of gaps and a table of times."""
    problems = list(dict.fromkeys(row.problem for row in rows))
    searches = list(dict.fromkeys(row.search for row in rows))
    found = {(search, problem): of(rows, search, problem) for search in searches for problem in problems}
    best = {problem: min(row.cost for row in rows if row.problem == problem and row.cost) for problem in problems}
    order = sorted(
        searches,
        key=lambda search: statistics.fmean(min(rank(found[search, one], best[one]), FAR) for one in problems),
    )
    head = (PAGE.parent / "searches.head.md").read_text()
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    seeds, seconds = sorted({row.seed for row in rows}), sorted({row.limit for row in rows})
    said = f"{', '.join(f'{limit:g}' for limit in seconds)} CPU seconds each, seeds {', '.join(map(str, seeds))}, "
    columns = f"| search | {' | '.join(problems)} |\n|---|{'--:|' * len(problems)}\n"
    gaps = [f"| {called(one)} | {' | '.join(gap_text(found[one, p], best[p]) for p in problems)} |" for one in order]
    times = [f"| {called(one)} | {' | '.join(time_text(found[one, p]) for p in problems)} |" for one in order]
    bounds = [
        f"| {p} | {best[p]:.6g} | {max(row.bound for row in rows if row.problem == p and row.bound is not None):.6g} |"
        for p in problems
    ]
    return (
        f"{head.strip()}\n\n{said}{machine}.\n\n## Costs\n\n{columns}" + "\n".join(gaps) + "\n\n## Times\n\n"
        "CPU seconds until the best choice of a run was found, the median of the seeds. In brackets: until the run "
        f"ended by itself.\n\n{columns}" + "\n".join(times) + "\n\n## Best known\n\n"
        "| problem | lowest cost of any run | highest bound of any run |\n|---|--:|--:|\n" + "\n".join(bounds) + "\n\n"
        "![Best cost over time](searches.svg)\n"
    )


def of(rows: Iterable[Row], search: str, problem: str) -> list[Row]:
    """The runs of a search on a problem."""
    return [row for row in rows if (row.search, row.problem) == (search, problem)]


def called(search: str) -> str:
    return "*the solver's own*" if search == OWN else search


def rank(rows: Sequence[Row], best: float) -> float:
    """How far above the best known cost the median of the runs is, as a share of it."""
    return (
        statistics.median(math.inf if row.cost is None else row.cost / best - 1 for row in rows) if rows else math.inf
    )


def gap_text(rows: Sequence[Row], best: float) -> str:
    """Median and worst gap to the best known cost, in percent; bold if every run is the best known and proven."""
    if not rows:
        return ""
    gaps = sorted(math.inf if row.cost is None else 100 * (row.cost / best - 1) for row in rows)
    middle, worst = gaps[len(gaps) // 2], gaps[-1]
    if math.isinf(middle):
        return "nothing"
    text = percent(middle) if percent(middle) == percent(worst) else f"{percent(middle)} ({percent(worst)})"
    is_proven = all(row.cost is not None and relative_gap(row.cost, row.bound) <= OPTIMAL_GAP for row in rows)
    return f"**{text}**" if is_proven else text


def percent(gap: float) -> str:
    """
    >>> percent(0.00004), percent(0.034), percent(3.21), percent(321.0), percent(math.inf)
    ('0', '0.03', '3.2', '321', 'nothing')
    """
    if math.isinf(gap):
        return "nothing"
    return "0" if gap < 0.005 else f"{gap:.2f}" if gap < 1 else f"{gap:.1f}" if gap < 100 else f"{gap:.0f}"


def time_text(rows: Sequence[Row]) -> str:
    curves = [row.curve[-1][0] for row in rows if row.curve and row.cost is not None]
    if not curves:
        return ""
    ended = [row.seconds for row in rows if row.seconds < 0.95 * row.limit]
    text = f"{statistics.median(curves):.1f}"
    return f"{text} ({statistics.median(ended):.1f})" if len(ended) == len(rows) else text


def plot(rows: Sequence[Row], file: Path) -> None:
    """How far above the best known cost each search is over time, a panel per problem; seed 0."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "searches"}
    from matplotlib import pyplot

    problems = list(dict.fromkeys(row.problem for row in rows))
    searches = list(dict.fromkeys(row.search for row in rows))
    colors = pyplot.get_cmap("tab20")
    columns = 2
    lines = math.ceil(len(problems) / columns)
    figure, panels = pyplot.subplots(lines, columns, figsize=(10, 3.4 * lines), squeeze=False)
    for panel, problem in zip(panels.flat, problems, strict=False):
        best = min(row.cost for row in rows if row.problem == problem and row.cost)
        for row in (row for row in rows if row.problem == problem and row.seed == 0 and row.curve):
            seconds, costs = zip(*[*row.curve, [row.limit, row.curve[-1][1]]], strict=True)
            place = searches.index(row.search)
            style = {"color": "black", "linewidth": 2} if row.search == OWN else {"color": colors(place % 20)}
            gaps = [100 * (cost / best - 1) + 1e-2 for cost in costs]
            panel.step(seconds, gaps, where="post", label=called(row.search).strip("*"), **style)
        panel.set(
            title=problem, xscale="log", yscale="log", xlabel="CPU seconds", ylabel="% above the best known + 0.01"
        )
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=6, fontsize="small")
    figure.tight_layout(rect=(0, 0.5 / lines * 0.3, 1, 1))
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
