"""Every choice of a small `Problem`, tried in turn: the oracle of the other solvers."""

from __future__ import annotations

import itertools
import math

from autoshard.errors import SolverError
from autoshard.solver.problem import InfeasibleError, LeastNeed, Problem, Solution
from autoshard.solver.verify import fits, verify

MOST_CHOICES = 1_000_000  # choices; beyond it nobody waits for the answer


class _Evaluation:
    """Cost and peak bytes of one choice after the other, from numbers that Python holds."""

    def __init__(self, problem: Problem):
        self._costs = [costs.tolist() for costs in problem.costs]
        self._edges = [(edge.i, edge.j, edge.costs.tolist()) for edge in problem.edges]
        changes = [(live.start, live.node, live.usage.tolist()) for live in problem.lives]
        changes += [(live.end, live.node, [-size for size in live.usage.tolist()]) for live in problem.lives]
        changes.sort(key=lambda change: change[0])
        points = itertools.groupby(changes, key=lambda change: change[0])
        self._changes = [[(node, bytes_of) for _, node, bytes_of in at_once] for _, at_once in points]

    def cost(self, choice: tuple[int, ...]) -> float:
        """inf where the choice is forbidden."""
        nodes = [costs[option] for costs, option in zip(self._costs, choice, strict=True)]
        return math.fsum(nodes + [costs[choice[i]][choice[j]] for i, j, costs in self._edges])

    def peak(self, choice: tuple[int, ...]) -> float:
        """The most bytes at any program point."""
        held = peak = 0.0
        for changes in self._changes:
            held += sum([bytes_of[choice[node]] for node, bytes_of in changes])
            peak = max(peak, held)
        return peak


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
    if count > MOST_CHOICES:
        raise SolverError(f"{count} choices are too many to try")
    best, least, needed = None, math.inf, math.inf
    evaluate = _Evaluation(problem)
    for choice in itertools.product(*(range(len(costs)) for costs in problem.costs)):
        cost = evaluate.cost(choice)
        if cost < least:
            peak = evaluate.peak(choice)
            needed = min(needed, peak)
            if fits(peak, problem.limit):
                best, least = choice, cost
    if best is not None:
        least, _ = verify(problem, best)
        return Solution(best, least, bound=least, status="optimal")
    if needed < math.inf:
        assert problem.limit is not None, "without one every choice fits"
        raise InfeasibleError(problem.limit, LeastNeed(f"no choice fits in {problem.limit} bytes", needed))
    raise SolverError("every choice is forbidden")
