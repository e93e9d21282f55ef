"""Good choices of large problems, by block moves: nearly all nodes get their best options at once (compiled).

Moves go under the prices on memory of an ascent of the bound, and then let prices follow the choice: up where it holds
too much, down where it fits. When the bound has settled, moves under prices that rise from low ones, and moves of few
nodes take turns. Whatever a block move finds is made to fit, and then improved node by node.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np

from autoshard.solver.arrays import Graph, Memory
from autoshard.solver.bounds import message_passing_compiled as kernels
from autoshard.solver.bounds.ascent import Ascent
from autoshard.solver.bounds.settings import STEP_ENTRIES
from autoshard.solver.local_search import elimination_compiled, local_search_compiled
from autoshard.solver.local_search.neighbourhoods import near
from autoshard.solver.local_search.settings import BLOCK_SEARCH, MOVES


class BlockMoves:
    """Block moves over a graph. Plans are made as they are needed, and used again."""

    def __init__(self, graph: Graph, rng: np.random.Generator):
        self.graph, self.rng = graph, rng
        self.plans: list[elimination_compiled.EliminationPlan] = []
        self.frozen = np.zeros(len(graph.offsets) - 1)  # in how many plans each node is
        self.count = 0

    def move(self, costs: np.ndarray, choice: np.ndarray) -> float:
        """Improves a choice; returns how much work it was."""
        if len(self.plans) < BLOCK_SEARCH.plans and self.count % 2 == 0:
            chosen = self.new_plan()
        else:
            chosen = self.plans[self.rng.integers(len(self.plans))]
        self.count += 1
        elimination_compiled.move(self.graph, costs, chosen, choice)
        return chosen.work

    def new_plan(self) -> elimination_compiled.EliminationPlan:
        plan = self.plan(np.ones(len(self.frozen), dtype=bool), 0.7 * self.frozen)
        self.plans.append(plan)
        self.frozen[plan.frozen] += 1
        return plan

    def plan(self, movable: np.ndarray, reluctance: np.ndarray | float = 0.0) -> elimination_compiled.EliminationPlan:
        nodes = len(movable)
        reluctance = 2 * self.rng.random(nodes) + reluctance
        return elimination_compiled.plan(
            self.graph, movable, self.rng.random(nodes), reluctance, math.log(BLOCK_SEARCH.table_entries)
        )


class BlockSearch:
    """Block moves under prices that follow the choice."""

    def __init__(self, graph: Graph, memory: Memory, seed: tuple[int, ...]):
        self.graph, self.memory = graph, memory
        self.rng = np.random.default_rng(seed)
        self.moves = BlockMoves(graph, self.rng)
        self.lives = np.argsort(memory.node, kind="stable")
        self.starts = np.searchsorted(memory.node[self.lives], np.arange(len(graph.offsets)))
        self.best: np.ndarray | None = None
        self.cost, self.until_restart, self.rise = math.inf, 0, 1.0  # the factor of prices that rise
        self.owed = 0.0  # work that rounds have asked for, less what was done
        self.guide: tuple[np.ndarray, np.ndarray] = (
            np.zeros(0),
            np.zeros(0),
        )  # prices, and a choice that is good under them
        self.settled = self.local = False  # the guide will not change; moves go on near the best choice
        self.choice: np.ndarray = np.zeros(len(graph.offsets) - 1, dtype=np.int64)
        self.prices: np.ndarray = np.zeros(len(memory.room))
        finite = graph.tables[graph.tables < np.inf] if len(graph.tables) else graph.costs[graph.costs < np.inf]
        mean = memory.usage.mean() if len(memory.usage) else 1.0
        self.typical_price = MOVES.first_price * np.abs(finite).max(initial=0.0) / mean

    def begin(self, known: Sequence[int] | None, cost: float, ascent: Ascent) -> None:
        """Takes over what others found before a round."""
        if known is not None and cost < self.cost:
            self.best, self.cost = np.array(known, dtype=np.int64), cost
        self.guide, self.settled = (ascent.best_prices, ascent.choice.copy()), ascent.settled
        if not self.moves.count or (self.best is None and not self.prices.any()):
            self.restart()

    def round(self, stop: threading.Event, most: float) -> None:
        """Moves until that much work is done."""
        self.owed += most
        while self.owed > 0 and not stop.is_set():
            self.owed -= self.step()

    def step(self) -> float:
        """One block move, and what follows from it; returns how much work it was."""
        if self.until_restart <= 0:
            self.restart()
        self.until_restart -= 1
        if self.local:
            return self.local_step()
        work = self.moves.move(kernels.priced(self.graph, self.memory, self.prices), self.choice)
        over = kernels.over(self.memory, self.choice)
        work = 5 * work + self.improve(self.choice.copy(), over.copy())
        if self.until_restart > BLOCK_SEARCH.following_moves:
            self.prices = self.rise * self.prices
        else:
            self.adjust_prices(over)
        return work + 100 * len(self.choice) + 20 * (len(self.memory.usage) + len(over)) + STEP_ENTRIES

    def restart(self) -> None:
        """Goes on from where the ascent is; when it has settled, from low prices, and near the best choice, in turn."""
        self.prices, self.choice = self.guide[0], self.guide[1].copy()
        self.until_restart = BLOCK_SEARCH.following_moves
        if self.settled and self.moves.count:
            self.local = self.best is not None and not self.local
            self.until_restart = (
                BLOCK_SEARCH.local_moves if self.local else BLOCK_SEARCH.rising_moves + BLOCK_SEARCH.following_moves
            )
            self.prices = self.prices * (low := self.between(BLOCK_SEARCH.lowest_price, 1.0))
            self.rise = low ** (-1 / BLOCK_SEARCH.rising_moves)

    def local_step(self) -> float:
        """Moves the nodes near a random one, others as they are in the best choice."""
        nodes = len(self.choice)
        size = math.ceil(nodes * self.between(BLOCK_SEARCH.smallest_share, BLOCK_SEARCH.largest_share))
        movable = np.zeros(nodes, dtype=bool)
        movable[near(self.graph, int(self.rng.integers(nodes)), size, self.rng)] = True
        plan = self.moves.plan(movable)
        assert self.best is not None, "it is near the best that is looked"
        choice = self.best.copy()
        costs = kernels.priced(
            self.graph,
            self.memory,
            self.between(BLOCK_SEARCH.lowest_local_price, BLOCK_SEARCH.highest_local_price) * self.guide[0],
        )
        elimination_compiled.move(self.graph, costs, plan, choice)
        work = self.improve(choice, kernels.over(self.memory, choice))
        work += 5 * plan.work + 300 * nodes
        return work + 20 * (len(self.memory.usage) + len(self.prices)) + STEP_ENTRIES

    def between(self, low: float, high: float) -> float:
        """A random number of any magnitude."""
        return low * (high / low) ** self.rng.random()

    def improve(self, choice: np.ndarray, over: np.ndarray) -> float:
        """Makes a choice fit, and cheaper, and keeps it if it is the best; both arguments change. Returns the work."""
        parts = self.graph, self.memory, self.starts, self.lives, choice, over
        fits, changes = local_search_compiled.repair(*parts, BLOCK_SEARCH.repaired_nodes)
        if fits:
            local_search_compiled.descend(*parts)
            cost = kernels.cost_of(self.graph, self.graph.costs, choice)
            if cost < self.cost:
                if self.best is None:
                    self.until_restart = 0  # prices rose steeply until something fitted
                self.best, self.cost = choice, cost
        return 100.0 * changes * len(choice)

    def adjust_prices(self, over: np.ndarray) -> None:
        """Lets prices rise where so many bytes are over the limit, or fall if none are."""
        more = np.maximum(over, 0.0)
        if self.best is None:  # anything that fits is welcome
            self.prices = np.where(over > 0, MOVES.price_rise * self.prices + self.typical_price, self.prices)
        elif more.any():
            added = BLOCK_SEARCH.added_share * self.prices.sum() * more / more.sum()
            self.prices = np.where(over > 0, BLOCK_SEARCH.price_rise * self.prices, self.prices) + added
        else:
            self.prices = BLOCK_SEARCH.price_fall * self.prices
