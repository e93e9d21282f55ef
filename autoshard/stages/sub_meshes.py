"""A mesh in, the meshes of its stages out: each has a part of one axis, and the other axes whole."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.errors import MeshError

STAGE_AXES = ("stage", "pipe")  # a mesh axis of such a name is that of the stages


def stage_meshes(mesh: Mesh | AbstractMesh, stages: int) -> tuple[Mesh | AbstractMesh, ...]:
    """The meshes of so many stages. They have the axes of the whole mesh, of which one is shorter.

    That is the axis called "stage" or "pipe", else the first one that the number of stages divides.

    Raises:
        MeshError: no axis can be divided so.

    >>> [dict(one.shape) for one in stage_meshes(AbstractMesh((4, 2), ("data", "model")), 2)]
    [{'data': 2, 'model': 2}, {'data': 2, 'model': 2}]
    """
    sizes = dict(mesh.shape)
    at = stage_axis(mesh, stages)
    part = list(sizes.values())[at] // stages
    shape = [part if i == at else size for i, size in enumerate(sizes.values())]
    types: Any = (AxisType.Auto,) * len(shape)
    if isinstance(mesh, AbstractMesh):
        return (AbstractMesh(tuple(shape), tuple(sizes), axis_types=types),) * stages
    parts = np.split(mesh.devices, stages, axis=at)
    return tuple(Mesh(devices, tuple(sizes), axis_types=types) for devices in parts)


def stage_axis(mesh: Mesh | AbstractMesh, stages: int) -> int:
    """Which axis of a mesh is divided among so many stages.

    Raises:
        MeshError: none can be.
    """
    sizes = dict(mesh.shape)
    named = [axis for axis in STAGE_AXES if axis in sizes]
    fitting = [axis for axis in named or sizes if sizes[axis] % stages == 0]
    if not fitting:
        raise MeshError(
            f"pipeline: stages={stages} divide "
            + (f"not the mesh axis {named[0]!r} of {sizes[named[0]]} devices" if named else f"no axis of {sizes}")
            + ".\nUse a number of stages that divides an axis, or a mesh with an axis 'stage' of as many devices."
        )
    return list(sizes).index(fitting[0])


def stage_positions(mesh: Mesh | AbstractMesh, stages: int) -> tuple[tuple[int, ...], ...]:
    """The devices of each stage, by their place in the mesh.

    >>> stage_positions(AbstractMesh((2, 2), ("data", "model")), 2)
    ((0, 1), (2, 3))
    """
    places = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    parts = np.split(places, stages, axis=stage_axis(mesh, stages))
    return tuple(tuple(part.ravel().tolist()) for part in parts)
