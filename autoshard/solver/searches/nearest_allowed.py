"""A choice in, one near it out that is allowed and fits: the repair of what searches make up.

It is a problem of its own. An option costs 1 unless it is the one that the node has; what is forbidden stays so. Moves
along forests (`local_search/forest_moves.py`) change whole trees of nodes at once, at prices of memory that rise until
all fits. So nodes that only go together are changed together, and what a choice costs plays no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.solver.local_search.forest_moves import ForestState, move_seconds
from autoshard.solver.problem import Problem
from autoshard.solver.verify import ROUNDING


@dataclass(frozen=True)
class NearestSettings:
    """How long an allowed choice is looked for."""

    moves: int = 24  # along forests, at most
    move_share: float = 0.4  # of what a move takes by `move_seconds`, which has slower machines in mind


PRICE_RISE = 2.0  # factor of prices where memory is over the limit, from one move to the next
SETTINGS = NearestSettings()


class NearestProblem:
    """The problem of staying near a choice, set up once for any number of choices."""

    def __init__(self, problem: Problem, rng: np.random.Generator, spend: Callable[[float], None]):
        self._spend, self._seconds = spend, SETTINGS.move_share * move_seconds(problem)
        self._changed = [np.where(np.isfinite(costs), 1.0, np.inf) for costs in problem.costs]
        edges = tuple(replace(edge, costs=np.where(np.isfinite(edge.costs), 0.0, np.inf)) for edge in problem.edges)
        self._moves = ForestState(replace(problem, costs=tuple(self._changed), edges=edges, checked=True), rng)

    def find(self, choice: Sequence[int]) -> list[int] | None:
        """An allowed choice that fits, and keeps most options; None if none was found."""
        moves = self._moves
        moves.choice = np.array(choice, dtype=np.int64)
        moves.costs = [np.minimum(costs, moves.never) for costs in self._changed]
        for costs, option in zip(moves.costs, choice, strict=True):
            costs[option] -= 1.0
        moves.prices[:] = 0.0
        for _ in range(SETTINGS.moves):
            moves.move()
            self._spend(self._seconds)
            if self._is_allowed():
                return [int(option) for option in moves.choice]
            if moves.limit is not None:
                over = moves.held() > moves.limit * (1 + ROUNDING)
                moves.prices[over] = PRICE_RISE * moves.prices[over] + moves.typical_price
        return None

    def _is_allowed(self) -> bool:
        moves = self._moves
        now = moves.choice
        if any(costs[now[node]] >= moves.never - 1 for node, costs in enumerate(moves.costs)):
            return False
        if any(table[now[j], now[i]] for i, tables in enumerate(moves.tables) for j, table in tables.items() if i < j):
            return False
        return moves.limit is None or not (moves.held() > moves.limit * (1 + ROUNDING)).any()
