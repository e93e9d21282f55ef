"""A `Problem` in, ever better choices out, quickly and without a bound: where the integer program starts from.

One move changes many nodes at once. Of the nodes in random order, those that close no cycle with the ones before are
free: a forest, which dynamic programming optimises exactly against the rest. Memory enters as a price per byte at each
pressure point, raised while the choice is over the limit there and lowered once all fits. Whatever fits is improved
further, one node at a time, as far as memory allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.incumbent import Incumbent
from autoshard.solver.local_search.settings import MOVES
from autoshard.solver.problem import Problem
from autoshard.solver.run import ProblemPart, SolverRun
from autoshard.solver.verify import ROUNDING, verify


@dataclass(frozen=True)
class ForestMoves:
    """Moves along random forests, from the cheapest option of every node: an algorithm of the table."""

    visits: int = 100_000  # of nodes, in all moves together, about: a second or two
    patience: int = 15  # moves in a row that bring nothing better, after which it gives up
    attempts: int = 60  # moves in a row that do not fit, after which it gives up; the prices grow with each
    polishing_moves: int = 2  # that are tried on choices that come from elsewhere
    far_gap: float = 0.2  # of the bound: from which on moves start from several choices, where options are many

    def applies(self, part: ProblemPart, run: SolverRun) -> bool:
        return True

    def improve(self, part: ProblemPart, run: SolverRun, start: Sequence[int] | None = None) -> bool:
        """Offers choices; `start` is as in `choices`."""
        incumbent = part.incumbent
        with run.report.during("moves"):
            seconds = move_seconds(part.problem)
            for choice in self.choices(part.problem, run.seed, start):
                if choice is not None:
                    incumbent.offer(choice)
                if incumbent.is_solved:
                    return True
                run.clock.spend(seconds)
        return False

    def improve_if_far(self, part: ProblemPart, run: SolverRun) -> None:
        """Moves from what is known of the whole, and then from the best choice, if that is far from the bound.

        The cheapest options of all nodes, where moves start otherwise, do not suit each other: they may pay for nearly
        every edge, and moves do not get far from them. The first options leave all arrays whole and pay for none.
        """
        incumbent = part.incumbent
        is_many = run.sizes.few_options < part.options <= run.sizes.compiled_options
        if not is_many or incumbent.gap <= self.far_gap:
            return
        self.improve(part, run, incumbent.start or (0,) * len(part.problem.costs))
        if incumbent.choice is not None and incumbent.gap > self.far_gap:
            self.improve(part, run, incumbent.choice)

    def choices(
        self, problem: Problem, seed: int, start: Sequence[int] | None = None
    ) -> Iterator[tuple[int, ...] | None]:
        """The best choice so far that is allowed and fits, after each move; None while there is none.

        Args:
            start: where moves start, which need not be allowed; None: at the cheapest option of every node.
        """
        moves = ForestState(problem, np.random.default_rng(seed))
        if start is not None:
            moves.choice = np.array(start)
        best, least, idle = None, np.inf, 0
        for _ in range(max(self.attempts, self.visits // len(problem.costs))):
            moves.move()
            idle += 1
            if moves.adjust_prices():
                moves.descend()
                choice = tuple(int(option) for option in moves.choice)
                cost, _ = verify(problem, choice)
                if cost < least * (1 - ROUNDING):
                    best, least, idle = choice, cost, 0
            yield best
            if idle >= (self.attempts if best is None else self.patience):
                return

    def polish(
        self, incumbent: Incumbent, moves: ForestState, choice: Sequence[int], prices: np.ndarray, run: SolverRun
    ) -> None:
        """Offers what a few moves make of a choice, again as long as that is better than all before."""
        cost = math.inf
        while incumbent.cost < cost:
            cost, better = incumbent.cost, moves.improved(choice, prices, self.polishing_moves)
            run.clock.budget.spend(self.polishing_moves * move_seconds(incumbent.problem))
            if better is None:
                return
            incumbent.offer(better)
            choice = better


def move_seconds(problem: Problem) -> float:
    """About what a move takes on a quiet core."""
    lives = len(problem.lives) if problem.limit is not None else 0
    graph = MOVES.seconds_per_node * len(problem.costs) + MOVES.seconds_per_edge * len(problem.edges)
    return graph + MOVES.seconds_per_life * lives


class ForestState:
    """A choice under improvement. What is forbidden is finite here, but dearer than anything allowed."""

    def __init__(self, problem: Problem, rng: np.random.Generator):
        self.rng = rng
        tables = [*problem.costs, *(edge.costs for edge in problem.edges)]
        most = sum(map(_largest, tables))
        self.never = 2 * most + 1.0
        self.costs = [np.minimum(costs, self.never) for costs in problem.costs]
        self.tables: list[dict[int, np.ndarray]] = [{} for _ in problem.costs]  # node -> neighbour -> [its, own] cost
        for edge in problem.edges:
            allowed = edge.costs if edge.costs.max() < np.inf else np.minimum(edge.costs, self.never)
            for i, j, table in ((edge.j, edge.i, allowed), (edge.i, edge.j, allowed.T)):
                self.tables[i][j] = self.tables[i][j] + table if j in self.tables[i] else table
        points = problem.pressure_points() if problem.limit is not None else np.zeros(0, dtype=np.int64)
        self.lives: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in problem.costs]
        for live in problem.lives if len(points) else ():
            start, end = np.searchsorted(points, (live.start, live.end))
            self.lives[live.node].append((int(start), int(end), live.usage))
        self.limit = problem.limit
        self.prices = np.zeros(len(points))  # cost per byte
        spread = [np.ptp(usage) for lives in self.lives for _, _, usage in lives]
        self.typical_price = most / len(tables) / max(1.0, float(np.mean(spread))) if spread else 0.0
        self.choice = np.array([costs.argmin() for costs in self.costs])

    def improved(self, choice: Sequence[int], prices: np.ndarray, moves: int) -> tuple[int, ...] | None:
        """What so many moves make of a choice, at these prices per byte; None if that does not fit."""
        self.choice, self.prices = np.array(choice), prices
        for _ in range(moves):
            self.move()
        if self.limit is not None and (self.held() > self.limit * (1 + ROUNDING)).any():
            return None
        if prices.any():
            self.descend()
        return tuple(self.choice.tolist())

    def move(self) -> None:
        """Optimises a random forest of nodes against all others, at the present prices."""
        paid = np.append(0.0, np.cumsum(self.prices))
        order, parents = self.forest()
        costs: dict[int, np.ndarray] = {}
        for node in order:
            cost = self.costs[node].copy()
            for start, end, usage in self.lives[node]:
                cost += (paid[end] - paid[start]) * usage
            costs[node] = cost
        for node in order:
            for j, table in self.tables[node].items():
                if j not in costs:
                    costs[node] += table[self.choice[j]]
        for node in reversed(order):
            parent = parents[node]
            if parent is not None:
                costs[parent] += (self.tables[parent][node] + costs[node][:, None]).min(axis=0)
        for node in order:
            parent = parents[node]
            if parent is not None:
                costs[node] = costs[node] + self.tables[node][parent][self.choice[parent]]
            self.choice[node] = costs[node].argmin()

    def forest(self) -> tuple[list[int], dict[int, int | None]]:
        """Random nodes without a cycle among them, parents first, and the parent of each."""
        root = list(range(len(self.costs)))

        def find(node: int) -> int:
            while root[node] != node:
                root[node] = node = root[root[node]]
            return node

        free: dict[int, None] = {}
        for node in self.rng.permutation(len(self.costs)).tolist():
            roots = [find(j) for j in self.tables[node] if j in free]
            if len(set(roots)) == len(roots):
                free[node] = None
                for other in roots:
                    root[other] = node
        parents: dict[int, int | None] = {}
        order: list[int] = []
        for top in free:
            if top in parents:
                continue
            parents[top], tree = None, [top]
            for node in tree:
                for j in self.tables[node]:
                    if j in free and j not in parents:
                        parents[j] = node
                        tree.append(j)
            order += tree
        return order, parents

    def adjust_prices(self) -> bool:
        """Raises the prices where the choice is over the limit; where nothing is, lowers all and says so."""
        if self.limit is None:
            return True
        over = self.held() > self.limit * (1 + ROUNDING)
        if over.any():
            self.prices[over] = MOVES.price_rise * self.prices[over] + MOVES.first_price * self.typical_price
        else:
            self.prices *= MOVES.price_fall
        return not over.any()

    def held(self) -> np.ndarray:
        """Bytes at each pressure point."""
        held = np.zeros(len(self.prices))
        for node, lives in enumerate(self.lives):
            for start, end, usage in lives:
                held[start:end] += usage[self.choice[node]]
        return held

    def descend(self) -> None:
        """Gives one node after the other its cheapest option that fits, until none changes."""
        held, changed = self.held(), True
        while changed:
            changed = False
            for node, costs in enumerate(self.costs):
                total = costs.copy()
                for j, table in self.tables[node].items():
                    total += table[self.choice[j]]
                now = self.choice[node]
                better = np.flatnonzero(total < total[now] - ROUNDING * abs(total[now]))
                for option in better[np.argsort(total[better], kind="stable")]:
                    if self.fits(node, option, held):
                        for start, end, usage in self.lives[node]:
                            held[start:end] += float(usage[option]) - float(usage[now])
                        self.choice[node], changed = option, True
                        break

    def fits(self, node: int, option: int, held: np.ndarray) -> bool:
        """Whether a node may change to an option, given what all hold now."""
        change = np.zeros_like(held)
        for start, end, usage in self.lives[node]:
            change[start:end] += float(usage[option]) - float(usage[self.choice[node]])
        return self.limit is None or not (held + change > self.limit * (1 + ROUNDING)).any()


def _largest(table: np.ndarray) -> float:
    """The largest finite entry, whatever its sign."""
    largest = float(np.abs(table).max())
    if largest == np.inf:
        largest = float(np.abs(table, where=np.isfinite(table), out=np.zeros_like(table)).max())
    return largest
