"""Frontiers, largest batches and fewest devices of several models, each held against plans made one by one.

    python benchmarks/frontiers.py                   # five small models on v5e:2x4; compiles nothing
    python benchmarks/frontiers.py --models vit moe --machine v5e:4x4 --mesh 4 4

A row per model. *monotone*: seconds go up and bytes go down along the plans. *ends*: the first plan costs what the plan
without a limit costs, and under four fifths of the last plan's limit there is none. *between*: under the limit of each
plan, planning alone finds nothing faster by more than the planner's gap; where it finds nothing at all, the ratio is 0.
*batch*: the largest batch fits and the next one does not. *devices*: half as many do not do. The exit status is 1 if
one of these fails.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from jax.sharding import AbstractMesh  # noqa: E402  (needs the path above)
from workloads import LARGE, SMALL  # noqa: E402

from autoshard import MemoryLimitError, Plan, fewest_devices, frontier, largest_batch, plan  # noqa: E402

GAP = 0.02  # share by which two searches for the same plan may differ
# Seconds for all plans of a frontier, or of a largest batch: each search then has about the work of planning alone,
# and a busy machine ends it, too.
SECONDS_TOGETHER = 600.0


def fits(made: Callable[[], Any]) -> bool:
    try:
        made()
    except MemoryLimitError:
        return False
    return True


def seconds(made: Callable[[], Plan]) -> float:
    """Of a plan; inf if there is none."""
    try:
        return made().predicted.step_seconds
    except MemoryLimitError:
        return math.inf


def is_monotone(plans: tuple[Plan, ...]) -> bool:
    figures = [(one.predicted.step_seconds, one.predicted.peak_bytes) for one in plans]
    return all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(figures))


def row(name: str, sizes: Any, machine: str, axes: dict[str, int], points: int) -> bool:
    """Searches all three for one model and prints its line; whether all is as it should be."""
    work = sizes[name].abstract()
    arguments = work.step, work.state, work.batch
    how: dict[str, Any] = {"donate_argnums": 0, "topology": machine}
    how["mesh"] = AbstractMesh(tuple(axes.values()), tuple(axes))
    alone = functools.partial(plan, *arguments, **how)
    start = time.process_time()
    found = frontier(*arguments, points=points, time_limit=SECONDS_TOGETHER, **how)
    took = time.process_time() - start
    free, last = alone(memory="10TiB"), found.limit_of(found.plans[-1])
    ends = found.plans[0].predicted.step_seconds <= free.predicted.step_seconds * (1 + GAP)
    ends &= free.predicted.step_seconds <= found.plans[0].predicted.step_seconds * (1 + GAP)
    ends &= not fits(lambda: alone(memory=0.8 * last))
    again = [seconds(lambda one=one: alone(memory=found.limit_of(one))) for one in found.plans[1:]]
    ratios = [one.predicted.step_seconds / other for one, other in zip(found.plans[1:], again, strict=True)]
    limit = found.limit_of(found.plans[len(found) // 2])
    of_batch = largest_batch(*arguments, memory=limit, time_limit=SECONDS_TOGETHER, **how)
    rows, batch = of_batch.rows, of_batch.undecided is None and (of_batch.refused or 0) > of_batch.rows
    chip = machine.partition(":")[0]
    few = functools.partial(fewest_devices, *arguments, chip=chip, memory=limit, donate_argnums=0)
    least = few().mesh.size
    devices = least == 1 or not fits(lambda: few(most=least // 2))
    checks = {"monotone": is_monotone(found.plans), "ends": ends, "batch": batch, "devices": devices}
    checks["between"] = max(ratios, default=1.0) <= 1 + GAP
    failed = ", ".join(check for check, holds in checks.items() if not holds)
    first, smallest = (found.plans[i].predicted for i in (0, -1))
    print(
        f"| {name} | {len(found)} | {first.step_seconds * 1e3:.4g} ms, {first.peak_bytes / 2**20:.4g} MiB "
        f"| {smallest.step_seconds * 1e3:.4g} ms, {smallest.peak_bytes / 2**20:.4g} MiB "
        f"| {max(ratios, default=1.0):.3f} | {rows} | {least} | {took:.0f} | {failed or 'all hold'} |",
        flush=True,
    )
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["vit", "lstm", "moe", "unet", "resnet"], choices=list(SMALL))
    parser.add_argument("--large", action="store_true", help="models of the size that accelerators train")
    parser.add_argument("--machine", default="v5e:2x4")
    parser.add_argument("--mesh", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--points", type=int, default=5)
    asked = parser.parse_args()
    axes = dict(zip(("data", "model"), asked.mesh, strict=False))
    print("| model | plans | fastest | smallest | over planned alone | batch | devices | CPU s | |")
    print("|---|--:|---|---|--:|--:|--:|--:|---|")
    sizes = LARGE if asked.large else SMALL
    kept = [row(name, sizes, asked.machine, axes, asked.points) for name in asked.models]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
