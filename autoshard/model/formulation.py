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

# Share of the limit from which the model looks at the chip's own memory. A peak leaves out the values that lie there.
# No row of a problem can express whether all temporaries do.
ON_CHIP_SHARE = 0.05
# Share of the limit from which the model looks at temporaries in the buffers of results.
LARGE_ROOM_SHARE = 0.005


class _ExtraLife(NamedTuple):
    """What a resharding holds beside the lives of a problem."""

    span: Span
    bytes: int  # negative if a life is freed before its end
    holder: Span  # while the buffer exists that these bytes belong to


@dataclass(frozen=True)
class SharedLayout:
    """The node that decides in which layout several groups read one value."""

    node: int
    layouts: tuple[Layout, ...]  # its options
    narrow: tuple[Group, ...] = ()  # the groups that read fewer bits than others, from copies of their own
    apart: int = 0  # the first of the options that stand for such copies

    def copied_for(self, option: int) -> Readers:
        """The groups that read the copy of an option; None: all readers."""
        return self.narrow if self.narrow and option >= self.apart else None


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem, and what each of its nodes and options means."""

    program: Program
    traced: Program  # before branches for other platforms were removed
    rules: Sequence[Rule]  # one per equation
    mesh: Mapping[str, int]  # without axes of one device
    prices: PriceList
    groups: Sequence[Group]
    arguments: Sequence[tuple[ArgumentOption, ...]]  # per argument, its options
    priced: Sequence[PricedStrategies]  # per group
    shared: Mapping[int, SharedLayout]  # value id -> its node
    readers: Mapping[int, Sequence[ValueReader]]  # value id -> its readers
    reshardings: Sequence[Resharding]  # which may need memory beside the lives
    problem: Problem
    heap: Heap = field(repr=False, default_factory=Heap)  # which of its lives are temporaries and results
    # The problem of communication alone, made on request, no later than a time of `time.monotonic`.
    waits: Callable[[float], Problem] = field(repr=False, default=lambda until: Problem((), (), (), None))
    least: float | None = None  # bound in seconds over all strategies, if only a part of them is offered
    restrictions: tuple[str, ...] = ()  # remarks of plans on removed options
    is_late: bool = False  # whether options were removed because time was up

    def copied_for(self, value: Value, choice: Sequence[int]) -> Readers:
        """The readers of a value that share a copy; None: all of them."""
        if (shared := self.shared.get(value.id)) is not None:
            return shared.copied_for(choice[shared.node])
        argument = self.argument_index.get(value.id)
        if argument is None or not self.arguments[argument][choice[argument]].narrow:
            return None
        return narrow_groups(self.readers[value.id], value, self.prices.itemsizes)

    @cached_property
    def argument_index(self) -> Mapping[int, int]:
        """Value id -> index of the argument."""
        return {value.id: index for index, value in enumerate(self.program.arguments)}

    @cached_property
    def last_choice(self) -> LastChoice:
        """Cached results for the choice of the last query."""
        return LastChoice()

    def peak_bytes(self, choice: Sequence[int]) -> int:
        """The most bytes that are in use on one device at any program point, both ends of each resharding included."""
        return int(self.bytes_in_use(choice).max())

    def accepted_peak(self, choice: Sequence[int]) -> int:
        """The peak that is compared with the memory limit."""
        return int(self.accepted_bytes_in_use(choice).max())

    def accepted_bytes_in_use(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes that are compared with the memory limit, per program point."""
        if self.is_limit_small:
            return self.bytes_in_use_outside_chip(choice)
        bytes_in_use = self.bytes_in_use(choice)
        return bytes_in_use - self._sum(self.lying_in_results(choice), choice) if self.is_room_large else bytes_in_use

    def lying_in_results(self, choice: Sequence[int]) -> list[Live]:
        """The temporaries that lie in the buffers of results."""
        return self.last_choice.once("in results", choice, lambda: self.heap.room_in_results.lying(choice))

    @property
    def is_limit_small(self) -> bool:
        """Whether the limit is so small that the chip's own memory matters."""
        backend, limit = self.prices.backend, self.problem.limit
        if limit is None or not self.heap.on_chip:
            return False
        return backend.on_chip_bytes >= ON_CHIP_SHARE * limit * backend.usable

    @cached_property
    def is_room_large(self) -> bool:
        """Whether results are so large that temporaries in their buffers matter."""
        limit = self.problem.limit
        return limit is not None and self.heap.room_in_results.most >= LARGE_ROOM_SHARE * limit

    def peak_outside_chip(self, choice: Sequence[int]) -> int:
        """The peak without relocated temporaries: those in the chip's own memory, or in buffers of results.

        Under large limits temporaries in the chip count, too, since no row of a `Problem` can express which of them are
        alive together. `memory_limit.py` first solves the problem without any temporaries that can be relocated.
        """
        return int(self.bytes_in_use_outside_chip(choice).max())

    def bytes_in_use_outside_chip(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes in use on one device, per program point, without relocated temporaries."""
        return self.bytes_in_use(choice) - self.elsewhere(choice).bytes

    def elsewhere(self, choice: Sequence[int]) -> RelocatedTemporaries:
        """The temporaries in the chip's own memory, or those in buffers of results: whichever gives the lower peak."""
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
        """The reshardings at points with more than `limit` bytes in use, and equal ones in other layers."""
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
        """How many seconds go by from one program point to another, as libtpu counts them: loops turn once.

        Communication is left out.
        """
        spent = np.zeros(len(self.program.equations) + 2)
        for group in self.groups:
            node = self.group_node(group)
            spent[group.point + 1] += self.problem.costs[node][choice[node]] / group.trips
        until = spent.cumsum()
        return lambda start, end: float(until[end] - until[start])

    def _sum_of_spans(self, extras: Iterable[_ExtraLife]) -> np.ndarray:
        """Bytes of temporaries over spans, per program point."""
        difference = np.zeros(len(self.program.equations) + 2)
        for extra in extras:
            start, end = extra.span
            difference[start] += extra.bytes * HEAP_OVERHEAD
            difference[end] -= extra.bytes * HEAP_OVERHEAD
        return difference.cumsum()

    def _resharding_lives(self, choice: Sequence[int]) -> Iterator[_ExtraLife]:
        """The extra bytes of resharded values, and the bytes that their operands free early."""
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
