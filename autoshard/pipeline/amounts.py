"""What callers say of tasks (seconds, bytes) to one number per task, and of links to seconds per transfer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

from autoshard.errors import ArgumentError
from autoshard.pipeline.orders import Schedule, Task

# Of one stage as a whole, which its virtual stages and the slices of a microbatch share equally; or per virtual stage,
# which only the slices share; or of each task.
Amount = float | Sequence[float] | Callable[[Task], float]

# The same for every pair of devices; or, as a matrix, from each device to each other one.
Transfer = float | Sequence[Sequence[float]]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a real number; arrays of one number count, booleans do not.

    >>> is_number(2), is_number(float("nan")), is_number("2"), is_number(True)
    (True, False, False, False)
    """
    if isinstance(value, bool | str | bytes):
        return False
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def per_task(schedule: Schedule, name: str, amount: Amount) -> Callable[[Task], float]:
    """A function of the tasks of a schedule.

    Raises:
        ArgumentError: an amount is negative, no number, or not one per virtual stage.
    """
    if callable(amount):
        return amount
    if is_number(amount):
        parts = [float(amount) / sharers for sharers in schedule.sharers]
    else:
        parts = _numbers(name, amount)
        if len(parts) != len(schedule.placement):
            raise ArgumentError(
                f"{name} has {len(parts)} entries; schedule {schedule.name!r} has {len(schedule.placement)} virtual "
                "stages.\nGive one number for a whole stage, or one per virtual stage."
            )
    if min(parts) < 0:
        raise ArgumentError(f"{name}={amount!r}; 0 or more is needed")
    parts = [part / schedule.slices for part in parts]
    return lambda task: parts[task[2]]


def between_devices(schedule: Schedule, transfer: Transfer) -> Callable[[int, int], float]:
    """Seconds from one device to another; none from a device to itself.

    Raises:
        ArgumentError: seconds are negative, no number, or a matrix has another size than devices by devices.
    """
    if is_number(transfer):
        same = float(transfer)
        rows = [[same] * schedule.stages] * schedule.stages
    else:
        rows = [_numbers("transfer", row) for row in transfer] if isinstance(transfer, Iterable) else []
        if len(rows) != schedule.stages or any(len(row) != schedule.stages for row in rows):
            raise ArgumentError(
                f"transfer={transfer!r}; seconds are needed, or {schedule.stages} rows of {schedule.stages} entries: "
                "from each device to each"
            )
    if min(map(min, rows)) < 0:
        raise ArgumentError(f"transfer={transfer!r}; 0 seconds or more are needed")
    return lambda source, target: 0.0 if source == target else rows[source][target]


def _numbers(name: str, values: Any) -> list[float]:
    listed = list(values) if isinstance(values, Iterable) else [values]
    if not listed or not all(map(is_number, listed)):
        raise ArgumentError(f"{name}={values!r}; a number is needed, or one per virtual stage, or a function of a task")
    return [float(value) for value in listed]
