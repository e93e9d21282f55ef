"""A schedule to the first fault that would keep it from running."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.errors import ScheduleError
from autoshard.errors.kinds import check_fields, checks_kinds
from autoshard.pipeline.operations import OperationGraph, operation_graph
from autoshard.pipeline.orders import Schedule, Task


@checks_kinds("schedule")
def validate(schedule: Schedule) -> None:
    """Checks that every task is there once, on its device, and that no device waits forever.

    Raises:
        ScheduleError: with the first fault: its task, its device, and what would mend it.
    """
    for fuse in (False, True) if schedule.fused else (False,):
        graph = checked_graph(schedule, fuse=fuse)
        lags = [[(other, 0.0) for other in inputs] for inputs in graph.inputs]
        graph.start_times([0.0] * len(lags), lags)


def checked_graph(schedule: Schedule, *, fuse: bool = False) -> OperationGraph:
    """The operations of a schedule that has every task once, on its device. Devices may still wait forever."""
    try:
        _check_shape(schedule)
        _check_tasks(schedule)
        _check_groups(schedule)
    except (AttributeError, IndexError, TypeError, ValueError):
        check_fields(schedule)
        raise
    return operation_graph(schedule, fuse=fuse)


def _check_shape(schedule: Schedule) -> None:
    stages, devices = len(schedule.placement), len(schedule.orders)
    if not devices or not stages or schedule.microbatches < 1 or schedule.slices < 1 or schedule.replicas < 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {devices} devices, {stages} virtual stages, {schedule.microbatches} "
            f"microbatches, {schedule.slices} slices and {schedule.replicas} replicas; each must be 1 or more"
        )
    for stage, device in enumerate(schedule.placement):
        if not 0 <= device < devices:
            raise ScheduleError(
                f"schedule {schedule.name!r} places virtual stage {stage} on device {device}; it has the orders of "
                f"{devices} devices, 0 to {devices - 1}"
            )
    if stages % schedule.replicas or schedule.microbatches % schedule.replicas:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.replicas} replicas, which must have equally many of its "
            f"{stages} virtual stages and of its {schedule.microbatches} microbatches"
        )
    if len(schedule.predecessors) != stages:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {stages} virtual stages in `placement` and "
            f"{len(schedule.predecessors)} in `predecessors`; give the predecessors of each, () for the first"
        )
    for stage, before in enumerate(schedule.predecessors):
        for earlier in before:
            if not 0 <= earlier < stage:
                raise ScheduleError(
                    f"schedule {schedule.name!r}: virtual stage {stage} reads virtual stage {earlier}; number virtual "
                    f"stages so that each reads only earlier ones"
                )


def _check_tasks(schedule: Schedule) -> None:
    expected = dict.fromkeys(schedule.tasks())
    where: dict[Task, int] = {}
    for device, order in enumerate(schedule.orders):
        for task in order:
            if task not in expected:
                kinds = "F, B and W" if schedule.has_weight_tasks else "F and B"
                raise ScheduleError(
                    f"device {device} of schedule {schedule.name!r} has {task}, which is no task of it: kinds are "
                    f"{kinds}, units 0 to {schedule.units - 1}, virtual stages 0 to {len(schedule.placement) - 1}"
                    + (", each microbatch in those of its replica" if schedule.replicas > 1 else "")
                )
            if task in where:
                raise ScheduleError(
                    f"schedule {schedule.name!r} has {task} twice: on device {where[task]} and on device {device}; "
                    f"leave one out"
                )
            home = schedule.placement[task.virtual_stage]
            if home != device:
                raise ScheduleError(
                    f"schedule {schedule.name!r} has {task} on device {device}; virtual stage {task.virtual_stage} "
                    f"is placed on device {home}"
                )
            where[task] = device
    missing = [task for task in expected if task not in where]
    if missing:
        raise ScheduleError(
            f"schedule {schedule.name!r} misses {missing[0]}, which belongs to device "
            f"{schedule.placement[missing[0].virtual_stage]}; {len(missing)} of {len(expected)} tasks are missing"
        )


def _check_groups(schedule: Schedule) -> None:
    for group in schedule.fused:
        order = schedule.orders[schedule.placement[group[0][2]]]
        at = order.index(group[0])
        if order[at : at + len(group)] != group:
            raise ScheduleError(f"schedule {schedule.name!r} fuses {_listed(group)}, which do not stand in a row")
    for eviction in schedule.evictions:
        device = schedule.placement[eviction.forward.virtual_stage]
        order = schedule.orders[device]
        backward = eviction.forward._replace(kind="B")
        if not order.index(eviction.forward) < order.index(eviction.before) <= order.index(backward):
            raise ScheduleError(
                f"schedule {schedule.name!r} brings what {eviction.forward} saved back before {eviction.before}; that "
                f"must stand after it and not after {backward}"
            )
        if eviction.keeper == device or not 0 <= eviction.keeper < schedule.stages:
            raise ScheduleError(
                f"schedule {schedule.name!r} evicts what {eviction.forward} saved from device {device} to device "
                f"{eviction.keeper}; another device of the {schedule.stages} is needed"
            )


def _listed(tasks: Sequence[Task]) -> str:
    return ", ".join(map(str, tasks))
