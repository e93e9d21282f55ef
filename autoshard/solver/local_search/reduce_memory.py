"""A choice in, one out that costs no more and holds less: many cost the same when memory does not bind.

What a choice holds is counted as byte points: bytes times the program points over which they are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.solver.local_search.forest_moves import ForestState
from autoshard.solver.problem import Problem
from autoshard.solver.verify import OPTIMAL_GAP, fits, verify


@dataclass(frozen=True)
class LeanSettings:
    """How much memory is worth where choices cost the same, and how long a leaner one is looked for."""

    visits: int = 6000  # of nodes, in all moves together
    least_moves: int = 4  # however many nodes there are
    patience: int = 16  # moves in a row that change nothing: each is exact over most of the nodes
    memory_value: float = 0.1 * OPTIMAL_GAP  # of the cost of the choice: what all that it holds is worth
    option_value: float = 0.01  # of that: what it is worth, over all nodes, that an option stays


LEAN = LeanSettings()


def leaner_choice(problem: Problem, choice: Sequence[int], seed: int) -> tuple[int, ...]:
    """The choice, or one that costs no more but rounding and holds fewer byte points.

    >>> from autoshard.solver.problem import Live
    >>> either = Problem((np.array([1.0, 1.0]),), (), (Live(0, 0, 3, np.array([8, 2])),), None)
    >>> leaner_choice(either, (0,), seed=0)
    (1,)
    """
    held = [np.zeros(len(costs)) for costs in problem.costs]
    for live in problem.lives:
        held[live.node] += live.usage * float(live.end - live.start)
    cost, most = verify(problem, choice)[0], sum(own[option] for own, option in zip(held, choice, strict=True))
    if not most or not cost:
        return tuple(choice)
    value = LEAN.memory_value * abs(cost)
    worth, stay = value / most, LEAN.option_value * value / len(choice)
    costs = [costs + worth * own + stay for costs, own in zip(problem.costs, held, strict=True)]
    for own, option in zip(costs, choice, strict=True):
        own[option] -= stay
    moves = ForestState(
        replace(problem, costs=tuple(costs), lives=(), limit=None, checked=True), np.random.default_rng(seed)
    )
    moves.choice = np.array(choice)
    idle = 0
    for _ in range(max(LEAN.least_moves, LEAN.visits // len(costs))):
        before = moves.choice.copy()
        moves.move()
        idle = idle + 1 if np.array_equal(before, moves.choice) else 0
        if idle == LEAN.patience:
            break
    found = tuple(moves.choice.tolist())
    cheaper, peak = verify(problem, found)
    return found if cheaper <= cost + value and fits(peak, problem.limit) else tuple(choice)
