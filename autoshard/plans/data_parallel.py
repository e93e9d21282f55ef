"""A formulation and what a search found in it in, nothing dearer than data parallelism out, however short the search.

A search that the clock ends may still hold the first options that it tried. Data parallelism leaves few options open,
so that its cheapest choice is found in a fraction of a second. The solution is that, where it fits and costs less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoshard.errors import SolverError
from autoshard.layout import Layout
from autoshard.model.formulation import Formulation
from autoshard.model.search_policy import CLOSE_GAP
from autoshard.plans.alternatives import data_parallel_problem
from autoshard.plans.chosen_options import prediction_of
from autoshard.plans.limited_overlap import at_its_price
from autoshard.solver import solve
from autoshard.solver.problem import Problem, Solution, UndecidedError
from autoshard.solver.solve import with_bound
from autoshard.solver.verify import fits

SECONDS_AT_MOST = 2.0  # s, which the search for data parallelism may take past the time limit; it takes 0.1 s


def no_dearer_than_data_parallel(
    formulation: Formulation, search: Callable[[], Solution], limit: float, gap: float = 0.0
) -> Solution:
    """What a search finds, or the cheapest data parallel choice, if that costs less and fits.

    Args:
        search: returns a solution at its price.
        limit: the most bytes that a choice may hold, reshardings included.
        gap: relative, at which the search is to end. A solution so near its bound is taken as it is.

    Raises:
        UndecidedError: the search found nothing in time, and no data parallel choice fits.
    """
    try:
        found = search()
    except UndecidedError:
        if (plain := _data_parallel(formulation, limit)) is None:
            raise
        return plain
    if found.gap <= max(gap, CLOSE_GAP):
        return found
    plain = _data_parallel(formulation, limit)
    return found if plain is None or plain.cost >= found.cost else with_bound(plain, found.bound)


def _data_parallel(formulation: Formulation, limit: float) -> Solution | None:
    """The cheapest data parallel choice with nothing proven of others; None if none is found that fits."""
    problem = data_parallel_problem(formulation)
    if problem is None:
        return None
    small, options = _allowed(problem.restrict(_copies_in_a_row(formulation)))
    try:
        solution = solve(small, time_limit=SECONDS_AT_MOST)
    except SolverError:
        return None
    choice = tuple(int(kept[option]) for kept, option in zip(options, solution.choice, strict=True))
    if not fits(formulation.accepted_peak(choice), limit):
        return None
    return at_its_price(with_bound(replace(solution, choice=choice), 0.0), prediction_of(formulation, choice))


def _copies_in_a_row(formulation: Formulation) -> dict[int, list[int]]:
    """Node of a copy that several groups read -> its options that split one dim at most, over axes in mesh order.

    Data parallel work reads and makes no other. Of all options in the problem most are such copies.
    """
    order = {axis: i for i, axis in enumerate(formulation.mesh)}

    def in_a_row(layout: Layout) -> bool:
        split = [axes for axes in layout if axes]
        return not split or (len(split) == 1 and split[0] == tuple(sorted(split[0], key=order.__getitem__)))

    return {
        shared.node: [option for option, layout in enumerate(shared.layouts) if in_a_row(layout)]
        for shared in formulation.shared.values()
    }


def _allowed(problem: Problem) -> tuple[Problem, list[np.ndarray]]:
    """The problem without memory and forbidden options, and the number that each option left has in the whole."""
    options = [np.flatnonzero(np.isfinite(costs)) for costs in problem.costs]
    costs = tuple(costs[kept] for costs, kept in zip(problem.costs, options, strict=True))
    edges = tuple(replace(edge, costs=edge.costs[np.ix_(options[edge.i], options[edge.j])]) for edge in problem.edges)
    return replace(problem, costs=costs, edges=edges, lives=(), limit=None, checked=True), options
