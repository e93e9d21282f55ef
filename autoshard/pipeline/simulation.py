"""A schedule and what its tasks take to a `Timeline`: when each task runs, and what devices hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autoshard.errors import ArgumentError
from autoshard.errors.kinds import checks_kinds
from autoshard.pipeline.amounts import Amount, Transfer, between_devices, is_number, per_task
from autoshard.pipeline.memory import Size, part_of_stage, peaks
from autoshard.pipeline.operations import OperationGraph
from autoshard.pipeline.orders import Schedule, Task
from autoshard.pipeline.timeline import Timeline
from autoshard.pipeline.validation import checked_graph


@dataclass(frozen=True)
class Durations:
    """Seconds of every operation of a schedule, and of the transfers that each waits for."""

    seconds: list[float]  # per operation
    lags: list[list[tuple[int, float]]]  # per operation, the operations that it waits for and their transfers
    of_task: Callable[[Task], float]


@checks_kinds("schedule")
def simulate(
    schedule: Schedule,
    forward: Amount = 1.0,
    backward: Amount = 2.0,
    weight: Amount = 0.0,
    transfer: Transfer = 0.0,
    *,
    overlap: float | None = None,
    memory: Amount = 0.0,
    weight_memory: Amount | None = None,
) -> Timeline:
    """When every task of a schedule runs, on devices that follow their orders and start each task as soon as they can.

    An amount is one number for a whole stage, shared equally by its virtual stages and by the slices of a microbatch;
    or a sequence of one number per virtual stage; or a function of a task. Amounts are taken as they are for each kind
    of task: `backward` is the whole backward pass where the schedule has no W, and the part without W where it has.

    Args:
        schedule: checked as by `validate`.
        forward: seconds of F.
        backward: seconds of B.
        weight: seconds of W.
        transfer: seconds from the end of a task to the moment at which another device has its result. They take no
            time of the devices. A matrix gives them from each device to each other one.
        overlap: runs the schedule's fused groups as one program each. Their results are there when the group ends, and
            a forward and backward of a whole stage is so many seconds shorter than one after the other. By default
            each task runs on its own.
        memory: bytes that F leaves for B and W.
        weight_memory: those of them that stay until the end of W. By default all; without W all go with B.

    Raises:
        ScheduleError: the schedule cannot run.
        ArgumentError: an amount is negative, no number, or of the wrong length.
    """
    graph = checked_graph(schedule, fuse=overlap is not None)
    durations = durations_of(graph, forward, backward, weight, transfer, overlap=0.0 if overlap is None else overlap)
    starts = graph.start_times(durations.seconds, durations.lags)
    start: dict[Task, float] = {}
    end: dict[Task, float] = {}
    for tasks, begin, seconds in zip(graph.operations, starts, durations.seconds, strict=True):
        # One after the other, as if each took its part of the group's seconds.
        alone = sum(map(durations.of_task, tasks))
        for task in tasks:
            start[task] = begin
            begin += durations.of_task(task) * (seconds / alone if alone else 1.0)
            end[task] = begin
    saved = per_task(schedule, "memory", memory)
    kept = saved if weight_memory is None else per_task(schedule, "weight_memory", weight_memory)
    _check_kept(start, saved, kept)
    work = tuple(sum(durations.seconds[operation] for operation in row) for row in graph.rows)
    parts = part_of_stage(schedule)
    peak = peaks(schedule, start, end, parts, parts)
    return Timeline(schedule, start, end, work, peak, peaks(schedule, start, end, saved, kept))


def _check_kept(tasks: Iterable[Task], saved: Size, kept: Size) -> None:
    for task in tasks:
        if task.kind == "F" and kept(task) > saved(task):
            raise ArgumentError(
                f"weight_memory={kept(task):g} bytes of {task} are part of memory={saved(task):g}; give less"
            )


def durations_of(
    graph: OperationGraph,
    forward: Amount,
    backward: Amount,
    weight: Amount,
    transfer: Transfer,
    *,
    overlap: float = 0.0,
) -> Durations:
    """What the arguments of `simulate` say of every operation."""
    schedule = graph.schedule
    if not is_number(overlap) or overlap < 0:
        raise ArgumentError(f"overlap={overlap!r}; 0 seconds or more are needed")
    by_kind = {
        kind: per_task(schedule, name, amount)
        for kind, name, amount in (("F", "forward", forward), ("B", "backward", backward), ("W", "weight", weight))
    }
    travel = between_devices(schedule, transfer)
    lags = [
        [(other, travel(graph.devices[other], device)) for other in inputs]
        for inputs, device in zip(graph.inputs, graph.devices, strict=True)
    ]

    def of_task(task: Task) -> float:
        return by_kind[task[0]](task)

    seconds = [sum(map(of_task, tasks)) for tasks in graph.operations]
    for i, tasks in enumerate(graph.operations):
        if {"F", "B"} <= {task.kind for task in tasks}:
            seconds[i] -= min(seconds[i], overlap / schedule.sharers[tasks[0].virtual_stage] / schedule.slices)
    return Durations(seconds, lags, of_task)
