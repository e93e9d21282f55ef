"""A `Problem` in, a proven lower bound and choices near it out: sequential tree-reweighted message passing (TRW-S).

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 2006: every edge carries a
message to each of its ends, a share of its costs that the end's options pay instead. Sweeps over the nodes in order,
forward and backward, move costs to where they bind, and what no choice can avoid is the bound. Memory enters as a price
per byte at each pressure point: a choice that fits earns what its bytes fall short of the limit.

Costs written with these messages say more than one number: how much dearer than the bound any choice with a given
option must be. Options that make it dearer than a choice in hand can be forbidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.tables import classes
from autoshard.solver.verify import ROUNDING

UNPRICED = 20  # rounds before memory gets its first price
STEP = 0.3  # of the way to the known cost, as the slope of the bound points there: how far prices move in a round
SMOOTHING = 0.7  # of the slope that comes from earlier rounds, since one choice says little
PATIENCE = 15  # rounds of prices that do not raise the bound, after which steps get shorter
LITTLE = 1e-2  # of the gap: a rise that does not count as one
SHORTER, SHORTEST = 0.7, 0.05  # factor between step lengths; of the first length: the last one
MOST = 1000  # rounds
SLACK = 1e-11  # relative; what rounding may make of bytes, and of what they cost and get back
PAUSE = 25  # rounds without prices between two looks at whether they pay ...
WORTH = 0.02  # ... which they do if they closed this much of the gap


class _Side:
    """One end of an edge: which class each option of the node is in, and the message that the edge sends the node."""

    def __init__(self, node: int, option_class: np.ndarray):
        self.node = node
        self.option_class = option_class
        self.order = np.argsort(option_class, kind="stable")
        self.starts = np.searchsorted(option_class[self.order], np.arange(option_class.max() + 1))
        self.message = np.zeros(len(self.starts))  # per class

    def least(self, costs: np.ndarray) -> np.ndarray:
        """Per class, the least of its options' costs."""
        return np.minimum.reduceat(costs[self.order], self.starts)


class _Link:
    """An edge as the node at one end sees it. Options with equal costs over the edge are one class."""

    def __init__(self, own: _Side, other: _Side, table: np.ndarray):
        self.own, self.other = own, other
        self.table = table  # [own class, other class]
        self.received = np.ascontiguousarray(table.T)  # [other class, own class]


