"""What a pipeline schedule is: which device runs which tasks in what order, and what each task waits for.

A task is one microbatch's forward pass (F), backward pass (B) or weight gradient (W) through one virtual stage.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from autoshard.errors import ScheduleError

KINDS = ("F", "B", "W")


class Task(NamedTuple):
    """One microbatch in one virtual stage. Equal to the plain tuple of its three entries.

    >>> Task("F", 0, 2) == ("F", 0, 2)
    True
    """

    kind: str  # "F" forward, "B" backward, "W" gradient of the weights where it is not part of B
    microbatch: int  # its unit where the sequence is sliced: microbatch * slices + slice
    virtual_stage: int

    def __str__(self) -> str:
        return f"{self.kind}(microbatch {self.microbatch}, virtual stage {self.virtual_stage})"


@functools.lru_cache(maxsize=8192)
def tasks(kind: str, units: range | tuple[int, ...], stage: int) -> tuple[Task, ...]:
    """The tasks of one kind of one virtual stage. Schedules share them: those that a search looks at have millions."""
    return tuple([Task(kind, unit, stage) for unit in units])


def _order(entries: Iterable[Iterable[Any]]) -> tuple[Task, ...]:
    return tuple([entry if isinstance(entry, Task) else Task(*entry) for entry in entries])


@dataclass(frozen=True)
class Eviction:
    """What one forward task saved, kept by another device for a while.

    It leaves when its forward task ends, and is back before the task `before` of the same device starts.
    """

    forward: Task
    keeper: int  # device
    before: Task  # at or before the backward task


@dataclass(frozen=True)
class WeightUpdates:
    """When a schedule without flushes changes weights, and which version a task reads."""

    every: int  # microbatches that one update sums the gradients of
    delay: int | None  # versions that a forward task is behind its own update; None: it reads the latest version
    is_stashed: bool  # whether the backward task reads the version that its forward task read, or the latest one


@dataclass(frozen=True)
class Schedule:
    """The order of every device's tasks. Data only: `validate` says whether it can run, `simulate` how long it takes.

    A forward task waits for the forward tasks of the virtual stages before its own. A backward task waits for its own
    forward task and for the backward tasks of the virtual stages after its own. A W waits for its own B.

    With several `replicas`, pipelines with a copy of the weights each share the devices. Replica r has the r-th part
    of the virtual stages and of the microbatches. With several `slices`, a slice of a sequence reads keys and values
    of the slices before it: its F waits for theirs in the same virtual stage, its B for those of the slices after it.
    """

    name: str
    microbatches: int
    orders: tuple[tuple[Task, ...], ...]  # per device
    placement: tuple[int, ...]  # virtual stage -> device
    predecessors: tuple[tuple[int, ...], ...]  # virtual stage -> virtual stages whose results its forward tasks read
    replicas: int = 1
    slices: int = 1  # of each microbatch, along the sequence
    fused: tuple[tuple[Task, ...], ...] = ()  # tasks in a row on one device that are meant to run as one program
    evictions: tuple[Eviction, ...] = ()
    updates: WeightUpdates | None = None  # None: gradients of all microbatches are summed, and weights change once

    def __post_init__(self) -> None:
        try:
            orders = tuple(map(_order, self.orders))
        except TypeError:
            raise ScheduleError(
                f"the orders of schedule {self.name!r} must be a sequence per device of tasks: "
                "(kind, microbatch, virtual stage)"
            ) from None
        object.__setattr__(self, "orders", orders)

    @property
    def stages(self) -> int:
        """Devices of the pipeline."""
        return len(self.orders)

    @property
    def units(self) -> int:
        """What the second entry of a task counts: microbatches, or their slices."""
        return self.microbatches * self.slices

    @cached_property
    def has_weight_tasks(self) -> bool:
        """Whether gradients of weights are tasks of their own. If not, B is the whole backward pass."""
        return any(task.kind == "W" for order in self.orders for task in order)

    @cached_property
    def sharers(self) -> tuple[int, ...]:
        """Per virtual stage, how many of its replica its device has, itself included: the parts of one stage."""
        per_replica = len(self.placement) // self.replicas
        homes = [(device, stage // per_replica) for stage, device in enumerate(self.placement)]
        counts = Counter(homes)
        return tuple(counts[home] for home in homes)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Virtual stage -> virtual stages that read its results."""
        found: list[list[int]] = [[] for _ in self.placement]
        for stage, before in enumerate(self.predecessors):
            for earlier in before:
                found[earlier].append(stage)
        return tuple(map(tuple, found))

    def virtual_stages(self, unit: int) -> range:
        """The virtual stages that a microbatch, or a slice of one, goes through."""
        per_replica = len(self.placement) // self.replicas
        replica = unit * self.replicas // self.units
        return range(replica * per_replica, (replica + 1) * per_replica)

    def inputs(self, task: Task) -> tuple[Task, ...]:
        """The tasks that a task waits for, on whatever device."""
        kind, unit, stage = task
        if kind == "W":
            return (Task("B", unit, stage),)
        neighbours = self.predecessors[stage] if kind == "F" else self.successors[stage]
        found = [Task(kind, unit, other) for other in neighbours]
        if kind == "F" and unit % self.slices:
            found.append(Task("F", unit - 1, stage))
        if kind == "B":
            found.append(Task("F", unit, stage))
            if (unit + 1) % self.slices:
                found.append(Task("B", unit + 1, stage))
        return tuple(found)

    def tasks(self) -> Iterator[Task]:
        """Every task that the orders must have, once."""
        kinds = KINDS if self.has_weight_tasks else KINDS[:2]
        for unit in range(self.units):
            for stage in self.virtual_stages(unit):
                for kind in kinds:
                    yield Task(kind, unit, stage)


def chain(length: int, replicas: int = 1) -> tuple[tuple[int, ...], ...]:
    """The predecessors of virtual stages in a row, in every replica `length` of them.

    >>> chain(3), chain(2, replicas=2)
    (((), (0,), (1,)), ((), (0,), (), (2,)))
    """
    return tuple(() if i % length == 0 else (i - 1,) for i in range(length * replicas))
