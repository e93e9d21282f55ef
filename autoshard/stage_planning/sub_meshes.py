"""A mesh and what its machine costs, in; its devices in a row and the sub-meshes that stages may have, out.

The row is the mesh's devices in their order, outermost axis first. A sub-mesh has a part of one axis and all of the
axes inside it, so its devices are neighbours in the row. It keeps the names of all axes. Where devices are not alike,
parts of one shape that have other speeds or memories are shapes of their own, each with the places where it lies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from autoshard.errors import MeshError
from autoshard.layout import MeshShape
from autoshard.mesh.links import Link
from autoshard.mesh.topology import Topology
from autoshard.stage_search import Channel, DeviceRow, SubMesh
from autoshard.stages.sub_meshes import STAGE_AXES


@dataclass(frozen=True)
class SubMeshShape:
    """One shape of a stage's devices, as the planner sees it and as the search of stages does."""

    axes: MeshShape  # those of the whole mesh, with the devices that a stage has along each
    topology: Topology  # of these devices alone: the figures are those of the slowest and the smallest of them
    in_row: SubMesh

    @property
    def mesh(self) -> AbstractMesh:
        """The same without devices."""
        return AbstractMesh(tuple(self.axes.values()), tuple(self.axes))

    def on(self, mesh: Mesh | AbstractMesh, start: int) -> Mesh | AbstractMesh:
        """The part of a mesh that begins at a position of its row."""
        if isinstance(mesh, AbstractMesh):
            return self.mesh
        devices = mesh.devices.reshape(-1)[start : start + self.in_row.devices]
        return Mesh(devices.reshape(tuple(self.axes.values())), tuple(self.axes))


def sub_mesh_shapes(
    mesh_shape: MeshShape, topology: Topology, memory: float, *, is_limit_for_all: bool = False
) -> list[SubMeshShape]:
    """Every shape of a stage's devices, from one device to the whole mesh.

    With an axis named "stage" or "pipe" a stage has all other axes.

    Args:
        memory: bytes that a stage may use on the smallest device.
        is_limit_for_all: whether stages on larger devices may use no more; by default they may in proportion.

    Raises:
        MeshError: such an axis is not the outermost, so that the devices of a stage are no neighbours in the row.
    """
    named = [axis for axis in mesh_shape if axis in STAGE_AXES]
    if named:
        outside = dict(itertools.takewhile(lambda one: one[0] != named[0], mesh_shape.items()))
        if math.prod(outside.values()) > 1:
            first = {named[0]: mesh_shape[named[0]], **mesh_shape}
            raise MeshError(
                f"pipeline='auto': the mesh axis {named[0]!r} lies inside {', '.join(map(repr, outside))}, and the "
                f"devices of a stage have to follow each other.\nPut {named[0]!r} first, as in a mesh of {first}."
            )
        ways: list[dict[str, int]] = [{**mesh_shape, named[0]: 1}]
    else:
        ways = list(_parts(mesh_shape))
    found = [one for axes in ways for one in _shapes(axes, mesh_shape, topology, memory)]
    if is_limit_for_all:
        return [replace(one, in_row=replace(one.in_row, memory_bytes=memory)) for one in found]
    return found


def _parts(mesh_shape: MeshShape) -> Iterator[dict[str, int]]:
    """Sizes of axes: a divisor of one axis, all of those inside it, one of those outside."""
    names = list(mesh_shape)
    yield dict.fromkeys(names, 1)
    for at in range(len(names) - 1, -1, -1):
        size = mesh_shape[names[at]]
        for part in range(2, size + 1):
            if size % part == 0:
                inside = {name: mesh_shape[name] for name in names[at + 1 :]}
                yield {**dict.fromkeys(names[:at], 1), names[at]: part, **inside}


def _shapes(axes: MeshShape, mesh_shape: MeshShape, topology: Topology, memory: float) -> list[SubMeshShape]:
    """The parts of a mesh that have these axes, like ones together."""
    inside = [axis for axis, size in axes.items() if size > 1]
    devices = math.prod(axes.values())
    name = "x".join(str(size) for size in axes.values() if size > 1) or "1"
    anywhere = SubMesh.anywhere(name, devices, math.prod(mesh_shape.values()), memory)
    alike: dict[Topology, list[int]] = {}
    for start in anywhere.starts:
        part = topology.part(axes, mesh_shape, start)
        alike.setdefault(replace(part, links={axis: part.links[axis] for axis in inside}), []).append(start)
    found = []
    for part, starts in alike.items():
        room = memory * part.memory_bytes / topology.memory_bytes
        own = name if len(alike) == 1 else f"{name} from {starts[0]}"
        found.append(SubMeshShape(axes, part, SubMesh(own, devices, tuple(starts), room)))
    return found


def device_row(mesh_shape: MeshShape, topology: Topology) -> DeviceRow:
    """The devices of a mesh in a row: two neighbours talk over the outermost link that is between them."""
    levels: list[tuple[int, Link]] = []  # outermost first: devices, link
    for axis, size in mesh_shape.items():
        if size > 1:
            levels += topology.links[axis].over(size)
    strides = np.cumprod([1, *[devices for devices, _ in reversed(levels)]])[:-1][::-1]
    channels = []
    for position in range(1, math.prod(mesh_shape.values())):
        link = next(link for stride, (_, link) in zip(strides, levels, strict=True) if position % stride == 0)
        channels.append(Channel(link.latency, link.one_way()))
    return DeviceRow(tuple(channels))
