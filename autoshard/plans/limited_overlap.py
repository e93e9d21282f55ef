"""A formulation and its cheapest solution in, the cheapest of which no more is hidden than there is compute out.

The problem charges a step its compute and its communication less a share of the latter that runs behind compute. Of a
step of little compute that can be more than there is, and no problem of nodes and edges knows. Such a step takes as
long as it communicates. So a step takes the larger of two costs: that of the problem, and its communication alone. Any
mixture of the two is a problem again, and what it costs at least, any step takes at least. The best mixture lies where
its cheapest choices change from those that hide too much to others. It is found by cutting planes (Kelley, 1960): the
next mixture is that in which the last two such choices cost the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoshard.model.formulation import Formulation
from autoshard.plans.chosen import prediction_of
from autoshard.plans.prediction import Prediction
from autoshard.solver.problem import Edge, Problem, Solution
from autoshard.solver.solve import with_bound
from autoshard.solver.verify import OPTIMAL_GAP, verify

ROUNDS = 6  # of solving a mixture, at most; most steps need two

Solve = Callable[[Problem], Solution | None]  # None: no time is left


def with_limited_overlap(formulation: Formulation, solution: Solution, solve: Solve) -> Solution:
    """The cheapest solution found if no more is hidden than there is compute, at what it costs then.

    Args:
        formulation: the problem is its `problem`.
        solution: the cheapest solution of that.
        solve: solves a problem of the same nodes, options and memory.
    """
    best = at_its_price(solution, prediction_of(formulation, solution.choice))
    if best.cost <= solution.cost:
        return best
    problem, waits = formulation.problem, formulation.waits()
    behind, beside = _both(problem, waits, solution), None  # costs of choices that hide too much, and that do not
    share, bound = 0.0, solution.bound
    for _ in range(ROUNDS):
        found = solve(mixed(problem, waits, share))
        if found is None:
            break
        whole, communication = costs = _both(problem, waits, found)
        bound = max(bound, found.bound)
        if max(costs) < best.cost:
            best = replace(found, cost=max(costs))
        if whole >= communication:
            beside = costs
        else:
            behind = costs
        if beside is None or best.cost <= bound * (1 + OPTIMAL_GAP):
            break
        less, more = behind[1] - beside[1], beside[0] - behind[0]
        before, share = share, less / (less + more) if less + more > 0 else share
        if abs(share - before) <= OPTIMAL_GAP:
            break
    return with_bound(best, bound)


def at_its_price(solution: Solution, predicted: Prediction) -> Solution:
    """A solution at what it costs if no more is hidden than there is compute."""
    if predicted.communication_seconds <= solution.cost:
        return solution
    return with_bound(replace(solution, cost=predicted.communication_seconds), solution.bound)


def mixed(problem: Problem, waits: Problem, share: float) -> Problem:
    """The problem whose costs are such a share of those of the first, and the rest of those of the second.

    What the first forbids is forbidden, however small its share is.
    """

    def scaled(costs: np.ndarray, share: float) -> np.ndarray:
        return np.where(np.isinf(costs), np.inf, costs * share if share else 0.0)

    pairs = zip(problem.costs, waits.costs, strict=True)
    costs = tuple(scaled(first, share) + scaled(second, 1 - share) for first, second in pairs)
    edges = [Edge(edge.i, edge.j, scaled(edge.costs, share)) for edge in problem.edges]
    edges += [Edge(edge.i, edge.j, scaled(edge.costs, 1 - share)) for edge in waits.edges]
    return replace(problem, costs=costs, edges=tuple(edge for edge in edges if edge.costs.any()), checked=True)


def _both(problem: Problem, waits: Problem, solution: Solution) -> tuple[float, float]:
    return verify(problem, solution.choice)[0], verify(waits, solution.choice)[0]
