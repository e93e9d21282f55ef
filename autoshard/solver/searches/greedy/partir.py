"""PartIR's search: a node is decided, and what follows from it without a resharding is propagated, never taken back.

Alabed et al., "PartIR: Composing SPMD partitioning strategies for machine learning", ASPLOS 2025, section 5. Adaptive
Paddle decides its operators in the same way: Ao et al., "End-to-end adaptive distributed training on PaddlePaddle",
2021.

Kept: propagation goes both ways along edges, takes what costs no resharding, and stops at conflicts; decisions stand.
Different: a user names PartIR's tactics; here the node that could lose most is decided first, with its cheapest option.
Further rounds decide in other orders, and some nodes at random.
"""

from __future__ import annotations

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.searches.position import CHANGE_ROUNDING, Position
from autoshard.solver.searches.search_run import SearchRun

NOISE = 2.0  # of the logarithm of what is at stake, in further orders


def partir(problem: Problem, run: SearchRun) -> None:
    """Rounds of decisions and propagation."""
    at, rng = Position(problem, run), run.rng
    for turn in run.rounds():
        order = at.by_stake(NOISE if turn else 0.0)
        strays = rng.random() ** 2 if turn else 0.0
        at.start(_propagated(at, order, strays))
        at.repair()
        at.offer()


def _propagated(at: Position, order: list[int], strays: float) -> list[int]:
    """A choice made in this order, with what follows from each decision.

    Args:
        strays: share of nodes that are decided at random, and of neighbours that are not propagated to.
    """
    chosen: dict[int, int] = {}
    for first in order:
        if first in chosen:
            continue
        is_stray = at.rng.random() < strays
        chosen[first] = int(at.rng.integers(at.sizes[first])) if is_stray else int(at.prospects(first, chosen).argmin())
        waiting = [first]
        for node in waiting:
            for other in at.tables[node]:
                if other in chosen or at.rng.random() < strays:
                    continue
                free = _free(at, other, chosen)
                if free.any():
                    costs = np.where(free, at.prospects(other, chosen), np.inf)
                    chosen[other] = int(costs.argmin())
                    waiting.append(other)
    return [chosen[node] for node in range(len(at.sizes))]


def _free(at: Position, node: int, chosen: dict[int, int]) -> np.ndarray:
    """Whether each option of a node costs no resharding beside any decided neighbour: [options]."""
    free = np.ones(at.sizes[node], dtype=bool)
    for other, table in at.tables[node].items():
        if other in chosen:
            row = table[chosen[other]]
            free &= row <= row.min() + CHANGE_ROUNDING * abs(row.min())
    return free
