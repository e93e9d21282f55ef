"""Tasks to be put in order on their devices: the problem that list scheduling, local search and HiGHS share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.pipeline.amounts import Amount, Transfer
from autoshard.pipeline.memory import Size, changes
from autoshard.pipeline.operations import operation_graph, start_times
from autoshard.pipeline.orders import Schedule, Task
from autoshard.pipeline.simulation import durations_of

TOLERANCE = 1e-9  # of a limit or a makespan, for rounding

Rows = list[list[int]]  # per device, the numbers of its tasks in order


@dataclass(frozen=True)
class HeldLimit:
    """A limit on what devices hold, in bytes or in microbatches."""

    at_start: list[float]  # per task, by how much more is held from its start on
    at_end: list[float]  # per task, by how much less from its end on; negative
    most: float  # on every device

    def fits(self, row: Sequence[int]) -> bool:
        """Whether a device that runs these tasks in this order stays within the limit."""
        held, most = 0.0, self.most * (1 + TOLERANCE)
        for task in row:
            held += self.at_start[task]
            if held > most:
                return False
            held += self.at_end[task]
        return True


@dataclass(frozen=True)
class OrderProblem:
    """Every task with its device, its seconds and what it waits for. The order of each device is to be chosen."""

    schedule: Schedule  # whose orders are one choice
    tasks: list[Task]  # numbered device by device, in the order of `schedule`
    devices: list[int]  # per task
    seconds: list[float]  # per task
    lags: list[list[tuple[int, float]]]  # per task, those it waits for and the seconds that their results travel
    limits: tuple[HeldLimit, ...]

    @cached_property
    def number(self) -> dict[Task, int]:
        """The number of each task."""
        return {task: i for i, task in enumerate(self.tasks)}

    @cached_property
    def readers(self) -> list[list[tuple[int, float]]]:
        """Per task, those that wait for it, and the seconds that its result travels."""
        found: list[list[tuple[int, float]]] = [[] for _ in self.tasks]
        for task, inputs in enumerate(self.lags):
            for other, lag in inputs:
                found[other].append((task, lag))
        return found

    @cached_property
    def topological(self) -> list[int]:
        """All tasks, each after those it waits for."""
        waiting = [len(inputs) for inputs in self.lags]
        order = [task for task, count in enumerate(waiting) if not count]
        for task in order:
            for reader, _ in self.readers[task]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    order.append(reader)
        return order

    @cached_property
    def heads(self) -> list[float]:
        """Per task, seconds before which it cannot start."""
        found = [0.0] * len(self.tasks)
        for task in self.topological:
            found[task] = max((found[other] + self.seconds[other] + lag for other, lag in self.lags[task]), default=0.0)
        return found

    @cached_property
    def tails(self) -> list[float]:
        """Per task, seconds that pass after its end at least."""
        found = [0.0] * len(self.tasks)
        for task in reversed(self.topological):
            after = (lag + self.seconds[reader] + found[reader] for reader, lag in self.readers[task])
            found[task] = max(after, default=0.0)
        return found

    @cached_property
    def lines(self) -> dict[tuple[str, int], list[int]]:
        """Per kind and virtual stage, its tasks by microbatch; slices of one in their order."""
        found: dict[tuple[str, int], list[int]] = {}
        slices = self.schedule.slices

        def place(task: Task) -> tuple[int, int]:
            microbatch, part = divmod(task.microbatch, slices)
            return microbatch, part if task.kind == "F" else -part

        for task in sorted(self.tasks, key=place):
            found.setdefault((task.kind, task.virtual_stage), []).append(self.number[task])
        return found

    @cached_property
    def are_microbatches_alike(self) -> bool:
        """Whether tasks differ by kind, virtual stage and slice alone. Then some best orders keep the `lines`."""
        seen: dict[tuple[str, int, int], tuple[float, ...]] = {}
        for i, task in enumerate(self.tasks):
            facts = (self.seconds[i], *(x for limit in self.limits for x in (limit.at_start[i], limit.at_end[i])))
            key = (task.kind, task.virtual_stage, task.microbatch % self.schedule.slices)
            if seen.setdefault(key, facts) != facts:
                return False
        return True

    def fits(self, row: Sequence[int]) -> bool:
        """Whether a device that runs these tasks in this order stays within all limits."""
        return all(limit.fits(row) for limit in self.limits)

    def makespan(self, rows: Rows) -> float | None:
        """Seconds until the last task ends; None where devices wait for each other."""
        starts, blocked = start_times(rows, self.lags, self.seconds)
        if blocked:
            return None
        return max(start + seconds for start, seconds in zip(starts, self.seconds, strict=True))

    def ordered(self, rows: Rows) -> Schedule:
        """The schedule with these orders."""
        orders = tuple(tuple(self.tasks[task] for task in row) for row in rows)
        return replace(self.schedule, orders=orders)


def order_problem(
    schedule: Schedule,
    forward: Amount,
    backward: Amount,
    weight: Amount,
    transfer: Transfer,
    limits: Sequence[tuple[Size, Size, float]] = (),
) -> OrderProblem:
    """The problem of which a valid schedule without fused groups and evictions is one solution.

    Args:
        limits: what a forward task saves, what of it stays until W, and how much of that a device may hold.
    """
    graph = operation_graph(schedule)
    durations = durations_of(graph, forward, backward, weight, transfer)
    tasks = [task for (task,) in graph.operations]
    found = []
    for saved, kept, most in limits:
        moments: dict[str, dict[Task, float]] = {"start": {}, "end": {}}
        for order in schedule.orders:
            for task, moment, change in changes(schedule, order, saved, kept):
                moments[moment][task] = float(change)
        at_start, at_end = ([moments[moment].get(task, 0.0) for task in tasks] for moment in ("start", "end"))
        found.append(HeldLimit(at_start, at_end, most))
    return OrderProblem(schedule, tasks, graph.devices, durations.seconds, durations.lags, tuple(found))
