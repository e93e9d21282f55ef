"""Schedules without flushes: weights change while microbatches are in flight, so they change the numbers of a step.

PipeDream (Harlap et al., arXiv:1806.03377), PipeDream-2BW (Narayanan et al., arXiv:2006.09503), PipeMare (Yang et al.,
arXiv:1910.05124), AMPNet (Gaunt et al., arXiv:1705.09786). For simulation only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.errors import ArgumentError, ScheduleError
from autoshard.errors.kinds import checks_kinds
from autoshard.pipeline.catalogue.one_direction import one_forward_one_backward
from autoshard.pipeline.orders import Schedule, Task, WeightUpdates


def pipedream(stages: int, microbatches: int, every: int) -> Schedule:
    """1F1B. Each microbatch's backward task reads the weights that its forward task read."""
    base = one_forward_one_backward("pipedream", stages, microbatches, hops=1)
    return replace(base, updates=WeightUpdates(every, delay=None, is_stashed=True))


def pipedream_2bw(stages: int, microbatches: int, every: int) -> Schedule:
    """1F1B. All microbatches of one update read the weights before the last update, so two versions are kept."""
    base = one_forward_one_backward("pipedream_2bw", stages, microbatches, hops=1)
    return replace(base, updates=WeightUpdates(every, delay=1, is_stashed=True))


def pipemare(stages: int, microbatches: int, every: int) -> Schedule:
    """Eager 1F1B. Forward and backward tasks read the latest weights, of which there is one version."""
    base = one_forward_one_backward("pipemare", stages, microbatches, hops=2)
    return replace(base, updates=WeightUpdates(every, delay=None, is_stashed=False))


def ampnet(stages: int, microbatches: int, every: int) -> Schedule:
    """Devices take messages as they come, backward ones first. At most as many microbatches as devices are in flight.

    Where tasks take equally long everywhere, that is the order of 1F1B.
    """
    base = one_forward_one_backward("ampnet", stages, microbatches, hops=1)
    return replace(base, updates=WeightUpdates(every, delay=None, is_stashed=False))


@dataclass(frozen=True)
class Staleness:
    """How old the weights are that the tasks of each virtual stage read."""

    forward: tuple[int, ...]  # most updates between the version that F reads and the one that its gradient changes
    backward: tuple[int, ...]  # the same of B
    versions: tuple[int, ...]  # of the weights, kept at one time


@checks_kinds("schedule")
def staleness(schedule: Schedule) -> Staleness:
    """How old the weights are that tasks read, in updates. Schedules that flush read the weights they change: 0.

    Raises:
        ArgumentError: a schedule without flushes that splits W, slices sequences, or has several virtual stages per
            device.
        ScheduleError: a task reads a version that is not there yet.
    """
    count = len(schedule.placement)
    if schedule.updates is None:
        return Staleness((0,) * count, (0,) * count, (1,) * count)
    if schedule.has_weight_tasks or schedule.slices > 1 or count > schedule.stages:
        raise ArgumentError(
            f"staleness of schedule {schedule.name!r}: tasks F and B of one virtual stage per device are needed"
        )
    rows = [_staleness_of(schedule.name, order, schedule.updates) for order in schedule.orders]
    return Staleness(*zip(*rows, strict=True))


def _staleness_of(name: str, order: tuple[Task, ...], updates: WeightUpdates) -> tuple[int, int, int]:
    """Most updates behind of F and of B, and most versions, on one device."""
    latest = done = 0
    stashed: dict[int, int] = {}  # microbatch in flight -> version
    behind = {"F": 0, "B": 0}
    versions = 1
    for task in order:
        changed = task.microbatch // updates.every  # its gradient makes this version the next one
        wanted = latest if updates.delay is None else max(0, changed - updates.delay)
        if wanted > latest:
            raise ScheduleError(
                f"schedule {name!r}: {task} reads version {wanted} of the weights when {latest} is the latest; "
                "sum more microbatches per update"
            )
        read = stashed.get(task.microbatch, wanted) if updates.is_stashed else wanted
        behind[task.kind] = max(behind[task.kind], changed - read)
        if task.kind == "F":
            stashed[task.microbatch] = read
        in_use = {*stashed.values()} if updates.is_stashed else set()
        versions = max(versions, len({latest, wanted} | in_use))
        if task.kind == "B":
            del stashed[task.microbatch]
            done += 1
            latest = done // updates.every
    return behind["F"], behind["B"], versions
