"""The arguments of a step in; the PartitionSpecs that flax keeps beside their arrays, out.

linen keeps names of dims in boxes around arrays (`nn.Partitioned`, `nn.LogicallyPartitioned`), nnx in the metadata of
its variables. Logical names are resolved by the rules that hold where the step is traced. What has a box is known by
its methods, so that linen's users import nothing more.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from autoshard.layout import Layout, MeshShape, in_mesh_order, shards
from autoshard.program.signature import Arguments
from autoshard.program.trees import Tree

if TYPE_CHECKING:
    from autoshard.program.modules import ModuleArguments


def wishes_of(dynamic: Arguments, tree: Tree, modules: ModuleArguments | None) -> dict[int, PartitionSpec]:
    """Index of a flat argument -> the PartitionSpec that flax has for it; names may be of no mesh axis.

    Args:
        tree: of the arguments.
        modules: the arguments taken apart, if there are nnx modules among them.
    """
    if modules is not None:
        return modules.specs()
    if "flax" not in sys.modules:
        return {}
    wishes: dict[int, PartitionSpec] = {}
    place = 0
    for node in jax.tree.leaves(dynamic, is_leaf=_is_box):
        end = place + len(jax.tree.leaves(node))
        if _is_box(node):
            wishes |= {i: _spec_of(node) for i in tree.order[place:end] if i is not None}
        place = end
    return wishes


def _is_box(node: Any) -> bool:
    return hasattr(node, "get_partition_spec") and hasattr(node, "unbox")


def _spec_of(box: Any) -> PartitionSpec:
    names = box.get_partition_spec()
    linen = sys.modules.get("flax.linen")
    if linen is None or not hasattr(box, "rules"):
        return PartitionSpec(*names)
    return PartitionSpec(*(linen.logical_to_mesh_axes(tuple(names), box.rules) or ()))


def layout_of_wish(spec: PartitionSpec, shape: tuple[int, ...], mesh: MeshShape) -> Layout | None:
    """What of a wish the mesh can keep: None if it names no axis of the mesh, or does not fit the array.

    >>> layout_of_wish(PartitionSpec("embed", "model"), (6, 8), {"data": 4, "model": 2})
    ((), ('model',))
    """
    if len(spec) > len(shape):
        return None
    names = [() if axes is PartitionSpec.UNCONSTRAINED else axes for axes in spec]
    layout = tuple(
        tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis in mesh)
        for axes in (*names, *[None] * (len(shape) - len(spec)))
    )
    used = [axis for axes in layout for axis in axes]
    fits = all(size % shards(axes, mesh) == 0 for size, axes in zip(shape, layout, strict=True))
    return layout if used and fits and len(set(used)) == len(used) and in_mesh_order(layout, mesh) else None
