"""How long planning takes, in CPU seconds from the call to the Plan, tracing included, and where they go.

    python benchmarks/planning.py                                # everything; writes docs/benchmarks/planning.md
    python benchmarks/planning.py --only scan                    # rows with this word in their name; printed only
    python benchmarks/planning.py --layers 2 4 8 16 32           # a Llama-3-8B of so many unrolled layers; printed only
    python benchmarks/planning.py --again                        # the first row, from a cache on disk; printed only
    python benchmarks/planning.py --rows FILE --only ResNet      # adds to the rows of earlier runs; writes the page

Nothing is allocated. Each row is planned three times, in processes of its own, for a TPU by name, under that machine's
memory limit; the fastest run counts. The page shows equations of the step, nodes and options of the problem, CPU
seconds in all and of each stage (what is left is checking and printing), the predicted seconds per step, and how far
they may be from the best. The plot of the growth with layers needs matplotlib.
"""

import argparse
import json
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from rows import read_rows, write_rows  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "planning.md"
PLOT = PAGE.with_suffix(".svg")
ROWS = {  # name -> workload, mesh, machine, target in CPU seconds
    "Llama-3-8B, 32 unrolled layers, v5e (8, 8)": ("llama 8b", (8, 8), "v5e:8x8", 5.0),
    "the same, scanned": ("llama 8b scan", (8, 8), "v5e:8x8", 1.5),
    "the same, scanned, four axes, v5e (2, 4, 2, 4)": ("llama 8b scan", (2, 4, 2, 4), "v5e:8x8", 10.0),
    "the same, unrolled, v5p (4, 4, 4)": ("llama 8b", (4, 4, 4), "v5p:4x4x4", 10.0),
    "GPT-3, 96 unrolled layers, v6e (16, 16)": ("gpt-3", (16, 16), "v6e:16x16", 15.0),
    "ResNet-50, v5e (8, 8)": ("resnet-50", (8, 8), "v5e:8x8", 3.0),
}
FIRST = next(iter(ROWS))
LAYERS = (2, 4, 8, 16, 32)
RUNS = 3  # of each row: a core that others share is slower at times
STAGES = {  # room of autoshard, function -> column
    ("decorated", "traced_step"): "trace",
    ("variants.variant.StepVariants", "program"): "trace",
    ("planning", "formulated"): "formulate",
    ("planning", "solve_within"): "solve",
    ("planning", "make_plan"): "plan",
}


@dataclass(frozen=True)
class Row:
    """One step planned once. Seconds are of the CPU."""

    name: str
    layers: int  # 0: those of the model
    start: int  # 1: without a cache or with an empty one; 2: with a cache that the first start filled
    equations: int
    nodes: int
    options: int
    seconds: float
    trace: float
    formulate: float
    solve: float
    plan: float
    step_seconds: float
    gap: float
    compiled: bool  # whether the solver loaded compiled code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a part of the names of rows")
    parser.add_argument("--layers", type=int, nargs="*", help="instead of the table")
    parser.add_argument("--again", action="store_true", help="the first row from a cache that another process filled")
    parser.add_argument("--rows", type=Path, help="a file of rows to add to")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)  # a row, layers or 0, which start, cache or ""
    chosen = parser.parse_args()
    if chosen.one:
        name, layers, start, cache = chosen.one
        print(json.dumps(asdict(measured(name, int(layers), int(start), cache))))
        return
    kept = read_rows(chosen.rows, Row, key)
    whole = chosen.only is None and chosen.layers is None and not chosen.again
    names = [name for name in ROWS if whole or (chosen.only is not None and chosen.only in name)]
    layers = LAYERS if whole else chosen.layers or ()
    for row in measurements(names, layers, again=whole or chosen.again):
        kept[key(row)] = row
        write_rows(chosen.rows, kept.values())
        print(table([row], {field.name: (lambda row, name=field.name: getattr(row, name)) for field in fields(Row)}))
    if whole or chosen.rows:
        PAGE.write_text(page(list(kept.values())))


def key(row: Row) -> tuple:
    return row.name, row.layers, row.start


def measurements(names: Iterable[str], layers: Iterable[int], again: bool) -> Iterator[Row]:
    """Rows, each from a process of its own: of a few, the one that took least."""
    runs = [(name, 0, 1) for name in names] + [(FIRST, count, 1) for count in layers] + [(FIRST, 0, 2)] * again
    with tempfile.TemporaryDirectory() as cache:
        for name, count, start in runs:
            rows = []
            for _ in range(RUNS):
                for turn in range(1, start + 1):  # a second start comes after a first one
                    command = [sys.executable, __file__, "--one", name, str(count), str(turn), cache * (start == 2)]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                rows.append(Row(**json.loads(done.stdout.splitlines()[-1])))
            yield min(rows, key=lambda row: row.seconds)


