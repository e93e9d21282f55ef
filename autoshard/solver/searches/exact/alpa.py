"""Alpa's search within an operator: the integer program.

Zheng et al., "Alpa: Automating inter- and intra-operator parallelism for distributed deep learning", OSDI 2022,
section 4.2.

Kept: one binary variable per option, the cost of an edge linearised, one solve of the whole. Different: Alpa has no
memory limit within a stage; here memory is one row per pressure point, and rows come in as solutions violate them. The
solver is HiGHS, the program that of `exact/integer_program.py`. It starts from a choice that descent has made fit, and
its bound is proven.
"""

from __future__ import annotations

import math

from autoshard.solver.problem import Problem
from autoshard.solver.run import NoChoice
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.search_run import SearchRun


def alpa(problem: Problem, run: SearchRun) -> None:
    """One integer program over all nodes.

    Raises:
        NoChoice: nothing fits.
    """
    at = Position(problem, run)
    at.repair()
    at.settle()
    run.verify()
    programs = run.run.load_programs()
    outcome = programs.cheapest(problem, run.choice, seed=run.seed, **run.run.clock.program_limits())
    if outcome.bound == math.inf:
        raise NoChoice
    if outcome.choice is not None:
        run.part.incumbent.offer(outcome.choice)
    run.prove(outcome.bound)
    if outcome.interrupted:
        raise KeyboardInterrupt
