"""The bound of a large problem, raised by compiled message passing under prices on memory that rise as it goes.

The prices, one per byte and pressure point, rise along the slope of the bound that TRW-S proves under them: Polyak's
steps along a smoothed subgradient, that of all options mixed by how cheap they are, which varies less from step to step
than that of one choice. The price of a point moves in proportion to what it is already (as in exponentiated gradients:
Kivinen and Warmuth, 1997), since few points need one.
"""

from __future__ import annotations

import math
import threading

import numpy as np

from autoshard.solver.arrays import Graph, Memory
from autoshard.solver.bounds import message_passing_compiled as kernels
from autoshard.solver.bounds.settings import ASCENT, STEP_ENTRIES

LEAST_TEMPERATURE = 1e-300  # instead of 0, to divide by
PRICE_GRID = 2.0**-52  # relative; prices are rounded so that their sums are exact


class Ascent:
    """Messages and prices of a problem, on their way to the best bound."""

    def __init__(self, graph: Graph, memory: Memory):
        self.graph, self.memory = graph, memory
        self.to_left, self.to_right = np.zeros(graph.left_offsets[-1]), np.zeros(graph.right_offsets[-1])
        self.extra = np.empty(len(graph.costs))  # by how much options cost more than the best of their node
        self.choice = np.zeros(len(graph.offsets) - 1, dtype=np.int64)  # good under the present prices
        self.best, self.idle = -math.inf, 0
        self.owed = 0.0  # work that rounds have asked for, less what was done
        self.direction = np.zeros(len(memory.room))
        self.set_prices(np.zeros(len(memory.room)))
        self.best_prices = self.prices
        for _ in range(ASCENT.unpriced_sweeps):
            self.best = max(self.best, self.sweep())
        self.aim = ASCENT.first_aim * max(abs(self.best), float(np.ptp(graph.costs[graph.costs < np.inf])))
        self.finest = ASCENT.finest_aim * self.aim
        self.work = ASCENT.sweep_entries * len(graph.tables) + 4 * len(memory.usage) + STEP_ENTRIES  # of one step
        self.bold = True  # steps may go too far, as long as that finds out where prices are needed
        self.settled = False  # going on is not worth it

    def round(self, known: float, stop: threading.Event, most: float) -> None:
        """Steps until that much work is done, given the cost of the best choice by now."""
        self.owed += most
        while self.owed > 0 and not (self.settled or stop.is_set()):
            self.owed -= self.step(known)
        kernels.choose(self.graph, self.costs, self.to_left, self.choice)

    def step(self, known: float) -> float:
        """Sweeps forward and backward, proves a bound and changes prices; returns how much work it was."""
        bound = self.sweep()
        gap, gained = min(max(known - self.best, 0.0), self.aim), bound - self.best
        if bound > self.best:
            self.aim *= ASCENT.farther if bound > self.best + ASCENT.large_gain * gap else 1.0
            self.best, self.best_prices, self.idle = bound, self.prices, 0
        else:
            self.idle += 1
            if self.idle == ASCENT.patience:
                self.aim, self.idle = ASCENT.nearer * gap, 0
        nodes = len(self.choice)
        temperature = max(ASCENT.prices.temperature * gap / nodes, LEAST_TEMPERATURE)
        over = kernels.expected_over(self.graph, self.memory, self.extra, temperature)
        smoothing = ASCENT.prices.smoothing
        slope = np.where((over < 0) & (self.prices <= 0), 0.0, over)
        self.direction = smoothing * self.direction + (1 - smoothing) * slope
        scale = self.prices + ASCENT.new_price * self.prices.max() if self.prices.any() else np.ones(len(slope))
        square = (scale * self.direction**2).sum()
        if not self.bold:
            square = max(square, (scale * slope**2).sum())
        fine = self.aim < max(ASCENT.settled_aim * abs(self.best), self.finest)
        if square == 0:  # all fits at no price
            self.settled = not gained > ASCENT.settled_aim * self.aim
        elif fine and self.bold:
            self.bold, self.aim = False, max(ASCENT.second_aim * abs(self.best), 10 * self.finest)
            self.direction = np.zeros(len(slope))
            self.set_prices(self.best_prices)
        elif fine:
            self.settled = True
        elif math.isfinite(bound):
            step = ASCENT.step * (self.best + gap - bound) / square
            self.set_prices(np.maximum(0.0, self.prices + step * scale * self.direction))
        return self.work

    def sweep(self, complete: bool = False) -> float:
        """Sweeps forward and backward: the bound that is proven."""
        parts = self.graph, self.costs, self.to_left, self.to_right, self.extra
        kernels.sweep(*parts, True, False)
        bound, allowance = kernels.sweep(*parts, False, complete)
        return bound - allowance - self.refund

    def least(self) -> np.ndarray:
        """What any choice with each option costs at least, under the best prices."""
        self.set_prices(self.best_prices)
        for _ in range(ASCENT.unpriced_sweeps):
            self.sweep()
        bound = self.sweep(complete=True)
        self.best = max(self.best, bound)
        return bound + self.extra * (1 - 1e-9)

    def set_prices(self, prices: np.ndarray) -> None:
        total = prices.sum()
        if total > 0:
            grid = 2.0 ** math.ceil(math.log2(total)) * PRICE_GRID
            prices = np.round(prices / grid) * grid
        self.prices = prices
        self.costs = kernels.priced(self.graph, self.memory, prices)
        back = (prices * self.memory.room)[prices > 0]
        self.refund = math.fsum(back) + 8 * kernels.HALF_ULP * math.fsum(np.abs(back))
