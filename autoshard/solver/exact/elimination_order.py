"""In which order to minimise nodes out, found from the numbers of their options alone, so that tables stay small.

Most wide problems are told at once by a lower bound on the largest table of any order: the minor-min-width bound
(Gogate and Dechter, "A complete anytime algorithm for treewidth", UAI 2004), with options as weights. For the others
the min-fill and min-weight heuristics find an order, some of them at random in part.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import Problem

MOST_ENTRIES = 1 << 28  # of all tables together, before the minimum is taken: what takes a second
LOG_SLACK = 1e-6  # of logarithms, which are sums: what rounding may make of them


@dataclass(frozen=True)
class OrderSettings:
    """How an elimination order is looked for, and what one takes."""

    most_kept: int = 1 << 26  # entries of all tables together after the minimum is taken, 8 bytes each
    dimensions: int = 24  # of a table, at most; NumPy takes 32
    tries: int = 6  # orders, some of them at random
    noise: float = 0.3  # of logarithms of entries, in those
    far: int = 30  # times too many entries, in a first order: from there others are not tried
    seconds_per_entry: float = 4e-9  # of a quiet core
    seconds_per_node: float = 1e-4  # of a quiet core: NumPy's calls, and finding the node's place in one order


ORDERS = OrderSettings()


@dataclass(frozen=True)
class Order:
    """In which order to minimise nodes out, and what that takes."""

    nodes: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]  # per step, the nodes that its table is over besides its own
    entries: int  # of all tables before the minimum is taken

    @property
    def seconds(self) -> float:
        """About what it takes on a quiet core."""
        return ORDERS.seconds_per_entry * self.entries + ORDERS.seconds_per_node * len(self.nodes)


def order_of(problem: Problem, most: int = MOST_ENTRIES) -> Order | None:
    """The best order found in which all tables together have no more entries; None if none was found.

    >>> from autoshard.solver.problem import Edge
    >>> chain = tuple(Edge(i, i + 1, np.zeros((2, 2))) for i in range(3))
    >>> order_of(Problem((np.zeros(2),) * 4, chain, (), None)).entries
    14
    """
    logs = np.log2([len(costs) for costs in problem.costs])
    if _is_wider(problem, logs.tolist(), math.log2(max(most, 1))):
        return None
    found, rng = None, np.random.default_rng(0)
    for turn in range(ORDERS.tries):
        noise = (ORDERS.noise * rng.random(len(logs)) if turn > 1 else np.zeros(len(logs))).tolist()
        order = _greedy(
            problem, logs.tolist(), noise, most if found or turn > 1 else ORDERS.far * most, filling=turn != 1
        )
        if order is not None and (found is None or order.entries < found.entries):
            found, most = order, min(most, order.entries)
        if turn and (
            found is None or found.entries * ORDERS.seconds_per_entry < turn * len(logs) * ORDERS.seconds_per_node
        ):
            break  # none is near, or another one takes longer than it can save
    return found if found and found.entries <= most else None


def depth_first(order: Order) -> Order:
    """An order of the same tables, in which a node follows soon after those whose tables it takes in.

    A choice that is built in its reverse depends on few nodes at a time: small branches end before large ones begin.

    >>> depth_first(Order((0, 3, 1, 4, 2), ((2,), (4,), (2,), (2,), ()), 0)).nodes
    (3, 4, 1, 0, 2)
    """
    place = {node: step for step, node in enumerate(order.nodes)}
    children: list[list[int]] = [[] for _ in order.nodes]
    sizes, roots = [1] * len(order.nodes), []
    for step, scope in enumerate(order.scopes):
        if scope:
            into = min(place[other] for other in scope)
            children[into].append(step)
            sizes[into] += sizes[step]
        else:
            roots.append(step)
    steps, waiting = [], sorted(roots, key=sizes.__getitem__)[::-1]  # the next one last
    while waiting:  # the reverse: a node before its branches, and these from small to large
        step = waiting.pop()
        steps.append(step)
        waiting += sorted(children[step], key=sizes.__getitem__)[::-1]
    steps.reverse()
    nodes, scopes = tuple(order.nodes[step] for step in steps), tuple(order.scopes[step] for step in steps)
    return Order(nodes, scopes, order.entries)


def _greedy(
    problem: Problem, logs: Sequence[float], noise: Sequence[float], most: int, *, filling: bool
) -> Order | None:
    """The order in which the node of least weight goes next; None if its tables have more entries.

    Args:
        logs: node -> the logarithm of the number of its options.
        noise: added to the logarithms of weights.
        filling: whether the weight is the entries of the edges that a node leaves, rather than of its table.
    """
    beside = neighbours_of(problem)

    def weight(node: int) -> float:
        table = logs[node] + sum(map(logs.__getitem__, beside[node]))
        if not filling:
            return table + noise[node]
        around, added = sorted(beside[node]), 0.0
        for place, i in enumerate(around):
            own, known, apart = logs[i], beside[i], 0.0
            for j in around[place + 1 :]:
                if j not in known:
                    apart += 2.0 ** (own + logs[j])
            added += apart
        return math.log2(1 + added) + noise[node] + 1e-3 * table

    waiting = [(weight(node), node) for node in range(len(logs))]
    heapq.heapify(waiting)
    now = {node: value for value, node in waiting}  # node -> its present weight
    nodes, scopes, entries, left = [], [], 0, 0
    while waiting:
        value, node = heapq.heappop(waiting)
        if now.get(node) != value:
            continue
        del now[node]
        scope = sorted(beside[node])
        kept = math.prod(len(problem.costs[other]) for other in scope)
        left += kept
        entries += kept * len(problem.costs[node])
        if entries > most or left > ORDERS.most_kept or len(scope) >= ORDERS.dimensions:
            return None
        nodes.append(node)
        scopes.append(tuple(scope))
        near = set(scope)
        if filling:  # a node beside two of the scope need not join these any more
            near |= _twice(beside[other] for other in scope)
        for other in scope:
            beside[other] |= beside[node]
            beside[other] -= {node, other}
        for other in near - {node}:
            changed = weight(other)
            if changed != now[other]:
                now[other] = changed
                heapq.heappush(waiting, (changed, other))
    return Order(tuple(nodes), tuple(scopes), entries)


def _twice(sets: Iterable[set[int]]) -> set[int]:
    """What is in more than one of the sets."""
    once: set[int] = set()
    twice: set[int] = set()
    for one in sets:
        twice |= once & one
        once |= one
    return twice


def _is_wider(problem: Problem, logs: Sequence[float], most: float) -> bool:
    """Whether every order has a table with more entries, for all that is shown here; False says nothing.

    The first node of an order has a table over its neighbours, so no order does better than the node with the smallest
    such table. The same holds of what is left when an edge is contracted, if the node that two become has the fewer
    options of the two: no table of any order gets larger by that.

    Args:
        logs: node -> the logarithm of the number of its options.
        most: the logarithm of the entries of a table, before the minimum is taken.
    """
    logs, beside = list(logs), neighbours_of(problem)
    weight = [own + sum(logs[other] for other in around) for own, around in zip(logs, beside, strict=True)]
    waiting = [(value, node) for node, value in enumerate(weight)]
    heapq.heapify(waiting)
    is_gone = [False] * len(logs)
    while waiting:
        value, node = heapq.heappop(waiting)
        if is_gone[node] or value != weight[node]:
            continue
        if value > most + LOG_SLACK:
            return True
        is_gone[node] = True
        around = beside[node]
        for other in around:
            beside[other].discard(node)
            weight[other] -= logs[node]
        if around:
            into = min(around, key=lambda other: _contraction_loss(node, other, logs, beside))
            for other in around - beside[into] - {into}:
                beside[into].add(other)
                beside[other].add(into)
                weight[other] += logs[into]
                weight[into] += logs[other]
            loss = max(0.0, logs[into] - logs[node])
            logs[into] -= loss
            for other in (into, *beside[into]) if loss else ():
                weight[other] -= loss
                heapq.heappush(waiting, (weight[other], other))
        for other in around:
            heapq.heappush(waiting, (weight[other], other))
    return False


def _contraction_loss(
    node: int, into: int, logs: Sequence[float], beside: Sequence[set[int]]
) -> tuple[float, int, int]:
    """How much smaller tables get if a node is contracted into a neighbour: options, then neighbours in common."""
    return max(0.0, logs[into] - logs[node]) * len(beside[into]), len(beside[into] & beside[node]), into


def neighbours_of(problem: Problem) -> list[set[int]]:
    """Node -> the nodes that it has an edge with."""
    beside: list[set[int]] = [set() for _ in problem.costs]
    for edge in problem.edges:
        beside[edge.i].add(edge.j)
        beside[edge.j].add(edge.i)
    return beside
