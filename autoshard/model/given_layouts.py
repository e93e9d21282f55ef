"""A formulation and the layout of every value in, the cheapest choice that leaves values so out. Nothing is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.errors import SolverError
from autoshard.layout import Layout, without_idle_axes
from autoshard.model.formulation import Formulation
from autoshard.solver.problem import Solution
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.solve import solve
from autoshard.solver.verify import verify

_TIME_LIMIT = 20.0  # s; with the layouts given, little is left to choose
_TIE = 1e-18  # s per byte held: of choices that take equally long, the one that holds less


def as_propagated(formulation: Formulation, layouts: Mapping[int, Layout]) -> Solution:
    """The solution of a step whose values lie as `layouts` (value id -> layout) say.

    Operands are read as they lie, if the results then lie as they should. A group that cannot leave its results so is
    free to do its best. The solution claims no bound, since it was not searched for among all shardings.
    """
    given = {value: without_idle_axes(layout, formulation.mesh) for value, layout in layouts.items()}
    costs = [costs.copy() for costs in formulation.problem.costs]
    for live in formulation.problem.lives:
        costs[live.node] += _TIE * live.usage
    free = replace(formulation.problem, costs=tuple(costs), limit=None, lives=())
    allowed = {}
    for group, priced in zip(formulation.groups, formulation.priced, strict=True):
        ends = [given.get(made.value.id) for made in group.made]
        fitting = [option for option, strategy in enumerate(priced.strategies) if _agree(ends, strategy.leaves)]
        reads = [given.get(use.value.id) for use in group.uses]
        as_they_lie = [  # as XLA does: it moves no operand where it can work on it as it lies
            option for option in fitting if _agree(reads, priced.strategies[option].wants)
        ]
        if fitting and not group.fills:
            allowed[formulation.group_node(group)] = as_they_lie or fitting
    try:
        solution = solve(free.restrict(allowed), budget=Budget.of(_TIME_LIMIT))
    except SolverError:  # some value would have to be resharded in a way that no strategy has
        solution = solve(free, budget=Budget.of(_TIME_LIMIT))
    cost, _ = verify(formulation.problem, solution.choice)
    return replace(solution, cost=cost, bound=0.0, status="feasible")


def _agree(given: Sequence[Layout | None], found: Sequence[Layout]) -> bool:
    return all(layout is None or layout == other for layout, other in zip(given, found, strict=True))
