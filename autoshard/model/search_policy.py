"""What the planner asks of the solver: at which relative gap a search ends, and which method it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoshard.solver.method import Method
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.run import count_options
from autoshard.solver.runtime.garbage_collection import uncollected
from autoshard.solver.settings import Goal
from autoshard.solver.solve import solve
from autoshard.solver.symmetry.repeated_nodes import RepeatedNodes

CLOSE_GAP = 0.01  # relative; the search ends at it in a problem of thousands of options
# The gap instead of `CLOSE_GAP` once memory has prices, in problems of at most `CLOSE_OPTIONS` options.
CLOSE_GAP_IF_PRICED = 0.005
CLOSE_OPTIONS = 20_000
# While the incumbent is rejected (its reshardings do not fit), a choice that fits will come of another problem. So the
# search of this one ends at a wider gap, and after a share of its budget.
REJECTED_GAP = 0.05
REJECTED_SHARE = 0.5
METHOD = Method(repeated_nodes=RepeatedNodes())  # Equal layers are solved as one where memory hardly binds.


def goal_of(problem: Problem, *, gap: float = 0.0, accepts: Callable[[Sequence[int]], bool] | None = None) -> Goal:
    """The goal of a search for a plan.

    Args:
        gap: the relative gap at which the search ends in a problem of any size; 0: that of the planner. An integer
            program is held to the bound that is known when it starts.
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


@uncollected()
def solve_for_plan(
    problem: Problem, *, gap: float = 0.0, accepts: Callable[[Sequence[int]], bool] | None = None, **limits: Any
) -> Solution:
    """A solution as good as a plan needs, and lean; `limits` are further keywords of `solve`."""
    return solve(problem, goal=goal_of(problem, gap=gap, accepts=accepts), method=METHOD, **limits)
