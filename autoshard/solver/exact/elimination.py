"""A `Problem` in, its cheapest choice out, exactly, where its graph is narrow: bucket elimination with NumPy.

Dechter, "Bucket elimination: a unifying framework for reasoning", 1999; also known as nonserial dynamic programming
(Bertele and Brioschi, 1972). A node is minimised out into a table over its neighbours, which are neighbours of each
other from then on. What that takes is known beforehand (`elimination_order.py`). Chains of layers with residual
connections are narrow, however many layers there are, and their linear relaxation is loose: an integer program would
have to branch layer by layer.
"""

from __future__ import annotations

import functools
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
FEW_ENTRIES = 1 << 13  # of a table: so few take longer to add up option by option than all at once
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
    sizes = tuple([len(problem.costs[node]) for node in nodes])
    way = _way_to_add(tuple([own for own, _ in factors]), nodes, sizes)
    tables = []
    for (place, turned), *more in way.sums:
        table = turned.of(factors[place][1])
        for before, place, turned in more:
            table = before.of(table) + turned.of(factors[place][1])
        tables.append(table)
    tables = [np.ascontiguousarray(last.of(table)) for last, table in zip(way.last, tables, strict=True)]
    return way.others, _least(tables, way.sizes)


def _least(tables: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    """The least along the first of the axes of these sizes of a sum of tables.

    A table has one entry along an axis that it does not depend on.
    """
    if math.prod(sizes) <= FEW_ENTRIES:
        least = sum(tables[1:], tables[0]).min(axis=0)
        return least if least.shape == sizes[1:] else np.array(np.broadcast_to(least, sizes[1:]))
    options, *sizes = sizes
    outer = next(k for k in range(len(sizes) + 1) if math.prod(sizes[k:]) <= BLOCK_ENTRIES)
    least, total = np.full(sizes, np.inf), np.empty(sizes[outer:])
    for place in itertools.product(*map(range, sizes[:outer])):
        within = [table[_block(table, place)] for table in tables]
        here: tuple[Any, ...] = (*place, ...)  # a view, also where nothing is left but a number
        block = least[here]
        for option in range(options):
            first, *more = (table[option if len(table) > 1 else 0] for table in within)
            for table in more:
                first = np.add(first, table, out=total)
            np.minimum(block, first, out=block)
    return least


@dataclass(frozen=True)
class Turn:
    """A table with its axes in another order, and with axes of one entry."""

    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, table: np.ndarray) -> np.ndarray:
        return table.transpose(self.axes).reshape(self.shape)


@dataclass(frozen=True)
class _WayToAdd:
    """How tables are added up, which their nodes and sizes say."""

    sums: tuple[tuple, ...]  # (table, turned), and then (turned sum so far, table, turned) for all that are added to it
    last: tuple[Turn, ...]  # of each of these sums
    others: tuple[int, ...]  # the nodes that are left, in the order of the axes
    sizes: tuple[int, ...]  # options of the node that is minimised out, and of these


@functools.lru_cache(maxsize=4096)  # the same problem is eliminated again and again, at other prices
def _way_to_add(owns: tuple[tuple[int, ...], ...], nodes: tuple[int, ...], sizes: tuple[int, ...]) -> _WayToAdd:
    """Small tables are added to each other before their sum is added to a large one.

    Args:
        owns: the nodes of each table.
        nodes: that of which the least is taken, and all others of the tables.
        sizes: how many options each of `nodes` has.
    """
    size, whole = dict(zip(nodes, sizes, strict=True)), math.prod(sizes)
    sums: list[list] = []
    scopes: list[tuple[int, ...]] = []
    for place in sorted(range(len(owns)), key=lambda place: math.prod(size[node] for node in owns[place])):
        own = owns[place]
        if sums:
            both = (*scopes[-1], *(node for node in own if node not in scopes[-1]))
            if math.prod(size[node] for node in both) * FEWER_ENTRIES <= whole:
                sums[-1].append((_turn(scopes[-1], size, both), place, _turn(own, size, both)))
                scopes[-1] = both
                continue
        sums.append([(place, _turn(own, size, own))])
        scopes.append(own)
    node, *others = nodes
    others.sort(key=lambda other: [other not in own for own in scopes])
    last = tuple(_turn(own, size, (node, *others)) for own in scopes)
    return _WayToAdd(tuple(map(tuple, sums)), last, tuple(others), tuple(size[own] for own in (node, *others)))


def _block(table: np.ndarray, place: Sequence[int]) -> tuple[slice | int, ...]:
    """The index of the part of a table that is at this place of its second and further axes."""
    return slice(None), *(at if size > 1 else 0 for at, size in zip(place, table.shape[1:], strict=False))


def _turn(own: Sequence[int], size: Mapping[int, int], nodes: Sequence[int]) -> Turn:
    """Gives a table of some nodes an axis for each of these, of one entry where it does not depend on it."""
    axes = sorted(range(len(own)), key=lambda axis: nodes.index(own[axis]))
    return Turn(tuple(axes), tuple(size[node] if node in own else 1 for node in nodes))


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
