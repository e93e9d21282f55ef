"""A narrow `Problem` whose memory binds in, choices and a bound out, closer than prices of memory come: labels.

Under prices of memory, bucket elimination is exact. But the best prices leave a gap where a few large values decide
what fits. So choices are built node by node, in the reverse of the elimination order. A *label* is a choice of the
nodes so far, with the bytes that these hold. Its *floor* is the least that any choice with it costs under the prices:
the tables of the elimination say it exactly (Kask and Dechter, "A general scheme for automatic generation of search
heuristics from specification dependencies", Artificial Intelligence 2001). A label is dropped if

* its floor is above what is wanted, or it does not fit;
* another label costs and holds no more, and tables of later nodes cannot tell the two apart (Desrochers and Soumis, "A
  generalized permanent labelling algorithm for the shortest path problem with time windows", INFOR 1988);
* there are too many. Those with the lowest floors stay, and the least floor of the others is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.bounds.prices import SLACK, Prices
from autoshard.solver.exact.elimination import eliminated
from autoshard.solver.exact.elimination_order import Order, depth_first
from autoshard.solver.problem import Problem
from autoshard.solver.verify import ROUNDING


@dataclass(frozen=True)
class LabelSettings:
    """How labels are compared, and what that takes."""

    compared: int = 8  # labels that each is compared with: those that cost a little less
    few_dominated: float = 0.1  # of the labels: if fewer fall, they are not compared again
    candidates: int = 4  # times as many as are kept: the most that are compared
    copies: int = 4  # of what candidates hold: as built, as far as it binds, in order, and as kept
    block: int = 1 << 15  # candidates of which it is looked at once whether they fit
    most_cells: int = 1 << 24  # candidates times points, 8 bytes each, in one of these copies
    seconds_per_entry: float = 5e-9  # of a quiet core: a candidate and a point, or a label, another one and a point


LABELS = LabelSettings()
MOST_NUMBERS = 1 << 62  # that groups may have before they are numbered again


@dataclass(frozen=True, eq=False)
class Labels:
    """Choices of the nodes so far; arrays have one entry per label."""

    floors: np.ndarray  # what any choice with it costs at least
    held: np.ndarray  # [point, label]: bytes beyond those of the leanest options
    options: dict[int, np.ndarray]  # those of nodes that later tables depend on
    parents: np.ndarray  # the label of the step before that it continues
    chosen: np.ndarray  # the option of this step's node

    def __len__(self) -> int:
        return len(self.floors)

    def kept(self, which: np.ndarray) -> Labels:
        options = {node: own[which] for node, own in self.options.items()}
        return Labels(self.floors[which], self.held[:, which], options, self.parents[which], self.chosen[which])


@dataclass(frozen=True)
class LabelOutcome:
    """What a search found."""

    choice: tuple[int, ...] | None  # the cheapest that fits; None: none that costs less than what is wanted is known
    bound: float  # a choice that fits and costs less than what is wanted costs no less than this; inf: there is none


class LabelSearch:
    """The tables of one elimination under prices of memory, and what options hold.

    >>> from autoshard.solver.exact.elimination_order import order_of
    >>> from autoshard.solver.problem import Live
    >>> lives = tuple(Live(node, 0, 1, np.array([0, 3, 4])) for node in range(3))
    >>> problem = Problem((np.array([9.0, 2.0, 0.0]),) * 3, (), lives, 9)
    >>> outcome = LabelSearch(problem, order_of(problem), np.array([1.5])).run(wanted=math.inf, most=100)
    >>> outcome.choice, round(outcome.bound, 6)
    ((1, 1, 1), 6.0)
    """

    def __init__(self, problem: Problem, order: Order, values: np.ndarray):
        """
        Args:
            values: the prices: cost per byte of each pressure point.
        """
        assert problem.limit is not None, "memory binds"
        order = depth_first(order)
        self.order, self.values = order, values
        prices = Prices(problem)
        prices.set(values)
        made = eliminated(prices.priced(problem), order)
        self.factors = made.factors
        # That of every choice; sums of paid and refunded bytes are rounded.
        self.floor = made.least - prices.refund - SLACK * (abs(made.least) + abs(prices.refund))
        points = problem.pressure_points()
        least = np.zeros(len(points))
        self.usage = [np.zeros((len(points), len(costs))) for costs in problem.costs]  # node -> [point, option]
        for live in problem.lives:
            start, end = np.searchsorted(points, (live.start, live.end))
            least[start:end] += live.usage.min()
            self.usage[live.node][start:end] += live.usage - live.usage.min()
        self.room = problem.limit * (1 + ROUNDING + SLACK) - least  # a choice is verified before it is taken
        most = [self.usage[node].max(axis=1) for node in order.nodes]
        self.later = np.cumsum([np.zeros(len(points)), *most], axis=0)[:-1]  # step -> bytes of later nodes at most
        self.told_apart = told_apart(order)
        self.most = max(1, LABELS.most_cells // (LABELS.candidates * max(1, len(points))))  # labels that are kept

    def run(self, *, wanted: float, most: int, spend: Callable[[float], None] = lambda _: None) -> LabelOutcome:
        """The cheapest choice, as far as so many labels show it.

        Args:
            wanted: only choices that cost less are of use.
            most: labels that are kept after each step; no more than `self.most` are.
            spend: is told what was spent, in seconds of a quiet core.
        """
        if not math.isfinite(self.floor):  # every choice is forbidden
            return LabelOutcome(None, math.inf)
        most, none = min(most, self.most), np.zeros(1, np.int32)
        labels, bound = Labels(np.array([self.floor]), np.zeros((len(self.room), 1)), {}, none, none), math.inf
        trace: list[Labels] = []
        for step in reversed(range(len(self.order.nodes))):
            labels, dropped = self._extended(labels, step, wanted, LABELS.candidates * most, spend)
            bound = min(bound, dropped)
            labels, dropped = _cut(self._undominated(labels, step, spend), most)
            bound = min(bound, dropped)
            if not len(labels):
                return LabelOutcome(None, bound)
            trace.append(Labels(np.zeros(0), np.zeros(0), {}, labels.parents, labels.chosen))
        costs = labels.floors - self.values @ (labels.held - self.room[:, None])
        best = int(costs.argmin())
        return LabelOutcome(self._choice(trace, best), min(bound, float(costs[best])))

    def _choice(self, trace: Sequence[Labels], label: int) -> tuple[int, ...]:
        chosen = [0] * len(self.order.nodes)
        for step, labels in enumerate(reversed(trace)):
            chosen[self.order.nodes[step]] = int(labels.chosen[label])
            label = int(labels.parents[label])
        return tuple(chosen)

    def _extended(
        self, labels: Labels, step: int, wanted: float, most: int, spend: Callable[[float], None]
    ) -> tuple[Labels, float]:
        """Labels with the next node's options that fit and may cost less than what is wanted; the floor of the rest."""
        node = self.order.nodes[step]
        usage = self.usage[node]
        total = sum(rows_of(table, nodes, node, labels.options) for nodes, table in self.factors[step])
        floors = labels.floors[:, None] + (total - np.min(total, axis=1, keepdims=True))
        parents, chosen = np.nonzero(floors < wanted)
        spend(LABELS.seconds_per_entry * len(parents) * len(self.room))
        fits = np.ones(len(parents), dtype=bool)
        for start in range(0, len(parents), LABELS.block):
            block = slice(start, start + LABELS.block)
            held = labels.held[:, parents[block]] + usage[:, chosen[block]]
            fits[block] = (held <= self.room[:, None]).all(axis=0)
        parents, chosen = parents[fits], chosen[fits]
        own, bound = floors[parents, chosen], math.inf
        if len(own) > most:
            rank = np.argsort(own, kind="stable")
            bound = float(own[rank[most]])
            kept = np.sort(rank[:most])
            own, parents, chosen = own[kept], parents[kept], chosen[kept]
        options = {other: labels.options[other][parents] for other in self.told_apart[step] if other != node}
        if node in self.told_apart[step]:
            options[node] = chosen.astype(np.int32)
        spend(LABELS.seconds_per_entry * LABELS.copies * len(parents) * len(self.room))
        held = labels.held[:, parents] + usage[:, chosen]
        return Labels(own, held, options, parents.astype(np.int32), chosen.astype(np.int32)), bound

    def _undominated(self, labels: Labels, step: int, spend: Callable[[float], None]) -> Labels:
        """Without labels than which another one is no worse, whatever later nodes choose."""
        slack = self.room - self.later[step]  # what holds less is below the limit, whatever comes
        binding = slack < self.room
        held = np.maximum(labels.held[binding], slack[binding, None])
        costs = labels.floors - self.values @ labels.held
        group = groups_of(labels.options, len(labels))
        rank = np.lexsort((held.sum(axis=0), costs, group))
        while len(rank) > 1:
            spend(LABELS.seconds_per_entry * LABELS.compared * len(rank) * len(held))
            groups, rows, dominated = group[rank], held[:, rank], np.zeros(len(rank), dtype=bool)
            for back in range(1, min(LABELS.compared, len(rank) - 1) + 1):
                same = groups[back:] == groups[:-back]
                dominated[back:] |= same & (rows[:, :-back] <= rows[:, back:]).all(axis=0)
            rank = rank[~dominated]
            if dominated.sum() <= LABELS.few_dominated * len(dominated):
                break
        return labels.kept(np.sort(rank))


