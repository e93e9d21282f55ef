"""Schedules written as time slots: every task has its slot, and a device runs its tasks in the order of slots.

Chimera (Li and Hoefler, arXiv:2107.06925) and Hanayo (Liu et al., arXiv:2308.15762).
"""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.pipeline.catalogue.one_direction import v_placement
from autoshard.pipeline.orders import Schedule, Task, chain


def chimera(stages: int, microbatches: int) -> Schedule:
    """Two pipelines in opposite directions, each with a copy of the weights and half of the microbatches.

    A unit is as many microbatches as there are devices. In it every pipeline starts a microbatch every other slot, and
    turns it round at once: F of its s-th stage is in slot s + 2j, B in slot 2p - 1 - s + 2j. In slots of which one
    pipeline uses the even ones of a device, the other uses the odd ones. The next unit starts 2p slots later.
    """
    half, per_unit = microbatches // 2, stages // 2
    slots = []
    for j in range(half):
        at = 2 * (j % per_unit) + 2 * stages * (j // per_unit)
        for replica in range(2):
            for stage in range(stages):
                where = (replica * half + j, replica * stages + stage)
                slots += [(at + stage, Task("F", *where)), (at + 2 * stages - 1 - stage, Task("B", *where))]
    placement = v_placement(stages)
    return Schedule("chimera", microbatches, _in_order(slots, placement), placement, chain(stages, 2), replicas=2)


def hanayo(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Chunks forth and back in waves, with one copy of the weights.

    A unit is as many microbatches as there are devices. One starts every other slot and takes a slot per virtual
    stage, forward and then backward. So a device's first, third, ... chunk use slots of one parity and the others those
    of the other, until the unit's last forward task. The next unit starts as many slots later as a device has tasks.
    """
    placement = v_placement(stages, chunks // 2)
    last = len(placement) - 1
    slots = []
    for microbatch in range(microbatches):
        at = 2 * (microbatch % stages) + 2 * len(placement) * (microbatch // stages)
        for stage in range(last + 1):
            slots += [
                (at + stage, Task("F", microbatch, stage)),
                (at + 2 * last + 1 - stage, Task("B", microbatch, stage)),
            ]
    return Schedule("hanayo", microbatches, _in_order(slots, placement), placement, chain(len(placement)))


def _in_order(slots: Iterable[tuple[int, Task]], placement: tuple[int, ...]) -> tuple[tuple[Task, ...], ...]:
    """The tasks of each device by slot."""
    rows: list[dict[int, Task]] = [{} for _ in range(max(placement) + 1)]
    for slot, task in slots:
        row = rows[placement[task.virtual_stage]]
        assert slot not in row, (slot, task, row[slot])
        row[slot] = task
    return tuple(tuple(row[slot] for slot in sorted(row)) for row in rows)
