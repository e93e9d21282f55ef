"""Arrays of stages and the arrays that users see: parts of one array, on the devices of several stages.

A stacked argument of which each stage has as many trips is one global array, split over the stages along dim 0. The
arrays of stages share its buffers, so neither way copies anything. Any other stack is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


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


def joined(parts: Sequence[jax.Array]) -> jax.Array:
    """Parts along dim 0 as one array; a view if they are equally long, and lie alike on devices of their own."""
    first = parts[0]
    shardings = [part.sharding for part in parts]
    devices = [device for sharding in shardings for device in sharding.device_set]
    assert all(isinstance(sharding, NamedSharding) for sharding in shardings), "stages place their arrays so"
    meshes: list[Any] = [sharding.mesh for sharding in shardings]  # type: ignore[attr-defined]
    specs: list[Any] = [sharding.spec for sharding in shardings]  # type: ignore[attr-defined]
    whole = (sum(part.shape[0] for part in parts), *first.shape[1:])
    is_view = (
        len(set(devices)) == len(devices)
        and all(part.shape == first.shape for part in parts)
        and all(spec == specs[0] for spec in specs)
        and all(mesh.devices.shape == meshes[0].devices.shape for mesh in meshes)
    )
    axes = ("stages", *meshes[0].axis_names)
    types: Any = (AxisType.Auto,) * len(axes)
    if is_view:
        mesh = Mesh(np.stack([mesh.devices for mesh in meshes]), axes, axis_types=types)
        inner = specs[0][0] if len(specs[0]) else None
        dim = ("stages", *(inner if isinstance(inner, tuple) else [inner] if inner else []))
        sharding = NamedSharding(mesh, PartitionSpec(dim, *specs[0][1:]))
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(whole, sharding, shards)
    distinct = {tuple(mesh.devices.flat): mesh for mesh in meshes}
    mesh = Mesh(np.stack([one.devices for one in distinct.values()]), axes, axis_types=types)
    free = [dim for dim, size in enumerate(whole) if size % len(distinct) == 0]
    spread: list[Any] = [None] * len(whole)
    if free:
        spread[free[0]] = "stages"
    everywhere = NamedSharding(mesh, PartitionSpec())
    copies = [jax.device_put(part, everywhere) for part in parts]
    return jax.jit(jnp.concatenate, out_shardings=NamedSharding(mesh, PartitionSpec(*spread)))(copies)


def _spans(index: Sequence[slice], shape: Sequence[int]) -> list[tuple[int, int]]:
    return [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]


def _moved(spans: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(spans[0][0] + by, spans[0][1] + by), *spans[1:]]