def measured(name: str, layers: int, start: int, cache: str) -> Row:
    """Plans one step."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jax.sharding import AbstractMesh, AxisType
    from workloads import PLANNED, Workload

    from autoshard import autoshard

    workload, mesh, machine, _ = ROWS[name]
    work = PLANNED[workload]
    if layers:
        work = Workload(work.family, {**work.sizes, "layers": layers})
    step, state, batch = work.abstract()
    devices = AbstractMesh(mesh, tuple("xyzw"[: len(mesh)]), axis_types=(AxisType.Auto,) * len(mesh))
    taken, results = dict.fromkeys(STAGES, 0.0), {}
    for module, function in STAGES:
        room = pkgutil.resolve_name(f"autoshard.{module}")
        setattr(room, function, timed(getattr(room, function), (module, function), taken, results))
    decorated = autoshard(step, mesh=devices, topology=machine, donate_argnums=0, cache=cache or None)
    begin = time.process_time()
    plan = decorated.plan(state, batch)
    seconds = time.process_time() - begin
    formulation = results.get(("planning", "formulated"))
    problem = formulation.problem if formulation is not None else None
    return Row(
        name=name,
        layers=layers,
        start=start,
        equations=len(results["variants.variant.StepVariants", "program"].equations),
        nodes=len(problem.costs) if problem else 0,
        options=sum(map(len, problem.costs)) if problem else 0,
        seconds=seconds,
        step_seconds=plan.predicted.step_seconds,
        gap=plan.gap,
        compiled="numba" in sys.modules,
        **{column: sum(taken[each] for each in STAGES if STAGES[each] == column) for column in STAGES.values()},
    )


def timed(fn: Callable, name: tuple[str, str], taken: dict, results: dict) -> Callable:
    """`fn`, with the CPU seconds that it takes noted, and its last result."""

    def run(*args, **kwargs):
        start = time.process_time()
        results[name] = fn(*args, **kwargs)
        taken[name] += time.process_time() - start
        return results[name]

    return run


def page(rows: list[Row]) -> str:
    """The head, the tables and the plot."""
    stages = {stage: lambda row, stage=stage: f"{getattr(row, stage):.1f}" for stage in STAGES.values()}
    sizes = {name: lambda row, name=name: getattr(row, name) for name in ("equations", "nodes", "options")}
    seconds = {"CPU s": lambda row: f"{row.seconds:.1f}"}
    gap = {"proven gap": lambda row: f"{row.gap:.2%}"}
    found = {
        "target": lambda row: f"{ROWS[row.name][3]:g}",
        **stages,
        "step s": lambda row: f"{row.step_seconds:.4g}",
        **gap,
        "compiled code": lambda row: "yes" if row.compiled else "no",
    }
    planned = [row for name in ROWS for row in rows if row.name == name and not row.layers and row.start == 1]
    grown = sorted((row for row in rows if row.layers), key=lambda row: row.layers)
    again = [row for row in rows if row.start == 2]
    parts = [
        (PAGE.parent / "planning.head.md").read_text(),
        table(planned, {"step": lambda row: row.name, **sizes, **seconds, **found}),
        "## Growth with layers\n\n    python benchmarks/planning.py --layers " + " ".join(map(str, LAYERS)),
        table(grown, {"layers": lambda row: row.layers, **sizes, **seconds, **stages, **gap}),
    ]
    if len(grown) > 1:
        plot(grown)
        first, last = grown[0], grown[-1]
        parts += [
            f"![CPU seconds over layers]({PLOT.name})",
            f"{last.layers / first.layers:.0f} times the layers take {last.solve / first.solve:.1f} times as long to "
            f"solve, {last.formulate / first.formulate:.1f} times as long to formulate, and "
            f"{last.trace / first.trace:.1f} times as long to trace.",
        ]
    if again:
        parts += [
            "## A second start\n\n    python benchmarks/planning.py --again",
            "The first row with `cache=folder`, in another process than the one that filled it:",
            table(again, {**seconds, "trace": lambda row: f"{row.trace:.1f}"}),
            "The rest makes the key and reads the plan.",
        ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def table(rows: list[Row], columns: dict[str, Callable]) -> str:
    """The rows in Markdown."""
    lines = [" | ".join(columns), " | ".join(["---"] * len(columns))]
    return "\n".join([*lines, *(" | ".join(str(show(row)) for show in columns.values()) for row in rows)])


def plot(rows: list[Row]) -> None:
    """CPU seconds of each stage over layers, beside what would grow with them."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "planning"}
    from matplotlib import pyplot
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    layers = [row.layers for row in rows]
    for stage in ("solve", "formulate", "trace"):
        axes.loglog(layers, [getattr(row, stage) for row in rows], marker="o", label=stage)
    first = rows[0].solve
    axes.loglog(layers, [first * count / layers[0] for count in layers], "k:", linewidth=1, label="in proportion")
    axes.xaxis.set_major_locator(FixedLocator(layers))
    axes.xaxis.set_major_formatter(FixedFormatter(list(map(str, layers))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("unrolled layers")
    axes.set_ylabel("CPU seconds")
    axes.legend()
    figure.savefig(PLOT, metadata={"Date": None})


if __name__ == "__main__":
    main()
