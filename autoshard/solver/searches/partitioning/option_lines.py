"""The options of each node in a line, such that halves of the line are alike: what stands for halving the devices.

Systems that bisect devices refine a split one factor of two at a time. A `Problem` does not say what its options split.
It says what they cost beside those of neighbours, and options that split alike cost alike there. So options are put in
the order of their costs along a direction in which these differ most, and each bisection halves an interval of it.
"""

from __future__ import annotations

import numpy as np

from autoshard.solver.searches.position import Position

POWER_STEPS = 4  # towards the direction in which costs differ most
SECONDS_PER_COST = 2e-8  # of a quiet core: of the costs of the options of a node


def option_lines(at: Position, *, is_random: bool) -> list[np.ndarray]:
    """Node -> its options in the order of the line.

    Args:
        is_random: whether the directions are random ones.
    """
    lines = []
    for node, costs in enumerate(at.costs):
        beside = [table.T for table in at.tables[node].values()]
        rows = np.concatenate([costs[:, None], *beside], axis=1)
        rows = np.minimum(rows, _largest_allowed(rows, at.never))
        rows = rows - rows.mean(axis=0)
        direction = at.rng.standard_normal(rows.shape[1])
        for _ in range(0 if is_random else POWER_STEPS):
            direction = rows.T @ (rows @ direction)
            direction /= np.abs(direction).max() or 1.0
        at.run.spend(at.looks[node] + SECONDS_PER_COST * rows.size)
        lines.append(np.argsort(rows @ direction, kind="stable"))
    return lines


def _largest_allowed(rows: np.ndarray, never: float) -> float:
    """Twice the dearest entry that is not forbidden."""
    return 2 * float(rows.max(initial=0.0, where=rows < never))


def representatives(at: Position, intervals: list[np.ndarray]) -> list[int]:
    """Node -> the option of its interval that is cheapest beside what the intervals of its neighbours allow."""
    found = []
    for node, own in enumerate(intervals):
        costs = at.costs[node][own].copy()
        for other, table in at.tables[node].items():
            costs += table[np.ix_(intervals[other], own)].min(axis=0)
        at.run.spend(2 * at.looks[node])
        found.append(int(own[costs.argmin()]))
    return found
