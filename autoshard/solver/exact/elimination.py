"""A `Problem` in, its cheapest choice out, exactly, where its graph is narrow: bucket elimination with NumPy.

Dechter, "Bucket elimination: a unifying framework for reasoning", 1999; also known as nonserial dynamic programming
(Bertele and Brioschi, 1972). A node is minimised out into a table over its neighbours, which are neighbours of each
other from then on. What that takes is known beforehand (`elimination_order.py`). Chains of layers with residual
connections are narrow, however many layers there are, and their linear relaxation is loose: an integer program would
have to branch layer by layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.solver.exact.elimination_order import Order, order_of
from autoshard.solver.exact.option_classes import with_classes
from autoshard.solver.problem import Problem
from autoshard.solver.tables import summed

BLOCK_ENTRIES = 1 << 18  # of a table that are added up at once, 8 bytes each: what a core's cache holds
FEWER_ENTRIES = 8  # times fewer than the table: what tables are added up to before they are added to it


Factor = tuple[tuple[int, ...], np.ndarray]  # nodes, and a table over their options


def cheapest(problem: Problem, order: Order) -> tuple[int, ...] | None:
    """The cheapest choice, memory aside; None if every choice is forbidden.

    >>> from autoshard.solver.problem import Edge
    >>> edge = Edge(0, 1, np.array([[5.0, 0.0], [0.0, 5.0]]))
    >>> problem = Problem((np.array([0.0, 1.0]), np.array([0.0, 3.0])), (edge,), (), None)
    >>> cheapest(problem, order_of(problem))
    (1, 0)
    """
    made = eliminated(problem, order)
    if not math.isfinite(made.least):
        return None
    chosen: dict[int, int] = {}
    for step in reversed(range(len(order.nodes))):
        node = order.nodes[step]
        costs = np.asarray(sum(_at(table, nodes, node, chosen) for nodes, table in made.factors[step]))
        chosen[node] = int(costs.argmin())
    return tuple(chosen[node] for node in range(len(problem.costs)))


@dataclass(frozen=True, eq=False)
class EliminationTables:
    """What elimination makes of a problem."""

    factors: list[list[Factor]]  # step -> tables over its node and scope; together the least that all before it cost
    least: float  # what the cheapest choice costs, memory aside; inf: all are forbidden


def eliminated(problem: Problem, order: Order) -> EliminationTables:
    """The tables of an elimination; those that come after one that forbids everything are left out."""
    place = {node: step for step, node in enumerate(order.nodes)}
    factors: list[list[Factor]] = [[] for _ in order.nodes]
    for node, costs in enumerate(problem.costs):
        factors[place[node]].append(((node,), costs))
    for (i, j), table in summed(problem.edges).items():
        factors[min(place[i], place[j])].append(((i, j), table))
    least = 0.0
    for step, (node, scope) in enumerate(zip(order.nodes, order.scopes, strict=True)):
        others, table = minimised(factors[step], (node, *scope), problem)
        if others:
            factors[min(place[other] for other in others)].append((others, table))
        else:
            least += float(table)
            if not math.isfinite(least):
                break
    return EliminationTables(factors, least)


def minimised(factors: Sequence[Factor], nodes: tuple[int, ...], problem: Problem) -> Factor:
    """The least over the options of the first node of a sum of tables, for all options of the others.

    The others are put in an order in which those of the same tables follow each other, so that NumPy adds along all of
    them in one loop; and the sums are of a size that a core's cache holds. The two together halve the time.
    """
    whole = math.prod(len(problem.costs[node]) for node in nodes)
    sums: list[Factor] = []
    for own, table in sorted(factors, key=lambda factor: factor[1].size):
        if sums:
            both = (*sums[-1][0], *(node for node in own if node not in sums[-1][0]))
            if math.prod(len(problem.costs[node]) for node in both) * FEWER_ENTRIES <= whole:
                sums[-1] = both, _spread(*sums[-1], both) + _spread(own, table, both)
                continue
        sums.append((own, table))
    node, *others = nodes
    others.sort(key=lambda other: [other not in own for own, _ in sums])
    tables = [np.ascontiguousarray(_spread(own, table, (node, *others))) for own, table in sums]
    sizes = [len(problem.costs[other]) for other in others]
    outer = next(k for k in range(len(sizes) + 1) if math.prod(sizes[k:]) <= BLOCK_ENTRIES)
    least, total = np.full(sizes, np.inf), np.empty(sizes[outer:])
    for place in itertools.product(*map(range, sizes[:outer])):
        within = [table[_block(table, place)] for table in tables]
        here: tuple[Any, ...] = (*place, ...)  # a view, also where nothing is left but a number
        block = least[here]
        for option in range(len(problem.costs[node])):
            first, *more = (table[option if len(table) > 1 else 0] for table in within)
            for table in more:
                first = np.add(first, table, out=total)
            np.minimum(block, first, out=block)
    return tuple(others), least


def _block(table: np.ndarray, place: Sequence[int]) -> tuple[slice | int, ...]:
    """The index of the part of a table that is at this place of its second and further axes."""
    return slice(None), *(at if size > 1 else 0 for at, size in zip(place, table.shape[1:], strict=False))


def _spread(own: Sequence[int], table: np.ndarray, nodes: Sequence[int]) -> np.ndarray:
    """A table with an axis for each of these nodes, of one entry where it does not depend on it."""
    axis = {node: place for place, node in enumerate(nodes)}
    shape = [1] * len(nodes)
    for node, size in zip(own, table.shape, strict=True):
        shape[axis[node]] = size
    return table.transpose(np.argsort([axis[node] for node in own])).reshape(shape)


def _at(table: np.ndarray, nodes: tuple[int, ...], node: int, chosen: Mapping[int, int]) -> np.ndarray:
    """The costs of a node's options, where the other nodes of a table are chosen."""
    return table[tuple(slice(None) if other == node else chosen[other] for other in nodes)]


@dataclass(frozen=True)
class NarrowWay:
    """How a problem is eliminated: an order of its nodes, or of those that it has with nodes of classes."""

    order: Order
    has_classes: bool

    def problem(self, problem: Problem) -> Problem:
        """The problem whose nodes the order has; those of `problem` come first."""
        if not self.has_classes:
            return problem
        return replace(with_classes(problem).problem, lives=problem.lives, limit=problem.limit, checked=True)

    def cheapest(self, problem: Problem) -> tuple[int, ...] | None:
        """The cheapest choice of the problem, or of one with the same tables; None if every choice is forbidden."""
        if not self.has_classes:
            return cheapest(problem, self.order)
        classed = with_classes(problem)
        choice = cheapest(classed.problem, self.order)
        return None if choice is None else classed.invert(choice)


def narrow_way(problem: Problem, most: int) -> NarrowWay | None:
    """The first way found that makes no more entries in all tables together; None if none was found."""
    if (order := order_of(problem, most)) is not None:
        return NarrowWay(order, has_classes=False)
    if (order := order_of(with_classes(problem).problem, most)) is not None:
        return NarrowWay(order, has_classes=True)
    return None
