"""Arrays of stages and the arrays that users see: parts of one array, on the devices of several stages.

A stacked argument of which each stage has as many trips is one global array, split over the stages along dim 0. The
arrays of stages share its buffers, so neither way copies anything. Any other stack is copied on every step, and split
along another dim over the devices of all its stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


def part_of(array: Any, start: int, stop: int, sharding: NamedSharding) -> jax.Array:
    """Rows of an array along dim 0, on other devices; a view if its shards there are these."""
    shape = (stop - start, *np.shape(array)[1:])
    if isinstance(array, jax.Array) and array.is_fully_addressable:
        held = {shard.device: shard for shard in array.addressable_shards}
        found = []
        for device, index in sharding.devices_indices_map(shape).items():
            shard = held.get(device)
            if shard is None or _spans(shard.index, array.shape) != _moved(_spans(index, shape), start):
                break
            found.append(shard.data)
        else:
            return jax.make_array_from_single_device_arrays(shape, sharding, found)
    return jax.device_put(array[start:stop], sharding)


@dataclass(frozen=True)
class StackSharding:
    """How a stack of parts lies on the devices of all its stages."""

    sharding: NamedSharding
    is_view: bool  # whether parts stay where they are; otherwise they are copied


def stack_sharding(
    shapes: Sequence[tuple[int, ...]], shardings: Sequence[NamedSharding], places: Sequence[Sequence[Hashable]]
) -> StackSharding:
    """How parts along dim 0 lie as one array.

    A view if parts are equally long, and lie alike on devices of their own. Otherwise a dim other than 0 is split over
    all devices, or over as many as divide it, since parts of any length can be put together so.

    Args:
        places: per part the devices of its mesh, or what stands for them.
    """
    meshes, specs = [one.mesh for one in shardings], [_entries(one.spec, len(shapes[0])) for one in shardings]
    every = list(dict.fromkeys(place for part in places for place in part))
    inner = dict(meshes[0].shape)
    is_view = (
        len(every) == sum(map(len, places))
        and all(shape == shapes[0] for shape in shapes)
        and all(spec == specs[0] for spec in specs)
        and all(dict(mesh.shape) == inner for mesh in meshes)
    )
    if is_view:
        devices = [device for mesh in meshes if isinstance(mesh, Mesh) for device in mesh.devices.flat]
        mesh = _mesh({"stages": len(meshes), **inner}, devices)
        return StackSharding(NamedSharding(mesh, PartitionSpec(("stages", *specs[0][0]), *specs[0][1:])), True)
    ways = [0, *(math.gcd(size, len(every)) for size in shapes[0][1:])]
    dim = max(range(len(ways)), key=ways.__getitem__)
    split = max(1, ways[dim])
    devices = list(dict.fromkeys(device for mesh in meshes if isinstance(mesh, Mesh) for device in mesh.devices.flat))
    mesh = _mesh({"stages": split, "copies": len(every) // split}, devices)
    spec = PartitionSpec(*[None] * dim, "stages") if split > 1 else PartitionSpec()
    return StackSharding(NamedSharding(mesh, spec), False)


def joined(parts: Sequence[jax.Array], move: Callable[[Any, Any], Any] = jax.device_put) -> jax.Array:
    """Parts along dim 0 as one array, which lies as `stack_sharding` says.

    Args:
        move: puts a part where that says, if it is no view.
    """
    shardings: list[Any] = [part.sharding for part in parts]
    assert all(isinstance(sharding, NamedSharding) for sharding in shardings), "stages place their arrays so"
    places = [list(sharding.mesh.devices.flat) for sharding in shardings]
    made = stack_sharding([part.shape for part in parts], shardings, places)
    if made.is_view:
        whole = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(whole, made.sharding, shards, dtype=parts[0].dtype)
    copies = [move(part, made.sharding) for part in parts]
    return jax.jit(jnp.concatenate, out_shardings=made.sharding)(copies)


def _entries(spec: PartitionSpec, dims: int) -> list[tuple[str, ...]]:
    """The mesh axes of each dim."""
    named = [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in spec]
    return [*named, *[()] * (dims - len(named))]


def _mesh(shape: Mapping[str, int], devices: Sequence[Any]) -> Mesh | AbstractMesh:
    """A mesh of so many devices; one without devices if there are none."""
    types: Any = (AxisType.Auto,) * len(shape)
    if not devices:
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=types)
    return Mesh(np.array(devices).reshape(tuple(shape.values())), tuple(shape), axis_types=types)


def _spans(index: Sequence[slice], shape: Sequence[int]) -> list[tuple[int, int]]:
    return [one.indices(size)[:2] for one, size in zip(index[: len(shape)], shape, strict=True)]


def _moved(spans: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(spans[0][0] + by, spans[0][1] + by), *spans[1:]]
