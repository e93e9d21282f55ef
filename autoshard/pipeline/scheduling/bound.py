"""A makespan that no order of the tasks is below."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autoshard.errors.kinds import checks_kinds
from autoshard.pipeline.amounts import Amount, Transfer
from autoshard.pipeline.orders import Schedule
from autoshard.pipeline.scheduling.problem import OrderProblem, order_problem
from autoshard.pipeline.validation import validate


@checks_kinds("schedule")
def makespan_bound(
    schedule: Schedule,
    forward: Amount = 1.0,
    backward: Amount = 2.0,
    weight: Amount = 0.0,
    transfer: Transfer = 0.0,
) -> float:
    """Seconds that every order of the tasks of a schedule takes at least, on the devices that it places them on.

    The arguments are those of `simulate`. Orders may separate the tasks of fused groups.

    Raises:
        ScheduleError: the schedule cannot run.
        ArgumentError: an amount is negative, no number, or of the wrong length.
    """
    validate(schedule)
    return bound_of(order_problem(without_groups(schedule), forward, backward, weight, transfer))


def without_groups(schedule: Schedule) -> Schedule:
    """The schedule with every task on its own, and its savings on its device."""
    return Schedule(
        schedule.name,
        schedule.microbatches,
        schedule.orders,
        schedule.placement,
        schedule.predecessors,
        schedule.replicas,
        schedule.slices,
        updates=schedule.updates,
    )


def bound_of(problem: OrderProblem) -> float:
    """The largest bound of a single device.

    Each task of a device is there from its head on, and leaves its tail to be done elsewhere. A device that could
    interrupt tasks does best by always running the one with the longest tail (Jackson's rule), which is quickly found.
    """
    rows: dict[int, list[int]] = {}
    for task, device in enumerate(problem.devices):
        rows.setdefault(device, []).append(task)
    return max((_one_device(row, problem.heads, problem.seconds, problem.tails) for row in rows.values()), default=0.0)


def _one_device(row: Sequence[int], heads: Sequence[float], seconds: Sequence[float], tails: Sequence[float]) -> float:
    """The makespan of Jackson's preemptive schedule of one device."""
    coming = sorted(row, key=heads.__getitem__, reverse=True)
    left = {task: seconds[task] for task in row}
    ready: list[tuple[float, int]] = []
    now = best = 0.0
    while coming or ready:
        if not ready:
            now = max(now, heads[coming[-1]])
        while coming and heads[coming[-1]] <= now:
            task = coming.pop()
            heapq.heappush(ready, (-tails[task], task))
        tail, task = ready[0]
        until = heads[coming[-1]] if coming else float("inf")
        if now + left[task] <= until:
            now += left[task]
            heapq.heappop(ready)
            best = max(best, now - tail)
        else:
            left[task] -= until - now
            now = until
    return best
