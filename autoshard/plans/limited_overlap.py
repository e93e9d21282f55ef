"""A formulation and its cheapest solution in, the cheapest of which no more is hidden than there is compute out.

The problem charges a step its compute and its communication less a share of the latter that runs behind compute. Of a
step of little compute that can be more than there is, and no problem of nodes and edges knows. Such a step takes as
long as it communicates. So a step takes the larger of two costs: that of the problem, and its communication alone
(`solver/exact/two_costs.py`). Mixtures of both are solved as the problem is. The best mixture lies where its cheapest
choices change from those that hide too much to others. It is found by cutting planes (Kelley, 1960): the next mixture
is that in which the least cost of all known choices is largest. What mixtures leave open, integer programs of both
costs close where few options are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import SolverError
from autoshard.model.formulation import Formulation
from autoshard.model.pricing.formulation_deadline import FormulationTimeout
from autoshard.model.search_policy import CLOSE_GAP
from autoshard.plans.chosen_options import prediction_of
from autoshard.plans.prediction import Prediction
from autoshard.solver.exact.two_costs import TwoCosts
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.run import count_options
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.settings import USUAL_SIZES
from autoshard.solver.solve import with_bound
from autoshard.solver.verify import OPTIMAL_GAP, fits

FIRST_PROBLEM_SHARE = 0.75  # weight of the problem's cost in the first mixture; the best mixture of most steps is near
LEAST_PROBLEM_SHARE = 0.1  # of the mixtures that are solved before that which has nothing of the problem's cost
MIXTURE_BUDGET_SHARE = 0.6  # of the remaining budget, spent on one mixture

Solve = Callable[[Problem, Budget], Solution]


def with_limited_overlap(
    formulation: Formulation,
    solution: Solution,
    solve: Solve,
    budget: Budget,
    limit: float | None = None,
) -> Solution:
    """The cheapest solution found if no more is hidden than there is compute, at what it costs then.

    Args:
        formulation: the problem is its `problem`.
        solution: the cheapest solution of that.
        solve: solves a problem of the same nodes, options and memory, in so much work.
        budget: what all of it may take.
        limit: the most bytes that a choice may hold, reshardings included; None: as many as it takes.
    """
    best = at_limited_overlap(solution, prediction_of(formulation, solution.choice))
    if best.cost <= solution.cost:
        return best
    try:
        search = _OverlapSearch(formulation, best, solve, budget, limit)
    except FormulationTimeout:
        return best
    return search.run(solution)


def at_limited_overlap(solution: Solution, predicted: Prediction) -> Solution:
    """A solution at what it costs if no more is hidden than there is compute."""
    if predicted.communication_seconds <= solution.cost:
        return solution
    return with_bound(replace(solution, cost=predicted.communication_seconds), solution.bound)


class _OverlapSearch:
    """The choices that are known, each with its two costs, and the best bound that some mixture has proven."""

    def __init__(self, formulation: Formulation, best: Solution, solve: Solve, budget: Budget, limit: float | None):
        self.formulation, self.best, self.bound = formulation, best, best.bound
        self.solve, self.budget, self.limit = solve, budget, limit
        self.problems = TwoCosts(
            replace(formulation.problem, limit=limit, checked=True), formulation.waits(budget.until)
        )
        self.known: dict[tuple[int, ...], tuple[float, float]] = {}
        few = count_options(formulation.problem) <= USUAL_SIZES.few_options
        self.close_gap = OPTIMAL_GAP if few else CLOSE_GAP  # relative, with which the best one is left alone

    def run(self, solution: Solution) -> Solution:
        self.learn(solution.choice)
        share, solved = FIRST_PROBLEM_SHARE, {}  # share of a mixture -> its bound
        while share not in solved and not (self.budget.over or self.is_close):
            mixture = replace(self.problems.mixed(share), limit=self.formulation.problem.limit, checked=True)
            budget = Budget(MIXTURE_BUDGET_SHARE * self.budget.left, self.budget.until, whole=self.budget)
            try:
                found = self.solve(mixture, budget)
            except (SolverError, KeyboardInterrupt):  # the best choice so far fits
                break
            solved[share] = found.bound
            is_new = tuple(found.choice) not in self.known
            self.bound = max(self.bound, found.bound)
            self.learn(found.choice)
            share, reachable = best_mixture(list(self.known.values()))
            if reachable == math.inf:  # each smaller share would raise the bound a little: none is their limit
                smaller = FIRST_PROBLEM_SHARE * min(solved)
                share = smaller if is_new and smaller >= LEAST_PROBLEM_SHARE else 0.0
            elif reachable <= (1 + self.close_gap) * self.bound:
                break
        if solved and not (self.budget.over or self.is_close):
            self.close(max(solved, key=solved.__getitem__))
        return with_bound(self.best, self.bound)

    def close(self, share: float) -> None:
        """Looks among all that the bounds of a mixture leave, and near the choices that are known."""
        for choice, bound in self.problems.labelled(self.best.choice, share, gap=self.close_gap, budget=self.budget):
            self.bound = max(self.bound, bound)
            self.learn(choice)
        if self.budget.over or self.is_close:
            return
        fits = list[bool]()
        for choice in self.problems.near(self.by_cost, share, budget=self.budget):
            self.learn(choice)
            fits.append(choice is None or self.fits(choice))
        if not (self.budget.over or self.is_close or (fits and all(fits))):
            choice = self.problems.recombined(self.by_cost(), gap=self.gap, budget=self.budget)
            self.learn(choice)
        if not (self.budget.over or self.is_close):
            choice, bound = self.problems.solved(self.best.choice, share, gap=self.gap, budget=self.budget)
            self.bound = max(self.bound, bound)
            self.learn(choice)

    def by_cost(self) -> list[tuple[int, ...]]:
        """The choices that are known, the cheapest one first."""
        return sorted(self.known, key=lambda choice: max(self.known[choice]))

    @property
    def is_close(self) -> bool:
        return self.best.cost <= self.bound * (1 + self.close_gap)

    @property
    def gap(self) -> float:
        """Cost by which an integer program may miss the best choice."""
        return 0.5 * self.close_gap * self.bound

    def learn(self, choice: Sequence[int] | None) -> None:
        """Takes a choice into account, if one was found, and as the best one where it is."""
        if choice is None:
            return
        choice = tuple(choice)
        self.known[choice] = costs = self.problems.costs(choice)
        if max(costs) < self.best.cost and self.fits(choice):
            self.best = replace(self.best, choice=choice, cost=max(costs))

    def fits(self, choice: Sequence[int]) -> bool:
        return self.limit is None or fits(self.formulation.accepted_peak(choice), self.limit)


def best_mixture(costs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The share of the first cost in a mixture in which the least cost of some choices is largest, and that cost.

    No mixture proves more than that cost. It is inf, and the share 0, if the first cost of no choice is the larger one:
    then it says nothing of choices that are not known.

    >>> best_mixture([(5.0, 7.0), (8.0, 4.0)])
    (0.5, 6.0)
    """
    first, second = np.array(costs).T
    slopes = first - second
    if (slopes < 0).all():
        return 0.0, math.inf
    left, right = np.triu_indices(len(costs), 1)
    apart = slopes[left] != slopes[right]
    left, right = left[apart], right[apart]
    crossings = (second[right] - second[left]) / (slopes[left] - slopes[right])
    shares = np.array([0.0, 1.0, *crossings[(crossings > 0) & (crossings < 1)]])
    least = (np.outer(shares, slopes) + second).min(axis=1)
    return float(shares[least.argmax()]), float(least.max())