class Relaxation:
    """Messages over the edges of a problem, and prices on its memory, that together prove a bound.

    >>> from autoshard.solver.problem import Edge
    >>> problem = Problem((np.array([0.0, 3.0]),) * 2, (Edge(0, 1, np.array([[4.0, 0.0], [0.0, 9.0]])),), (), None)
    >>> Relaxation(problem).sweep()
    3.0

    Every option must have a finite cost, and a finite pair over every edge; `simplify` sees to that.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        nodes = len(problem.costs)
        tables: dict[tuple[int, int], np.ndarray] = {}
        for edge in problem.edges:
            i, j, table = (edge.i, edge.j, edge.costs) if edge.i < edge.j else (edge.j, edge.i, edge.costs.T)
            tables[i, j] = tables[i, j] + table if (i, j) in tables else table
        self._later: list[list[_Link]] = [[] for _ in range(nodes)]  # node -> its edges to nodes of higher number
        self._earlier: list[list[_Link]] = [[] for _ in range(nodes)]
        for (i, j), table in sorted(tables.items(), key=lambda item: item[0]):
            rows, columns = classes(table), classes(table.T)
            first_rows, first_columns = (np.unique(of, return_index=True)[1] for of in (rows, columns))
            table = np.ascontiguousarray(table[np.ix_(first_rows, first_columns)])
            own, other = _Side(i, rows), _Side(j, columns)
            self._later[i].append(_Link(own, other, table))
            self._earlier[j].append(_Link(other, own, table.T))
        self._spread = max(float(np.ptp(costs)) for costs in problem.costs)
        self.prices = Prices(problem)
        self.choice = [int(costs.argmin()) for costs in problem.costs]  # what the last sweep would take

    def rounds(self, known: Callable[[], float]) -> Iterator[tuple[tuple[int, ...], float]]:
        """Sweeps forward and backward and sets prices as long as it pays; after each sweep a choice and a bound.

        Prices follow the slope of the bound, in Polyak's steps: as far as the best known cost would be on that slope.

        Args:
            known: the cost of the best choice by now; inf if there is none.
        """
        best, before = -np.inf, -np.inf  # the bound, now and at the last look
        prices, tried, length, direction = self.prices.values, 0, STEP, None
        for count in range(1, MOST + 1):
            for forward in (True, False):
                bound = self.sweep(forward=forward)
                yield tuple(self.choice), bound
            rise, best = bound - best, max(bound, best)
            gap = min(known() - best, max(abs(best), self._spread))
            if rise > 0:
                prices = self.prices.values
            if rise > LITTLE * gap:
                tried = 0
            priced = prices.any() or self.prices.values.any()
            if count % PAUSE == 0 and not priced:
                if best - before <= WORTH * gap:
                    return
                before = best
            if count < UNPRICED:
                continue
            over = self.prices.over(self.choice)
            direction = over if direction is None else SMOOTHING * direction + (1 - SMOOTHING) * over
            slope = np.where((self.prices.values <= 0) & (direction < 0), 0.0, direction)
            if not np.isfinite(bound):  # nothing fits
                return
            if not (priced or slope.any()):  # all fits
                continue
            tried += 1
            if tried > PATIENCE or not slope.any():
                tried, length, direction = 0, length * SHORTER, None
                self.prices.set(prices)
                if length < SHORTEST * STEP:
                    break
            else:
                step = length * (best + gap - bound) / (slope @ slope)
                self.prices.set(np.maximum(0.0, self.prices.values + step * slope))
        for forward in (True, False) * UNPRICED:  # until the messages suit the best prices again
            bound = self.sweep(forward=forward)
            yield tuple(self.choice), bound

    def sweep(self, *, forward: bool = True) -> float:
        """Updates all messages in one direction, and `choice`; the bound that they prove now."""
        return self._sweep(forward, None)

    def least(self, *, forward: bool = True) -> list[np.ndarray]:
        """Node -> option -> what every choice with that option costs at least. Sweeps once."""
        extras: list[np.ndarray] = [np.zeros(0)] * len(self.problem.costs)
        bound = self._sweep(forward, extras)
        return [bound + extra for extra in extras]

    def _sweep(self, forward: bool, extras: list[np.ndarray] | None) -> float:
        behind, ahead = (self._earlier, self._later) if forward else (self._later, self._earlier)
        costs = self.prices.costs
        bound = -self.prices.refund
        for node in range(len(costs)) if forward else range(len(costs) - 1, -1, -1):
            total = costs[node].copy()
            for link in ahead[node]:
                total += link.own.message[link.own.option_class]
            taken = total.copy()  # given what the nodes behind took
            for link in behind[node]:
                taken += link.received[link.other.option_class[self.choice[link.other.node]]][link.own.option_class]
                total += link.own.message[link.own.option_class]
            self.choice[node] = int(taken.argmin())
            least = total.min()
            bound += least
            total -= least
            share = total / max(len(ahead[node]), len(behind[node]), 1)
            for link in ahead[node]:
                message = (link.received + (link.own.least(share) - link.own.message)).min(axis=1)
                least = message.min()
                bound += least
                link.other.message = message - least
                if extras is not None:
                    # The bound counts `least` of what the edge and this share of the node cost together.
                    left = (link.table - link.other.message).min(axis=1) - link.own.message - least
                    total += left[link.own.option_class]
            if extras is not None:
                extras[node] = total
        return float(bound)


def finite(problem: Problem, ceiling: float) -> Problem:
    """The problem in which nothing costs more than `ceiling`, what is forbidden included: its bounds hold for both.

    >>> finite(Problem((np.array([1.0, np.inf]),), (), (), None), 5.0).costs
    (array([1., 5.]),)
    """
    cut: dict[int, np.ndarray] = {}  # many tables are one object

    def below(costs: np.ndarray) -> np.ndarray:
        if id(costs) not in cut:
            cut[id(costs)] = np.minimum(costs, ceiling)
        return cut[id(costs)]

    edges = tuple(replace(edge, costs=below(edge.costs)) for edge in problem.edges)
    return replace(problem, costs=tuple(map(below, problem.costs)), edges=edges)


class Prices:
    """A price per byte at each pressure point, what options cost with them, and what the limit gives back.

    Bytes are counted beyond those of each life's leanest option, so that what is paid and given back is small.
    """

    def __init__(self, problem: Problem):
        points = problem.pressure_points() if problem.limit is not None else np.zeros(0, dtype=np.int64)
        lives = problem.lives if len(points) else ()
        self._plain = problem.costs
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
        stacked = np.bincount(self._option, extra, minlength=self._offsets[-1])
        parts = np.split(stacked, self._offsets[1:-1])
        self.costs = [plain + part for plain, part in zip(self._plain, parts, strict=True)]

    def over(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes per pressure point by which a choice is over the limit; negative where it is below."""
        chosen = np.zeros(self._offsets[-1], dtype=bool)
        chosen[self._offsets[:-1] + np.asarray(choice, dtype=np.int64)] = True
        chosen = chosen[self._option]
        held = _over_points(self._start[chosen], self._end[chosen], self._usage[chosen], len(self.values))
        over = held - self._room
        over[np.abs(over) <= SLACK * self._limit] = 0.0
        return over


def _over_points(start: np.ndarray, end: np.ndarray, usage: np.ndarray, points: int) -> np.ndarray:
    """Bytes per point of what is held from start to end."""
    change = np.zeros(points + 1)
    np.add.at(change, start, usage)
    np.subtract.at(change, end, usage)
    return change.cumsum()[:-1]
