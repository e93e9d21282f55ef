"""Our plans beside the shardings that experts write, each compiled for its machine: does it fit, and how fast is it.

    python benchmarks/plans.py --machines v5e:4x4 --models gpt moe  # a part; only prints the rows
    python benchmarks/plans.py --rows FILE --cache DIR  # adds to earlier runs; writes docs/benchmarks/plans.md

Needs the extras tpu and cuda, but no hardware. Everything takes hours on two cores.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from prediction import OWN, by_kind, communication_seconds, compiled, compute_seconds, mib
from rows import read_rows, write_rows
from shardings import SHARDINGS, InShardings, constraint_of, names_of
from workloads import LARGE, TRAINED, Abstract, Workload

from autoshard import AutoshardError, Prediction, evaluate, plan, topology
from autoshard.mesh.targets import target_mesh
from autoshard.report.hlo import read_collectives

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "plans.md"
MACHINES = {
    "v5e:4x4": {"data": 4, "model": 4},
    "v5e:16x16": {"data": 16, "model": 16},
    "v5p:4x4x4": {"data": 16, "model": 4},
    "2x v5e:4x4": {"data": 8, "model": 4},
    "h100:2x8": {"data": 2, "model": 8},
}
MODELS = LARGE | TRAINED
BATCH_FOR = 16  # devices that the batches of MODELS are meant for; more devices get larger ones
BATCHES = ("batch", "groups", "nodes", "edges")  # sizes that make up a batch
BETTER, WORSE = 0.95, 1.005  # of the best expert's seconds; closer ones are equal


@dataclass(frozen=True)
class Row:
    """One train step under one sharding, as its compiled program shows it, per step on one device."""

    machine: str
    model: str
    sharding: str
    fits: bool  # XLA compiles it for the memory of the machine
    peak: int | None  # bytes; None if it does not fit
    bytes: Mapping[str, int]  # by kind of collective
    compute: float  # s
    communication: float  # s, one collective after the other

    @property
    def apart(self) -> float:
        """Seconds if nothing overlaps."""
        return self.compute + self.communication

    @property
    def overlapped(self) -> float:
        """Seconds if everything does."""
        return max(self.compute, self.communication)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", nargs="*", default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--shardings", nargs="*", help="some of those in shardings.py, or autoshard")
    parser.add_argument("--cache", type=Path, help="a folder for what was compiled")
    parser.add_argument("--rows", type=Path, help="a JSON file of rows, to do everything in several runs")
    chosen = parser.parse_args()
    kept = read_rows(chosen.rows, Row, lambda row: (row.machine, row.model, row.sharding))
    for machine in chosen.machines:
        for model in chosen.models:
            for row in rows_of(machine, model, chosen.shardings, chosen.cache):
                kept[machine, model, row.sharding] = row
                print(line(row), flush=True)
                write_rows(chosen.rows, kept.values())
    order = [*MACHINES], [*MODELS]
    rows = sorted(kept.values(), key=lambda row: (order[0].index(row.machine), order[1].index(row.model)))
    print(summary(rows))
    if chosen.rows:
        PAGE.write_text(page(rows))


class Program(NamedTuple):
    """A train step under one sharding, not compiled yet."""

    lowered: jax.stages.Lowered
    predicted: Callable[[], Prediction]


def rows_of(machine: str, model: str, shardings: Sequence[str] | None, cache: Path | None) -> Iterator[Row]:
    axes = MACHINES[machine]
    mesh = target_mesh(machine, axes)
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    for name, found in programs_of(for_devices(MODELS[model], mesh.size), mesh, machine, shardings):
        try:
            program = compiled(found.lowered, mesh, cache)
            there = read_collectives(program.hlo, axes) if program.hlo else ()
            if on_tpu and program.hlo:
                compute = compute_seconds(program.hlo, machine)
            else:  # XLA gives no estimate for GPU
                compute = found.predicted().compute_seconds
        except AutoshardError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        yield Row(
            machine=machine,
            model=model,
            sharding=name,
            fits=program.hlo is not None,
            peak=program.peak,
            bytes=by_kind(there),
            compute=compute,
            communication=communication_seconds(there, machine, axes),
        )


def programs_of(
    workload: Workload, mesh: Mesh, machine: str, shardings: Sequence[str] | None
) -> Iterator[tuple[str, Program]]:
    """The step under every sharding by hand, as `jax.jit` has it, and under our own plan."""
    options = {"mesh": mesh, "topology": topology(machine, dict(mesh.shape)), "donate_argnums": 0}
    step, state, batch = workload.abstract()
    if not shardings or OWN in shardings:
        try:
            made = plan(step, state, batch, **options)
            yield OWN, Program(made.lowering(mesh), lambda: made.predicted)
        except AutoshardError as error:
            print(f"{OWN}: {error}", file=sys.stderr)
    for name in names_of(workload.family):
        if not shardings or name in shardings:
            work = workload.abstract(constraint_of(name, mesh))
            specs = SHARDINGS[name](workload.family, work.state, work.batch, dict(mesh.shape))
            yield name, by_hand(work, specs, options)


def by_hand(work: Abstract, specs: InShardings, options: Mapping[str, Any]) -> Program:
    """A step whose state and batch lie as `specs` say, under `jax.jit` alone."""
    in_shardings = jax.tree.map(lambda spec: NamedSharding(options["mesh"], spec), specs)
    jitted = jax.jit(
        work.step, in_shardings=in_shardings, out_shardings=(in_shardings[0], None), donate_argnums=0
    )
    return Program(
        jitted.lower(work.state, work.batch),
        lambda: evaluate(work.step, work.state, work.batch, in_shardings=specs, **options).predicted,
    )


def for_devices(workload: Workload, devices: int) -> Workload:
    """The workload with as large a batch on each device as it has on 16 of them."""
    times = max(devices // BATCH_FOR, 1)
    larger = {name: size * times for name, size in workload.sizes.items() if name in BATCHES}
    return dataclasses.replace(workload, sizes={**workload.sizes, **larger})


# Reports.


def best(rows: Sequence[Row], machine: str, model: str, by: str) -> tuple[Row | None, Row | None]:
    """Ours, and the expert's with the fewest seconds, of those that fit."""
    found = [row for row in rows if (row.machine, row.model) == (machine, model) and row.fits]
    experts = [row for row in found if row.sharding != OWN]
    ours = next((row for row in found if row.sharding == OWN), None)
    return ours, min(experts, key=lambda row: getattr(row, by), default=None)


