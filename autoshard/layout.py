"""How one array lies on the mesh: the vocabulary that every stage shares.

A *layout* gives, for each dim of an array, the mesh axes that split it, major to minor; ``()`` leaves the dim whole.
It is a `PartitionSpec` in normal form: always one entry per dim, always tuples, hashable and comparable.
A *mesh shape* is a plain ordered dict from axis name to the number of devices along that axis.

>>> layout_of(PartitionSpec("data", None, ("x", "y")), ndim=4)
(('data',), (), ('x', 'y'), ())
>>> spec_of((("data",), (), ("x", "y"), ()))
P('data', None, ('x', 'y'))
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from autoshard.errors import MeshError

Layout = tuple[tuple[str, ...], ...]
Axis = TypeVar("Axis")  # a mesh axis, or a part of one
MeshShape = Mapping[str, int]


def with_auto_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh with Auto axes: on Explicit axes, constraints inside a step are errors.

    >>> with_auto_axes(AbstractMesh((4,), ("x",), axis_types=(AxisType.Explicit,)))
    AbstractMesh('x': 4, axis_types=(Auto,))
    """
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return with_axis_types(mesh, types)
    return AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=types)


def with_axis_types(mesh: Mesh | AbstractMesh, types: Sequence[AxisType]) -> Mesh | AbstractMesh:
    """The same mesh with axes of these types, in order."""
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(types))
    return mesh.update(axis_types=tuple(types))


def replicated(ndim: int) -> Layout:
    """The layout that keeps every dim whole."""
    return ((),) * ndim


def layout_of(spec: PartitionSpec | None, ndim: int) -> Layout:
    """A PartitionSpec in normal form for an array of `ndim` dims; None means replicated.

    Raises:
        MeshError: the spec names more dims than the array has, or one axis twice.
    """
    entries = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec or ()]
    if len(entries) > ndim:
        raise MeshError(f"{spec} names {len(entries)} dims, but the array has {ndim}")
    layout = tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries)
    axes = [axis for dim in layout for axis in dim]
    if len(set(axes)) < len(axes):
        raise MeshError(f"{spec} uses a mesh axis twice; one axis can split one dim only")
    return layout + replicated(ndim - len(entries))


def without_idle_axes(layout: Layout, mesh: MeshShape) -> Layout:
    """The layout without axes that the mesh leaves out: axes of one device, which split nothing.

    >>> without_idle_axes((("x", "one"), ("one",)), {"x": 4})
    (('x',), ())
    """
    return tuple(tuple(axis for axis in dim if axis in mesh) for dim in layout)


def without_axes(layout: Layout, axes: Collection[str]) -> Layout:
    """The layout along all other mesh axes.

    >>> without_axes((("x", "y"), ("z",)), {"y", "z"})
    (('x',), ())
    """
    return tuple(tuple(axis for axis in dim if axis not in axes) for dim in layout)


def spec_text(layout: Layout) -> str:
    """A layout as one writes its PartitionSpec.

    >>> spec_text((("data",), (), ("x", "y"), ()))
    'P("data", None, ("x", "y"))'
    """
    quoted = [[f'"{axis}"' for axis in axes] for axes in layout]
    entries = [f"({', '.join(axes)})" if len(axes) > 1 else axes[0] if axes else "None" for axes in quoted]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def spec_of(layout: Layout) -> PartitionSpec:
    """The shortest PartitionSpec that means `layout`."""
    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in layout]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def shards(axes: Sequence[Axis], mesh: Mapping[Axis, int]) -> int:
    """Into how many pieces `axes` together split a dim."""
    pieces = 1
    for axis in axes:  # planning calls this too often for a generator
        pieces *= mesh[axis]
    return pieces


def axes_of(layout: Layout) -> frozenset[str]:
    """Every mesh axis that splits some dim."""
    return frozenset(axis for dim in layout for axis in dim)


