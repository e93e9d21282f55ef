"""Our plans beside the shardings that experts write, each compiled for its machine: does it fit, and how fast is it.

    python benchmarks/plans.py --machines v5e:4x4 --models gpt moe  # a part; only prints the rows
    python benchmarks/plans.py --rows FILE --cache DIR  # adds to earlier runs; writes docs/benchmarks/plans.md

Needs the extras tpu and cuda, but no hardware. Everything takes hours on two cores.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prediction import OWN, by_kind, communication_seconds, compiled, compute_seconds, mib, plans_of
from rows import read_rows, write_rows
from workloads import LARGE, Workload

from autoshard import topology
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
BATCH_FOR = 16  # devices that the batches of LARGE are meant for; more devices get larger ones
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
    parser.add_argument("--models", nargs="*", default=list(LARGE), choices=list(LARGE))
    parser.add_argument("--cache", type=Path, help="a folder for what was compiled")
    parser.add_argument("--rows", type=Path, help="a JSON file of rows, to do everything in several runs")
    chosen = parser.parse_args()
    kept = read_rows(chosen.rows, Row, lambda row: (row.machine, row.model, row.sharding))
    for machine in chosen.machines:
        for model in chosen.models:
            for row in rows_of(machine, model, chosen.cache):
                kept[machine, model, row.sharding] = row
                print(line(row), flush=True)
            write_rows(chosen.rows, kept.values())
    order = [*MACHINES], [*LARGE]
    rows = sorted(kept.values(), key=lambda row: (order[0].index(row.machine), order[1].index(row.model)))
    print(summary(rows))
    if chosen.rows:
        PAGE.write_text(page(rows))


def rows_of(machine: str, model: str, cache: Path | None) -> list[Row]:
    axes = MACHINES[machine]
    mesh, links = target_mesh(machine, axes), topology(machine, axes)
    workload = for_devices(LARGE[model], mesh.size)
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    rows = []
    for name, made in plans_of(workload, {"mesh": mesh, "topology": links, "donate_argnums": 0}, None):
        program = compiled(made, mesh, cache)
        estimated = program.hlo is not None and on_tpu  # XLA gives none for GPU
        there = read_collectives(program.hlo, axes) if program.hlo else made.predicted.collectives
        rows.append(
            Row(
                machine=machine,
                model=model,
                sharding=name,
                fits=program.hlo is not None,
                peak=program.peak,
                bytes=by_kind(there),
                compute=compute_seconds(program.hlo, machine) if estimated else made.predicted.compute_seconds,
                communication=communication_seconds(there, machine, axes),
            )
        )
    return rows


def for_devices(workload: Workload, devices: int) -> Workload:
    """The workload with as large a batch on each device as it has on 16 of them."""
    batch = "groups" if "groups" in workload.sizes else "batch"
    size = workload.sizes[batch] * max(devices // BATCH_FOR, 1)
    return dataclasses.replace(workload, sizes={**workload.sizes, batch: size})


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
