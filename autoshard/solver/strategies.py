"""A group and a mesh in, every way to split the group out.

A *strategy* gives each mesh axis to at most one factor of the group. If a reduced factor is split, the result is
unreduced, and the strategy also says how each axis finishes it: by an all_reduce, or by a reduce_scatter onto a dim.
Nothing here knows of data, tensor or expert parallelism: they are what comes out when strategies are priced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autoshard.layout import Layout, MeshShape, in_mesh_order, local_shape, shards
from autoshard.propagation.projection import layout_of_factors
from autoshard.propagation.rule import Dims
from autoshard.solver.groups import Group

ALL_REDUCE, REDUCE_SCATTER = "all_reduce", "reduce_scatter"


@dataclass(frozen=True)
class Finish:
    """One collective that turns an unreduced result into a finished one."""

    kind: str  # ALL_REDUCE or REDUCE_SCATTER
    axes: tuple[str, ...]
    made: int  # which of the group's results
    elements: int  # of the collective's result on one device


@dataclass(frozen=True)
class Strategy:
    """One way to split a group."""

    assignment: tuple[tuple[int, tuple[str, ...]], ...]  # factor -> mesh axes, in mesh order; unsplit factors left out
    wants: tuple[Layout, ...]  # per use of the group
    leaves: tuple[Layout, ...]  # per made value
    finishes: tuple[Finish, ...]

    @cached_property
    def axes(self) -> dict[int, tuple[str, ...]]:
        return dict(self.assignment)


def strategies_of(group: Group, mesh: MeshShape) -> list[Strategy]:
    """Every strategy of `group`; the first splits nothing.

    Two strategies that want and leave the same layouts at the same cost are one: strategies come in a fixed order and
    the first is kept.
    """
    unique: dict[tuple, Strategy] = {}
    for assignment in _assignments(group, mesh):
        wants = _layouts([use.dims for use in group.uses], assignment, group, mesh)
        leaves = _layouts([made.dims for made in group.made], assignment, group, mesh)
        if wants is None or leaves is None:
            continue
        frozen = tuple(sorted(assignment.items()))
        partial = tuple(axis for axis in mesh for factor in group.reduction if axis in assignment.get(factor, ()))
        for finished, finishes in _finishes(group, leaves, partial, mesh):
            strategy = Strategy(frozen, wants, finished, finishes)
            unique.setdefault((frozen, wants, finished, finishes), strategy)
    return list(unique.values())


def _assignments(group: Group, mesh: MeshShape) -> Iterator[dict[int, tuple[str, ...]]]:
    factors = sorted(group.splittable)
    for choice in itertools.product([None, *factors], repeat=len(mesh)):
        assignment: dict[int, tuple[str, ...]] = {}
        for axis, factor in zip(mesh, choice, strict=True):
            if factor is not None:
                assignment[factor] = (*assignment.get(factor, ()), axis)
        if all(group.sizes[factor] % shards(axes, mesh) == 0 for factor, axes in assignment.items()):
            yield assignment


def _layouts(tensors: list[Dims], assignment, group: Group, mesh: MeshShape) -> tuple[Layout, ...] | None:
    """How the tensors lie when their factors are split so; None where no PartitionSpec in mesh order says it."""
    layouts = []
    for dims in tensors:
        layout = layout_of_factors(dims, assignment, group.sizes, mesh)
        if layout is None or not in_mesh_order(layout, mesh):
            return None
        layouts.append(layout)
    return tuple(layouts)


def _finishes(group: Group, leaves, partial: tuple[str, ...], mesh: MeshShape) -> Iterator[tuple]:
    """The ways to finish results that are unreduced over the axes `partial`: (layouts, collectives) pairs."""
    if not partial:
        yield leaves, ()
        return
    elements = [
        math.prod(local_shape(made.value.shape, layout, mesh)) for made, layout in zip(group.made, leaves, strict=True)
    ]
    yield leaves, tuple(Finish(ALL_REDUCE, partial, i, count) for i, count in enumerate(elements))
    if len(group.made) != 1:
        return
    (layout,), (local,), shape = leaves, elements, group.made[0].value.shape
    for targets in itertools.product([None, *range(len(shape))], repeat=len(partial)):
        scattered = _scattered(layout, partial, targets, shape, mesh)
        if scattered is None:
            continue
        scatter_axes = tuple(axis for axis, dim in zip(partial, targets, strict=True) if dim is not None)
        reduce_axes = tuple(axis for axis, dim in zip(partial, targets, strict=True) if dim is None)
        finishes = []
        remaining = local // shards(scatter_axes, mesh)
        finishes.append(Finish(REDUCE_SCATTER, scatter_axes, 0, remaining))
        if reduce_axes:
            finishes.append(Finish(ALL_REDUCE, reduce_axes, 0, remaining))
        yield (scattered,), tuple(finishes)


def _scattered(layout: Layout, axes, targets, shape, mesh: MeshShape) -> Layout | None:
    """`layout` with each axis appended to its target dim; None if nothing is scattered, or not evenly, or reordered."""
    if all(dim is None for dim in targets):
        return None
    dims = list(layout)
    for axis, dim in zip(axes, targets, strict=True):
        if dim is None:
            continue
        dims[dim] = (*dims[dim], axis)
        if shape[dim] % shards(dims[dim], mesh):
            return None
    return tuple(dims) if in_mesh_order(tuple(dims), mesh) else None
