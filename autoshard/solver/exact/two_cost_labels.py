"""Two problems of the same options in, the choice whose larger cost is least and a bound out, where they are narrow.

No mixture of two costs proves more than the best mixture does, and choices that are best in some mixture lie far from
each other: all layers talk, or all layers compute everything themselves. The best choice lies between. It is built
node by node, in the reverse of an elimination order, as in `labels.py`. A label is a choice of the nodes so far. The
tables of an elimination of each of a few mixtures say what any choice with the label costs at least in that mixture.
The largest of these floors is a bound for the larger cost. A label is dropped if

* its floor is above what is wanted;
* another label costs no more by either cost, and tables of later nodes cannot tell the two apart;
* there are too many. Those with the lowest floors stay, and the least floor of the others is a bound.

Memory is left aside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.solver.bounds.prices import SLACK
from autoshard.solver.exact.elimination import eliminated
from autoshard.solver.exact.elimination_order import Order, depth_first, order_of
from autoshard.solver.exact.labels import LabelOutcome, groups_of, rows_of, told_apart
from autoshard.solver.problem import Edge, Problem


@dataclass(frozen=True)
class TwoCostLabelSettings:
    """How large tables may be, how many labels are kept, and what that takes."""

    most_entries: int = 1 << 27  # of all tables of one elimination together
    most_labels: int = 2000  # that are kept after each step, those with the lowest floors
    seconds_per_step: float = 1e-4  # of a quiet core: a node and a mixture
    seconds_per_entry: float = 2e-8  # of a quiet core: a label, an option and a mixture


TWO_COST_LABELS = TwoCostLabelSettings()


def labelled(
    first: Problem,
    second: Problem,
    mixed: Callable[[float], Problem],
    share: float,
    wanted: float,
    spend: Callable[[float], None] = lambda _: None,
) -> LabelOutcome | None:
    """The choice of two problems whose larger cost is least, as far as a few labels show it; None if they are wide.

    Args:
        mixed: the problem whose costs are such a share of the first's, and the rest of the second's.
        share: that of a mixture with a high bound.
        wanted: only choices that cost less are of use.
        spend: is told what was spent, in seconds of a quiet core.
    """
    own = TWO_COST_LABELS
    shares = [0.0, 1.0, *({share} - {0.0, 1.0})]
    decided = [len(costs) == 1 for costs in first.costs]
    mixtures = [_undecided(mixed(one), decided) for one in shares]
    joined = replace(mixtures[0][0], edges=_all_edges([problem for problem, _ in mixtures]), checked=True)
    order = order_of(joined, own.most_entries)
    spend(own.seconds_per_step * len(decided))
    if order is None:
        return None
    search = _TwoCostLabelSearch(mixtures, depth_first(order), spend)
    outcome = search.run(wanted)
    if outcome.choice is None:
        return outcome
    chosen = iter(outcome.choice)
    return replace(outcome, choice=tuple(0 if is_decided else next(chosen) for is_decided in decided))


class _TwoCostLabelSearch:
    """The tables of eliminations of several mixtures, of which the first two are of one cost alone."""

    def __init__(self, mixtures: Sequence[tuple[Problem, float]], order: Order, spend: Callable[[float], None]):
        self.order, self.spend = order, spend
        made = [eliminated(problem, order) for problem, _ in mixtures]
        spend(len(made) * order.seconds)
        self.factors = [one.factors for one in made]
        self.floors = np.array([one.least + rest for one, (_, rest) in zip(made, mixtures, strict=True)])
        self.told_apart = told_apart(order)

    def run(self, wanted: float) -> LabelOutcome:
        if not (self.floors < wanted).all():
            return LabelOutcome(None, math.inf)
        floors, options = self.floors[:, None], dict[int, np.ndarray]()  # [mixture, label]; node -> label -> option
        bound, trace = math.inf, []
        for step in reversed(range(len(self.order.nodes))):
            floors, options, parents, chosen = self._extended(floors, options, step, wanted)
            kept, dropped = _kept(floors, options)
            bound = min(bound, dropped)
            floors, options = floors[:, kept], {node: own[kept] for node, own in options.items()}
            trace.append((parents[kept], chosen[kept]))
            if not len(kept):
                return LabelOutcome(None, _less(bound))
        costs = floors.max(axis=0)
        best = label = int(costs.argmin())
        choice = [0] * len(self.order.nodes)
        for step, (parents, chosen) in enumerate(reversed(trace)):
            choice[self.order.nodes[step]] = int(chosen[label])
            label = int(parents[label])
        return LabelOutcome(tuple(choice), _less(min(bound, float(costs[best]))))

    def _extended(
        self, floors: np.ndarray, options: dict[int, np.ndarray], step: int, wanted: float
    ) -> tuple[np.ndarray, dict[int, np.ndarray], np.ndarray, np.ndarray]:
        """Labels with the next node's options that may cost less than what is wanted: floors, options, parents, own."""
        node, extended = self.order.nodes[step], []
        for own, factors in zip(floors, self.factors, strict=True):
            total = sum(rows_of(table, nodes, node, options) for nodes, table in factors[step])
            extended.append(own[:, None] + (total - np.min(total, axis=1, keepdims=True)))
        every = np.array(extended)
        settings = TWO_COST_LABELS
        self.spend(settings.seconds_per_step * len(every) + settings.seconds_per_entry * every.size)
        parents, chosen = np.nonzero(every.max(axis=0) < wanted)
        further = {other: options[other][parents] for other in self.told_apart[step] if other != node}
        if node in self.told_apart[step]:
            further[node] = chosen
        return every[:, parents, chosen], further, parents, chosen


