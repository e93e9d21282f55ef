"""Double Recursive's search: one recursion over bisections, one over the nodes, largest first, without a table.

Wang et al., "Efficient and systematic partitioning of large and deep neural networks for parallelization", Euro-Par
2021, section 4.

Kept: at each bisection the nodes go in the order of what is at stake, and each takes the half that costs least beside
those that went before; the time is linear in nodes and levels. Different: a bisection halves the options of a node, as
in `tofu.py`, since a `Problem` does not say what they split. Further rounds take other lines and orders,
and some halves at random, and end in a descent.
"""

from __future__ import annotations

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.searches.partitioning.option_lines import option_lines, representatives
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.search_run import SearchRun

NOISE = 1.0  # of the logarithm of what is at stake, in further orders


def double_recursive(problem: Problem, run: SearchRun) -> None:
    """Rounds of bisection, node by node."""
    at = Position(problem, run)
    for turn in run.rounds():
        order = at.by_stake(NOISE if turn else 0.0)
        strays = run.rng.random() ** 2 if turn else 0.0
        intervals = option_lines(at, is_random=turn > 0)
        while max(map(len, intervals)) > 1:
            for node in order:
                if len(intervals[node]) > 1:
                    intervals[node] = _cheaper_half(at, node, intervals, strays)
        at.start(representatives(at, intervals))
        at.repair()
        at.offer()
        if turn:
            at.settle()


def _cheaper_half(at: Position, node: int, intervals: list[np.ndarray], strays: float) -> np.ndarray:
    """The half of a node's options that has the cheapest beside what its neighbours may still take."""
    own = intervals[node]
    if at.rng.random() < strays:
        return np.asarray(np.array_split(own, 2)[at.rng.integers(2)])
    costs = at.costs[node][own].copy()
    for other, table in at.tables[node].items():
        costs += table[np.ix_(intervals[other], own)].mean(axis=0)
    at.run.spend(2 * at.looks[node])
    middle = (len(own) + 1) // 2
    return np.asarray(own[:middle] if costs[:middle].min() <= costs[middle:].min() else own[middle:])
