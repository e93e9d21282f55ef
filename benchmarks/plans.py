"""Our plans beside the shardings that experts write, each compiled for its machine: does it fit, and how fast is it.

    python benchmarks/plans.py --machines v5e:4x4 --models gpt moe  # a part; only prints the rows
    python benchmarks/plans.py --rows FILE --cache DIR  # adds to the rows of FILE; writes docs/benchmarks/plans.md
    python benchmarks/plans.py --rows FILE --refine 4   # our plan alone, the best of four that are compiled
    python benchmarks/plans.py --rows FILE --memory     # our plans alone, under smaller and smaller memory limits

The rows of the page are in docs/benchmarks/plans.json. Needs the extras tpu and cuda, but no hardware. Everything takes
hours on two cores.
"""

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from prediction import OWN, by_kind, compiled, device_ids, mib, scheduled
from rows import read_rows, write_rows
from shardings import SHARDINGS, InShardings, constraint_of, names_of
from workloads import LARGE, TRAINED, Abstract, Workload

from autoshard import AutoshardError, MemoryLimitError, Prediction, evaluate, plan, topology
from autoshard.compiled.collectives import read_collectives
from autoshard.mesh.collectives import total_seconds
from autoshard.mesh.targets import target_mesh
from autoshard.model.xla.backends import backend_of

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "plans.md"
MACHINES = {
    "v5e:4x4": {"data": 4, "model": 4},
    "v5e:16x16": {"data": 16, "model": 16},
    "v5p:4x4x4": {"data": 16, "model": 4},
    "2x v5e:4x4": {"slices": 2, "data": 4, "model": 4},
    "h100:2x8": {"data": 2, "model": 8},
}
MODELS = LARGE | TRAINED
BATCH_FOR = 16  # devices that the batches of MODELS are meant for; more devices get larger ones
BATCHES = ("batch", "groups", "nodes", "edges")  # sizes that make up a batch
LIMITS = 5  # of a sweep
BETTER, WORSE = 0.95, 1.005  # of the best expert's seconds; closer ones are equal


@dataclass(frozen=True)
class Row:
    """One train step under one sharding, as its compiled program shows it, per step on one device."""

    machine: str
    model: str
    sharding: str
    fits: bool  # into the memory of the machine, or within the limit
    peak: int | None  # bytes; None if XLA does not compile it for that memory
    bytes: Mapping[str, int]  # by kind of collective
    compute: float  # s
    communication: float  # s, one collective after the other
    predicted: float | None = None  # s, of our plans
    limit: int | None = None  # bytes that a plan was made for, if not those of the machine
    scheduled: float | None = None  # s, as XLA has put the program's operations; None if it does not compile

    @property
    def apart(self) -> float:
        """Seconds if nothing overlaps."""
        return self.compute + self.communication

    @property
    def overlapped(self) -> float:
        """Seconds with what the program's schedule lets overlap."""
        return self.scheduled or self.apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", nargs="*", default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--shardings", nargs="*", help="some of those in shardings.py, or autoshard")
    parser.add_argument("--refine", type=int, help="how many of our plans to compile, to keep the best")
    parser.add_argument("--memory", action="store_true", help="under memory limits from roomy to the smallest")
    parser.add_argument("--cache", type=Path, help="a folder for what was compiled")
    parser.add_argument("--rows", type=Path, help="a JSON file of rows, to do everything in several runs")
    chosen = parser.parse_args()
    kept = read_rows(chosen.rows, Row, key)
    for machine in chosen.machines:
        for model in chosen.models:
            for row in rows_of(machine, model, chosen):
                kept[key(row)] = row
                print(line(row), flush=True)
                write_rows(chosen.rows, kept.values())
    rows = sorted(kept.values(), key=place)
    print(summary(rows))
    if chosen.rows:
        PAGE.write_text(page(rows))


def key(row: Row) -> tuple:
    return row.machine, row.model, row.sharding, row.limit


def place(row: Row) -> tuple:
    """Where a row stands among all; those that are not of experts last."""
    names = [*SHARDINGS]
    sharding = names.index(row.sharding) if row.sharding in names else len(names)
    return [*MACHINES].index(row.machine), [*MODELS].index(row.model), sharding, row.sharding, -(row.limit or 0)


class Program(NamedTuple):
    """A train step under one sharding, not compiled yet."""

    sharding: str
    lowered: jax.stages.Lowered
    predicted: Callable[[], Prediction]
    limit: int | None = None  # bytes, of a sweep


