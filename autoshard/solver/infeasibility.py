"""The errors of a search without a choice: how much memory would do, or what is known of that."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import SolverError
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.problem import ForbiddenError, InfeasibleError, Problem
from autoshard.solver.run import NoChoice, Run, count_options
from autoshard.solver.runtime.clock import TimeUp
from autoshard.solver.verify import verify

LEAST_MEMORY_SHARE = 0.5  # of the time left: what is given to how much memory would do
MOST_OPTIONS = 60_000  # more than the integer program can find the leanest choice of


def late_error(problem: Problem, spent: str) -> SolverError:
    """The error that says that time was too short."""
    message = f"no choice was found in {spent}, nor was it proven that there is none; raise time_limit"
    if problem.limit is None or not problem.lives:
        return SolverError(message)
    point, held = _least_held(problem)
    limit = f"the limit is {problem.limit:.0f} bytes; point {point} needs {held:.0f} at least"
    return SolverError(f"{message} or the memory limit ({limit})")


def infeasible_error(run: Run) -> SolverError:
    """The error that says how much memory would do. The search for it is a problem of its own: cost is no object."""
    problem = run.incumbent.problem
    run.clock.extend()
    try:
        with run.clock.hurry(LEAST_MEMORY_SHARE):
            return _leanest(problem, run)
    except TimeUp:
        pass
    except NoChoice as error:
        return ForbiddenError(str(error) or "every choice is forbidden")
    point, held = _least_held(problem)
    with contextlib.suppress(TimeUp):
        held = max(held, _bound_at(point, run))
    return SolverError(
        f"no choice fits in {problem.limit:.0f} bytes; point {point} needs {held:.0f} at least; "
        "how much memory would do was not found in time"
    )


def _leanest(problem: Problem, run: Run) -> InfeasibleError:
    """The error that carries the least that a choice holds.

    Raises:
        TimeUp: it was not found in time.
        NoChoice: every choice is forbidden.
    """
    free = _at_no_cost(problem, [np.zeros(len(costs)) for costs in problem.costs])
    small = run.simplified(replace(free, lives=problem.lives, limit=0.0))  # every point matters
    if max(map(count_options, small.parts), default=0) > MOST_OPTIONS:
        raise TimeUp
    programs = run.load_programs() if small.parts else None
    limits = run.clock.program_limits
    outcomes = [programs.leanest(part, seed=run.seed, **limits()) for part in small.parts] if programs else []
    if any(outcome.interrupted for outcome in outcomes):
        raise KeyboardInterrupt
    if any(outcome.bound == np.inf for outcome in outcomes):
        raise NoChoice
    choices = [outcome.choice for outcome in outcomes]
    if None in choices:
        raise TimeUp
    choice = small.invert(choices)
    _, needed = verify(problem, choice)
    point, _ = _fullest(problem, [live.usage[choice[live.node]] for live in problem.lives])
    held = f"the least that one holds is {needed:.0f}, at point {point}"
    assert problem.limit is not None, "without one every choice fits"
    message = f"no choice fits in {problem.limit:.0f} bytes; {held}"
    return InfeasibleError(message, limit=problem.limit, needed=needed, choice=choice)


def _bound_at(point: int, run: Run) -> float:
    """A bound on the bytes that any choice holds at one point."""
    problem = run.incumbent.problem
    held = [np.zeros(len(costs)) for costs in problem.costs]
    for live in problem.lives:
        if live.start <= point < live.end:
            held[live.node] += live.usage
    there = Incumbent(_at_no_cost(problem, held))
    with contextlib.suppress(TimeUp):
        run.solve(there, bounds_pay=True)
    return there.bound


def _at_no_cost(problem: Problem, costs: Sequence[np.ndarray]) -> Problem:
    """The problem with these costs, but for what is forbidden, and without memory."""
    return Problem(
        costs=tuple(np.where(np.isfinite(old), new, np.inf) for old, new in zip(problem.costs, costs, strict=True)),
        edges=tuple(replace(edge, costs=np.where(np.isfinite(edge.costs), 0.0, np.inf)) for edge in problem.edges),
        lives=(),
        limit=None,
    )


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
