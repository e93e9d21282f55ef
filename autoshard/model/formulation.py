"""A `Problem`, and the way back from its choices to what they mean in the program. `formulating.py` makes it.

Nodes of the problem, in this order:

* one per argument. Option: its home layout, and the layout of one resharded copy that its users share (or none);
* one per group of equations (`groups.py`). Option: a `Strategy`;
* one per value that several groups read. Option: the layout in which they share it, so that a value resharded the
  same way for two readers is resharded, and paid, once; or the layout of a copy for those who read it in fewer bits,
  while the others read it as it is left.

Node costs are the seconds of the group per step; edge costs the seconds of resharding a value from how it is left to
how it is wanted. A result that takes an argument's place in the next step ends in that argument's home layout.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoshard.layout import Layout
from autoshard.model.groups import Group
from autoshard.model.heap.heap import Heap, RelocatedTemporaries
from autoshard.model.lifetimes import (
    HEAP_OVERHEAD,
    Span,
)
from autoshard.model.pricing.cost_tables import (
    ArgumentOption,
)
from autoshard.model.pricing.memo import LastChoice
from autoshard.model.pricing.prices import PricedStrategies, PriceList
from autoshard.model.resharding_memory import Resharding, ValueReader, narrow_groups
from autoshard.model.xla.rounding import Readers
from autoshard.program import Program, Value
from autoshard.propagation.rule import Rule
from autoshard.solver.problem import Live, Problem

# Least share of the limit at which the chip's own memory is looked at. A peak leaves out what lies there. No row of a
# problem knows whether all temporaries do.
ON_CHIP_SHARE = 0.05
# Least share of the limit that temporaries in buffers of results may fill, at which they are looked at.
LARGE_ROOM_SHARE = 0.005


class _ExtraLife(NamedTuple):
    """What a resharding holds beside the lives of a problem."""

    span: Span
    bytes: int  # below 0: that such a life does not hold to its end
    holder: Span  # while the buffer is held that they belong to


@dataclass(frozen=True)
class SharedLayout:
    """The node that decides in which layout several groups read one value."""

    node: int
    layouts: tuple[Layout, ...]  # its options
    narrow: tuple[Group, ...] = ()  # who reads fewer bits than others do, from copies of their own
    apart: int = 0  # the first of the options that stand for such copies

    def copied_for(self, option: int) -> Readers:
        """Whom the copy of an option is for; None: for all."""
        return self.narrow if self.narrow and option >= self.apart else None


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem, and what each of its nodes and options means."""

    program: Program
    traced: Program  # as it was traced, branches for other platforms included
    rules: Sequence[Rule]  # one per equation
    mesh: Mapping[str, int]  # without axes of one device
    prices: PriceList
    groups: Sequence[Group]
    arguments: Sequence[tuple[ArgumentOption, ...]]  # per argument, its options
    priced: Sequence[PricedStrategies]  # per group
    shared: Mapping[int, SharedLayout]  # value id -> its node
    readers: Mapping[int, Sequence[ValueReader]]  # value id -> who wants it
    reshardings: Sequence[Resharding]  # what may hold more, beside the lives
    problem: Problem
    heap: Heap = field(repr=False, default_factory=Heap)  # which of its lives are temporaries and results
    # Communication alone, formulated when it is first asked for; by which time, as `time.monotonic` has it.
    waits: Callable[[float], Problem] = field(repr=False, default=lambda until: Problem((), (), (), None))
    least: float | None = None  # where it offers a part of all strategies: seconds that no choice of all goes below
    restrictions: tuple[str, ...] = ()  # what plans say of options that were taken away
    is_late: bool = False  # whether the clock took them away

    def copied_for(self, value: Value, choice: Sequence[int]) -> Readers:
        """Whom the copy is for that several readers of a value share; None: for all."""
        if (shared := self.shared.get(value.id)) is not None:
            return shared.copied_for(choice[shared.node])
        argument = self.argument_index.get(value.id)
        if argument is None or not self.arguments[argument][choice[argument]].narrow:
            return None
        return narrow_groups(self.readers[value.id], value, self.prices.widths)

    @cached_property
    def argument_index(self) -> Mapping[int, int]:
        """Value id -> which argument it is."""
        return {value.id: index for index, value in enumerate(self.program.arguments)}

    @cached_property
    def last_choice(self) -> LastChoice:
        """What was found of the choice that was asked about last."""
        return LastChoice()

    def peak_bytes(self, choice: Sequence[int]) -> int:
        """The most bytes that are in use on one device at any program point, both ends of each resharding included."""
        return int(self.bytes_in_use(choice).max())

    def accepted_peak(self, choice: Sequence[int]) -> int:
        """The peak that the memory limit is held against."""
        return int(self.accepted_bytes_in_use(choice).max())

    def accepted_bytes_in_use(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes that the memory limit is held against, per program point."""
        if self.is_limit_small:
            return self.bytes_in_use_outside_chip(choice)
        bytes_in_use = self.bytes_in_use(choice)
        return bytes_in_use - self._sum(self.lying_in_results(choice), choice) if self.is_room_large else bytes_in_use

    def lying_in_results(self, choice: Sequence[int]) -> list[Live]:
        """The temporaries that lie where results will."""
        return self.last_choice.once("in results", choice, lambda: self.heap.room_in_results.lying(choice))

    @property
    def is_limit_small(self) -> bool:
        """Whether the limit is so small that the chip's own memory is looked at."""
        backend, limit = self.prices.backend, self.problem.limit
        if limit is None or not self.heap.on_chip:
            return False
        return backend.on_chip_bytes >= ON_CHIP_SHARE * limit * backend.usable

    @cached_property
    def is_room_large(self) -> bool:
        """Whether results have so much room that what may lie in their buffers is looked at."""
        limit = self.problem.limit
        return limit is not None and self.heap.room_in_results.most >= LARGE_ROOM_SHARE * limit

    def peak_outside_chip(self, choice: Sequence[int]) -> int:
        """The same without temporaries that lie elsewhere: in the chip's own memory, or where results will.

        Large limits are held against what lies in the chip, too, since no row of a `Problem` knows which temporaries
        live when. `memory_limit.py` looks at the problem without what may lie elsewhere first.
        """
        return int(self.bytes_in_use_outside_chip(choice).max())

    def bytes_in_use_outside_chip(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes that are in use on one device, per program point, without temporaries that lie elsewhere."""
        return self.bytes_in_use(choice) - self.elsewhere(choice).bytes

    def elsewhere(self, choice: Sequence[int]) -> RelocatedTemporaries:
        """The temporaries that lie in the chip's own memory, or where results will: whichever leaves the lower peak."""
        in_results = self.lying_in_results(choice)
        in_place = RelocatedTemporaries(in_results, self._sum(in_results, choice))
        if not (self.heap.on_chip or self.heap.tables) or not (room := self.prices.backend.on_chip_bytes):
            return in_place
        lasts, longest = self._lasts(choice), self.prices.backend.on_chip_seconds
        small = [
            live
            for live in self.heap.on_chip
            if live.usage[choice[live.node]] <= room and lasts(live.start, live.end) <= longest
        ]
        short = (extra for extra in self._extra_lives(choice) if lasts(*extra.holder) <= longest)
        held = np.maximum(0.0, self._sum(small, choice) + self._sum_of_spans(short))
        all_fit = len(small) == len(self.heap.on_chip) and held.max() <= room
        absent = self.heap.tables if all_fit and self.heap.is_outside_empty(choice) else []
        on_chip = RelocatedTemporaries(
            [*small, *absent],
            np.minimum(held, room) + self._sum(absent, choice),
            np.divide(room, held, out=np.ones_like(held), where=held > room),
        )
        bytes_in_use = self.bytes_in_use(choice)
        return min(on_chip, in_place, key=lambda one: float((bytes_in_use - one.bytes).max()))

    def reshardings_over(self, choice: Sequence[int], limit: float) -> list[Resharding]:
        """What is resharded while more than `limit` bytes are in use, and what is alike in other layers."""
        over = self.bytes_in_use(choice) > limit
        kinds = set()
        for resharding in self.reshardings:
            extra = resharding.extra(*resharding.layouts(choice), self.prices)
            start, first = resharding.starts(extra), resharding.begins(extra)
            if (extra.first and over[first]) or (extra.then and over[start : resharding.used[1]].any()):
                kinds.add(resharding.kind)
        return [resharding for resharding in self.reshardings if resharding.kind in kinds]

    def bytes_in_use(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes that are in use on one device, per program point."""
        return self._sum(self.problem.lives, choice) + self._in_use_by_reshardings(choice)

    def _in_use_by_reshardings(self, choice: Sequence[int]) -> np.ndarray:
        return self.last_choice.once("reshardings", choice, lambda: self._sum_of_spans(self._extra_lives(choice)))

    def _extra_lives(self, choice: Sequence[int]) -> list[_ExtraLife]:
        return self.last_choice.once("extra lives", choice, lambda: list(self._resharding_lives(choice)))

    def _sum(self, lives: Iterable[Live], choice: Sequence[int]) -> np.ndarray:
        """Bytes of these lives, per program point."""
        difference = np.zeros(len(self.program.equations) + 2)
        for live in lives:
            difference[live.start] += live.usage[choice[live.node]]
            difference[live.end] -= live.usage[choice[live.node]]
        return difference.cumsum()

    def _lasts(self, choice: Sequence[int]) -> Callable[[int, int], float]:
        """How many seconds go by from one program point to another, in one turn of the loops around the first.

        What is communicated on the way is left out.
        """
        spent = np.zeros(len(self.program.equations) + 2)
        for group in self.groups:
            node = self.group_node(group)
            spent[group.point + 1] += self.problem.costs[node][choice[node]]
        until, turns = spent.cumsum(), [*(max(1, equation.trips) for equation in self.program.equations), 1, 1]
        return lambda start, end: float(until[end] - until[start]) / turns[start]

    def _sum_of_spans(self, extras: Iterable[_ExtraLife]) -> np.ndarray:
        """Bytes of temporaries over spans, per program point."""
        difference = np.zeros(len(self.program.equations) + 2)
        for extra in extras:
            start, end = extra.span
            difference[start] += extra.bytes * HEAP_OVERHEAD
            difference[end] -= extra.bytes * HEAP_OVERHEAD
        return difference.cumsum()

    def _resharding_lives(self, choice: Sequence[int]) -> Iterator[_ExtraLife]:
        """What resharded values hold beside what is counted anyway, and how much less what they are made of."""
        extras = [resharding.extra(*resharding.layouts(choice), self.prices) for resharding in self.reshardings]
        both = list(zip(self.reshardings, extras, strict=True))
        at_once = (resharding for resharding, extra in both if extra.at_once)
        last = self._last_runs(
            {(resharding.value.id, reader.node) for resharding in at_once for reader in resharding.copied_to(choice)}
        )
        for resharding, extra in both:
            left, wanted = resharding.layouts(choice)
            end = resharding.used[1]
            if resharding.counts_wanted:
                less = -self.prices.arrays.local_bytes(resharding.value, wanted)
                yield _ExtraLife((resharding.end_of_use(resharding.users, last), end), less, resharding.used)
            elif left != wanted:
                end = resharding.end_of_use(resharding.copied_to(choice), last)
            start, first = resharding.starts(extra), resharding.begins(extra)
            yield _ExtraLife((first, first + 1), extra.first, (first, first + 1))
            yield _ExtraLife((start, end), extra.then, (start, end))

    def _last_runs(self, moved: Container[tuple[int, int]]) -> list[int]:
        """Per group the last point at which it runs.

        Args:
            moved: (value, node that reads it) where a copy is read that is made as soon as the value is.
        """
        last = [group.last_point for group in self.groups]
        for group in reversed(self.groups):
            if group.lies_nowhere:
                readers = ((made.value.id, reader) for made in group.outputs for reader in self.readers[made.value.id])
                again = (last[r.group.index] for value, r in readers if r.group and (value, r.node) not in moved)
                last[group.index] = max(again, default=group.point)
        return last

    def group_node(self, group: Group) -> int:
        return len(self.arguments) + group.index