def rows_of(machine: str, model: str, chosen: argparse.Namespace) -> Iterator[Row]:
    axes = MACHINES[machine]
    mesh = target_mesh(machine, axes)
    workload = for_devices(MODELS[model], mesh.size)
    options = {"mesh": mesh, "topology": topology(machine, axes), "donate_argnums": 0}
    if chosen.memory:
        programs = under_limits(workload, options)
    elif chosen.refine:
        programs = our_own(workload, options | {"refine": chosen.refine}, f"{OWN}, refine={chosen.refine}")
    else:
        programs = programs_of(workload, options, chosen.shardings)
    for found in programs:
        try:
            program = compiled(found.lowered, mesh, chosen.cache)
            there = read_collectives(program.hlo, axes, device_ids=device_ids(mesh)) if program.hlo else ()
            schedule = scheduled(program.hlo, machine, mesh) if program.hlo else None
            compute = schedule.compute_seconds if schedule else found.predicted().compute_seconds
        except AutoshardError as error:
            print(f"{found.sharding}: {error}", file=sys.stderr)
            continue
        yield Row(
            machine=machine,
            model=model,
            sharding=found.sharding,
            fits=program.peak is not None and program.peak <= (found.limit or options["topology"].memory_bytes),
            peak=program.peak,
            bytes=by_kind(there),
            compute=compute,
            communication=total_seconds(there, axes, options["topology"]),
            predicted=found.predicted().step_seconds if found.sharding.startswith(OWN) else None,
            limit=found.limit,
            scheduled=schedule and schedule.step_seconds,
        )


def programs_of(workload: Workload, options: Mapping[str, Any], shardings: Sequence[str] | None) -> Iterator[Program]:
    """The step under our own plan, and under every sharding by hand as `jax.jit` has it."""
    if not shardings or OWN in shardings:
        yield from our_own(workload, options, OWN)
    for name in names_of(workload.family):
        if not shardings or name in shardings:
            work = workload.abstract(constraint_of(name, options["mesh"]))
            specs = SHARDINGS[name](workload.family, work.state, work.batch, dict(options["mesh"].shape))
            yield by_hand(name, work, specs, options)


def our_own(workload: Workload, options: Mapping[str, Any], name: str, limit: int | None = None) -> Iterator[Program]:
    """The step under our plan, if there is one."""
    try:
        made = plan(*workload.abstract(), memory=limit, **options)
    except AutoshardError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return
    for warning in made.warnings:
        print(f"{name}: {warning}", file=sys.stderr)
    yield Program(name, made.lowering(options["mesh"]), lambda: made.predicted, limit)


def under_limits(workload: Workload, options: Mapping[str, Any]) -> Iterator[Program]:
    """The step under plans for less and less memory, from what the free plan needs to the least that can be planned."""
    abstract = workload.abstract()
    roomy = plan(*abstract, **options).predicted.peak_bytes / backend_of(options["mesh"]).usable
    try:
        plan(*abstract, memory=0, **options)
    except MemoryLimitError as error:
        least = error.needed
    for i in range(LIMITS):
        limit = roomy * (least / roomy) ** (i / (LIMITS - 1))
        yield from our_own(workload, options, OWN, math.ceil(limit / 2**20) * 2**20)


def by_hand(name: str, work: Abstract, specs: InShardings, options: Mapping[str, Any]) -> Program:
    """A step whose state and batch lie as `specs` say, under `jax.jit` alone."""
    in_shardings = jax.tree.map(lambda spec: NamedSharding(options["mesh"], spec), specs)
    jitted = jax.jit(work.step, in_shardings=in_shardings, out_shardings=(in_shardings[0], None), donate_argnums=0)
    lowered = jitted.lower(work.state, work.batch)
    return Program(name, lowered, lambda: evaluate(*work, in_shardings=specs, **options).predicted)


