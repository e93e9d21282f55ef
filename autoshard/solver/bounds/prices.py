"""Prices on memory: a price per byte at each pressure point, and what options cost with them.

A choice that fits earns what its bytes fall short of the limit, so that a bound under any prices is one without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.verify import ROUNDING

SLACK = 1e-11  # relative; what rounding may make of bytes, and of what they cost and get back


class Prices:
    """A price per byte at each pressure point, what options cost with them, and what the limit gives back.

    Bytes are counted beyond those of each life's leanest option, so that what is paid and given back is small.
    """

    def __init__(self, problem: Problem):
        points = problem.pressure_points() if problem.limit is not None else np.zeros(0, dtype=np.int64)
        lives = problem.lives if len(points) else ()
        self.plain = np.concatenate(problem.costs)  # all options, without prices
        self._offsets = np.cumsum([0, *(len(costs) for costs in problem.costs)])
        sizes = [len(live.usage) for live in lives]
        options = [self._offsets[live.node] + np.arange(len(live.usage)) for live in lives]
        leanest = np.array([live.usage.min() for live in lives], dtype=np.float64)
        start, end = (np.searchsorted(points, [getattr(live, side) for live in lives]) for side in ("start", "end"))
        held = _over_points(start, end, leanest, len(points))
        self._limit = 0.0 if problem.limit is None else problem.limit * (1 + ROUNDING)
        self._room = self._limit - held
        self._usage = np.concatenate([np.zeros(0), *(live.usage - live.usage.min() for live in lives)])  # all options
        self._option = np.concatenate([np.zeros(0, dtype=np.int64), *options])
        self._start, self._end = np.repeat(start, sizes), np.repeat(end, sizes)
        self.set(np.zeros(len(points)))

    def set(self, values: np.ndarray) -> None:
        """Makes these the prices: cost per byte, 0 or more, of each pressure point."""
        self.values = values
        back = values * self._room
        self.refund = float(back.sum() + SLACK * np.abs(back).sum())
        paid = np.append(0.0, values.cumsum())
        extra = (paid[self._end] - paid[self._start]) * self._usage
        self.costs = self.plain + np.bincount(self._option, extra, minlength=self._offsets[-1])

    def priced(self, problem: Problem) -> Problem:
        """The problem whose prices these are, with what its options cost under them."""
        return replace(problem, costs=tuple(np.split(self.costs, self._offsets[1:-1])), checked=True)

    def over(self, shares: np.ndarray) -> np.ndarray:
        """Bytes per pressure point by which what is held is over the limit; negative where it is below.

        Args:
            shares: how much of each option is taken; of the options of a node one in all.
        """
        held = _over_points(self._start, self._end, self._usage * shares[self._option], len(self.values))
        over = held - self._room
        over[np.abs(over) <= SLACK * self._limit] = 0.0
        return over

    def taken(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """The shares of a choice: 1 of each option that is chosen."""
        shares = np.zeros(self._offsets[-1])
        shares[self._offsets[:-1] + np.asarray(choice, dtype=np.int64)] = 1.0
        return shares


def _over_points(start: np.ndarray, end: np.ndarray, usage: np.ndarray, points: int) -> np.ndarray:
    """Bytes per point of what is held from start to end."""
    change = np.bincount(start, usage, points + 1) - np.bincount(end, usage, points + 1)
    return change.cumsum()[:-1]
