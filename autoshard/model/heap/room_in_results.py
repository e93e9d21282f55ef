"""Temporaries in the buffers of results: which lie there under a choice, and how much may at most under any.

XLA reserves the buffer of a result for the whole program. Until the result is written, temporaries lie there: the
largest first, each in the smallest buffer that is as large and free while the temporary is needed
(xla/service/buffer_assignment.cc). `tests/model/test_workspaces.py` compiles programs that show it.

No row of a `Problem` knows which lie there. A row that leaves out all that may is true of every choice, but often says
little. A `RoomCut` says more of one program point. A buffer holds one temporary at a time. So of the temporaries from
`least` to `most` bytes there, no more lie in results than these have room for, each with at most `most`, and none if it
is smaller than `least`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoshard.model.lifetimes import HEAP_OVERHEAD
from autoshard.solver.problem import Live, Problem

BUFFERS_AT_ONCE = 32  # of results, that are looked at together for one that is free: most often the first few are
SIZES_OF_CUTS = 12  # of temporaries at a point, the largest, between which the sizes of a cut are sought
CUTS_AT_ONCE = 4  # that are found for one choice, at most


class RoomCut(NamedTuple):
    """What one row says of one program point: which temporaries there lie in results only as far as these have room."""

    point: int
    least: float  # bytes of a temporary, gaps included
    most: float


class ResultBuffer(NamedTuple):
    """The buffer of a result. It is there all the time."""

    live: Live
    written_at: int  # the program point that first writes it


@dataclass(frozen=True)
class RoomInResults:
    """The temporaries and results of a problem."""

    temporaries: list[Live] = field(default_factory=list)  # of one buffer each, with the gaps between them
    results: list[ResultBuffer] = field(default_factory=list)

    @property
    def most(self) -> float:
        """Bytes of temporaries that lie in results at most, whatever is chosen."""
        return HEAP_OVERHEAD * sum(float(live.usage.max()) for live, _ in self.results) if self.guests else 0.0

    @cached_property
    def guests(self) -> dict[int, np.ndarray]:
        """`id` of a temporary that may lie in a result -> what it holds under the options with which it does not."""
        order = sorted((written_at, HEAP_OVERHEAD * float(live.usage.max())) for live, written_at in self.results)
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
        results = [(live.usage[choice[live.node]], written_at, live.end) for live, written_at in self.results]
        results = sorted((one for one in results if one[0]), key=lambda one: one[0])
        if not results:
            return []
        sizes = np.array([size for size, *_ in results])
        taken = np.zeros((len(results), max(end for *_, end in results)), bool)
        for row, (_, written_at, _) in enumerate(results):
            taken[row, written_at:] = True
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
        lives = [replace(live, usage=self.guests.get(id(live), live.usage)) for live in problem.lives]
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
        written = {id(live): written_at for live, written_at in self.results}
        usages, raised = [], 0.0
        for live in problem.lives:
            if not live.start <= cut.point < live.end:
                continue
            usage = live.usage
            if (kept := self.guests.get(id(live))) is not None:
                usage = np.where((cut.least <= usage) & (usage <= cut.most), usage, kept)
            elif written.get(id(live), 0) > cut.point:
                room = usage * HEAP_OVERHEAD
                usage = usage - np.where(room >= cut.least, np.minimum(room, cut.most), 0.0)
                raised += (below := max(0.0, -float(usage.min())))
                usage = usage + below
            usages.append((live.node, usage))
        scale = problem.limit / (problem.limit + raised) if raised else 1.0
        return [Live(node, place, place + 1, usage * scale) for node, usage in usages]

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
        guests = [live for live in self.temporaries if id(live) in self.guests and live.start <= point < live.end]
        sizes = np.array([live.usage[choice[live.node]] - self.guests[id(live)][choice[live.node]] for live in guests])
        rooms = np.array([live.usage[choice[live.node]] for live, written_at in self.results if written_at > point])
        rooms, distinct = rooms * HEAP_OVERHEAD, np.unique(sizes[sizes > 0])[-SIZES_OF_CUTS:]
        best = RoomCut(point, np.inf, 0.0), float(sizes.sum())
        for least, most in itertools.combinations_with_replacement(distinct.tolist(), 2):
            beside = sizes[(sizes < least) | (sizes > most)].sum()
            spared = float(beside + np.minimum(rooms[rooms >= least], most).sum())
            if spared < best[1]:
                best = RoomCut(point, least, most), spared
        return best
