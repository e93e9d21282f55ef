"""Dynamic programming over a graph of any width, and the choices that are found by its tables in the order of cost.

Nodes are minimised out one after the other, as in `exact/elimination.py`. Where the table of a node would be too
large, the tables in its bucket are minimised in several groups instead, each with an option of its own (mini-buckets:
Dechter and Rish, "Mini-buckets: a general scheme for bounded inference", JACM 2003). Then what is left to pay is a
lower bound. It is exact where no bucket was split.

Memory enters twice. Bytes have prices, at which the cheapest choice is one for the tables; what the limit gives back
makes the least priced cost a bound. And a branch is left where the leanest options of all other nodes do not fit.

The tables of node 0 in a chain 0 - 1 - 2, minimised out in this order, are its costs and those of edge (0, 1). Their
minimum over node 0 is a table over node 1, which waits in the bucket of node 1. The choice is then made from node 2
back to node 0. Once node 2 is decided, the bound is what its option costs plus its entry in the table of node 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.arrays import memory_of
from autoshard.solver.exact.elimination import Factor, minimised
from autoshard.solver.exact.elimination_order import ORDERS, neighbours_of
from autoshard.solver.problem import Problem
from autoshard.solver.searches.position import CHANGE_ROUNDING, SECONDS_PER_CHANGE, SECONDS_PER_LOOK
from autoshard.solver.searches.search_run import SearchRun
from autoshard.solver.tables import summed
from autoshard.solver.verify import ROUNDING

SECONDS_PER_BOUND = 1e-8  # of a quiet core: a bound of an option from a state


@dataclass(frozen=True)
class Bucket:
    """A node and the tables that are minimised over its options."""

    node: int
    factors: tuple[Factor, ...]  # over the node, and nodes that are decided before it
    left: tuple[Factor, ...]  # their minima, over the nodes that are decided before it


class MiniBuckets:
    """The buckets of a problem, and choices found by them.

    Attributes:
        bound: no choice costs less, at the prices that the node costs have.
        is_exact: whether no bucket was split.
    """

    def __init__(self, problem: Problem, costs: Sequence[np.ndarray], order: Sequence[int], most: int, run: SearchRun):
        """
        Args:
            costs: node -> option -> cost, prices of memory included.
            order: in which nodes are minimised out.
            most: entries of a table, before the minimum is taken.
        """
        self.run = run
        place = {node: step for step, node in enumerate(order)}
        factors: list[list[Factor]] = [[((node,), costs[node])] for node in order]
        for (i, j), table in summed(problem.edges).items():
            factors[min(place[i], place[j])].append(((i, j), table))
        self.bound, self.is_exact, self.buckets = 0.0, True, []
        for step, node in enumerate(order):
            left = []
            groups = _groups(factors[step], node, [len(row) for row in problem.costs], most)
            self.is_exact &= len(groups) == 1
            for group in groups:
                scope = dict.fromkeys(other for nodes, _ in group for other in nodes if other != node)
                others, table = minimised(group, (node, *scope), problem)
                entries = table.size * len(problem.costs[node])
                run.spend(ORDERS.seconds_per_entry * entries + ORDERS.seconds_per_node)
                if others:
                    left.append((others, table))
                    factors[min(place[other] for other in others)].append((others, table))
                else:
                    left.append(((), table))
                    self.bound += float(table)
            self.buckets.append(Bucket(node, tuple(factors[step]), tuple(left)))
        self.buckets.reverse()

    def open_after(self, depth: int) -> list[int]:
        """The nodes among the first `depth` + 1 that later nodes have tables with."""
        first = {bucket.node for bucket in self.buckets[: depth + 1]}
        later = (nodes for bucket in self.buckets[depth + 1 :] for nodes, _ in bucket.factors)
        return sorted({node for nodes in later for node in nodes} & first)

    def states_options(self, depth: int, chosen: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """The bounds that the options of a node lead to, from each of many states: [states, options].

        Args:
            chosen: what the nodes that are decided have chosen: int64[nodes, states].
            bounds: of the states, before: [states].
        """
        bucket = self.buckets[depth]
        own = np.arange(len(bucket.factors[0][1]))  # the first factor is the costs of the node
        costs = np.zeros((len(bounds), len(own)))
        for nodes, table in bucket.factors:
            costs += table[tuple(own if node == bucket.node else chosen[node][:, None] for node in nodes)]
        before = bounds.copy()
        for nodes, table in bucket.left:
            before -= table[tuple(chosen[node] for node in nodes)]
        self.run.spend(SECONDS_PER_LOOK * (1 + len(bucket.factors)) + SECONDS_PER_BOUND * costs.size)
        before[np.isinf(before)] = 0.0  # of a state that allows no option here
        return before[:, None] + costs

    def first_choice(self) -> list[int]:
        """The choice that takes the option with the lowest bound at every node, memory aside."""
        chosen: dict[int, int] = {}
        for depth, bucket in enumerate(self.buckets):
            options = self._options(depth, chosen, 0.0)
            chosen[bucket.node] = options[0][1] if options else 0
        return [chosen[node] for node in range(len(chosen))]

    def choices(self, memory: LeanRoom, refund: float, branches: int) -> bool:
        """Goes through choices depth first, cheaper branches first, and offers those that fit.

        Args:
            memory: what is free while nodes are decided.
            refund: what prices of memory give back: a choice that fits costs at least its priced cost less this.
            branches: options that are tried, at most.

        Returns:
            Whether it has seen all that could be cheaper than the best.
        """
        chosen: dict[int, int] = {}
        waiting = [iter(self._options(0, chosen, self.bound))]
        while waiting:
            depth = len(waiting) - 1
            node = self.buckets[depth].node
            if node in chosen:
                memory.release(node, chosen.pop(node))
            found = next(waiting[-1], None)
            if found is None or self._is_dear(found[0] - refund):
                waiting.pop()
                continue
            if branches == 0:
                return False
            branches -= 1
            bound, option = found
            if not memory.take(node, option):
                continue
            chosen[node] = option
            if depth + 1 < len(self.buckets):
                waiting.append(iter(self._options(depth + 1, chosen, bound)))
            else:
                self._offer(chosen, memory)
        return True

    def _options(self, depth: int, chosen: dict[int, int], bound: float) -> list[tuple[float, int]]:
        """The options of a node with the bounds that they lead to, lowest first."""
        bucket = self.buckets[depth]
        node = bucket.node
        costs = sum(
            table[tuple(slice(None) if other == node else chosen[other] for other in nodes)]
            for nodes, table in bucket.factors
        )
        paid = sum(float(table[tuple(chosen[other] for other in nodes)]) for nodes, table in bucket.left)
        self.run.spend(SECONDS_PER_LOOK * (1 + len(bucket.factors)))
        allowed = np.flatnonzero(np.isfinite(costs))
        bounds = bound - paid + np.asarray(costs)[allowed]
        order = np.argsort(bounds, kind="stable")
        return list(zip(bounds[order].tolist(), allowed[order].tolist(), strict=True))

    def _is_dear(self, bound: float) -> bool:
        """Whether a branch cannot lead to anything that is cheaper than the best, but for rounding."""
        best = self.run.cost
        return best < math.inf and bound >= best - CHANGE_ROUNDING * abs(best)

    def _offer(self, chosen: dict[int, int], memory: LeanRoom) -> None:
        choice = [chosen[node] for node in range(len(chosen))]
        self.run.offer(choice, memory.cost_of(choice))


class LeanRoom:
    """Bytes that are free at each pressure point while nodes are decided, if all others take their leanest options."""

    def __init__(self, problem: Problem, run: SearchRun):
        self.problem, self.run = problem, run
        memory = memory_of(problem)
        self.free = memory.room.copy()
        self.rounding = ROUNDING * memory.unit  # as `fits` allows: a byte over the limit is no rounding
        self.lives: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in problem.costs]
        for k, node in enumerate(memory.node.tolist()):
            usage = memory.usage[memory.usage_offsets[k] : memory.usage_offsets[k + 1]]
            self.lives[node].append((int(memory.start[k]), int(memory.end[k]), usage))

    def take(self, node: int, option: int) -> bool:
        """Takes what an option holds beyond the leanest; whether it fits. If it does not, nothing is taken."""
        for start, end, usage in self.lives[node]:
            self.free[start:end] -= usage[option]
        self.run.spend(SECONDS_PER_CHANGE * len(self.lives[node]))
        if all((self.free[start:end] >= -self.rounding).all() for start, end, _ in self.lives[node]):
            return True
        self.release(node, option)
        return False

    def release(self, node: int, option: int) -> None:
        for start, end, usage in self.lives[node]:
            self.free[start:end] += usage[option]

    def cost_of(self, choice: Sequence[int]) -> float:
        """What a choice costs, without prices."""
        costs = [float(row[option]) for row, option in zip(self.problem.costs, choice, strict=True)]
        return math.fsum([*costs, *(float(edge.costs[choice[edge.i], choice[edge.j]]) for edge in self.problem.edges)])


def _groups(factors: Sequence[Factor], node: int, sizes: Sequence[int], most: int) -> list[list[Factor]]:
    """The tables of a bucket in groups, each over few enough nodes that its sum is no larger than `most` entries."""
    groups: list[tuple[set[int], list[Factor]]] = []
    for nodes, table in sorted(factors, key=lambda factor: -factor[1].size):
        for scope, group in groups:
            both = scope.union(nodes)
            if math.prod(sizes[other] for other in both) <= most:
                scope |= both
                group.append((nodes, table))
                break
        else:
            groups.append(({node, *nodes}, [(nodes, table)]))
    return [group for _, group in groups]


def smallest_tables_first(problem: Problem, noise: np.ndarray, most: int) -> list[int]:
    """The order in which the node with the smallest table goes next.

    A node with a table of more than `most` entries ties no neighbours to each other, since its bucket is split.

    Args:
        noise: node -> what is added to the logarithm of its table.
    """
    beside, logs = neighbours_of(problem), np.log([len(costs) for costs in problem.costs])
    weights = {node: logs[node] + sum(logs[j] for j in around) + noise[node] for node, around in enumerate(beside)}
    waiting = [(weight, node) for node, weight in weights.items()]
    heapq.heapify(waiting)
    order = []
    while waiting:
        weight, node = heapq.heappop(waiting)
        if weights.get(node) != weight:
            continue
        is_small = weights.pop(node) - noise[node] <= math.log(most)
        order.append(node)
        around = beside[node]
        for other in around:
            beside[other].discard(node)
            if is_small:
                beside[other] |= around - {other}
        for other in around:
            weights[other] = logs[other] + sum(logs[j] for j in beside[other]) + noise[other]
            heapq.heappush(waiting, (weights[other], other))
    return order
