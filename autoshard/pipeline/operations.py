"""A schedule as a graph of operations, and the times at which devices that follow their orders start them.

An operation is one task, or a group of tasks that run as one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.errors import ScheduleError
from autoshard.pipeline.orders import Schedule, Task


@dataclass(frozen=True)
class OperationGraph:
    """Operations of a schedule, numbered device by device in their order."""

    schedule: Schedule
    operations: list[tuple[Task, ...]]
    inputs: list[tuple[int, ...]]  # per operation, the operations that it waits for beside the one before it in its row
    devices: list[int]  # per operation
    rows: list[range]  # per device, its operations

    def start_times(self, seconds: Sequence[float], lags: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
        """When each operation starts, with operations and the seconds that their results travel in `lags`.

        Raises:
            ScheduleError: devices wait for each other.
        """
        starts, blocked = start_times(self.rows, lags, seconds)
        if blocked:
            waits = (
                f"device {self.devices[operation]} at {self.operations[operation][0]} for "
                f"{self._task_of(operation, awaited)} of device {self.devices[awaited]}"
                for operation, awaited in blocked
            )
            raise ScheduleError(
                f"schedule {self.schedule.name!r} deadlocks: {'; '.join(waits)}.\n"
                "Put a task that others wait for before those that wait."
            )
        return starts

    def _task_of(self, operation: int, awaited: int) -> Task:
        """The task of `awaited` that `operation` reads."""
        inputs = {task for own in self.operations[operation] for task in self.schedule.inputs(own)}
        return next(task for task in self.operations[awaited] if task in inputs)


def operation_graph(schedule: Schedule, *, fuse: bool = False) -> OperationGraph:
    """The operations of a schedule whose orders have every task once; a fused group is one operation if `fuse`."""
    group_of = {group[0]: group for group in schedule.fused} if fuse else {}
    operations: list[tuple[Task, ...]] = []
    devices: list[int] = []
    rows: list[range] = []
    number: dict[Task, int] = {}
    for device, order in enumerate(schedule.orders):
        first = at = len(operations)
        position = 0
        while position < len(order):
            group = group_of.get(order[position]) or (order[position],)
            number |= dict.fromkeys(group, at)
            operations.append(group)
            devices.append(device)
            position += len(group)
            at += 1
        rows.append(range(first, at))
    inputs = [
        tuple(sorted({number[other] for task in group for other in schedule.inputs(task)} - {own}))
        for own, group in enumerate(operations)
    ]
    return OperationGraph(schedule, operations, inputs, devices, rows)


def start_times(
    rows: Sequence[Sequence[int]], lags: Sequence[Sequence[tuple[int, float]]], seconds: Sequence[float]
) -> tuple[list[float], list[tuple[int, int]]]:
    """When operations start on devices that run their row one by one, each as soon as it can.

    Args:
        rows: per device, its operations in order.
        lags: per operation, those that it waits for, and the seconds that each one's result travels.
        seconds: per operation.

    Returns:
        Seconds per operation; and per device that never ends, the operation it stops at and one that this waits for.
    """
    starts = [0.0] * len(seconds)
    ends: list[float | None] = [None] * len(seconds)
    free = [0.0] * len(rows)
    position = [0] * len(rows)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(rows)))
    while ready:
        device = ready.pop()
        row = rows[device]
        while position[device] < len(row):
            operation = row[position[device]]
            start = free[device]
            for other, lag in lags[operation]:
                end = ends[other]
                if end is None:
                    waiting.setdefault(other, []).append(device)
                    break
                if end + lag > start:
                    start = end + lag
            else:
                starts[operation] = start
                ends[operation] = free[device] = start + seconds[operation]
                position[device] += 1
                ready += waiting.pop(operation, ())
                continue
            break
    blocked = [(rows[device][position[device]], other) for other, devices in waiting.items() for device in devices]
    return starts, sorted(blocked)
