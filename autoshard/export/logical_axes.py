"""A plan in, names for the dims of its arguments and results out, and the mesh axes that split each name.

Dims have one name if the program ties them together: if they are one factor of some operation, as the columns of one
weight and the rows of the next. Dims that are tied and yet split in two ways get two names.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.program import Program, Value
from autoshard.propagation import rules_for

Names = tuple[str | None, ...]  # per dim of an array; None: a whole dim that needs no name
_Dim = tuple[int, int]  # value or place of an array, dim


@dataclass(frozen=True)
class LogicalAxes:
    """Names of dims, and how each name is split."""

    rules: Mapping[str, tuple[str, ...]]  # name -> mesh axes; () is whole
    arguments: tuple[Names, ...]
    results: tuple[Names, ...]


def logical_axes(plan: PlanData, program: Program | None) -> LogicalAxes:
    """Names for the dims of arguments and results.

    Args:
        plan: whose layouts they name.
        program: that was planned; None: dims are not known to be tied, and each has a name of its own.
    """
    ties = _Ties() if program is None else _Ties.of(program)
    arrays = [*plan.arguments, *plan.results]
    values = [None] * len(arrays) if program is None else [*program.own_arguments, *program.results]
    dims = [[_dim(ties, values[i], i, dim) for dim in range(len(array.shape))] for i, array in enumerate(arrays)]
    arriving = {i for i in range(len(plan.arguments)) if i not in plan.carried}
    stems = dict(_stems(arrays, dims, arriving))
    split: dict[_Dim, dict[tuple[str, ...], None]] = defaultdict(dict)
    for array, ours in zip(arrays, dims, strict=True):
        for root, axes in zip(ours, array.layout, strict=True):
            split[root][axes] = None

    def name(root: _Dim, axes: tuple[str, ...]) -> str:
        suffix = "_".join(axes) or "whole"
        return f"{stems[root]}_{suffix}" if len(split[root]) > 1 else stems[root]

    rules: dict[str, tuple[str, ...]] = {}
    found: list[Names] = []
    for array, ours in zip(arrays, dims, strict=True):
        names: list[str | None] = []
        for root, axes in zip(ours, array.layout, strict=True):
            one = name(root, axes)
            names.append(None if one in names else one)  # flax takes no name twice; the second is whole
            rules[one] = axes
        found.append(tuple(names))
    count = len(plan.arguments)
    return LogicalAxes(rules, tuple(found[:count]), tuple(found[count:]))


def _stems(
    arrays: Sequence[PlacedArray], dims: Sequence[Sequence[_Dim]], arriving: set[int]
) -> Iterator[tuple[_Dim, str]]:
    """A name for each set of dims: "batch", or the first array and dim in it."""
    seen: dict[_Dim, str] = {}
    taken: set[str] = set()
    for i in [*sorted(arriving), *range(len(arrays))]:
        for dim, root in enumerate(dims[i]):
            if root in seen:
                continue
            key = arrays[i].name.split("/")[-1]
            first = "batch" if i in arriving and dim == 0 else f"{key}_{dim}"
            numbered = (f"{first}_{number}" for number in itertools.count(2))
            stem = next(name for name in itertools.chain([first], numbered) if name not in taken)
            taken.add(stem)
            seen[root] = stem
            yield root, stem


def _dim(ties: _Ties, value: Value | np.ndarray | None, place: int, dim: int) -> _Dim:
    """The set of dims that a dim belongs to; places of arrays without a value count below 0."""
    return ties.root((value.id, dim)) if isinstance(value, Value) else (-1 - place, dim)


class _Ties:
    """Sets of dims that are tied together."""

    def __init__(self) -> None:
        self.above: dict[_Dim, _Dim] = {}

    @classmethod
    def of(cls, program: Program) -> _Ties:
        ties = cls()
        for equation, rule in zip(program.equations, rules_for(program), strict=True):
            first: dict[str, _Dim] = {}
            values = [*equation.inputs, *equation.outputs]
            for value, dims in zip(values, [*rule.operands, *rule.results], strict=True):
                for dim, factors in enumerate(dims):
                    if isinstance(value, Value) and len(factors) == 1:
                        ties.tie((value.id, dim), first.setdefault(factors[0], (value.id, dim)))
        return ties

    def root(self, dim: _Dim) -> _Dim:
        while (above := self.above.get(dim, dim)) != dim:
            self.above[dim] = self.above.get(above, above)
            dim = above
        return dim

    def tie(self, some: _Dim, other: _Dim) -> None:
        self.above[self.root(some)] = self.root(other)