def for_devices(workload: Workload, devices: int) -> Workload:
    """The workload with as large a batch on each device as it has on 16 of them."""
    times = max(devices // BATCH_FOR, 1)
    larger = {name: size * times for name, size in workload.sizes.items() if name in BATCHES}
    return dataclasses.replace(workload, sizes={**workload.sizes, **larger})


# Reports.


def best(rows: Sequence[Row], machine: str, model: str, by: str) -> tuple[Row | None, Row | None]:
    """Ours, and the expert's with the fewest seconds, of those that fit."""
    found = [row for row in rows if (row.machine, row.model) == (machine, model) and row.fits and row.limit is None]
    experts = [row for row in found if row.sharding in SHARDINGS]
    ours = next((row for row in found if row.sharding == OWN), None)
    return ours, min(experts, key=lambda row: getattr(row, by), default=None)


def milliseconds(*seconds: float) -> str:
    """One cell for each."""
    return " | ".join(f"{time * 1e3:.4g}" for time in seconds)


def line(row: Row) -> str:
    moved = ", ".join(f"{kind} {size / 2**20:.0f}" for kind, size in sorted(row.bytes.items())) or "none"
    times = milliseconds(row.compute, row.communication, row.overlapped)
    peak = mib(row.peak) if row.fits else "does not fit"
    return f"{row.machine} | {row.model} | {row.sharding} | {peak} | {moved} | {times}"


def summary(rows: Sequence[Row]) -> str:
    rows = [row for row in rows if row.limit is None]
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
        how = "one after the other" if by == "apart" else "with overlap"
        lines.append(f"\n{how}: of {len(found)} programs ours is faster by 5% or more in {better}, slower in {worse}.")
    return "\n".join([*lines, *hidden(rows)])


def hidden(rows: Sequence[Row]) -> Iterator[str]:
    """How much of what our plans communicate runs behind compute, per machine."""
    for machine in dict.fromkeys(row.machine for row in rows):
        ours = [row for row in rows if (row.machine, row.sharding) == (machine, OWN) and row.communication]
        shares = sorted(max(0.0, row.apart - row.overlapped) / row.communication for row in ours)
        if shares:
            yield (
                f"\n{machine}: of what our plans communicate {statistics.median(shares):.0%} runs behind compute in the"
                f" median, {shares[0]:.0%} to {shares[-1]:.0%}."
            )


def refined(rows: Sequence[Row]) -> str:
    """What refining our plans changed."""
    plain = {(row.machine, row.model): row for row in rows if row.sharding == OWN and row.limit is None}
    titles = ("machine", "model", "refine", "ms, one after the other", "refined", "ratio")
    lines, changed = [" | ".join((*titles, "ms, overlapped", "refined", "ratio"))], 0
    lines.append(" | ".join("---" for _ in lines[0].split(" | ")))
    found = [row for row in rows if row.sharding.startswith(f"{OWN}, refine=") and (row.machine, row.model) in plain]
    if not found:
        return ""
    for row in found:
        before = plain[row.machine, row.model]
        changed += row.predicted != before.predicted
        pairs = (before.apart, row.apart), (before.overlapped, row.overlapped)
        figures = " | ".join(f"{old * 1e3:.4g} | {new * 1e3:.4g} | {new / old:.3f}" for old, new in pairs)
        lines.append(f"{row.machine} | {row.model} | {row.sharding.rpartition('=')[2]} | {figures}")
    return "\n".join([*lines, f"\nThe choice changed in {changed} of {len(found)} programs."])


def swept(rows: Sequence[Row]) -> str:
    """Our plans under memory limits."""
    if all(row.limit is None for row in rows):
        return ""
    titles = ("machine", "model", "limit MiB", "compiled peak MiB", "predicted ms", "compiled ms, overlapped")
    titles += ("one after the other",)
    lines = [" | ".join(titles), " | ".join("---" for _ in titles)]
    for row in rows:
        if row.limit is not None:
            times = milliseconds(row.predicted, row.overlapped, row.apart)
            peak = mib(row.peak) if row.fits else f"{mib(row.peak)}, over the limit"
            lines.append(f"{row.machine} | {row.model} | {mib(row.limit)} | {peak} | {times}")
    return "\n".join(lines)


def page(rows: Sequence[Row]) -> str:
    head = (PAGE.parent / "plans.head.md").read_text().strip()
    titles = ("machine", "model", "sharding", "peak MiB", "collectives, MiB")
    titles += ("compute ms", "communication ms", "overlapped ms")
    table = [" | ".join(titles), " | ".join("---" for _ in titles), *(line(row) for row in rows if row.limit is None)]
    sections = {
        "Summary": summary(rows),
        "Refined": refined(rows),
        "Less and less memory": swept(rows),
        "All programs": "\n".join(table),
    }
    return "\n\n".join([head, *(f"## {title}\n\n{text}" for title, text in sections.items() if text)]) + "\n"


if __name__ == "__main__":
    main()
