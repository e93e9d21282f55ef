"""The errors of a search without a choice: how much memory would do, or what is known of that."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence

import numpy as np

from autoshard.errors import SolverError
from autoshard.solver.least_memory import lean, leanest
from autoshard.solver.problem import ForbiddenError, InfeasibleError, LeastNeed, Problem, UndecidedError
from autoshard.solver.run import NoChoice, SolverRun
from autoshard.solver.runtime.clock import SearchTimeout
from autoshard.solver.verify import verify

EXACT_SHARE = 0.5  # of the time left: what is given to the integer program that finds how much memory would do


def late_error(problem: Problem, spent: str, bound: float) -> UndecidedError:
    """The error that says that time was too short."""
    message = f"no choice was found in {spent}, nor was it proven that there is none; raise time_limit"
    if problem.limit is None or not problem.lives:
        return UndecidedError(message, bound=bound)
    point, held = _least_held(problem)
    limit = f"the limit is {problem.limit:.0f} bytes; point {point} needs {held:.0f} at least"
    return UndecidedError(f"{message} or the memory limit ({limit})", bound=bound)


def infeasible_error(run: SolverRun) -> SolverError:
    """The error that says how much memory would do, or that every choice is forbidden.

    The search for that is a problem of its own: cost is no object. If some choice is known to be allowed, the search
    waits until somebody wants to know, and has as long then as it would have had.
    """
    problem = run.incumbent.problem
    run.clock.extend()
    start, first = time.monotonic(), [0] * len(problem.costs)
    try:
        is_allowed = problem.limit is not None and math.isfinite(verify(problem, first)[0])
        found = None if is_allowed else _needed_memory(problem, run)
    except NoChoice as error:
        return ForbiddenError(str(error) or "every choice is forbidden")
    assert problem.limit is not None, "without one every choice fits"

    def sought() -> LeastNeed:
        run.clock.resume(start)
        return _needed_memory(problem, run)

    run.report.progress = None  # whoever waited for the choice waits no more
    return InfeasibleError(problem.limit, found or sought)


def _needed_memory(problem: Problem, run: SolverRun) -> LeastNeed:
    """
    Raises:
        NoChoice: every choice is forbidden.
    """
    found = None
    with contextlib.suppress(SearchTimeout), run.clock.hurry(EXACT_SHARE):
        found = leanest(problem, run)
    found = found or lean(problem, run)
    assert problem.limit is not None, "without one every choice fits"
    if found is None:
        point, least = _least_held(problem)
        message = (
            f"no choice fits in {problem.limit:.0f} bytes; point {point} needs {least:.0f} at least; "
            "how much memory would do was not found in time"
        )
        return LeastNeed(message, math.inf, least=max(problem.limit, least))
    needed = verify(problem, found.choice)[1]
    point, _ = _fullest(problem, [live.usage[found.choice[live.node]] for live in problem.lives])
    if found.is_exact:
        held = f"the least that one holds is {needed:.0f}, at point {point}"
    else:
        held = f"one was found that holds {needed:.0f}, at point {point}; none holds less than {found.bound:.0f}"
    message = f"no choice fits in {problem.limit:.0f} bytes; {held}"
    least = max(problem.limit, needed if found.is_exact else found.bound)
    return LeastNeed(message, needed, found.choice, least)


def _least_held(problem: Problem) -> tuple[int, float]:
    """A program point, and the bytes that the leanest options of all nodes hold there: where that is most."""
    least = []
    for live in problem.lives:
        allowed = np.isfinite(problem.costs[live.node])
        least.append((live.usage[allowed] if allowed.any() else live.usage).min())
    return _fullest(problem, least)


def _fullest(problem: Problem, usages: Sequence[float]) -> tuple[int, float]:
    """The program point at which most is held, and how many bytes, when the lives hold this much."""
    ends = [[live.start for live in problem.lives], [live.end for live in problem.lives]]
    points, at = np.unique(np.array(ends, dtype=np.int64).ravel(), return_inverse=True)
    held_by = np.asarray(usages, dtype=np.float64)
    held = np.bincount(at, np.concatenate([held_by, -held_by])).cumsum()
    return int(points[held.argmax()]), float(held.max())
