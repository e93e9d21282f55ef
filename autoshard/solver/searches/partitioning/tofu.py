"""Tofu's search: recursive bisection, each step solved by dynamic programming over the whole graph.

Wang, Huang and Li, "Supporting very large models using automatic dataflow graph partitioning", EuroSys 2019, section 5.
HyPar (Song et al., HPCA 2019) and AccPar (HPCA 2020) recurse in the same way over layers in a chain.

Kept: at each level every node has two ways to go on, the best combination is found by dynamic programming, and the next
level starts from it. Different: a level halves the devices there; here it halves the options of each node, in a line in
which neighbours are alike (`option_lines.py`). Bytes have prices that follow what a round finds, and what it finds is
made to fit. Further rounds take other lines and some halves at random, and end in a descent.
"""

from __future__ import annotations

import numpy as np

from autoshard.solver.problem import Edge, Problem
from autoshard.solver.searches.exact.mini_buckets import MiniBuckets, smallest_tables_first
from autoshard.solver.searches.partitioning.option_lines import option_lines, representatives
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.search_run import SearchRun

LEVEL_ENTRIES = 1 << 14  # of a table of a level, in which each node has two options


def tofu(problem: Problem, run: SearchRun) -> None:
    """Rounds of bisection, the first along the lines in which options differ most."""
    at = Position(problem, run)
    for turn in run.rounds():
        strays = run.rng.random() ** 2 if turn else 0.0
        intervals = option_lines(at, is_random=turn > 0)
        while max(map(len, intervals)) > 1:
            halves = [[part for part in np.array_split(own, 2) if len(part)] for own in intervals]
            is_stray = run.rng.random(len(halves)) < strays
            sides = np.where(is_stray, run.rng.integers(list(map(len, halves))), _best_sides(at, problem, halves))
            intervals = [own[side] for own, side in zip(halves, sides, strict=True)]
        at.start(representatives(at, intervals))
        at.adjust_prices()
        at.repair()
        at.offer()
        if turn:
            at.settle()


def _best_sides(at: Position, problem: Problem, halves: list[list[np.ndarray]]) -> list[int]:
    """Which half each node takes, if each half stands for its best option."""
    most = max(map(len, halves))
    stand_ins = [representatives(at, [own[min(side, len(own) - 1)] for own in halves]) for side in range(most)]
    options = [np.array([stand_ins[side][node] for side in range(len(own))]) for node, own in enumerate(halves)]
    paid = np.append(0.0, np.cumsum(at.prices))
    costs = [at.costs[node][own] for node, own in enumerate(options)]
    for node, own in enumerate(options):
        for start, end, usage in at.lives[node]:
            costs[node] = costs[node] + (paid[end] - paid[start]) * usage[own]
    edges = tuple(
        Edge(other, node, table[np.ix_(options[other], options[node])])
        for node, tables in enumerate(at.tables)
        for other, table in tables.items()
        if other < node
    )
    level = Problem(tuple(costs), edges, (), None, checked=True)
    order = smallest_tables_first(level, np.zeros(len(costs)), LEVEL_ENTRIES)
    return MiniBuckets(level, costs, order, LEVEL_ENTRIES, at.run).first_choice()
