"""A timeline as text: one line per device, time from left to right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from string import ascii_lowercase

from autoshard.errors import ArgumentError
from autoshard.pipeline.orders import Schedule, Task

IDLE = "."


def names_of(schedule: Schedule) -> dict[Task, str]:
    """Kind and unit of each task; a letter says which of its device's virtual stages, where there are several."""
    of_device: dict[int, list[int]] = {}
    for stage, device in enumerate(schedule.placement):
        of_device.setdefault(device, []).append(stage)
    several = max(map(len, of_device.values())) > 1
    letter = {
        stage: ascii_lowercase[i % 26] if several else ""
        for stages in of_device.values()
        for i, stage in enumerate(stages)
    }
    return {task: f"{task.kind}{task.microbatch}{letter[task.virtual_stage]}" for o in schedule.orders for task in o}


def chart(schedule: Schedule, start: Mapping[Task, float], end: Mapping[Task, float], width: int) -> str:
    """Every task as its name at the place of its time; dots where a device is idle.

    The shortest task is as wide as the longest name and a space. If lines are longer than `width` then, every
    character is an equal part of the makespan and shows the kind of the task that runs in the middle of it.
    """
    if isinstance(width, bool) or not isinstance(width, int) or width < 20:
        raise ArgumentError(f"width={width!r}; 20 characters or more are needed")
    names = names_of(schedule)
    head = len(f"device {schedule.stages - 1}  ")
    first, last = min(start.values()), max(end.values())
    shortest = min((end[task] - start[task] for task in start if end[task] > start[task]), default=1.0)
    column = (max(map(len, names.values())) + 1) / shortest  # characters per second
    room = width - head
    is_named = (last - first) * column <= room + 1e-9
    lines = []
    for device, order in enumerate(schedule.orders):
        if is_named:
            line = [IDLE] * math.ceil((last - first) * column - 1e-9)
            for task in order:
                left, right = (round((moment - first) * column) for moment in (start[task], end[task]))
                if right > left:
                    line[left:right] = f"{names[task]:<{right - left}}"[: right - left]
        else:
            line = _sampled(order, start, end, first, (last - first) / room, room)
        lines.append(f"device {device}".ljust(head) + "".join(line).rstrip())
    return "\n".join(lines)


def _sampled(
    order: tuple[Task, ...],
    start: Mapping[Task, float],
    end: Mapping[Task, float],
    first: float,
    step: float,
    characters: int,
) -> list[str]:
    """One character per step: the kind of what runs in its middle."""
    line = []
    tasks = iter([task for task in order if end[task] > start[task]])
    task = next(tasks, None)
    for i in range(characters):
        moment = first + (i + 0.5) * step
        while task is not None and end[task] <= moment:
            task = next(tasks, None)
        line.append(task.kind if task is not None and start[task] <= moment else IDLE)
    return line
