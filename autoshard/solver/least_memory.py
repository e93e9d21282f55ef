"""A problem and no limit in, a choice with a low peak of memory out: how much memory would do.

`leanest` asks the integer program, which proves what it finds. `lean` needs no more than a few searches. It spreads a
weight of one over the program points. The problem in which a byte costs what its points weigh is one without a limit:
its bound is one on the peak of any choice, and its best choice has a peak itself. Points at which that choice holds
much then weigh more (multiplicative weights; Arora, Hazan, Kale, "The Multiplicative Weights Update Method", 2012).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.solver.incumbent import Incumbent
from autoshard.solver.problem import Problem
from autoshard.solver.run import NoChoice, SolverRun, count_options
from autoshard.solver.runtime.clock import SearchTimeout
from autoshard.solver.verify import verify


@dataclass(frozen=True)
class LeastMemorySettings:
    """How long a low peak is looked for."""

    most_options: int = 60_000  # more than the integer program can find the leanest choice of
    rounds: int = 10  # of weights; the first three find a choice within a few percent of what any rounds find
    step: float = 5.0  # exponent by which the fullest point gains on an empty one in the first round; then less
    gap: float = 1e-3  # relative, at which the rounds end


LEAST_MEMORY = LeastMemorySettings()


@dataclass(frozen=True)
class LeanChoice:
    """A choice, and what is proven of the peak of all choices."""

    choice: tuple[int, ...]
    bound: float  # bytes: no choice has a lower peak
    is_exact: bool  # whether the choice has the lowest peak there is


def leanest(problem: Problem, run: SolverRun) -> LeanChoice:
    """The choice with the lowest peak.

    Raises:
        SearchTimeout: it was not found in time.
        NoChoice: every choice is forbidden.
    """
    free = _at_no_cost(problem, [np.zeros(len(costs)) for costs in problem.costs])
    small = run.simplified(replace(free, lives=problem.lives, limit=0.0))  # every point matters
    if max(map(count_options, small.parts), default=0) > LEAST_MEMORY.most_options:
        raise SearchTimeout
    programs = run.load_programs() if small.parts else None
    limits = run.clock.program_limits
    outcomes = [programs.leanest(part, seed=run.seed, **limits()) for part in small.parts] if programs else []
    if any(outcome.interrupted for outcome in outcomes):
        raise KeyboardInterrupt
    if any(outcome.bound == np.inf for outcome in outcomes):
        raise NoChoice
    choices = [outcome.choice for outcome in outcomes]
    if None in choices:
        raise SearchTimeout
    choice = small.invert(choices)
    return LeanChoice(choice, verify(problem, choice)[1], is_exact=True)


def lean(problem: Problem, run: SolverRun) -> LeanChoice | None:
    """A choice with a low peak, the best of a few rounds of weights; None where there was no time for one.

    Raises:
        NoChoice: every choice is forbidden.
    """
    points = _Points(problem)
    weights = np.full(points.count, 1 / points.count)
    best, peak, bound = None, math.inf, 0.0
    with contextlib.suppress(SearchTimeout):
        for i in range(LEAST_MEMORY.rounds):
            weighted = Incumbent(_at_no_cost(problem, points.weighted(weights)))
            try:
                run.solve(weighted, bounds_pay=True)
            finally:
                bound = max(bound, weighted.bound)
            assert weighted.choice is not None, "`SolverRun.solve` ends without one by an error alone"
            held = points.held(weighted.choice)
            if held.max() < peak:
                best, peak = weighted.choice, held.max()
            if peak <= bound * (1 + LEAST_MEMORY.gap):
                break
            weights = weights * np.exp(LEAST_MEMORY.step / math.sqrt(1 + i) * (held / held.max() - 1))
            weights /= weights.sum()
            run.clock.check()
    return None if best is None else LeanChoice(best, bound, is_exact=False)


class _Points:
    """The program points at which something begins to be held: between them no peak is new."""

    def __init__(self, problem: Problem):
        points = np.unique([live.start for live in problem.lives])
        self.count = len(points)
        self._problem = problem
        self._spans = [np.searchsorted(points, (live.start, live.end)) for live in problem.lives]

    def weighted(self, weights: np.ndarray) -> list[np.ndarray]:
        """What the bytes of each option of each node weigh, when points weigh this."""
        before = np.append(0.0, weights.cumsum())
        costs = [np.zeros(len(costs)) for costs in self._problem.costs]
        for live, (start, end) in zip(self._problem.lives, self._spans, strict=True):
            costs[live.node] += (before[end] - before[start]) * live.usage
        return costs

    def held(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes that a choice holds at each point."""
        change = np.zeros(self.count + 1)
        for live, (start, end) in zip(self._problem.lives, self._spans, strict=True):
            used = live.usage[choice[live.node]]
            change[start] += used
            change[end] -= used
        return change.cumsum()[:-1]


def _at_no_cost(problem: Problem, costs: Sequence[np.ndarray]) -> Problem:
    """The problem with these costs, but for what is forbidden, and without memory, or edges that forbid nothing."""
    return Problem(
        costs=tuple(np.where(np.isfinite(old), new, np.inf) for old, new in zip(problem.costs, costs, strict=True)),
        edges=tuple(
            replace(edge, costs=np.where(finite, 0.0, np.inf))
            for edge in problem.edges
            if not (finite := np.isfinite(edge.costs)).all()
        ),
        lives=(),
        limit=None,
    )
