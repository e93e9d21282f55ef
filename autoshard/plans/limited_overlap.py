"""A formulation and its cheapest solution in, the cheapest of which no more is hidden than there is compute out.

The problem charges a step its compute and its communication less a share of the latter that runs behind compute. Of a
step of little compute that can be more than there is, and no problem of nodes and edges knows. Such a step takes as
long as it communicates. So a step takes the larger of two costs: that of the problem, and its communication alone
(`solver/two_costs.py`). Mixtures of the two are solved as the problem is. The best mixture lies where its cheapest
choices change from those that hide too much to others. It is found by cutting planes (Kelley, 1960): the next mixture
is that in which the least cost of all known choices is largest. What mixtures leave open, integer programs of both
costs close.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.model.formulation import Formulation
from autoshard.model.search_policy import CLOSE_GAP
from autoshard.plans.chosen import prediction_of
from autoshard.plans.prediction import Prediction
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.run import count_options
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.settings import USUAL_SIZES
from autoshard.solver.solve import with_bound
from autoshard.solver.two_costs import TwoCosts
from autoshard.solver.verify import OPTIMAL_GAP, fits

ROUNDS = 6  # of solving a mixture, at most; most steps need two
FIRST_SHARE = 0.75  # of the problem in the first mixture: where most steps have their best one
PROGRAM_SECONDS = 10.0  # time limit of an integer program, if nothing else is asked for
LEAST_MOVE = 1e-3  # of the share: a mixture that is nearer to one that is solved tells nothing new

Solve = Callable[[Problem], Solution | None]  # None: no time is left


def with_limited_overlap(
    formulation: Formulation,
    solution: Solution,
    solve: Solve,
    *,
    limit: float | None = None,
    budget: Callable[[], Budget] = lambda: Budget.of(PROGRAM_SECONDS),
) -> Solution:
    """The cheapest solution found if no more is hidden than there is compute, at what it costs then.

    Args:
        formulation: the problem is its `problem`.
        solution: the cheapest solution of that.
        solve: solves a problem of the same nodes, options and memory.
        limit: the most bytes that a choice may hold, reshardings included; None: as many as it takes.
        budget: makes what one integer program may take.
    """
    best = at_its_price(solution, prediction_of(formulation, solution.choice))
    if best.cost <= solution.cost:
        return best
    return _Search(formulation, best, solve, limit, budget).run(solution)


def at_its_price(solution: Solution, predicted: Prediction) -> Solution:
    """A solution at what it costs if no more is hidden than there is compute."""
    if predicted.communication_seconds <= solution.cost:
        return solution
    return with_bound(replace(solution, cost=predicted.communication_seconds), solution.bound)


class _Search:
    """The choices that are known, each with its two costs, and the best bound that some mixture has proven."""

    def __init__(
        self,
        formulation: Formulation,
        best: Solution,
        solve: Solve,
        limit: float | None,
        budget: Callable[[], Budget],
    ):
        self.formulation, self.best, self.bound = formulation, best, best.bound
        self.solve, self.limit, self.budget = solve, limit, budget
        first = replace(formulation.problem, limit=limit, checked=True)
        self.problems = TwoCosts(first, formulation.waits())
        self.known: dict[tuple[int, ...], tuple[float, float]] = {}
        few = count_options(first) <= USUAL_SIZES.few_options
        self.close_gap = OPTIMAL_GAP if few else CLOSE_GAP  # relative, with which the best one is left alone

    def run(self, solution: Solution) -> Solution:
        self.learn(solution.choice)
        shares, best_share = [1.0], 1.0
        while len(shares) <= ROUNDS and not self.is_close:
            share = _next_share(list(self.known.values()), min(shares))
            if min(abs(share - other) for other in shares) < LEAST_MOVE:
                break
            found = self.solve(self.problems.mixed(share))
            if found is None:
                return with_bound(self.best, self.bound)
            shares.append(share)
            if found.bound > self.bound:
                self.bound, best_share = found.bound, share
            self.learn(found.choice)
            if not self.is_close and len(self.known) > 1:
                self.recombine()
        if not self.is_close:
            choice, bound = self.problems.solved(self.best.choice, best_share, gap=self.gap, budget=self.budget())
            self.bound = max(self.bound, bound)
            if choice is not None:
                self.learn(choice)
        return with_bound(self.best, self.bound)

    @property
    def is_close(self) -> bool:
        return self.best.cost <= self.bound * (1 + self.close_gap)

    @property
    def gap(self) -> float:
        """Cost by which an integer program may miss the best choice."""
        return 0.5 * self.close_gap * self.bound

    def learn(self, choice: Sequence[int]) -> None:
        """Takes a choice into account, and as the best one where it is."""
        choice = tuple(choice)
        self.known[choice] = costs = self.problems.costs(choice)
        if max(costs) < self.best.cost and self.fits(choice):
            self.best = replace(self.best, choice=choice, cost=max(costs))

    def fits(self, choice: Sequence[int]) -> bool:
        return self.limit is None or fits(self.formulation.peak_bytes(choice), self.limit)

    def recombine(self) -> None:
        by_cost = sorted(self.known, key=lambda choice: max(self.known[choice]))
        choice = self.problems.recombined(by_cost, gap=self.gap, budget=self.budget())
        if choice is not None:
            self.learn(choice)


def _next_share(known: Sequence[tuple[float, float]], least: float) -> float:
    """The share at which the least cost of all known choices in the mixture is largest.

    Args:
        known: costs of choices in the two problems.
        least: of the shares that were solved.
    """
    costs = np.array(known)
    if (costs[:, 0] < costs[:, 1]).all():  # no choice that hides less is known
        return FIRST_SHARE * least
    first, second = costs[:, 0], costs[:, 1]
    slopes = first - second
    left, right = np.triu_indices(len(costs), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        crossings = (second[right] - second[left]) / (slopes[left] - slopes[right])
    shares = np.array([0.0, 1.0, *crossings[(crossings > 0) & (crossings < 1)]])
    return float(shares[(np.outer(shares, slopes) + second).min(axis=1).argmax()])