def local_shape(shape: Sequence[int], layout: Layout, mesh: MeshShape) -> tuple[int, ...]:
    """The shape of one device's shard; a dim that does not divide evenly is padded up, as XLA does."""
    return tuple(-(-size // shards(axes, mesh)) for size, axes in zip(shape, layout, strict=True))


def divides(shape: Sequence[int], layout: Layout, mesh: MeshShape) -> bool:
    """Whether every dim splits evenly, which `jax.jit` demands of arguments and results."""
    return all(size % shards(axes, mesh) == 0 for size, axes in zip(shape, layout, strict=True))


def evened(shape: Sequence[int], layout: Layout, mesh: MeshShape) -> Layout:
    """The layout with each dim split only as far as it divides evenly: what XLA makes of the layout of a result.

    >>> evened((6, 8), (("x", "y"), ("z",)), {"x": 2, "y": 2, "z": 2})
    (('x',), ('z',))
    """
    found = []
    for size, axes in zip(shape, layout, strict=True):
        while size % shards(axes, mesh):
            axes = axes[:-1]
        found.append(axes)
    return tuple(found)


def ordered_axes(axes: Collection[str], mesh: MeshShape) -> tuple[str, ...]:
    """The axes in the order of the mesh.

    >>> ordered_axes({"z", "x"}, {"x": 4, "y": 2, "z": 3})
    ('x', 'z')
    """
    return tuple(axis for axis in mesh if axis in axes)


def even_axes(size: int, axes: Sequence[str], mesh: MeshShape) -> tuple[str, ...]:
    """The axes, of those given and in the order of the mesh, that split a dim of this size evenly.

    >>> even_axes(12, ("z", "x", "y"), {"x": 4, "y": 2, "z": 3})
    ('x', 'z')
    """
    found: tuple[str, ...] = ()
    for axis in ordered_axes(axes, mesh):
        if size % shards((*found, axis), mesh) == 0:
            found += (axis,)
    return found


def in_mesh_order(layout: Layout, mesh: MeshShape) -> bool:
    """Whether the axes of every dim stand in the order of the mesh: the one order that plans use."""
    several = [dim for dim in layout if len(dim) > 1]
    if not several:
        return True
    order = {axis: i for i, axis in enumerate(mesh)}
    return all(order[a] < order[b] for dim in several for a, b in itertools.pairwise(dim))


def layouts_of(shape: Sequence[int], mesh: MeshShape) -> list[Layout]:
    """Every layout in mesh order that splits `shape` evenly; the first keeps it whole.

    >>> layouts_of((4, 3), {"x": 2, "y": 2})
    [((), ()), (('y',), ()), (('x',), ()), (('x', 'y'), ())]
    """
    return list(_layouts_of(tuple(shape), tuple(mesh.items())))


@functools.lru_cache(maxsize=1024)
def _layouts_of(shape: tuple[int, ...], axes: tuple[tuple[str, int], ...]) -> tuple[Layout, ...]:
    found, mesh = [], dict(axes)
    for dims in itertools.product([None, *range(len(shape))], repeat=len(mesh)):
        layout = tuple(
            tuple(axis for axis, split in zip(mesh, dims, strict=True) if split == dim) for dim in range(len(shape))
        )
        if divides(shape, layout, mesh):
            found.append(layout)
    return tuple(found)


def finest_axes(mesh: MeshShape, size: int) -> tuple[str, ...]:
    """The axes, in mesh order, that split a dim of this size into the most pieces.

    >>> finest_axes({"x": 2, "y": 4}, 8), finest_axes({"x": 2, "y": 4}, 12), finest_axes({"x": 2, "y": 4}, 7)
    (('x', 'y'), ('y',), ())
    """
    subsets = (axes for n in range(len(mesh) + 1) for axes in itertools.combinations(mesh, n))
    dividing = (axes for axes in subsets if size % shards(axes, mesh) == 0)
    return max(dividing, key=lambda axes: shards(axes, mesh))
