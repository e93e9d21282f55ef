"""From mesh axes per factor to the layout of one tensor, and back.

A compound dim ``(h k)`` is split along ``h`` first. Its minor factor ``k`` can be split only where every ``h`` stands
on a device of its own, because a layout has no strides.

>>> mesh, sizes = {"x": 4, "y": 2}, {"h": 4, "k": 16}
>>> layout_of_factors((("h", "k"),), {"h": ("x",), "k": ("y",)}, sizes, mesh)
(('x', 'y'),)
>>> layout_of_factors((("h", "k"),), {"k": ("y",)}, sizes, mesh) is None
True
>>> factors_of_layout((("h", "k"),), (("x", "y"),), sizes, mesh)
{'h': ('x',), 'k': ('y',)}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from autoshard.layout import Layout, MeshShape, shards
from autoshard.propagation.rule import Dims

Factor = TypeVar("Factor", str, int)  # a rule's have names, those of a group numbers


def layout_of_factors(
    dims: Sequence[Sequence[Factor]],
    assignment: Mapping[Factor, tuple[str, ...]],
    sizes: Mapping[Factor, int],
    mesh: MeshShape,
) -> Layout | None:
    """The layout of a tensor whose factors are split over these axes; None where no layout says so.

    Args:
        dims: the tensor's dims in a rule.
        assignment: factor -> the axes that split it, major to minor; each axis splits one factor.
        sizes: factor -> size.
        mesh: axis -> devices.
    """
    layout = []
    for dim in dims:
        if len(dim) == 1:  # nearly all dims: kept free of the bookkeeping below
            axes = assignment.get(dim[0], ())
            if axes and sizes[dim[0]] % shards(axes, mesh):
                return None
            layout.append(axes)
            continue
        split: tuple[str, ...] = ()
        major_is_whole = False
        for factor in dim:
            axes = assignment.get(factor, ())
            if axes and major_is_whole:
                return None
            pieces = shards(axes, mesh)
            if sizes[factor] % pieces:
                return None
            split += axes
            major_is_whole = major_is_whole or pieces < sizes[factor]
        layout.append(split)
    return tuple(layout)


def factors_of_layout(
    dims: Dims, layout: Layout, sizes: Mapping[str, int], mesh: MeshShape
) -> dict[str, tuple[str, ...]]:
    """The axes of every split factor of a tensor that lies so; the way back from `layout_of_factors`.

    The axes of a compound dim go to its factors, major first. Each factor takes the axes that fill it, and the last
    factor takes all the rest. If an axis would have to be cut to fit a factor, this axis and all after it are left out.
    """
    assignment: dict[str, tuple[str, ...]] = {}
    for dim, axes in zip(dims, layout, strict=True):
        if not axes or not dim:
            continue
        if len(dim) == 1:
            assignment[dim[0]] = axes
            continue
        for factor in dim[:-1]:
            taken, room = 0, sizes[factor]
            while taken < len(axes) and room % mesh[axes[taken]] == 0:
                room //= mesh[axes[taken]]
                taken += 1
            if taken:
                assignment[factor] = axes[:taken]
            axes = axes[taken:] if room == 1 else ()
        if axes:
            assignment[dim[-1]] = axes
    return assignment
