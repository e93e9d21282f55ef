"""Temporaries in the buffers of results: which lie there under a choice, and how much may at most under any.

XLA reserves the buffer of a result for the whole program. Until the result is written, temporaries lie there: the
largest first, each in the smallest buffer that is as large and free while the temporary is needed
(xla/service/buffer_assignment.cc). `tests/model/test_workspaces.py` compiles programs that show it.

Sums over devices that wait for each other delay the results that are made of them. Which wait depends on the choice.
`tests/model/test_result_places.py` compiles such a step.

No row of a `Problem` knows which lie there. A row that leaves out all that may is true of every choice, but often says
little. A `RoomCut` says more of one program point. A buffer holds one temporary at a time. So of the temporaries from
`least` to `most` bytes there, no more lie in results than these have room for, each with at most `most`, and none if it
is smaller than `least`. A result that is written later if more sums wait than under the choice that the cut was found
for gives its room to the options with which these sums wait.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoshard.model.lifetimes import HEAP_OVERHEAD, FirstWrite
from autoshard.solver.problem import Live, Problem

BUFFERS_AT_ONCE = 32  # of results, that are looked at together for one that is free: most often the first few are
SIZES_OF_CUTS = 12  # of temporaries at a point, the largest, between which the sizes of a cut are sought
EVERY = -1  # the groups of all sums, one bit each
CUTS_AT_ONCE = 4  # that are found for one choice, at most


class RoomCut(NamedTuple):
    """What one row says of one program point: which temporaries there lie in results only as far as these have room."""

    point: int
    least: float  # bytes of a temporary, gaps included
    most: float
    waiting: int = 0  # the sums that wait under the choice that it was found for


class ResultBuffer(NamedTuple):
    """The buffer of a result. It is there all the time."""

    live: Live
    written: FirstWrite


class WaitingSum(NamedTuple):
    """What devices have yet to add up, while it waits for others to be made: XLA reduces all of them together."""

    live: Live  # empty under options that do not wait
    group: int  # its bit in `FirstWrite.made_of`


@dataclass(frozen=True)
class RoomInResults:
    """The temporaries and results of a problem.

    Which sums wait is a number: one bit for each of their groups (`WaitingSum.group`).
    """

    temporaries: list[Live] = field(default_factory=list)  # of one buffer each, with the gaps between them
    results: list[ResultBuffer] = field(default_factory=list)
    sums: list[WaitingSum] = field(default_factory=list)

    @property
    def most(self) -> float:
        """Bytes of temporaries that lie in results at most, whatever is chosen."""
        return HEAP_OVERHEAD * sum(float(live.usage.max()) for live, _ in self.results) if self.guests(EVERY) else 0.0

    def waiting(self, choice: Sequence[int]) -> int:
        """The sums that wait under a choice."""
        waiting = (group for live, group in self.sums if live.usage[choice[live.node]])
        return functools.reduce(operator.or_, waiting, 0)

    def written(self, waiting: int) -> list[int]:
        """The point that first writes each result while these sums wait."""
        reduced = defaultdict[int, int](int)  # point -> the groups whose sums are reduced just before it
        for live, group in self.sums:
            reduced[live.end] |= group & waiting
        later = ((point for point, sums in reduced.items() if sums & one.written.made_of) for one in self.results)
        return [max((one.written.point, *points)) for one, points in zip(self.results, later, strict=True)]

    @cached_property
    def guests(self) -> Callable[[int], dict[int, np.ndarray]]:
        """`id` of a temporary that may lie in a result -> what it holds under the options with which it does not.

        That is for the sums that wait: a result that is made of them is free until they are reduced.
        """
        return functools.cache(self._guests)

    def _guests(self, waiting: int) -> dict[int, np.ndarray]:
        results = zip(self.results, self.written(waiting), strict=True)
        order = sorted((written, HEAP_OVERHEAD * float(one.live.usage.max())) for one, written in results)
        points, sizes = np.array([point for point, _ in order]), np.array([size for _, size in order])
        largest = np.append(np.maximum.accumulate(sizes[::-1])[::-1], 0.0)  # of those written then or later
        found = {}
        for live in self.temporaries:
            kept = np.where(live.usage <= largest[np.searchsorted(points, live.end)], 0.0, live.usage)
            if live.start < live.end and (kept < live.usage).any():
                found[id(live)] = kept
        return found

    def lying(self, choice: Sequence[int]) -> list[Live]:
        """The temporaries that lie in buffers of results, under one option per node."""
        buffers = zip(self.results, self.written(self.waiting(choice)), strict=True)
        results = [(live.usage[choice[live.node]], written, live.end) for (live, _), written in buffers]
        results = sorted((one for one in results if one[0]), key=lambda one: one[0])
        if not results:
            return []
        sizes = np.array([size for size, *_ in results])
        taken = np.zeros((len(results), max(end for *_, end in results)), bool)
        for row, (_, written, _) in enumerate(results):
            taken[row, written:] = True
        room, found = sizes * HEAP_OVERHEAD, list[Live]()
        held = [(live.usage[choice[live.node]], live) for live in self.temporaries if live.start < live.end]
        for size, live in sorted((one for one in held if 0 < one[0] <= room[-1]), key=lambda one: -one[0]):
            for first in range(int(np.searchsorted(room, size)), len(room), BUFFERS_AT_ONCE):
                free = ~taken[first : first + BUFFERS_AT_ONCE, live.start : live.end].any(axis=1)
                if free.any():
                    taken[first + int(free.argmax()), live.start : live.end] = True
                    found.append(live)
                    break
        return found

    def relaxed(self, problem: Problem, cuts: Sequence[RoomCut]) -> Problem:
        """The problem without the temporaries that may lie in results, but for what cuts say of single points.

        It counts no more than results and the temporaries beside them. Each cut is a program point behind all others.
        """
        guests = self.guests(EVERY)
        lives = [replace(live, usage=guests.get(id(live), live.usage)) for live in problem.lives]
        end = max((live.end for live in problem.lives), default=0)
        for place, cut in enumerate(cuts, end):
            lives += self._row(problem, cut, place)
        return replace(problem, lives=tuple(live for live in lives if live.usage.any()), checked=True)

    def _row(self, problem: Problem, cut: RoomCut, place: int) -> list[Live]:
        """The lives that say what a cut does.

        A result may take less than nothing, since temporaries count with gaps. So all is moved up, and scaled such that
        the limit stays.
        """
        assert problem.limit is not None, "there is a limit to cut at"
        guests, (free, more) = self.guests(cut.waiting), self._free(cut)
        usages, raised = [], 0.0
        for live in problem.lives:
            if not live.start <= cut.point < live.end:
                continue
            usage = live.usage
            if (kept := guests.get(id(live))) is not None:
                usage = np.where((cut.least <= usage) & (usage <= cut.most), usage, kept)
            elif id(live) in free:
                room = usage * HEAP_OVERHEAD
                usage = usage - np.where(room >= cut.least, np.minimum(room, cut.most), 0.0)
                raised += (below := max(0.0, -float(usage.min())))
                usage = usage + below
            usages.append((live.node, usage))
        for live, group in self.sums:
            if not group & cut.waiting and (longer := sum(size for sums, size in more.items() if sums & group)):
                raised += longer
                usages.append((live.node, np.where(live.usage, 0.0, longer)))
        scale = problem.limit / (problem.limit + raised) if raised else 1.0
        return [Live(node, place, place + 1, usage * scale) for node, usage in usages]

    def _free(self, cut: RoomCut) -> tuple[set[int], dict[int, float]]:
        """What is free at the point of a cut: under the choice that it was found for, and for longer if more sums wait.

        Returns:
            `id` of each result that is written past the point; and bytes of the results that would be free for longer,
            by the sums that delay them.
        """
        free, more = set[int](), defaultdict[int, float](float)
        for one, now, at_most in zip(self.results, self.written(cut.waiting), self.written(EVERY), strict=True):
            if now > cut.point:
                free.add(id(one.live))
            if at_most > max(now, cut.point):
                more[one.written.made_of] += HEAP_OVERHEAD * float(one.live.usage.max())
        return free, more

    def cuts(self, choice: Sequence[int], in_use: np.ndarray, accepted: np.ndarray, limit: float) -> list[RoomCut]:
        """Cuts that a choice over the limit does not meet, at the points that are furthest over it.

        Args:
            in_use: bytes of all that the choice holds, per program point.
            accepted: the same without what lies in results.
        """
        over = np.flatnonzero(np.diff(np.concatenate(([False], accepted > limit, [False]))))
        peaks = [first + int(accepted[first:end].argmax()) for first, end in over.reshape(-1, 2)]
        peaks = sorted(peaks, key=lambda point: -accepted[point])[:CUTS_AT_ONCE]
        found = (self._tightest(choice, point) for point in peaks)
        return [cut for cut, spared in found if in_use[cut.point] - spared > limit]

    def _tightest(self, choice: Sequence[int], point: int) -> tuple[RoomCut, float]:
        """The cut at a point that says the least to lie in results under a choice, and how many bytes it says."""
        waiting = self.waiting(choice)
        kept = self.guests(waiting)
        guests = [live for live in self.temporaries if id(live) in kept and live.start <= point < live.end]
        sizes = np.array([live.usage[choice[live.node]] - kept[id(live)][choice[live.node]] for live in guests])
        results = zip(self.results, self.written(waiting), strict=True)
        rooms = np.array([one.live.usage[choice[one.live.node]] for one, written in results if written > point])
        rooms, distinct = rooms * HEAP_OVERHEAD, np.unique(sizes[sizes > 0])[-SIZES_OF_CUTS:]
        best = RoomCut(point, np.inf, 0.0, waiting), float(sizes.sum())
        for least, most in itertools.combinations_with_replacement(distinct.tolist(), 2):
            beside = sizes[(sizes < least) | (sizes > most)].sum()
            spared = float(beside + np.minimum(rooms[rooms >= least], most).sum())
            if spared < best[1]:
                best = RoomCut(point, least, most, waiting), spared
        return best
