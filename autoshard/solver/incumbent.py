"""The state of a search: the incumbent, which is the best choice so far, and the best bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.solver.problem import Problem, relative_gap
from autoshard.solver.verify import OPTIMAL_GAP, fits, verify

SOLVED_GAP = OPTIMAL_GAP / 10  # relative; smaller than the gap of an optimal solution, to allow for rounding


class Incumbent:
    """The best choice of a problem so far, and the highest bound proven.

    Algorithms offer choices and prove bounds at any time; a choice is verified before it is taken. `tell` runs after
    each change, so that a problem learns at once what its parts learn.
    """

    def __init__(self, problem: Problem, tell: Callable[[], None] | None = None):
        self.problem = problem
        self.best: tuple[tuple[int, ...], float] | None = None  # one value: Ctrl-C leaves both or neither
        self.bound = -math.inf
        self.start: tuple[int, ...] | None = None  # a starting point of moves, feasible or not
        self.tell = tell or _tells_nobody
        # The gap at which the choice is good enough, in units of cost.
        self.tolerance: Callable[[], float] = _tolerates_nothing
        self.always_tolerant = False  # whether the tolerance also ends cheap searches and searches of few options

    def disconnect(self) -> None:
        """Removes `tell` and `tolerance`. They refer to the incumbent, and this cycle would keep it alive."""
        self.tell, self.tolerance = _tells_nobody, _tolerates_nothing

    @property
    def choice(self) -> tuple[int, ...] | None:
        return self.best[0] if self.best else None

    @property
    def cost(self) -> float:
        return self.best[1] if self.best else math.inf

    @property
    def target(self) -> float:
        """The cost below which a choice counts as better."""
        return self.cost - SOLVED_GAP * abs(self.cost) if self.best else math.inf

    @property
    def is_solved(self) -> bool:
        return self.bound >= self.target

    @property
    def gap(self) -> float:
        return relative_gap(self.cost, self.bound) if self.best else math.inf

    @property
    def is_close(self) -> bool:
        """Whether the best choice is good enough for a problem with too many options to solve exactly."""
        return self.is_solved or self.cost - self.bound <= self.tolerance()

    def offer(self, choice: Sequence[int]) -> None:
        """Takes the choice if it is feasible and cheaper than the best so far."""
        cost, peak = verify(self.problem, choice)
        if cost < self.cost and fits(peak, self.problem.limit):
            self.best = tuple(map(int, choice)), cost
            self.tell()

    def replace(self, choice: Sequence[int]) -> None:
        """Replaces the best choice by one of the same cost."""
        self.best = tuple(choice), verify(self.problem, choice)[0]

    def prove(self, bound: float) -> None:
        """Takes the bound if it is higher than the best so far."""
        if bound > self.bound:
            self.bound = bound
            self.tell()


def _tells_nobody() -> None:
    pass


def _tolerates_nothing() -> float:
    return 0.0


def least_sum(problem: Problem) -> float:
    """A bound: the sum of the cheapest option of every node and the cheapest pair of every edge."""
    return math.fsum(costs.min() for costs in [*problem.costs, *(edge.costs for edge in problem.edges)])


def most_sum(problem: Problem) -> float:
    """An upper bound of allowed choices: the sum of the dearest option of every node and pair of every edge."""
    tables = [*problem.costs, *(edge.costs for edge in problem.edges)]
    return math.fsum(table[np.isfinite(table)].max(initial=-np.inf) for table in tables)