def _kept(floors: np.ndarray, options: dict[int, np.ndarray]) -> tuple[np.ndarray, float]:
    """The labels that are kept, and the least floor of the others.

    Labels that later nodes cannot tell apart have the same cost to come. So the floors of one cost alone compare them.
    """
    group = groups_of(options, floors.shape[1])
    rank = np.lexsort((floors[0], floors[1], group))
    groups, costs = group[rank], floors[0][rank]
    place = np.unique(costs, return_inverse=True)[1]  # among all costs: sums of whole numbers are exact
    keys = (groups[-1:].max(initial=0) - groups) * (len(rank) + 1) + place
    lowest = np.minimum.accumulate(keys)
    is_dominated = np.zeros(len(rank), dtype=bool)
    is_dominated[1:] = (groups[1:] == groups[:-1]) & (keys[1:] >= lowest[:-1])
    rank = rank[~is_dominated]
    most, bounds = TWO_COST_LABELS.most_labels, floors[:, rank].max(axis=0)
    if len(rank) <= most:
        return rank, math.inf
    by_bound = np.argsort(bounds, kind="stable")
    return rank[by_bound[:most]], float(bounds[by_bound[most]])


def _less(bound: float) -> float:
    """A bound, less what rounding may have added to it."""
    return bound - SLACK * abs(bound) if math.isfinite(bound) else bound


def _undecided(problem: Problem, decided: Sequence[bool]) -> tuple[Problem, float]:
    """The problem without its nodes of one option, and what these cost among themselves."""
    number = np.cumsum([not is_decided for is_decided in decided]) - 1
    rest = [float(costs[0]) for costs, is_decided in zip(problem.costs, decided, strict=True) if is_decided]
    costs, edges = [own.copy() for own in problem.costs], []
    for edge in problem.edges:
        if decided[edge.i] and decided[edge.j]:
            rest.append(float(edge.costs[0, 0]))
        elif decided[edge.i]:
            costs[edge.j] += edge.costs[0]
        elif decided[edge.j]:
            costs[edge.i] += edge.costs[:, 0]
        else:
            edges.append(Edge(int(number[edge.i]), int(number[edge.j]), edge.costs))
    left = tuple(own for own, is_decided in zip(costs, decided, strict=True) if not is_decided)
    return Problem(left, tuple(edges), (), None, checked=True), math.fsum(rest)


def _all_edges(problems: Sequence[Problem]) -> tuple[Edge, ...]:
    """An edge wherever one of the problems has one."""
    return tuple({(edge.i, edge.j): edge for problem in problems for edge in problem.edges}.values())
