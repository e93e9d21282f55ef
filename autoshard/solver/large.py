"""A large `Problem` in, a proven bound and ever better choices out, from compiled code on several cores.

First prices on memory rise, one per byte and pressure point, along the slope of the bound that TRW-S proves under them
(Polyak's steps along a smoothed subgradient). Then block moves under these prices, which follow the choice: up where it
holds too much, down where it fits. Whatever a block move finds is made to fit, improved node by node, and told.

Searches run side by side, in rounds of a fixed number of moves; between two rounds they tell each other what they
found. So the same seed finds the same, however fast the machine is, up to the round that time allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from autoshard.solver import descent, elimination, trws
from autoshard.solver.arrays import Graph, Memory, graph_of, memory_of
from autoshard.solver.problem import Problem

UNPRICED = 15  # pairs of sweeps before memory gets its first price
SWEEPS = 4  # pairs of sweeps between two changes of prices
SMOOTHING = 0.6  # of the slope of the bound that comes from earlier steps
PATIENCE = 15  # steps that do not raise the bound by ...
LITTLE = 1e-5  # ... this much of it, after which steps get shorter
SHORTER, SHORTEST = 0.7, 1e-2  # factor between step lengths; the last one
GAP = 0.05  # of the bound: how far above it a choice is hoped for while none is known
ENTRIES = 1e4  # of a table in a block move, at most
PLANS = 24  # of block moves, per search
GRID = 2.0**-52  # relative; prices are rounded so that their sums are exact
NOTHING = np.zeros(0)


class Ascent:
    """Messages and prices of a problem, on their way to the best bound."""

    def __init__(self, graph: Graph, memory: Memory, seed: int):
        self.graph, self.memory = graph, memory
        nodes = len(graph.offsets) - 1
        self.to_left, self.to_right = np.zeros(graph.left_offsets[-1]), np.zeros(graph.right_offsets[-1])
        self.choice = np.zeros(nodes, dtype=np.int64)
        self.prices = np.zeros(len(memory.room))
        self.costs = graph.costs
        self.best, self.best_prices = -math.inf, self.prices
        self.length, self.idle, self.direction = 1.0, 0, np.zeros(len(memory.room))
        self.moves = Moves(graph, seed)
        self.spread = float(np.ptp(graph.costs))
        for _ in range(UNPRICED):
            self.sweep()

    def sweep(self, extra: np.ndarray = NOTHING) -> tuple[float, float]:
        """Sweeps forward and backward; the bound that is proven now, and its allowance for rounding."""
        trws.sweep(self.graph, self.costs, self.to_left, self.to_right, self.choice, True, NOTHING)
        return trws.sweep(self.graph, self.costs, self.to_left, self.to_right, self.choice, False, extra)

    @property
    def settled(self) -> bool:
        """Whether going on is not worth it."""
        return self.length < SHORTEST

    def step(self, known: float) -> np.ndarray:
        """Sweeps, proves a bound and changes prices; a choice that is good at the present prices."""
        for _ in range(SWEEPS):
            bound, allowance = self.sweep()
        back = self.prices * self.memory.room
        bound -= math.fsum(back) + allowance + 4 * trws.HALF_ULP * math.fsum(np.abs(back))
        self.idle = 0 if bound > self.best + LITTLE * abs(self.best) else self.idle + 1
        if bound > self.best:
            self.best, self.best_prices = bound, self.prices
        if self.idle >= PATIENCE:
            self.length, self.idle = self.length * SHORTER, 0
        choice = self.choice.copy()
        self.moves.move(self.costs, choice)
        over = trws.over(self.memory, choice)
        slope = np.where((over < 0) & (self.prices <= 0), 0.0, over)
        self.direction = SMOOTHING * self.direction + (1 - SMOOTHING) * slope
        square = self.direction @ self.direction
        if square > 0:
            gap = min(known - self.best, max(GAP * abs(self.best), self.spread))
            step = self.length * (self.best + gap - bound) / square
            self.set_prices(np.maximum(0.0, self.prices + step * self.direction))
        return choice

    def set_prices(self, prices: np.ndarray) -> None:
        total = prices.sum()
        if total > 0:
            grid = 2.0 ** math.ceil(math.log2(total)) * GRID
            prices = np.round(prices / grid) * grid
        self.prices = prices
        self.costs = trws.priced(self.graph, self.memory, prices)


class Moves:
    """Block moves over a graph; plans of them are made as they are used, and then used again."""

    def __init__(self, graph: Graph, seed: int):
        self.graph = graph
        self.rng = np.random.default_rng(seed)
        self.plans: list[elimination.Plan] = []
        self.frozen = np.zeros(len(graph.offsets) - 1)  # how often each node was
        self.count = 0

    def move(self, costs: np.ndarray, choice: np.ndarray) -> None:
        if len(self.plans) < PLANS and self.count % 2 == 0:
            nodes = len(self.frozen)
            noise, reluctance = self.rng.random(nodes), 2 * self.rng.random(nodes) + 0.7 * self.frozen
            movable = np.ones(nodes, dtype=bool)
            self.plans.append(elimination.plan(self.graph, movable, noise, reluctance, math.log(ENTRIES)))
            self.frozen[self.plans[-1].frozen] += 1
            chosen = self.plans[-1]
        else:
            chosen = self.plans[self.rng.integers(len(self.plans))]
        self.count += 1
        elimination.move(self.graph, costs, chosen, choice)


class Search:
    """Block moves under prices that follow the choice."""

    def __init__(self, graph: Graph, memory: Memory, seed: int):
        self.graph, self.memory = graph, memory
        self.moves = Moves(graph, seed)
        self.rng = np.random.default_rng([seed, 1])
        order = np.argsort(memory.node, kind="stable")
        self.lives = order
        self.starts = np.searchsorted(memory.node[order], np.arange(len(graph.offsets)))
        self.best: np.ndarray | None = None
        self.cost = math.inf

    def begin(self, choice: np.ndarray, prices: np.ndarray) -> None:
        self.choice, self.prices = choice.copy(), prices.copy()

    def improve(self, choice: np.ndarray, repairs: int) -> None:
        """Makes a choice fit, and better, and keeps it if it is the best."""
        choice = choice.copy()
        over = trws.over(self.memory, choice)
        if len(over) and over.max() > 0 and not descent.repair(
            self.graph, self.memory, self.starts, self.lives, choice, over, repairs
        ):
            return
        descent.descend(self.graph, self.memory, self.starts, self.lives, choice, over)
        cost = trws.cost_of(self.graph, self.graph.costs, choice)
        if cost < self.cost:
            self.best, self.cost = choice, cost

    def round(self, moves: int) -> None:
        for _ in range(moves):
            self.moves.move(trws.priced(self.graph, self.memory, self.prices), self.choice)
            over = trws.over(self.memory, self.choice) / self.memory.unit
            most = over.max(initial=0.0)
            self.improve(self.choice, 100)
            largest = max(self.prices.max(initial=0.0), 1e-300)
            if most > 0:
                high = over > 0
                self.prices[high] = 1.03 * self.prices[high] + 0.02 * largest * over[high] / most
            else:
                self.prices *= 0.97

    def perturb(self, share: float) -> None:
        """Gives some nodes of the best choice random options."""
        if self.best is not None:
            self.choice = self.best.copy()
            nodes = self.rng.integers(len(self.choice), size=max(1, int(share * len(self.choice))))
            sizes = np.diff(self.graph.offsets)[nodes]
            self.choice[nodes] = (self.rng.random(len(nodes)) * sizes).astype(np.int64)
