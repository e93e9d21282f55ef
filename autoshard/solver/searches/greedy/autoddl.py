"""AutoDDL's search: coordinate descent, next to a bound on what any choice must pay.

Chen, Li, Gao, Chen and Hoefler, "AutoDDL: Automatic distributed deep learning with near-optimal bandwidth cost", TPDS
2024, section 4.

Kept: the layers change one at a time to their best layouts given all others, until none changes, from several starts;
what is found is held against a lower bound. Different: AutoDDL's bounds are formulas for single layers. Here the bound
is that of a dynamic program whose large tables are split (`exact/mini_buckets.py`), which holds for any problem.
"""

from __future__ import annotations

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.searches.exact.mini_buckets import MiniBuckets, smallest_tables_first
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.search_run import SearchRun

BOUND_ENTRIES = 1 << 16  # of a table of the bound


def autoddl(problem: Problem, run: SearchRun) -> None:
    """Coordinate descent from the cheapest options, and then from random ones."""
    at = Position(problem, run)
    for turn in run.rounds():
        if turn == 1:
            order = smallest_tables_first(problem, np.zeros(len(at.sizes)), BOUND_ENTRIES)
            run.prove(MiniBuckets(problem, problem.costs, order, BOUND_ENTRIES, run).bound)
        if turn:
            at.start(at.random_choice())
        at.repair()
        at.settle()
