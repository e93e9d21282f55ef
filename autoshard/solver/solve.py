"""A `Problem` in, a verified `Solution` out: simplify, split into independent parts, integer program, the way back."""

from __future__ import annotations

import time

from autoshard.errors import SolverError
from autoshard.solver.ilp import cheapest, leanest
from autoshard.solver.problem import InfeasibleError, Problem, Solution
from autoshard.solver.verify import OPTIMAL_GAP, check, verify


def solve(problem: Problem, *, time_limit: float = 60.0, seed: int = 0) -> Solution:
    """The cheapest choice within the memory limit, and how far from it any other could be.

    When time runs out, or the user presses Ctrl-C, the best choice so far is returned with the bound proven so far.

    >>> import numpy as np
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
    """
    deadline = time.monotonic() + time_limit
    outcome = cheapest(problem, None, time_limit=time_limit, seed=seed)
    if outcome.choice is None:
        if outcome.bound < float("inf"):
            raise SolverError(f"no choice was found in {time_limit} s")
        lean = leanest(problem, time_limit=max(1.0, deadline - time.monotonic()), seed=seed)
        if lean.choice is None:
            raise SolverError("every choice is forbidden")
        needed = verify(problem, lean.choice)[1]
        message = f"no choice fits in {problem.limit:.0f} bytes; {needed:.0f} would do"
        raise InfeasibleError(message, limit=problem.limit, needed=needed)
    cost, _ = verify(problem, outcome.choice)
    bound = min(float(outcome.bound), cost)
    solution = Solution(outcome.choice, cost, bound, "optimal" if cost - bound <= OPTIMAL_GAP * cost else "feasible")
    check(problem, solution)
    return solution
