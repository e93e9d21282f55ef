"""Every choice of a small `Problem`, tried in turn: the oracle of the other solvers."""

from __future__ import annotations

import itertools
import math

from autoshard.errors import SolverError
from autoshard.solver.problem import InfeasibleError, Problem, Solution
from autoshard.solver.verify import fits, verify

MOST = 1_000_000  # choices; beyond it nobody waits for the answer


def exhaustive(problem: Problem) -> Solution:
    """The cheapest choice, by trying all.

    >>> import numpy as np
    >>> exhaustive(Problem((np.array([3.0, 2.0]), np.array([1.0])), (), (), None))
    Solution(choice=(1, 0), cost=3.0, bound=3.0, status='optimal')

    Raises:
        InfeasibleError: nothing fits in memory.
        SolverError: every choice is forbidden, or there are too many to try.
    """
    count = math.prod(map(len, problem.costs))
    if count > MOST:
        raise SolverError(f"{count} choices are too many to try")
    best, least, needed = None, math.inf, math.inf
    for choice in itertools.product(*(range(len(costs)) for costs in problem.costs)):
        cost, peak = verify(problem, choice)
        if cost == math.inf:
            continue
        needed = min(needed, peak)
        if cost < least and fits(peak, problem.limit):
            best, least = choice, cost
    if best is not None:
        return Solution(best, least, bound=least, status="optimal")
    if needed < math.inf:
        assert problem.limit is not None, "without one every choice fits"
        raise InfeasibleError(f"no choice fits in {problem.limit} bytes", limit=problem.limit, needed=needed)
    raise SolverError("every choice is forbidden")
