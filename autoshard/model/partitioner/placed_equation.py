"""An equation and how its arrays lie: what a split of it would make and move."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.layout import Layout, MeshShape, local_shape
from autoshard.mesh.resharding import reshard
from autoshard.program import Equation, Value
from autoshard.propagation.projection import factors_of_layout, layout_of_factors
from autoshard.propagation.rule import Dims, Rule

Split = Mapping[str, tuple[str, ...]]  # factor -> the mesh axes that split it


@dataclass(frozen=True)
class SettledSplit:
    """How an equation is split, and what of it was settled last."""

    split: Split
    inner_axes: frozenset[str] = frozenset()  # settled for each of the pieces that the other axes make


@dataclass(frozen=True)
class PlacedTensor:
    """One operand or result of an equation."""

    shape: tuple[int, ...]
    itemsize: int  # bytes per element
    dims: Dims  # in the factors of the rule
    layout: Layout

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def local_bytes(self, mesh: Mapping[str, int], layout: Layout | None = None) -> int:
        """On one device, in its own layout or another one."""
        return math.prod(local_shape(self.shape, layout or self.layout, mesh)) * self.itemsize


@dataclass(frozen=True)
class PlacedEquation:
    """An equation whose operands lie somewhere, and whose results are to."""

    rule: Rule
    operands: tuple[PlacedTensor, ...]  # arrays alone, no literals
    results: tuple[PlacedTensor, ...]
    mesh: MeshShape

    @classmethod
    def of(
        cls,
        equation: Equation,
        rule: Rule,
        operands: Sequence[Layout | None],
        results: Sequence[Layout],
        mesh: MeshShape,
    ) -> PlacedEquation:
        """
        Args:
            operands: how they lie; None for literals.
            results: how they are to lie.
        """
        read = (
            PlacedTensor(x.shape, x.itemsize, dims, layout)
            for x, dims, layout in zip(equation.inputs, rule.operands, operands, strict=True)
            if isinstance(x, Value) and layout is not None
        )
        made = (
            PlacedTensor(x.shape, x.itemsize, dims, layout)
            for x, dims, layout in zip(equation.outputs, rule.results, results, strict=True)
        )
        return cls(rule, tuple(read), tuple(made), mesh)

    @property
    def tensors(self) -> tuple[PlacedTensor, ...]:
        return (*self.operands, *self.results)

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """How each tensor is split, factor by factor."""
        return tuple(factors_of_layout(one.dims, one.layout, self.rule.sizes, self.mesh) for one in self.tensors)

    def has_layouts(self, split: Split) -> bool:
        """Whether every operand and result has a layout in which it is split so."""
        return all(layout_of_factors(one.dims, split, self.rule.sizes, self.mesh) is not None for one in self.tensors)

    def cost(self, split: Split) -> tuple[float, float]:
        """Bytes that are made and bytes that are moved on one device, if the equation is split so."""
        made = moved = 0.0
        partial = not self.rule.reduction.isdisjoint(split)
        for i, tensor in enumerate(self.tensors):
            found = layout_of_factors(tensor.dims, split, self.rule.sizes, self.mesh)
            if found is None:
                return math.inf, math.inf
            source, target = tensor.layout, found
            if i >= len(self.operands):
                source, target = found, tensor.layout
                whole = tensor.local_bytes(self.mesh, found)
                made += whole * (1 + partial)
                moved += whole * partial
            if source != target:
                steps = reshard(tensor.shape, tensor.itemsize, source, target, self.mesh)
                moved += sum(step.bytes for step in steps)
                made += sum(step.bytes for step in steps[:-1]) + tensor.local_bytes(self.mesh, target)
        return made, moved
