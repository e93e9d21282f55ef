"""A `Problem` in, a verified `Solution` out: simplify; per part, bounds, moves and the integer program; the way back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import SolverError
from autoshard.solver.bounds import Relaxation
from autoshard.solver.ilp import cheapest, leanest, trivial_bound
from autoshard.solver.moves import good_choices
from autoshard.solver.problem import InfeasibleError, Problem, Solution
from autoshard.solver.simplify import simplify
from autoshard.solver.verify import OPTIMAL_GAP, check, fits, verify

ENOUGH = OPTIMAL_GAP / 10  # the gap at which a part counts as solved; finer than the whole's, to leave room for rounding
GRACE = 10.0  # s past the time limit to find a first choice
WORTH_PRUNING = 0.8  # of the options left: if more are, simplifying again brings little


def solve(problem: Problem, *, time_limit: float = 60.0, seed: int = 0) -> Solution:
    """The cheapest choice within the memory limit, and how far from it any other could be.

    When time runs out, or the user presses Ctrl-C, the best choice so far is returned with the bound proven so far.
    It costs no more than the first option of every node, if that one fits.

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
    search = _Search(problem, seed, time.monotonic() + time_limit)
    known = search.known
    try:
        known.prove(_least_sum(problem))
        known.offer([0] * len(problem.costs))
        search.check_time()
        search.whole(known)
    except _TimeUp:
        pass
    except KeyboardInterrupt:
        if known.choice is None:
            raise
    except _Nothing:
        raise _infeasible(problem, seed, search.deadline) from None
    if known.choice is None:
        raise SolverError(
            f"no choice that fits in {problem.limit:.0f} bytes was found in {time_limit:.0f} s, nor was it proven that "
            "there is none; raise time_limit or the memory limit"
        )
    bound = min(known.bound, known.cost)
    solution = Solution(known.choice, known.cost, bound, "feasible")
    if solution.gap <= OPTIMAL_GAP:
        solution = replace(solution, status="optimal")
    check(problem, solution)
    return solution


class _TimeUp(Exception):
    """The time limit has passed."""


class _Nothing(Exception):
    """No choice is allowed and fits."""


class _Known:
    """The best choice and bound of a problem by now. Whatever is learnt goes on to the problem it is a part of."""

    def __init__(self, problem: Problem, tell: Callable[[], None] = lambda: None):
        self.problem = problem
        self.best: tuple[tuple[int, ...], float] | None = None  # one value, so that Ctrl-C finds both or neither
        self.bound = -math.inf
        self.tell = tell

    @property
    def choice(self) -> tuple[int, ...] | None:
        return self.best[0] if self.best else None

    @property
    def cost(self) -> float:
        return self.best[1] if self.best else math.inf

    @property
    def solved(self) -> bool:
        return self.best is not None and self.cost - self.bound <= ENOUGH * abs(self.cost)

    def offer(self, choice: Sequence[int]) -> None:
        """Takes the choice if it is the best that fits."""
        cost, peak = verify(self.problem, choice)
        if cost < self.cost and fits(peak, self.problem.limit):
            self.best = tuple(map(int, choice)), cost
            self.tell()

    def prove(self, bound: float) -> None:
        """Takes the bound if it is the highest."""
        if bound > self.bound:
            self.bound = bound
            self.tell()


class _Search:
    """One run of `solve`."""

    def __init__(self, problem: Problem, seed: int, deadline: float):
        self.seed, self.deadline = seed, deadline
        self.known = _Known(problem)  # of the whole

    def check_time(self) -> None:
        late = time.monotonic() - self.deadline
        if late > (0.0 if self.known.best else GRACE):
            raise _TimeUp

    def whole(self, known: _Known) -> None:
        """Solves a problem by its parts."""
        small = simplify(known.problem)
        if not fits(small.rest, known.problem.limit):
            raise _Nothing

        def tell() -> None:
            if all(part.best for part in parts):
                known.offer(small.invert([part.choice for part in parts]))
            known.prove(small.constant + math.fsum(part.bound for part in parts))

        parts = [_Known(part, tell) for part in small.parts]
        for part in parts:
            part.bound = _least_sum(part.problem)
        tell()
        for part in parts:
            self.part(part)

    def part(self, known: _Known) -> None:
        """Solves a problem that is one part and cannot be simplified."""
        if sum(map(len, known.problem.costs)) <= FEW_OPTIONS:
            return self.program(known)
        relaxation = Relaxation(known.problem)
        for choice, bound in relaxation.rounds(lambda: known.cost):
            known.offer(choice)
            known.prove(bound)
            if known.solved:
                return
            self.check_time()
        if DEBUG: print("part", known.problem, known.cost, known.bound, time.monotonic()-T0)
        self.moves(known)
        if DEBUG: print("  moved", known.problem, known.cost, known.bound, time.monotonic()-T0)
        if known.solved:
            return
        (one, _), (other, _) = relaxation.least(forward=True), relaxation.least(forward=False)
        least = [np.maximum(a, b) for a, b in zip(one, other, strict=True)]
        ceiling = max(map(np.max, least))
        for share in SHARES:
            enough = min(known.cost - ENOUGH * abs(known.cost), known.bound + share * (min(ceiling, known.cost)-known.bound))
            kept = [of_node < enough for of_node in least]
            if DEBUG: print("  share", share, "kept", sum(map(np.sum, kept)), "of", sum(map(len,kept)), time.monotonic()-T0)
            if sum(map(np.sum, kept)) > WORTH_PRUNING * sum(map(len, kept)):
                break
            if self.without(known, kept, enough): return
        self.program(known)

    def without(self, known, kept, enough):
            if not all(map(np.any, kept)):
                known.prove(enough)
                return known.solved
            fewer = _Known(known.problem.restrict({node: np.flatnonzero(options) for node, options in enumerate(kept)}))

            def tell() -> None:
                if fewer.best:
                    known.offer(fewer.choice)
                known.prove(min(enough, fewer.bound))

            fewer.tell = tell
            try:
                self.whole(fewer)
            except (SolverError, _Nothing):
                known.prove(enough)
            if DEBUG: print("   ->", known.cost, known.bound, time.monotonic()-T0)
            return known.solved

    def moves(self, known):
        for choice in good_choices(known.problem, self.seed):
            if choice is not None:
                known.offer(choice)
            self.check_time()

    def program(self, known):
        if not known.best: self.moves(known)
        left = max(0.0, self.deadline - time.monotonic())
        outcome = cheapest(known.problem, known.choice, time_limit=left, seed=self.seed)
        if outcome.choice is not None:
            known.offer(outcome.choice)
        if outcome.bound == math.inf:
            raise _Nothing
        known.prove(outcome.bound)
        if outcome.interrupted:
            raise KeyboardInterrupt
        self.check_time()
        if DEBUG: print("  highs", known.problem, known.cost, known.bound, time.monotonic()-T0)
FEW_OPTIONS=4000
SHARES=(0.03,.2,1.)
DEBUG=False
T0=0

def _least_sum(problem: Problem) -> float:
    """No choice costs less than the cheapest option of every node with the cheapest pair of every edge."""
    return math.fsum(costs.min() for costs in [*problem.costs, *(edge.costs for edge in problem.edges)])


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
