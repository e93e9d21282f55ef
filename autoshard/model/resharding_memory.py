"""What is held while values are resharded. Two nodes decide it, so no `Problem` has it until it is counted there.

A resharding that is counted has a node of its own. An option of this node stands for some layouts in which the value
may be left, some layouts in which it may be wanted, and the bytes that every resharding between them holds. Edges allow
the options that agree with what the two nodes choose. Such nodes cost nothing, and say nothing of how a step is run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autoshard.layout import Layout
from autoshard.mesh.resharding import ReshardingStep
from autoshard.model.groups import Group, Use
from autoshard.model.lifetimes import HEAP_OVERHEAD, Span, use_span
from autoshard.model.pricing.prices import PriceList
from autoshard.model.xla.backends import Backend
from autoshard.model.xla.rounding import Itemsizes, Readers
from autoshard.program import Value
from autoshard.solver.problem import Edge, Live, Problem

SAME_BYTES = 1e-9  # relative: sums of bytes that differ by less are equal


@dataclass(frozen=True)
class ValueReader:
    """Somebody who wants a value: a group, or an argument whose place it takes."""

    node: int
    wants: tuple[Layout, ...]  # per option of the node
    group: Group | None = None
    use: Use | None = None

    @property
    def copied_for(self) -> tuple[Group, ...]:
        """Who reads a copy that is for this reader alone."""
        return () if self.group is None else (self.group,)

    @property
    def is_elementwise(self) -> bool:
        """Whether a copy for this reader could never pay: it can as well compute on the shards it is given."""
        return self.group is None or self.group.fuses

    @property
    def computes_on_shards(self) -> bool:
        """Whether a copy for this reader could never pay. What a view makes is not resharded: what it views is."""
        return self.is_elementwise and not (self.group is not None and self.group.is_view)


def uses_of(readers: Iterable[ValueReader]) -> list[tuple[Group, Use]]:
    """The groups among the readers, and what they use."""
    return [(reader.group, reader.use) for reader in readers if reader.group and reader.use]


def narrow_groups(readers: Sequence[ValueReader], value: Value, itemsizes: Itemsizes) -> tuple[Group, ...]:
    """Those of several readers for whom alone a copy is smaller than one for all."""
    if len(readers) == 1:
        return ()
    size, groups = itemsizes.moving(value), (reader.group for reader in readers)
    return tuple(group for group in groups if group and itemsizes.moving(value, [group]) < size)


class ExtraBytes(NamedTuple):
    """Bytes that a resharding holds beside those that are counted anyway."""

    first: int  # when it starts: the value as it was left, pieces that an all_to_all cuts it into
    then: int  # until its last use: the resharded copy; of a slice that readers take, what it is taken from
    at_once: bool  # whether it starts when the value is made, not when it is first used


@dataclass(frozen=True, eq=False)
class Resharding:
    """A value between how it is left and how it is wanted, which may be two layouts."""

    value: Value
    used: Span  # from the first to past the last use
    left: tuple[int, Sequence[Layout]]  # the node that leaves it, and the layout per option
    wanted: tuple[int, Sequence[Layout]]
    counts_left: bool  # whether the problem counts the value as left while it is resharded
    counts_wanted: bool  # whether it counts the resharded copy
    fused: bool  # whether elementwise readers take their slices themselves
    users: Sequence[ValueReader]  # who gets the value this way
    copied_for: Readers  # who reads a copy that is for them alone
    made: int | None  # the point that makes it, if it is not stored until it is used

    @property
    def kind(self) -> tuple:
        """A key that is equal for changes of layers that repeat."""
        layouts = id(self.left[1]), id(self.wanted[1])
        return self.value.shape, self.value.dtype, *layouts, self.counts_left, self.counts_wanted, self.fused

    def layouts(self, choice: Sequence[int]) -> tuple[Layout, Layout]:
        """The layout in which the value is left, and the layout in which it is wanted."""
        (left, lefts), (wanted, wants) = self.left, self.wanted
        return lefts[choice[left]], wants[choice[wanted]]

    def extra(self, left: Layout, wanted: Layout, prices: PriceList) -> ExtraBytes:
        """The bytes that resharding the value from one layout to the other holds.

        A slice that is taken on the way costs nothing, but the value as it was left has to stay. XLA reshards a value
        that is not stored as soon as it is made, unless that makes it larger. The value is not made again then.
        """
        if left == wanted:
            return ExtraBytes(0, 0, False)
        before = prices.arrays.local_bytes(self.value, left)
        after = prices.arrays.copy_bytes(self.value, wanted, self.copied_for)
        steps = prices.steps(self.value, left, wanted, self.copied_for)
        kinds = [step.kind for step in steps]
        if not kinds:
            return ExtraBytes(0, (before - after) * self.fused, False)
        copies = (not self.counts_left) + ("all_to_all" in kinds)
        transposed = int(after // self._pieces_transposed(steps, left, wanted, prices))
        at_once = self.made is not None and after <= before
        return ExtraBytes(copies * before + transposed, after * (not self.counts_wanted), at_once)

    def _pieces_transposed(
        self, steps: Sequence[ReshardingStep], left: Layout, wanted: Layout, prices: PriceList
    ) -> float:
        """How many pieces are gathered once the last dim other than the first is; inf if none is.

        XLA gathers such a dim as the first, and transposes what it has.
        """
        if len(left) < self.least_rank_transposed(prices.backend):
            return math.inf
        inner = {axis for split, whole in zip(left[1:], wanted[1:], strict=True) for axis in split if axis not in whole}
        pieces = 1
        for step in reversed(steps):
            if step.kind == "all_gather":
                if inner.intersection(step.axes):
                    return pieces
                pieces *= math.prod(prices.mesh[axis] for axis in step.axes)
        return math.inf

    def least_rank_transposed(self, backend: Backend) -> int:
        """Dims from which on what is gathered is transposed. GPU and TPU read a matrix either way round, as it is."""
        return 2 if backend.transposes_operands else 3

    def starts(self, extra: ExtraBytes) -> int:
        """The point at which a resharding that holds this starts."""
        if not extra.at_once:
            return self.used[0]
        assert self.made is not None, "`extra` looks"
        return min(self.used[0], self.made + 1)

    def begins(self, extra: ExtraBytes) -> int:
        """The point at which it holds what it needs at first."""
        return self.starts(extra)

    def copied_to(self, choice: Sequence[int]) -> list[ValueReader]:
        """The users of the resharded copy; a user who wants the value as it is left reads no copy."""
        left, _ = self.layouts(choice)
        return [reader for reader in self.users if reader.wants[choice[reader.node]] != left]

    def end_of_use(self, users: Sequence[ValueReader], last: Sequence[int]) -> int:
        """The point past the last use by these users, given the last point at which each group runs."""
        uses = uses_of(users)
        return max((use_span(group, use, last[group.index])[1] for group, use in uses), default=self.used[1])

    def reliefs(self, earliest: Sequence[int], prices: PriceList) -> Iterator[tuple[Span, np.ndarray]]:
        """By how much less may be held than the problem counts: spans with bytes per option of who wants the value.

        Args:
            earliest: per group, the first point at which it may run last.
        """
        _, wants = self.wanted
        if self.counts_wanted and (start := self.end_of_use(self.users, earliest)) < self.used[1]:
            copies = [float(prices.arrays.local_bytes(self.value, want)) for want in wants]
            yield (start, self.used[1]), HEAP_OVERHEAD * np.array(copies)
        if self.fused:
            itemsizes = prices.itemsizes.stored(self.value), prices.itemsizes.moving(self.value, self.copied_for)
            shape = self.value.shape, self.value.on_host, *prices.arrays.order(self.value)
            what = type(self), self.counts_wanted, *itemsizes, *shape
            less = prices.memo.once(self._most_freed, self.left[1], wants, prices, of=what)
            if less.any():
                yield self.used, less

    def _most_freed(self, lefts: Sequence[Layout], wants: Sequence[Layout], prices: PriceList) -> np.ndarray:
        """Per option of who wants the value, the most bytes by which slices that readers take are smaller than it."""
        different = dict.fromkeys(lefts)
        less = [max(0.0, *(-self.extra(left, want, prices).then for left in different)) for want in wants]
        return HEAP_OVERHEAD * np.array(less)

    def earliest_end_of_use(self) -> int:
        """The point up to which a resharded copy is used, whoever of the users reads it; 0 where that is not known."""
        uses = uses_of(self.users)
        if any(group.lies_nowhere for group, _ in uses):
            return 0
        return min((use_span(group, use, group.last_point)[1] for group, use in uses), default=self.used[1])


@dataclass(frozen=True, eq=False)
class MoveToPlace(Resharding):
    """A result between how it is left and how the argument lies whose place it takes: its buffer lies like that.

    Where both lie alike, it is made in that buffer, if that can be (`is_copy`). Otherwise it stands beside the buffer
    until its last use, and is moved then.
    """

    is_copy: bool = False  # whether it cannot be made in its buffer, in which its maker reads the argument

    def extra(self, left: Layout, wanted: Layout, prices: PriceList) -> ExtraBytes:
        moved, before = super().extra(left, wanted, prices), prices.arrays.local_bytes(self.value, left)
        stays, first = self.is_copy, moved.first
        if left != wanted:
            steps = prices.steps(self.value, left, wanted, self.copied_for)
            stays |= not self.fused or bool(steps)  # what makes it may take a slice at once
            if prices.backend.gathers.copies_results and any(step.kind == "all_gather" for step in steps):
                first += prices.arrays.local_bytes(self.value, wanted)
        return ExtraBytes(first, before * stays, False)

    def begins(self, extra: ExtraBytes) -> int:
        return self.used[1] - 1

    def least_rank_transposed(self, backend: Backend) -> int:
        return 2  # a result lies in rows


def counted(
    problem: Problem, reshardings: Iterable[Resharding], prices: PriceList, *, at_least: bool = False
) -> Problem:
    """The problem with a node for each of these reshardings behind its own. It never counts less than held.

    Args:
        at_least: whether it never counts more than held instead.
    """
    costs, edges, lives, names = list(problem.costs), list(problem.edges), list(problem.lives), list(problem.names)
    for resharding in reshardings:
        node, own = len(costs), prices.memo.once(_node, resharding, prices, at_least)
        costs.append(own.costs)
        edges += [Edge(decides, node, table) for decides, table in own.agree.items()]
        lives += [Live(node, start, end, usage) for (start, end), usage in own.lives]
        names.append(f"resharding of {resharding.value}")
    return Problem(
        costs=tuple(costs),
        edges=tuple(edges),
        lives=tuple(lives),
        limit=problem.limit,
        names=tuple(names) if problem.names else (),
        checked=True,
    )


def relieved(
    problem: Problem, reshardings: Iterable[Resharding], groups: Sequence[Group], prices: PriceList
) -> Problem | None:
    """The problem whose lives hold no more than a choice does that reshards these; None where that is not found.

    What is resharded may be held for less long, or be smaller, than the lives say: no choice has a peak below its own
    in this problem.

    Args:
        groups: all, by their index.
    """
    lives: dict[int, list[Live]] = defaultdict(list)
    for live in problem.lives:
        lives[live.node].append(live)
    earliest = [group.point if group.lies_nowhere else group.last_point for group in groups]
    for resharding in reshardings:
        node, _ = resharding.wanted
        for (start, end), less in resharding.reliefs(earliest, prices):
            here = (live for live in lives[node] if live.start <= start and end <= live.end)
            if (found := next((live for live in here if (live.usage >= less * (1 - SAME_BYTES)).all()), None)) is None:
                return None
            lives[node].remove(found)
            whole, rest = found.usage, np.maximum(0.0, found.usage - less)
            spans = (found.start, start, whole), (start, end, rest), (end, found.end, whole)
            lives[node] += [Live(node, *span) for span in spans if span[0] < span[1] and span[2].any()]
    return replace(problem, lives=tuple(live for held in lives.values() for live in held), checked=True)


class _ReshardingNode(NamedTuple):
    """What is added to a problem for a resharding."""

    costs: np.ndarray  # per option
    agree: dict[int, np.ndarray]  # node that decides -> [its option, own option]: inf where they contradict each other
    lives: list[tuple[Span, np.ndarray]]  # bytes per option


def _node(resharding: Resharding, prices: PriceList, at_least: bool) -> _ReshardingNode:
    options = list(_options(resharding, prices))
    agree: dict[int, np.ndarray] = {}
    ends = resharding.left, resharding.wanted
    for (decides, layouts), among in zip(ends, zip(*options, strict=True), strict=False):
        own = np.array([[0.0 if layout in some else np.inf for some in among] for layout in layouts])
        agree[decides] = agree[decides] + own if decides in agree else own
    lives, end = [], resharding.earliest_end_of_use() if at_least else resharding.used[1]
    for start, first in {(resharding.starts(extra), resharding.begins(extra)) for *_, extra in options}:
        here = [extra if resharding.starts(extra) == start else ExtraBytes(0, 0, False) for *_, extra in options]
        at_first, then = (np.array([max(0, extra[part]) for extra in here]) * HEAP_OVERHEAD for part in (0, 1))
        lives += [((first, first + 1), at_first), ((start, max(end, start + 1)), then)]
    return _ReshardingNode(np.zeros(len(options)), agree, [(span, usage) for span, usage in lives if usage.any()])


def _options(
    resharding: Resharding, prices: PriceList
) -> Iterable[tuple[tuple[Layout, ...], tuple[Layout, ...], ExtraBytes]]:
    """Layouts in which the value is left and wanted, and what every resharding between them holds: each pair once."""
    found: dict[tuple[tuple[Layout, ...], ExtraBytes], list[Layout]] = defaultdict(list)
    for wanted in dict.fromkeys(resharding.wanted[1]):
        same: dict[ExtraBytes, list[Layout]] = defaultdict(list)
        for left in dict.fromkeys(resharding.left[1]):
            same[resharding.extra(left, wanted, prices)].append(left)
        for extra, lefts in same.items():
            found[tuple(lefts), extra].append(wanted)
    return ((lefts, tuple(wants), extra) for (lefts, extra), wants in found.items())