def line(row: Row) -> str:
    moved = ", ".join(f"{kind} {size / 2**20:.0f}" for kind, size in sorted(row.bytes.items())) or "none"
    times = f"{row.compute * 1e3:.4g} | {row.communication * 1e3:.4g}"
    return f"{row.machine} | {row.model} | {row.sharding} | {mib(row.peak) or 'does not fit'} | {moved} | {times}"


def summary(rows: Sequence[Row]) -> str:
    lines = ["machine | model | best expert | ms | ours | ratio | best expert, overlapped | ms | ours | ratio"]
    lines.append(" | ".join("---" for _ in lines[0].split(" | ")))
    ratios: dict[str, list[float]] = {"apart": [], "overlapped": []}
    for machine, model in dict.fromkeys((row.machine, row.model) for row in rows):
        cells = []
        for by, found in ratios.items():
            ours, expert = best(rows, machine, model, by)
            if ours is None or expert is None:
                cells.append(" | ".join(("none fits" if expert is None else expert.sharding, "", "", "")))
                continue
            mine, theirs = getattr(ours, by), getattr(expert, by)
            found.append(mine / theirs)
            cells.append(f"{expert.sharding} | {theirs * 1e3:.4g} | {mine * 1e3:.4g} | {mine / theirs:.3f}")
        lines.append(f"{machine} | {model} | {' | '.join(cells)}")
    for by, found in ratios.items():
        worse, better = sum(ratio > WORSE for ratio in found), sum(ratio <= BETTER for ratio in found)
        how = "one after the other" if by == "apart" else "all of the communication behind compute"
        lines.append(f"\n{how}: of {len(found)} programs ours is faster by 5% or more in {better}, slower in {worse}.")
    return "\n".join(lines)


def page(rows: Sequence[Row]) -> str:
    head = (PAGE.parent / "plans.head.md").read_text().strip()
    titles = ("machine", "model", "sharding", "peak MiB", "collectives, MiB", "compute ms", "communication ms")
    table = [" | ".join(titles), " | ".join("---" for _ in titles), *map(line, rows)]
    return "\n\n".join([head, "## Summary", summary(rows), "## All programs", "\n".join(table)]) + "\n"


if __name__ == "__main__":
    main()
