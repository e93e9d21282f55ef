"""A group and a mesh in, every way to split the group out.

A *strategy* gives each mesh axis to at most one factor of the group. If a reduced factor is split, the result is
unreduced, and the strategy also says how each axis finishes it: by an all_reduce, or by a reduce_scatter onto a dim.
Nothing here knows of data, tensor or expert parallelism: they are what comes out when strategies are priced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.layout import Layout, MeshShape, in_mesh_order, local_shape, ordered_axes, shards
from autoshard.model.equations import folds_by_hand
from autoshard.model.groups import FactorDims, Group
from autoshard.model.xla.backends import H100, Backend
from autoshard.model.xla.scatters import merges_slices, scatters_at_once, sent_slices, stages_of
from autoshard.operations.split import CallRun
from autoshard.operations.sums import IndexGroups, Stages
from autoshard.primitives import facts_of
from autoshard.program import Value
from autoshard.propagation.halos import are_small, transfers
from autoshard.propagation.projection import layout_of_factors

ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER = "all_gather", "all_reduce", "reduce_scatter"
EXCHANGE = "collective_permute"


@dataclass(frozen=True)
class Finish:
    """One collective that turns a partial sum into the total."""

    # ALL_REDUCE, REDUCE_SCATTER, EXCHANGE of rows of padded slices, or ALL_GATHER of candidates from which each device
    # picks.
    kind: str
    axes: tuple[str, ...]
    output: int  # which of the group's outputs
    elements: int  # of the collective's result on one device
    groups: IndexGroups | None = None  # of devices along its one axis that communicate; None: all devices do

    def devices(self, mesh: MeshShape) -> int:
        """How many devices communicate with each other."""
        return len(self.groups[0]) if self.groups else shards(self.axes, mesh)


@dataclass(frozen=True)
class Halo:
    """One collective_permute of rows that a device reads beyond its shard."""

    axes: tuple[str, ...]
    use: int  # index among the uses of the group
    elements: int  # on one device
    rows: tuple  # which rows; equal for the same rows of the same array
    readers: int = 1  # groups that need the same rows; each pays its part


@dataclass(frozen=True)
class Strategy:
    """One way to split a group."""

    assignment: tuple[tuple[int, tuple[str, ...]], ...]  # factor -> mesh axes, in mesh order; unsplit factors left out
    operand_layouts: tuple[Layout, ...]  # per use of the group
    output_layouts: tuple[Layout, ...]  # per output of the group
    finishes: tuple[Finish, ...]
    halos: tuple[Halo, ...] = ()
    run: CallRun | None = None  # of a call of an operation: its implementation on shards

    @cached_property
    def axes(self) -> dict[int, tuple[str, ...]]:
        return dict(self.assignment)


Choices = Callable[[Group, Sequence[str], Sequence[int]], Iterable[tuple[int | None, ...]]]


def every_choice(_: Group, axes: Sequence[str], factors: Sequence[int]) -> Iterable[tuple[int | None, ...]]:
    """Per axis the factor that it splits, or None: all combinations."""
    return itertools.product([None, *factors], repeat=len(axes))


def strategies_of(
    group: Group, mesh: MeshShape, backend: Backend = H100, choices: Choices = every_choice
) -> list[Strategy]:
    """Every strategy of `group`, or those that are offered; the first splits nothing.

    Strategies come in a fixed order. Of those with the same layouts at the same cost the first is kept.
    """
    unique: dict[tuple, Strategy] = {}
    for assignment in _assignments(group, mesh, choices):
        wants = _layouts([use.dims for use in group.uses], assignment, group, mesh)
        makes = _layouts([made.dims for made in group.outputs], assignment, group, mesh)
        if wants is None or makes is None:
            continue
        frozen = tuple(sorted(assignment.items()))
        halos = _halos(group, wants, assignment, mesh)
        for finished, finishes in _finishes(group, makes, assignment, mesh, backend):
            strategy = Strategy(frozen, wants, finished, finishes, halos)
            unique.setdefault((frozen, wants, finished, finishes), strategy)
    return list(unique.values())


def unsummed_key(group: Group) -> tuple | None:
    """Equal for groups with the same strategies; None if these depend on sums or halos, too."""
    if group.reduction or group.reaches or facts_of(group.equations[0].primitive).from_one_device:
        return None
    shapes = tuple((use.value.shape, use.dims) for use in group.uses)
    made = tuple((one.value.shape, one.dims) for one in group.outputs)
    given = tuple(group.given.items()), group.open_axes
    return shapes, made, tuple(group.sizes.items()), group.splittable, *given


def _assignments(group: Group, mesh: MeshShape, choices: Choices) -> Iterator[dict[int, tuple[str, ...]]]:
    given = group.given_on(mesh)
    taken = {axis for axes in given.values() for axis in axes}
    left = [axis for axis in mesh if axis not in taken and (axis in group.open_axes or not group.open_axes)]
    factors = sorted(group.splittable if group.open_axes else group.splittable - given.keys())
    if group.reaches and _is_shared_out(group, mesh):
        factors = [factor for factor in factors if factor not in group.windows]
    for choice in choices(group, left, factors):
        assignment = {factor: axes for factor, axes in given.items() if axes}
        for axis, factor in zip(left, choice, strict=True):
            if factor is not None:
                assignment[factor] = (*assignment.get(factor, ()), axis)
        if all(group.sizes[factor] % shards(axes, mesh) == 0 for factor, axes in assignment.items()) and (
            not group.reaches or _has_small_halos(group, assignment, mesh)
        ):
            yield assignment


def _is_shared_out(group: Group, mesh: MeshShape) -> bool:
    """Whether all axes can split the samples: then no device needs a halo."""
    return group.batch_factor is not None and group.sizes[group.batch_factor] % math.prod(mesh.values()) == 0


def _has_small_halos(group: Group, assignment: Mapping[int, tuple[str, ...]], mesh: MeshShape) -> bool:
    shapes = [value.shape for value in group.equations[0].inputs]
    return are_small(group.reaches, shapes, {factor: shards(axes, mesh) for factor, axes in assignment.items()})


def _halos(group: Group, wants, assignment: Mapping[int, tuple[str, ...]], mesh: MeshShape) -> tuple[Halo, ...]:
    """The halos that devices exchange before the group runs."""
    if group.windows.isdisjoint(assignment):
        return ()
    (equation,) = group.equations
    use_of = [group.use_of(operand) for operand in range(len(equation.inputs))]
    shapes = [
        value.shape if use is None else local_shape(value.shape, wants[use], mesh)
        for value, use in zip(equation.inputs, use_of, strict=True)
    ]
    moved = transfers(group.reaches, shapes, assignment, mesh)
    return tuple(Halo(one.axes, use_of[one.operand] or 0, one.elements, one.rows, one.readers) for one in moved)


def _layouts(tensors: list[FactorDims], assignment, group: Group, mesh: MeshShape) -> tuple[Layout, ...] | None:
    """The layouts of the tensors under an assignment; None if no PartitionSpec in mesh order expresses one of them."""
    layouts = []
    for dims in tensors:
        layout = layout_of_factors(dims, assignment, group.sizes, mesh)
        if layout is None or not in_mesh_order(layout, mesh):
            return None
        layouts.append(layout)
    return tuple(layouts)


def _finishes(group: Group, makes, assignment, mesh: MeshShape, backend: Backend) -> Iterator[tuple]:
    """The ways to finish unreduced results: (layouts, collectives) pairs.

    Results are reduced factor by factor. A reduce_scatter can take the place of one all_reduce, if it scatters over all
    the axes of that factor, on one dim. Where we run the reduce_scatter ourselves it comes first, so that only slices
    are left to all_reduce. XLA makes it of an all_reduce and a slice, and so reduces the whole each time.
    """
    partial = [(factor, assignment[factor]) for factor in sorted(group.reduction) if factor in assignment]
    summed = {factor for factor, _ in partial}
    is_known = any(0 in use.value.shape and summed & _factors_in(use.dims) for use in group.uses)  # sums without terms
    if not partial or is_known or all(0 in made.value.shape for made in group.outputs):
        yield makes, _results_from_one_device(group, mesh)
        return
    elements = [
        math.prod(local_shape(made.value.shape, layout, mesh))
        for made, layout in zip(group.outputs, makes, strict=True)
    ]
    if group.gathers_per_output:
        found = [i for i in range(len(group.outputs)) for _ in range(group.gathers_per_output)]
        gathers = [axes for _, axes in partial]
        if folds_by_hand(group.equations[0]):  # over all of them at once
            gathers = [_joined(gathers, mesh)]
        yield (
            makes,
            tuple(Finish(ALL_GATHER, axes, i, elements[i] * shards(axes, mesh)) for axes in gathers for i in found),
        )
        return
    at_once = partial
    if not group.windows.isdisjoint(assignment):  # run on shards: over the axes of all factors at once
        at_once = [(partial[0][0], _joined([axes for _, axes in partial], mesh))]
    yield (
        makes,
        tuple(
            Finish(ALL_REDUCE, axes, i, elements[i])
            for factor, axes in at_once
            for i, made in enumerate(group.outputs)
            if factor not in _factors_in(made.dims)  # others have one part of their results each
        ),
    )
    by_hand = group.sums_locally(assignment)
    if len(group.outputs) != 1 or not (by_hand or backend.scatters.from_all_reduces):
        return
    (layout,), (local,), made = makes, elements, group.outputs[0].value
    if not local:
        return
    for scattered_factor, axes in partial:
        if not by_hand and not scatters_at_once(axes, mesh, backend):
            continue
        stages = stages_of(axes, mesh, backend) if by_hand else ((axes, None),)
        for dim in range(len(made.shape)):
            scattered = _scattered(layout, dim, made, stages, mesh, backend)
            if scattered is None:
                continue
            sliced, finishes = scattered
            others = [other for factor, other in partial if factor != scattered_factor]
            if by_hand:
                slice_ = local // shards(axes, mesh)
                yield (sliced,), (*finishes, *(Finish(ALL_REDUCE, other, 0, slice_) for other in others))
            else:
                yield (sliced,), (*(Finish(ALL_REDUCE, other, 0, local) for other in others), *finishes)
        if by_hand and backend.scatters.over_some_axes:
            others = [other for factor, other in partial if factor != scattered_factor]
            yield from _sequences(layout, axes, others, local, made, mesh, backend)


def _joined(parts: Iterable[tuple[str, ...]], mesh: MeshShape) -> tuple[str, ...]:
    """All the axes of some parts, in mesh order."""
    return ordered_axes(set(itertools.chain(*parts)), mesh)


def _factors_in(dims: FactorDims) -> set[int]:
    """The factors of any dim."""
    return {factor for dim in dims for factor in dim}


def _results_from_one_device(group: Group, mesh: MeshShape) -> tuple[Finish, ...]:
    """The all_reduces that hand all devices the results of one device, as those of a callback."""
    (first, *_) = group.equations
    axes = tuple(axis for axis, devices in mesh.items() if devices > 1)
    if not facts_of(first.primitive).from_one_device or not axes:
        return ()
    sizes = (math.prod(made.value.shape) for made in group.outputs)
    return tuple(Finish(ALL_REDUCE, axes, i, elements) for i, elements in enumerate(sizes) if elements)


def _sequences(
    layout: Layout,
    axes: tuple[str, ...],
    others: list[tuple[str, ...]],
    local: int,
    made: Value,
    mesh: MeshShape,
    backend: Backend,
) -> Iterator[tuple]:
    """Sums that are reduce_scattered over some of their axes, then all_reduced over the rest: fewer bytes go over
    the rest, if that is a slow link, and each group of devices along the first ones has the whole sum.

    A compiler without reduce_scatters all_reduces the whole over the first axes.
    """
    for count in range(1, len(axes)):
        for inside in itertools.combinations(axes, count):
            outside = tuple(axis for axis in axes if axis not in inside)
            stages = stages_of(inside, mesh, backend)
            for dim in range(len(made.shape)):
                scattered = _scattered(layout, dim, made, stages, mesh, backend)
                if scattered is not None:
                    sliced, finishes = scattered
                    if not (backend.scatters.by_hand or backend.scatters.from_all_reduces):
                        finishes = [Finish(ALL_REDUCE, inside, 0, local)]  # each device keeps a slice of the total
                    slice_ = local // shards(inside, mesh)
                    reduced = (Finish(ALL_REDUCE, other, 0, slice_) for other in (outside, *others))
                    yield (sliced,), (*finishes, *reduced)


def merged_with_slice(
    made: Value, finish: Finish, layout: Layout, want: Layout, mesh: MeshShape, backend: Backend
) -> list[Finish]:
    """What XLA runs of a collective if all that read the sum want a slice of it: an all_reduce may be scattered.

    Args:
        made: the sum.
        finish: how it is finished.
        layout: how it lies then.
        want: how all read it.
    """
    if finish.kind == ALL_REDUCE and merges_slices(finish.axes, made.dtype, mesh, backend):
        for dim in range(len(made.shape)):
            scattered = _scattered(layout, dim, made, ((finish.axes, None),), mesh, backend)
            if scattered is not None and scattered[0] == want:
                return scattered[1]
    return [finish]


def _scattered(
    layout: Layout, dim: int, made: Value, stages: Stages, mesh: MeshShape, backend: Backend
) -> tuple[Layout, list[Finish]] | None:
    """`layout` with the axes of some stages appended to a dim, and the collectives of a sum that is scattered so.

    None if the layout would be uneven or out of mesh order, or if XLA would all_reduce the sum.
    """
    dims = list(layout)
    dims[dim] += ordered_axes({axis for axes, _ in stages for axis in axes}, mesh)
    sliced = tuple(dims)
    if made.shape[dim] % shards(dims[dim], mesh) or not in_mesh_order(sliced, mesh):
        return None
    sizes = [len(groups[0]) if groups else shards(axes, mesh) for axes, groups in stages]
    sent = sent_slices(local_shape(made.shape, layout, mesh), dim, sizes, made.dtype, backend)
    if sent is None:
        return None
    finishes = []
    for (axes, groups), one in zip(stages, sent, strict=True):
        finishes.append(Finish(REDUCE_SCATTER, axes, 0, one.elements, groups))
        if one.exchanged:
            finishes.append(Finish(EXCHANGE, axes, 0, one.exchanged, groups))
    return sliced, finishes
