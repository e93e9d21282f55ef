"""A choice that changes node by node: what every change costs and holds, a repair for memory, a descent.

What is forbidden costs `never`, which is finite and more than all that is allowed together, so that searches may pass
through it. Bytes over the limit are counted as their sum over all pressure points. One search has one `Position`, and
sets it anew for every choice that it starts from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from autoshard.solver.local_search.forest_moves import ForestState
from autoshard.solver.problem import Problem
from autoshard.solver.searches.nearest_allowed import NearestProblem
from autoshard.solver.searches.search_run import SearchRun
from autoshard.solver.verify import ROUNDING

# Seconds of a quiet core.
SECONDS_PER_LOOK = 2e-6  # at the options of a node, plus
SECONDS_PER_NEIGHBOUR = 6e-7  # for each of its neighbours
SECONDS_PER_CHANGE = 8e-6  # of bytes that are held
PAIR_SHARE = 0.35  # of a look: a look at one option only
PROSPECT_TIMES = 2.5  # as much as a look: one at what neighbours may take
CHANGE_ROUNDING = 1e-9  # relative: changes of cost and of bytes smaller than this are rounding


class Position(ForestState):
    """A choice with its cost and its bytes over the limit, both kept up to date.

    Attributes:
        choice: node -> option.
        cost: of the choice; `never` and more where something is forbidden.
        excess: bytes over the limit, summed over pressure points; 0: the choice fits.
        sizes: node -> how many options it has.
        decided: nodes that have more than one option.
        looks: node -> seconds of a quiet core that a look at its options takes.
    """

    def __init__(self, problem: Problem, run: SearchRun, *, offers: bool = True):
        """
        Args:
            offers: whether choices are offered; not if the problem is made of another.
        """
        super().__init__(problem, run.rng)
        self.run, self.offers = run, offers
        self.sizes = [len(costs) for costs in problem.costs]
        self.decided = [node for node, size in enumerate(self.sizes) if size > 1]
        self.room = 0.0 if problem.limit is None else problem.limit * (1 + ROUNDING)
        self._spans = [_span(lives) for lives in self.lives]
        self.looks = [SECONDS_PER_LOOK + SECONDS_PER_NEIGHBOUR * len(tables) for tables in self.tables]
        self._nearest = NearestProblem(problem, run.rng, run.spend)
        self.start(self.choice.tolist())

    @cached_property
    def at_stake(self) -> np.ndarray:
        """What each node and its edges cost on average, beyond the least: [nodes]."""
        own = [_spread(costs) for costs in self.costs]
        beside = [sum(map(_spread, tables.values())) for tables in self.tables]
        return np.array(own) + np.array(beside)

    def by_stake(self, noise: float = 0.0) -> list[int]:
        """The nodes, those with most at stake first; noise in its logarithm makes another order each time."""
        strays = np.exp(noise * self.rng.standard_normal(len(self.sizes))) if noise else 1.0
        return np.argsort(-self.at_stake * strays, kind="stable").tolist()

    def start(self, choice: Sequence[int]) -> None:
        """Makes this the choice."""
        self.choice = np.array(choice, dtype=np.int64)
        now = self.choice.tolist()
        nodes = sum(float(costs[option]) for costs, option in zip(self.costs, now, strict=True))
        pairs = sum(
            float(table[now[j], now[i]]) for i, tables in enumerate(self.tables) for j, table in tables.items() if i < j
        )
        self.cost = nodes + pairs
        self.bytes = self.held()
        self.excess = float(np.maximum(self.bytes - self.room, 0.0).sum())
        self.run.spend(sum(self.looks))

    def random_choice(self) -> list[int]:
        """One option of each node, all alike likely."""
        return [int(option) for option in self.rng.integers(self.sizes)]

    def option_costs(self, node: int) -> np.ndarray:
        """What each option of a node costs, with its edges to the others as they are: [options]."""
        self.run.spend(self.looks[node])
        choice = self.choice
        total = self.costs[node].copy()
        for j, table in self.tables[node].items():
            total += table[choice[j]]
        return total

    def prospects(self, node: int, chosen: Mapping[int, int]) -> np.ndarray:
        """What each option of a node costs beside the nodes that are chosen, and at least beside others: [options]."""
        costs = self.costs[node].copy()
        for other, table in self.tables[node].items():
            costs += table[chosen[other]] if other in chosen else table.min(axis=0)
        self.run.spend(PROSPECT_TIMES * self.looks[node])
        return costs

    def added_cost(self, node: int, option: int) -> float:
        """What the choice costs more if a node takes an option."""
        self.run.spend(PAIR_SHARE * self.looks[node])
        choice, now = self.choice, self.choice[node]
        added = float(self.costs[node][option] - self.costs[node][now])
        for j, table in self.tables[node].items():
            row = table[choice[j]]
            added += float(row[option] - row[now])
        return added

    def excess_change(self, node: int, option: int) -> float:
        """By how many bytes, summed over points, the choice is more over the limit if a node takes an option."""
        if not self.lives[node]:
            return 0.0
        low, high = self._spans[node]
        before = self.bytes[low:high]
        after = before.copy()
        for start, end, usage in self.lives[node]:
            after[start - low : end - low] += float(usage[option]) - float(usage[self.choice[node]])
        self.run.spend(SECONDS_PER_CHANGE)
        return float((np.maximum(after - self.room, 0.0) - np.maximum(before - self.room, 0.0)).sum())

    def change(self, node: int, option: int, added: float) -> None:
        """Lets a node take an option.

        Args:
            added: what that costs more.
        """
        if self.lives[node]:
            self.excess += self.excess_change(node, option)
            for start, end, usage in self.lives[node]:
                self.bytes[start:end] += float(usage[option]) - float(usage[self.choice[node]])
            if self.excess < CHANGE_ROUNDING * self.room:
                self.excess = float(np.maximum(self.bytes - self.room, 0.0).sum())
        self.choice[node] = option
        self.cost += added

    @property
    def is_allowed(self) -> bool:
        """Whether nothing of it is forbidden, and it fits."""
        return self.cost < self.never and self.excess == 0

    def offer(self) -> None:
        """Offers the choice if it is allowed."""
        if self.offers and self.is_allowed and self.cost < self.run.cost:
            self.run.offer(self.choice.tolist(), self.cost)

    def repair(self) -> None:
        """Makes the choice allowed and fit, as far as that is found: by changes of single nodes, or of many."""
        if self.cost < self.never:
            self._shrink()
        if not self.is_allowed:
            found = self._nearest.find(self.choice.tolist())
            if found is not None:
                self.start(found)

    def _shrink(self) -> None:
        """Changes single nodes until the choice fits or none helps: the cheapest per byte at the fullest point."""
        while self.excess > 0:
            worst, before = int(self.bytes.argmax()), self.excess
            for _, node, option in sorted(self._reliefs(worst)):
                if self.bytes[worst] <= self.room:
                    break
                if option != self.choice[node] and self.excess_change(node, option) < 0:
                    costs = self.option_costs(node)
                    self.change(node, option, float(costs[option] - costs[self.choice[node]]))
            if self.excess >= before * (1 - CHANGE_ROUNDING):
                return

    def _reliefs(self, point: int) -> list[tuple[float, int, int]]:
        """Changes of one node each that hold less at a point: what a byte costs, node, option; one for each node."""
        found = []
        for node in self.decided:
            low, high = self._spans[node]
            if not low <= point < high:
                continue
            held = sum(usage for start, end, usage in self.lives[node] if start <= point < end)
            saved = np.asarray(held, dtype=np.float64)
            saved = saved[self.choice[node]] - saved if saved.ndim else np.zeros(self.sizes[node])
            if (saved <= 0).all():
                continue
            costs = self.option_costs(node)
            price = np.where(saved > 0, (costs - costs[self.choice[node]]) / np.where(saved > 0, saved, 1.0), np.inf)
            option = int(price.argmin())
            found.append((float(price[option]), node, option))
        return found

    def settle(self, nodes: Sequence[int] | None = None) -> None:
        """Coordinate descent: each node in turn takes its cheapest option that is no more over the limit."""
        waiting = list(self.rng.permutation(self.decided)) if nodes is None else list(nodes)
        is_waiting = set(waiting)
        for node in waiting:
            is_waiting.discard(node)
            costs = self.option_costs(node)
            now = self.choice[node]
            better = np.flatnonzero(costs < costs[now] - CHANGE_ROUNDING * abs(costs[now]))
            for option in better[np.argsort(costs[better], kind="stable")].tolist():
                if self.excess_change(node, option) <= 0:
                    self.change(node, option, float(costs[option] - costs[now]))
                    added = [j for j in self.tables[node] if j not in is_waiting and self.sizes[j] > 1]
                    waiting += added
                    is_waiting.update(added)
                    break
        self.offer()


def _spread(table: np.ndarray) -> float:
    """How much more than the least entry the mean one is."""
    return float(table.mean() - table.min())


def _span(lives: Sequence[tuple[int, int, np.ndarray]]) -> tuple[int, int]:
    """First pressure point of the lives of a node, and one past the last; (0, 0) if it has none."""
    if not lives:
        return 0, 0
    return min(start for start, _, _ in lives), max(end for _, end, _ in lives)
