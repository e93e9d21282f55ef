"""A `Problem` in, a verified `Solution` out: simplify; per part, moves and the integer program; and the way back."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from autoshard.errors import SolverError
from autoshard.solver.ilp import Outcome, cheapest, leanest, trivial_bound
from autoshard.solver.moves import good_choices
from autoshard.solver.problem import InfeasibleError, Problem, Solution
from autoshard.solver.simplify import simplify
from autoshard.solver.verify import OPTIMAL_GAP, check, fits, verify


def solve(problem: Problem, *, time_limit: float = 60.0, seed: int = 0) -> Solution:
    """The cheapest choice within the memory limit, and how far from it any other could be.

    When time runs out, or the user presses Ctrl-C, the best choice so far is returned with the bound proven so far.

    >>> from autoshard.solver.problem import Edge
    >>> edge = Edge(0, 1, np.array([[5.0, 0.0], [0.0, 5.0]]))
    >>> solve(Problem((np.array([0.0, 1.0]), np.array([0.0, 3.0])), (edge,), (), None))
    Solution(choice=(1, 0), cost=1.0, bound=1.0, status='optimal')

    Args:
        time_limit: seconds to spend, about.
        seed: of the random numbers inside. The same problem and seed give the same optimal solution in any process.

    Raises:
        InfeasibleError: nothing fits in memory; it carries the smallest limit that would do.
        SolverError: every choice is forbidden, or none was found in time.
        KeyboardInterrupt: Ctrl-C, before any choice was found.
    """
    deadline = time.monotonic() + time_limit
    small = simplify(problem)
    if not fits(small.rest, problem.limit):
        raise _infeasible(problem, seed, deadline)
    choices, bound, interrupted = [], small.constant, False
    for part in small.parts:
        outcome = _solve_part(part, seed, 0.0 if interrupted else deadline)
        interrupted = interrupted or outcome.interrupted
        if outcome.bound == math.inf:
            raise _infeasible(problem, seed, deadline)
        if outcome.choice is None:
            raise KeyboardInterrupt if interrupted else SolverError(f"no choice that fits was found in {time_limit} s")
        choices.append(outcome.choice)
        bound += outcome.bound
    choice = small.invert(choices)
    cost, _ = verify(problem, choice)
    bound = min(float(bound), cost)
    solution = Solution(choice, cost, bound, "feasible")
    if solution.gap <= OPTIMAL_GAP:
        solution = replace(solution, status="optimal")
    check(problem, solution)
    return solution


def _solve_part(part: Problem, seed: int, deadline: float) -> Outcome:
    """The best choice of a part by then, moves first, since the integer program is faster with a good one to beat."""
    first, bound = None, trivial_bound(part)
    try:
        for first in good_choices(part, seed):
            if first is not None and time.monotonic() > deadline:
                return Outcome(first, bound, interrupted=False)
    except KeyboardInterrupt:
        return Outcome(first, bound, interrupted=True)
    left = deadline - time.monotonic()
    outcome = cheapest(part, first, time_limit=max(left, 0.0), seed=seed)
    known = [choice for choice in (outcome.choice, first) if choice is not None]
    best = min(known, key=lambda choice: verify(part, choice)[0], default=None)
    return replace(outcome, choice=best, bound=max(outcome.bound, bound))


def _infeasible(problem: Problem, seed: int, deadline: float) -> SolverError:
    """The error that says how much memory would do. The search for it is a problem of its own: cost is no object."""
    free = replace(
        problem,
        costs=tuple(np.where(np.isfinite(costs), 0.0, np.inf) for costs in problem.costs),
        edges=tuple(replace(edge, costs=np.where(np.isfinite(edge.costs), 0.0, np.inf)) for edge in problem.edges),
        limit=0.0,  # every point matters
    )
    small = simplify(free)
    choices = [
        leanest(part, time_limit=max(1.0, deadline - time.monotonic()), seed=seed).choice for part in small.parts
    ]
    if None in choices:
        return SolverError("every choice is forbidden")
    _, needed = verify(problem, small.invert(choices))
    message = f"no choice fits in {problem.limit:.0f} bytes; the least that one holds is {needed:.0f}"
    return InfeasibleError(message, limit=problem.limit, needed=needed)
