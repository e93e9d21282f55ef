"""A `Problem` in, its cheapest choice out, exactly, where its graph is narrow: bucket elimination with NumPy.

Dechter, "Bucket elimination: a unifying framework for reasoning", 1999; also known as nonserial dynamic programming
(Bertele and Brioschi, 1972). A node is minimised out into a table over its neighbours, which are neighbours of each
other from then on. What that takes is known beforehand: the order of the nodes is found from the numbers of their
options alone. Chains of layers with residual connections are narrow, however many layers there are, and their linear
relaxation is loose: an integer program would have to branch layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.tables import summed

MOST_ENTRIES = 1 << 23  # of one table before the minimum is taken
MOST_WORK = 1 << 26  # entries of all tables, each counted as often as something is added to it
DIMENSIONS = 24  # of a table, at most; NumPy takes 32
SECONDS_PER_ENTRY = 1.5e-9  # on a quiet core
SECONDS_PER_TABLE = 1e-5  # of NumPy's calls, however small the table


@dataclass(frozen=True)
class Order:
    """In which order to minimise nodes out, and what that takes."""

    nodes: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]  # per step, the nodes that its table is over besides its own
    entries: int  # of all tables, each counted as often as something is added to it
    largest: int  # entries of the largest one

    @property
    def seconds(self) -> float:
        """About what it takes on a quiet core."""
        return SECONDS_PER_ENTRY * self.entries + SECONDS_PER_TABLE * len(self.nodes)


def order_of(problem: Problem, most_entries: int = MOST_ENTRIES, most_work: int = MOST_WORK) -> Order | None:
    """An order in which all tables are small; None if none was found.

    >>> from autoshard.solver.problem import Edge
    >>> chain = tuple(Edge(i, i + 1, np.zeros((2, 2))) for i in range(3))
    >>> order_of(Problem((np.zeros(2),) * 4, chain, (), None)).largest
    4
    """
    found = None
    for rule in (_weight, _fill):
        order = _greedy(problem, rule, most_entries, most_work)
        if order is not None:
            found, most_work = order, order.entries - 1
    return found


def _weight(node: int, sizes: Sequence[int], beside: Sequence[set[int]]) -> float:
    """The logarithm of the entries of the node's table."""
    return math.log(sizes[node]) + sum(math.log(sizes[other]) for other in beside[node])


def _fill(node: int, sizes: Sequence[int], beside: Sequence[set[int]]) -> float:
    """The entries of the edges that the node's elimination adds, and a little for its table."""
    around = sorted(beside[node])
    added = 0.0
    for place, i in enumerate(around):
        added += sum(sizes[i] * sizes[j] for j in around[place + 1 :] if j not in beside[i])
    return added + 1e-3 * _weight(node, sizes, beside)


def _greedy(problem: Problem, rule, most_entries: int, most_work: int) -> Order | None:
    """The order in which the node with the least value of the rule goes next."""
    sizes = [len(costs) for costs in problem.costs]
    beside: list[set[int]] = [set() for _ in sizes]
    factors = [1] * len(sizes)  # what is added up where a node is minimised out, at least
    for edge in problem.edges:
        beside[edge.i].add(edge.j)
        beside[edge.j].add(edge.i)
    left = set(range(len(sizes)))
    value = [rule(node, sizes, beside) for node in range(len(sizes))]
    nodes, scopes, work, largest = [], [], 0, 0
    while left:
        node = min(left, key=lambda node: (value[node], node))
        scope = sorted(beside[node])
        entries = math.prod(sizes[other] for other in scope) * sizes[node]
        work += entries * (len(scope) + 2)
        largest = max(largest, entries)
        if entries > most_entries or work > most_work or len(scope) >= DIMENSIONS:
            return None
        nodes.append(node)
        scopes.append(tuple(scope))
        left.discard(node)
        near = set(scope)
        for other in scope:
            near |= beside[other]
            beside[other] |= beside[node]
            beside[other] -= {node, other}
        beside[node] = set()
        for other in near & left if rule is _fill else scope:
            value[other] = rule(other, sizes, beside)
    return Order(tuple(nodes), tuple(scopes), work, largest)


def cheapest(problem: Problem, order: Order) -> tuple[int, ...] | None:
    """The cheapest choice, memory aside; None if every choice is forbidden.

    >>> from autoshard.solver.problem import Edge
    >>> edge = Edge(0, 1, np.array([[5.0, 0.0], [0.0, 5.0]]))
    >>> problem = Problem((np.array([0.0, 1.0]), np.array([0.0, 3.0])), (edge,), (), None)
    >>> cheapest(problem, order_of(problem))
    (1, 0)
    """
    place = {node: step for step, node in enumerate(order.nodes)}
    factors: list[list[tuple[tuple[int, ...], np.ndarray]]] = [[] for _ in order.nodes]  # nodes of a table, and it
    for node, costs in enumerate(problem.costs):
        factors[place[node]].append(((node,), costs))
    for (i, j), table in summed(problem.edges).items():
        factors[min(place[i], place[j])].append(((i, j), table))
    for step, (node, scope) in enumerate(zip(order.nodes, order.scopes, strict=True)):
        table = _sum(factors[step], (node, *scope), problem).min(axis=0)
        if scope:
            factors[min(place[other] for other in scope)].append((scope, table))
        elif not math.isfinite(float(table)):
            return None
    chosen: dict[int, int] = {}
    for step in reversed(range(len(order.nodes))):
        node = order.nodes[step]
        costs = sum(_at(table, nodes, node, chosen) for nodes, table in factors[step])
        chosen[node] = int(costs.argmin())
    return tuple(chosen[node] for node in range(len(problem.costs)))


def _sum(
    factors: Sequence[tuple[tuple[int, ...], np.ndarray]], nodes: tuple[int, ...], problem: Problem
) -> np.ndarray:
    """The sum of tables, over all of these nodes."""
    axis = {node: place for place, node in enumerate(nodes)}
    total = np.zeros([len(problem.costs[node]) for node in nodes])
    for own, table in sorted(factors, key=lambda factor: factor[1].size):
        shape = [1] * len(nodes)
        for node, size in zip(own, table.shape, strict=True):
            shape[axis[node]] = size
        total += table.transpose(np.argsort([axis[node] for node in own])).reshape(shape)
    return total


def _at(table: np.ndarray, nodes: tuple[int, ...], node: int, chosen: Mapping[int, int]) -> np.ndarray:
    """The costs of a node's options, where the other nodes of a table are chosen."""
    return table[tuple(slice(None) if other == node else chosen[other] for other in nodes)]