def _cut(labels: Labels, most: int) -> tuple[Labels, float]:
    """The labels with the lowest floors, and the least floor of the others."""
    if len(labels) <= most:
        return labels, math.inf
    rank = np.argsort(labels.floors, kind="stable")
    return labels.kept(np.sort(rank[:most])), float(labels.floors[rank[most]])


def told_apart(order: Order) -> list[list[int]]:
    """Step -> the nodes chosen at this step or before by which tables of later ones tell labels apart."""
    seen: set[int] = set()
    found = []
    for node, scope in zip(order.nodes, order.scopes, strict=True):
        found.append(sorted(seen))
        seen = (seen | set(scope)) - {node}
    return found


def groups_of(options: dict[int, np.ndarray], count: int) -> np.ndarray:
    """Label -> a number, equal for labels of which these nodes have the same options.

    >>> groups_of({3: np.array([0, 2, 0]), 5: np.array([1, 1, 1])}, 3)
    array([0, 1, 0])
    """
    group, numbers = np.zeros(count, dtype=np.int64), 1
    for own in options.values():
        size = int(own.max(initial=0)) + 1
        if numbers * size > MOST_NUMBERS:
            group = np.unique(group, return_inverse=True)[1]
            numbers = count
        group, numbers = group * size + own, numbers * size
    return np.unique(group, return_inverse=True)[1]


def rows_of(table: np.ndarray, nodes: Sequence[int], node: int, options: dict[int, np.ndarray]) -> np.ndarray:
    """[label, option of the node] of a table over it and others that are chosen; one row if there are no others."""
    moved = np.moveaxis(table, nodes.index(node), -1)
    others = tuple(options[other] for other in nodes if other != node)
    return moved[others] if others else moved[None]
