"""A formulation and how every value is left and read in, the choice that does so out. Nothing is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.errors import SolverError
from autoshard.layout import Layout
from autoshard.model.formulation import Formulation
from autoshard.model.groups import Group
from autoshard.model.option_sets.option_set import OptionSet, Partition
from autoshard.model.strategies import Strategy
from autoshard.solver.problem import Solution
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.solve import solve
from autoshard.solver.verify import verify

_CHOICE_SECONDS = 20.0  # s, the limit of the search; few choices remain once layouts are given, so it ends far sooner
_TIE_BREAK = 1e-18  # s per byte held, so that of two choices that are equally fast the one that holds less is taken

Wants = Mapping[tuple[int, int], Layout]  # (equation, operand) -> the layout it is read in


@dataclass(frozen=True, eq=False)
class GivenLayouts(OptionSet):
    """Of each group the strategies that `as_given` chooses among, so that no others are priced."""

    partitions: tuple[Partition, ...] = ()
    layouts: Mapping[int, Layout] = field(default_factory=dict)  # value id -> how it is left
    wants: Wants = field(default_factory=dict)

    @property
    def has_every_split(self) -> bool:
        return True

    def fitting(self, group: Group, strategies: Sequence[Strategy]) -> Sequence[int] | None:
        return None if group.is_fill else _nearest(group, strategies, self.layouts, self.wants) or None

    def of_argument(self, index: int, homes: Sequence[Layout], axes: Sequence[str]) -> list[Layout]:
        return list(homes)

    def key(self, group: Group) -> Any:
        return group.is_fill, *_given_for(group, self.layouts, self.wants)


def as_given(formulation: Formulation, layouts: Mapping[int, Layout], wants: Wants) -> Solution:
    """The solution of a step whose values are left and read as said.

    A group that cannot do so does what is nearest: it leaves its results so, or else is free to do its best. The
    solution claims no bound, since it was not searched for among all shardings.

    Args:
        layouts: value id -> how it is left.
        wants: how operands are read.
    """
    costs = [costs.copy() for costs in formulation.problem.costs]
    for live in formulation.problem.lives:
        costs[live.node] += _TIE_BREAK * live.usage
    free = replace(formulation.problem, costs=tuple(costs), limit=None, lives=())
    allowed = {}
    for group, priced in zip(formulation.groups, formulation.priced, strict=True):
        options = _nearest(group, priced.strategies, layouts, wants)
        if options and not group.is_fill:
            allowed[formulation.group_node(group)] = options
    try:
        solution = solve(free.restrict(allowed), budget=Budget.of(_CHOICE_SECONDS))
    except SolverError:  # some value would have to be resharded in a way that no strategy has
        solution = solve(free, budget=Budget.of(_CHOICE_SECONDS))
    cost, _ = verify(formulation.problem, solution.choice)
    return replace(solution, cost=cost, bound=0.0, status="feasible")


def _given_for(
    group: Group, layouts: Mapping[int, Layout], wants: Wants
) -> tuple[tuple[Layout | None, ...], tuple[Layout | None, ...]]:
    """How the results of a group are left and its operands read; None where nothing is given."""
    ends = tuple(layouts.get(made.value.id) for made in group.outputs)
    return ends, tuple(wants.get((use.equation.index, use.operand)) for use in group.uses)


def _nearest(group: Group, strategies: Sequence[Strategy], layouts: Mapping[int, Layout], wants: Wants) -> list[int]:
    """The strategies that leave all results as said, and of these those that read the most operands so."""
    ends, reads = _given_for(group, layouts, wants)
    fitting = [i for i, one in enumerate(strategies) if _agreeing(ends, one.output_layouts) == len(ends)]
    count = {i: _agreeing(reads, strategies[i].operand_layouts) for i in fitting}
    return [i for i in fitting if count[i] == max(count.values())]


def _agreeing(given: Sequence[Layout | None], found: tuple[Layout, ...]) -> int:
    return sum(layout is None or layout == other for layout, other in zip(given, found, strict=True))
