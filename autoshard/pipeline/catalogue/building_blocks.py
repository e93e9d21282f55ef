"""V-Half and V-Min: schedules whose memory is set by how long a microbatch stays (Qi et al., arXiv:2405.15362).

Time is in slots, in each of which a device runs one F, B or W of one of its two chunks. A *building block* is the slots
of the four F and B of one microbatch on every device; its W go to slots that stay free. Blocks of later microbatches
start 6 slots apart, which is how many tasks a device has per microbatch, so no two tasks meet. A microbatch is in
flight for as many slots as its block is long: the block sets the memory.
"""

from __future__ import annotations

from collections import deque

from autoshard.pipeline.catalogue.one_direction import v_placement
from autoshard.pipeline.orders import Schedule, Task, chain

_PERIOD = 6  # slots between blocks: a device has two chunks, each with one slot of F, one of B and one of W


def v_half(stages: int, microbatches: int) -> Schedule:
    """About half the memory of 1F1B, and at most half of its bubble where F, B and W take equally long."""
    extra = 3 if stages % 2 == 0 else 0  # keeps blocks of different microbatches in different slots
    blocks = []
    for device in range(stages):
        first = 2 * device
        turned = 3 * stages - device - 2
        blocks.append((first, turned, 3 * stages + extra + first - 1, 3 * stages + extra + turned))
    return _from_blocks("v_half", microbatches, blocks, limit=2 * ((stages + 2) // 2))


def v_min(stages: int, microbatches: int) -> Schedule:
    """About a third of the memory of 1F1B, and at most two thirds of its bubble where F, B and W take equally long."""
    extra = 2 if stages % 3 == 0 else 0
    blocks = []
    for device in range(stages):
        turned = 2 * stages - device - 1
        blocks.append((device, turned, 2 * stages + extra + device, 2 * stages + extra + turned))
    return _from_blocks("v_min", microbatches, blocks, limit=2 * ((stages + 4) // 3))


def _from_blocks(name: str, microbatches: int, blocks: list[tuple[int, int, int, int]], limit: int) -> Schedule:
    """Blocks `_PERIOD` slots apart, then as far to the left as the order of tasks and memory allow.

    Args:
        blocks: per device the slots of F of its first chunk, F of its second, B of its second, B of its first.
        limit: of chunks in flight per device.
    """
    stages = len(blocks)
    slots: dict[Task, int] = {}
    for device, (forward, forward_turned, backward_turned, backward) in enumerate(blocks):
        turned = 2 * stages - 1 - device
        for microbatch in range(microbatches):
            at = _PERIOD * microbatch
            slots[Task("F", microbatch, device)] = at + forward
            slots[Task("F", microbatch, turned)] = at + forward_turned
            slots[Task("B", microbatch, turned)] = at + backward_turned
            slots[Task("B", microbatch, device)] = at + backward
    rows = [_Row(max(slots.values()) + 1) for _ in range(stages)]
    placement = v_placement(stages)
    for task, slot in slots.items():
        rows[placement[task.virtual_stage]].tasks[slot] = task
    for row in rows:
        row.count()
    while _moved_left(slots, rows, placement, limit):
        pass
    orders = tuple(row.order() for row in rows)
    return Schedule(name, microbatches, orders, placement, chain(2 * stages))


def _moved_left(slots: dict[Task, int], rows: list[_Row], placement: tuple[int, ...], limit: int) -> bool:
    """Moves every task to the first free slot that it can have; whether one moved.

    In the steady state there is no such slot. While the pipeline fills or drains there are many.
    """
    any_moved = False
    for task, slot in sorted(slots.items(), key=lambda item: item[1]):
        row = rows[placement[task.virtual_stage]]
        earliest = max((slots[other] + 1 for other in _earlier(task, len(placement)) if other in slots), default=0)
        for free in range(earliest, slot):
            if row.tasks[free] is None and row.moved(slot, free, limit):
                slots[task] = free
                any_moved = True
                break
    return any_moved


def _earlier(task: Task, virtual_stages: int) -> list[Task]:
    """The tasks that one comes after: those it waits for, and the same of the microbatch before."""
    kind, microbatch, stage = task
    if kind == "F":
        inputs = [Task("F", microbatch, stage - 1)]
    else:
        inputs = [Task("F", microbatch, stage), Task("B", microbatch, stage + 1)]
    return [*inputs, Task(kind, microbatch - 1, stage)]


class _Row:
    """The slots of one device. Free ones run the W that has waited longest, as long as one is due."""

    def __init__(self, length: int):
        self.tasks: list[Task | None] = [None] * length
        self._state = [(0, 0)] * length  # per slot, chunks in flight and W due after it

    def count(self) -> None:
        """Brings the counts up to date with the tasks."""
        state = (0, 0)
        for slot, task in enumerate(self.tasks):
            state = self._state[slot] = _after(state, task)

    def moved(self, slot: int, free: int, limit: int) -> bool:
        """Moves a task to an earlier free slot unless more than `limit` chunks are then in flight; whether it did."""
        tasks = self.tasks
        tasks[free], tasks[slot] = tasks[slot], None
        state = self._state[free - 1] if free else (0, 0)
        changed = []
        for at in range(free, len(tasks)):
            state = _after(state, tasks[at])
            if at >= slot and state == self._state[at]:
                break
            if state[0] > limit:
                tasks[slot], tasks[free] = tasks[free], None
                return False
            changed.append(state)
        self._state[free : free + len(changed)] = changed
        return True

    def order(self) -> tuple[Task, ...]:
        """The tasks with W in free slots, and at the end the W that are left."""
        order: list[Task] = []
        due: deque[Task] = deque()
        for task in self.tasks:
            if task is not None:
                order.append(task)
                if task.kind == "B":
                    due.append(task._replace(kind="W"))
            elif due:
                order.append(due.popleft())
        return (*order, *due)


def _after(state: tuple[int, int], task: Task | None) -> tuple[int, int]:
    """Chunks in flight and W due after a slot."""
    held, due = state
    if task is None:
        return (held - 1, due - 1) if due else state
    return (held + 1, due) if task.kind == "F" else (held, due + 1)
