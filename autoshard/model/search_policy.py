"""What the planner wants of the solver: how close to the best a plan is close enough, and what is solved as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoshard.solver.method import Method
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.run import count_options
from autoshard.solver.settings import Goal
from autoshard.solver.solve import solve
from autoshard.solver.symmetry.repeated_nodes import RepeatedNodes

CLOSE_GAP = 0.01  # relative: a plan of a problem of thousands of options is left alone with it
# The same once memory has prices, for problems of no more than `CLOSE_OPTIONS` options.
CLOSE_GAP_IF_PRICED = 0.005
CLOSE_OPTIONS = 20_000
# While the best choice does not fit with all that it holds, what fits will come of another problem. So this gap is
# enough, and this share of the time.
REJECTED_GAP = 0.05
REJECTED_SHARE = 0.5
METHOD = Method(repeated_nodes=RepeatedNodes())  # layers of a model that memory binds little are solved as one


def goal_of(problem: Problem, *, gap: float = 0.0, accepts: Callable[[Sequence[int]], bool] | None = None) -> Goal:
    """The goal of a search for a plan.

    Args:
        gap: the relative gap with which any problem is left alone, however few options it has, as far as the bound
            shows by then: an integer program is held to the one known when it starts. 0: that of the planner.
        accepts: whether a choice fits with all that it holds.
    """
    few = count_options(problem) <= CLOSE_OPTIONS
    return Goal(
        gap=gap or CLOSE_GAP,
        priced_gap=gap or (CLOSE_GAP_IF_PRICED if few else CLOSE_GAP),
        gap_ends_programs=gap > 0,
        repeated_gap=CLOSE_GAP,
        prefers_lean=True,
        accepts=accepts,
        rejected_gap=REJECTED_GAP,
        rejected_share=REJECTED_SHARE,
    )


def solve_for_plan(
    problem: Problem, *, gap: float = 0.0, accepts: Callable[[Sequence[int]], bool] | None = None, **limits: Any
) -> Solution:
    """A solution as good as a plan needs, and lean; `limits` are further keywords of `solve`."""
    return solve(problem, goal=goal_of(problem, gap=gap, accepts=accepts), method=METHOD, **limits)
