"""What devices hold at most, from the times of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate

from autoshard.pipeline.orders import Schedule, Task

Size = Callable[[Task], float | Fraction]  # of what a forward task saves, in bytes or in microbatches
_LETS_GO, _COMES, _RETURNS = range(3)  # the order of what happens at one moment
_Change = tuple[float, int, float | Fraction]  # moment, place in it, and by how much more or less is held from then on


def part_of_stage(schedule: Schedule) -> Size:
    """What a forward task saves, in microbatches of a whole stage."""
    parts = [Fraction(1, sharers * schedule.slices) for sharers in schedule.sharers]
    return lambda task: parts[task.virtual_stage]


def changes(
    schedule: Schedule, order: Sequence[Task], saved: Size, kept: Size
) -> Iterator[tuple[Task, str, float | Fraction]]:
    """What a device holds more or less at the start or the end of its tasks, in their order.

    A forward task's savings are there from its start on. B lets go of what W does not need when it ends, and W of the
    rest; without W, B lets go of all. An eviction takes savings away from the end of F until the start of a later task.
    """
    evicted = {eviction.forward for eviction in schedule.evictions}
    returns = {eviction.before: eviction.forward for eviction in schedule.evictions}
    for task in order:
        forward = task._replace(kind="F")
        if task in returns:
            yield task, "start", saved(returns[task])
        if task.kind == "F":
            yield task, "start", saved(task)
            if task in evicted:
                yield task, "end", -saved(task)
        elif task.kind == "W":
            yield task, "end", -kept(forward)
        else:
            yield task, "end", (kept(forward) if schedule.has_weight_tasks else 0) - saved(forward)


def peaks(
    schedule: Schedule, start: Mapping[Task, float], end: Mapping[Task, float], saved: Size, kept: Size
) -> tuple[float, ...]:
    """The most that each device holds at one time.

    What a device lets go of at one moment is let go first. But an eviction has come to its keeper before one that
    returns at the same moment has left: both take a transfer.

    Args:
        start: seconds per task.
        end: seconds per task.
        saved: what a forward task saves.
        kept: the part of it that stays until the end of W.
    """
    hosted: list[list[_Change]] = [[] for _ in schedule.orders]  # per keeper of evictions
    for eviction in schedule.evictions:
        size = saved(eviction.forward)
        hosted[eviction.keeper] += [
            (end[eviction.forward], _COMES, size),
            (start[eviction.before], _RETURNS, -size),
        ]
    found = []
    for device, order in enumerate(schedule.orders):
        own: list[_Change] = [
            (start[task] if moment == "start" else end[task], _LETS_GO if change < 0 else _COMES, change)
            for task, moment, change in changes(schedule, order, saved, kept)
        ]
        if hosted[device]:
            own = sorted(own + hosted[device])
        found.append(float(max(accumulate(change for _, _, change in own), default=0)))
    return tuple(found)
