"""A formulation with a memory limit in, the cheapest choice out that was found within it, all it holds counted."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace

from autoshard.errors import SolverError
from autoshard.solver.formulate import Formulation
from autoshard.solver.problem import InfeasibleError, Problem, Solution
from autoshard.solver.solve import solve, with_bound
from autoshard.solver.verify import fits, verify

ROUNDS = 8  # of solving under lower and lower limits
SLACKS = (math.inf, 2.0, 1.7, 1.4, 1.2, 1.1, 1.06, 1.03, 1.01, 1.0)  # times the least that any choice holds without
# reshardings: limits to seek lean choices under
LEAN_SECONDS = 1.0  # for each of these limits, at most


def solve_within(formulation: Formulation, time_limit: float) -> Solution:
    """The cheapest solution found whose predicted peak is within the usable share of the limit.

    What a resharding holds depends on two choices at once, so it stands in no problem. The problem is solved again
    under what its solution holds without reshardings less what it is over, a few times; after that, or if nothing is
    left, lean choices are taken.

    Raises:
        InfeasibleError: even the leanest choice found is over; the error carries the limit that it needs.
    """
    usable = formulation.prices.backend.usable
    given, limit, bound = formulation.problem.limit, formulation.problem.limit * usable, 0.0
    problem = replace(formulation.problem, limit=limit, checked=True)
    deadline = time.monotonic() + time_limit
    for _ in range(ROUNDS):
        try:
            solution = solve(problem, time_limit=max(0.0, deadline - time.monotonic()), layered=True)
        except SolverError:  # nothing fits, or nothing was found in time
            break
        bound = bound or solution.bound  # of the first round: a lower limit costs more
        peak = formulation.peak_bytes(solution.choice)
        if fits(peak, limit):
            return with_bound(solution, bound)
        held = verify(problem, solution.choice)[1]  # below the problem's limit, perhaps far
        problem = replace(problem, limit=max(0.0, held + limit - peak), checked=True)
    best, needed = None, math.inf
    for solution in _lean_solutions(replace(problem, lives=tuple(formulation.lives)), time_limit):
        peak = formulation.peak_bytes(solution.choice)
        needed = min(needed, peak / usable)
        if fits(peak, limit) and (best is None or solution.cost < best.cost):
            best = solution
        if best is not None and time.monotonic() > deadline:
            break
    if best is None:
        raise InfeasibleError("the leanest choice is over the limit", limit=given, needed=needed)
    return with_bound(best, bound)


def _lean_solutions(problem: Problem, time_limit: float) -> Iterator[Solution]:
    """Choices that hold less and less without reshardings, down to the one that holds the least, whatever it costs.

    Those that hold more are cheaper and reshard less, so that what they hold in all can be less. They do not depend on
    the problem's limit: what one call says is needed, another one finds again.

    Raises:
        SolverError: the least that a choice holds was not found in time.
    """
    try:
        yield solve(replace(problem, limit=0.0), time_limit=time_limit, layered=True)
        return
    except InfeasibleError as error:
        least = error
    except SolverError as error:
        raise SolverError(f"how much memory it takes was not found in {time_limit:g} s; raise time_limit") from error
    for slack in SLACKS:
        with contextlib.suppress(SolverError):  # none was found in time
            leaner = replace(problem, limit=slack * least.needed)
            yield solve(leaner, time_limit=min(time_limit, LEAN_SECONDS), layered=True)
    yield Solution(least.choice, verify(problem, least.choice)[0], 0.0, "feasible")
