"""Automap's search: Monte Carlo tree search over the decisions that matter most, and propagation for the rest.

Schaarschmidt et al., "Automap: Towards ergonomic automated parallelism for ML models", 2021, sections 2 and 3.

Kept: few decisions, those on the nodes with the most at stake, stand in the tree; all else follows from them.
Different: a learned filter picks Automap's nodes; here it is what their costs differ by. Options have priors, since a
node has up to a hundred of them. What follows is the cheapest option beside what is decided.
"""

from __future__ import annotations

from autoshard.solver.problem import Problem
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.sampling.tree_search import search_tree
from autoshard.solver.searches.search_run import SearchRun

NOISE = 1.0  # of the logarithm of what is at stake, in further orders


def automap(problem: Problem, run: SearchRun) -> None:
    """Trees over single nodes, in other orders each time."""
    at = Position(problem, run)
    for turn in run.rounds():
        search_tree(at, [[node] for node in at.by_stake(NOISE if turn else 0.0)], run, turn)
