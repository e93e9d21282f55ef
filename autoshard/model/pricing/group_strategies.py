"""A group in, its strategies and their layouts out; found once for groups that can be split alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoshard.layout import Layout, MeshShape
from autoshard.model.groups import Group
from autoshard.model.option_sets.option_set import OptionSet
from autoshard.model.pricing.memo import Memo
from autoshard.model.regions.strategies import is_call, operation_strategies
from autoshard.model.strategies import Strategy, strategies_of, unsummed_key
from autoshard.model.xla.backends import Backend

_Layouts = tuple[tuple[Layout, ...], ...]  # per use or output of a group, that of each strategy
StrategiesWithLayouts = tuple[
    tuple[Strategy, ...], _Layouts, _Layouts
]  # strategies, how operands are wanted, how results are left


class GroupStrategies:
    """The strategies of one mesh and compiler."""

    def __init__(self, mesh: MeshShape, backend: Backend, memo: Memo, of_calls: dict[int, list[Strategy]] | None):
        """
        Args:
            of_calls: of calls of operations, as `operation_strategies` knows them.
        """
        self._mesh, self._backend, self._memo, self._of_calls = mesh, backend, memo, of_calls
        self._known: dict[tuple, StrategiesWithLayouts] = {}

    def of(self, group: Group, offered: OptionSet | None = None) -> StrategiesWithLayouts:
        """The strategies of a group, or those that are offered, in time."""
        splits = None if offered is None or offered.has_every_split else offered
        if is_call(group):
            found = self._in_time(operation_strategies(group, self._mesh, splits, self._of_calls))
        elif splits is not None:
            found = self._in_time(strategies_of(group, self._mesh, self._backend, splits.choices))
        else:
            found = self._every(group)
        fitting = None if offered is None else offered.fitting(group, found[0])
        return found if fitting is None else self._with_layouts([found[0][i] for i in fitting])

    def _every(self, group: Group) -> StrategiesWithLayouts:
        key = unsummed_key(group)
        if key is None:
            return self._in_time(strategies_of(group, self._mesh, self._backend))
        if key not in self._known:
            self._known[key] = self._in_time(strategies_of(group, self._mesh, self._backend))
        return self._known[key]

    def _in_time(self, found: Iterable[Strategy]) -> StrategiesWithLayouts:
        return self._with_layouts(self._memo.in_time(found))

    def _with_layouts(self, found: Sequence[Strategy]) -> StrategiesWithLayouts:
        strategies = tuple(found)
        wants = tuple(map(self._memo.one, zip(*(one.operand_layouts for one in strategies), strict=True)))
        makes = tuple(map(self._memo.one, zip(*(one.output_layouts for one in strategies), strict=True)))
        return strategies, wants, makes
