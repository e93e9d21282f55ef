"""The plans of all example programs as digests: whether a change of the code has changed a plan, and the time it takes.

    python benchmarks/digests.py FILE               # plans everything, writes digests and CPU seconds to FILE
    python benchmarks/digests.py FILE --against OLD # and compares with an earlier file: names what is not equal
    python benchmarks/digests.py FILE --only llama  # rows with this word in their name
    python benchmarks/digests.py FILE --starved 2   # on one core, which two busy processes share: the same digests

The rows are the programs of `plans.py` on all its machines. On three meshes they are every model of `tests/models`, the
small programs of `workloads.py` and those of `stacks.py`, free and under a memory limit between the least that the
model needs and what the free plan takes. Each row is planned in a process that has planned others before. A digest is
of all that `Plan.save` writes. Nothing is allocated or compiled. The exit status is 1 if a plan differs from that of
the earlier file.
"""

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import jax  # noqa: E402
from jax.sharding import AbstractMesh  # noqa: E402
from models import MODELS, MORE_MODELS  # noqa: E402
from plans import MACHINES, for_devices  # noqa: E402
from plans import MODELS as WORKLOADS  # noqa: E402
from rows import read_rows, write_rows  # noqa: E402
from stacks import STACKS  # noqa: E402
from workloads import SMALL  # noqa: E402

from autoshard import MemoryLimitError, Plan, SolverError, plan  # noqa: E402

MESHES = {  # of the models of tests/models: a machine by name -> mesh axes
    "cpu:8": {"data": 8},
    "v5e:2x4": {"data": 4, "model": 2},
    "h100:2x4": {"pod": 2, "data": 2, "model": 2},
}
TIGHT = 0.5  # of the way from the least memory to that of the free plan
SCARCE = 1  # byte: a limit that no plan keeps, so that the error says what is needed


@dataclass(frozen=True)
class Row:
    """One plan."""

    name: str
    digest: str  # of its JSON
    cost: float  # s
    gap: float
    seconds: float  # CPU seconds of planning, tracing included


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a JSON file of rows, written after each of them")
    parser.add_argument("--against", type=Path, help="such a file, made before")
    parser.add_argument("--only", default="", help="a part of the rows' names")
    parser.add_argument("--starved", type=int, default=0, help="busy processes on the one core that planning gets")
    chosen = parser.parse_args()
    before = read_rows(chosen.against, Row, name_of)
    rows: dict[str, Row] = {}
    with starving(chosen.starved) if chosen.starved else contextlib.nullcontext():
        for name, make in programs():
            if chosen.only in name:
                for row in made(name, make):
                    rows[row.name] = row
                    write_rows(chosen.file, rows.values())
                    print(line(row, before.get(row.name)), flush=True)
    shared = [(row, before[name]) for name, row in rows.items() if name in before]
    changed = [row.name for row, old in shared if row.digest != old.digest]
    if shared:
        seconds, earlier = (sum(row.seconds for row in side) for side in zip(*shared, strict=True))
        print(f"{len(shared)} plans, {len(changed)} changed; {seconds:.1f} CPU-s, before {earlier:.1f}")
    return bool(changed)


@contextlib.contextmanager
def starving(processes: int) -> Iterator[None]:
    """While it lasts, this process has one core, which so many busy processes share."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    spawn = multiprocessing.get_context("spawn")  # JAX has threads, which do not survive a fork
    busy = [spawn.Process(target=spin, daemon=True) for _ in range(processes)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
        os.sched_setaffinity(0, cores)


def spin() -> None:
    while True:
        pass


def name_of(row: Row) -> str:
    return row.name


def programs() -> Iterator[tuple[str, Callable[..., Plan]]]:
    """Names, and what plans each under a memory limit, or under that of its machine if it is None."""
    for family, make in (MODELS | MORE_MODELS).items():
        for machine, axes in MESHES.items():
            yield f"{family} on {machine}", planner(lambda make=make: of_model(make()), machine, axes)
    steps = {f"{name}, larger": workload.abstract for name, workload in SMALL.items()} | STACKS
    for name, make in steps.items():
        for machine, axes in MESHES.items():
            yield f"{name} on {machine}", planner(make, machine, axes)
    for machine, axes in MACHINES.items():
        for name, workload in WORKLOADS.items():
            sized = for_devices(workload, AbstractMesh(tuple(axes.values()), tuple(axes)).size)
            yield f"{name} on {machine}", planner(sized.abstract, machine, axes)


def of_model(model):
    return model.step, *jax.eval_shape(lambda: (model.state, model.batches(0)))


def planner(make: Callable, machine: str, axes: dict[str, int]) -> Callable[..., Plan]:
    def planned(memory: int | None = None) -> Plan:
        step, *args = make()
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
        return plan(step, *args, mesh=mesh, topology=machine, donate_argnums=0, memory=memory)

    return planned


def made(name: str, planned: Callable[..., Plan]) -> Iterator[Row]:
    free, row = timed(name, planned, None)
    yield row
    if name.split(" on ")[1] in MESHES:
        limit = limit_between(planned, free.predicted.peak_bytes)
        if limit is not None:
            yield timed(f"{name}, tight", planned, limit)[1]


def limit_between(planned: Callable[..., Plan], roomy: int) -> int | None:
    """Bytes between the least that is needed and the free plan's peak; None if they are equal or none was found."""
    try:
        planned(SCARCE)
    except MemoryLimitError as error:
        least = error.needed
    except SolverError:  # it was not found in time
        return None
    else:
        raise AssertionError("a plan in one byte")
    return round(least + TIGHT * (roomy - least)) if least < roomy else None


def timed(name: str, planned: Callable[..., Plan], memory: int | None) -> tuple[Plan, Row]:
    start = time.process_time()
    found = planned(memory)
    seconds = time.process_time() - start
    digest = hashlib.sha256(found.dumps().encode()).hexdigest()[:16]
    return found, Row(name, digest, found.cost, found.gap, round(seconds, 3))


def line(row: Row, before: Row | None) -> str:
    text = f"{row.name}: {row.digest}, {row.cost * 1e3:.4g} ms, gap {row.gap:.2%}, {row.seconds:.1f} CPU-s"
    if before is None:
        return text
    same = "same" if row.digest == before.digest else f"CHANGED, cost {row.cost / before.cost - 1:+.4%}"
    return f"{text} ({same}; {before.seconds:.1f} CPU-s before)"


if __name__ == "__main__":
    sys.exit(main())
