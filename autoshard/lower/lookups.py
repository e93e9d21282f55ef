"""A lookup and one device's shards of its operands in, what the device adds to the rows that are looked up out.

Each device looks up all indices in its own shard. Of a row that lies elsewhere it makes zeros. This file knows JAX
alone: exported code has it, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def local_lookup(
    eqn: Any, shards: Sequence[jax.Array], axes: Sequence[Sequence[str]], sizes: Sequence[int]
) -> jax.Array:
    """The device's part of the rows: the sum of all parts is what the lookup makes.

    Args:
        eqn: the gather or `dynamic_slice` as it is written.
        shards: the device's shards of the array and of the indices.
        axes: mesh axes that split the dims of the array from which one position per index is taken; () for other dims.
        sizes: of the slices, on one device.
    """
    if eqn.primitive.name == "dynamic_slice":
        return _local_slice(shards, axes, sizes)
    array, starts = shards
    numbers, mode = eqn.params["dimension_numbers"], jax.lax.GatherScatterMode.from_any(eqn.params["mode"])
    if mode == jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS:  # XLA clips where a gather breaks that promise
        mode = jax.lax.GatherScatterMode.CLIP
    indexed, fills = numbers.start_index_map, mode == jax.lax.GatherScatterMode.FILL_OR_DROP
    extents = [array.shape[dim] for dim in indexed]
    pieces = [math.prod(map(jax.lax.axis_size, axes[dim])) for dim in indexed]
    shard_of = [jax.lax.axis_index(tuple(axes[dim])) if axes[dim] else 0 for dim in indexed]
    limits = [size * count - sizes[dim] for dim, size, count in zip(indexed, extents, pieces, strict=True)]
    starts = signed_positions(starts, limits, mode)

    def positions(numbers: Sequence[Any]) -> jax.Array:
        return _per_dim(jnp.stack([jnp.asarray(number, starts.dtype) for number in numbers]), starts)

    last = positions(limits)
    first = positions([size * shard for size, shard in zip(extents, shard_of, strict=True)])
    is_here = ((starts >= first) & (starts < first + positions(extents)) & (starts <= last)).all(axis=-1)
    if fills:  # the devices with the first shard fill what is out of bounds
        is_here |= ((starts < 0) | (starts > last)).any(axis=-1) & (first == 0).all()
    params = {
        "slice_sizes": tuple(sizes),
        "mode": jax.lax.GatherScatterMode.FILL_OR_DROP,
        "fill_value": eqn.params.get("fill_value") if fills else 0,
    }
    rows = eqn.primitive.bind(array, starts - first, **eqn.primitive.get_bind_params({**eqn.params, **params}))
    return jnp.where(jnp.expand_dims(is_here, numbers.offset_dims), rows, jnp.zeros((), rows.dtype))


def _local_slice(shards: Sequence[jax.Array], axes: Sequence[Sequence[str]], sizes: Sequence[int]) -> jax.Array:
    """The same of a `dynamic_slice`, which clips where it starts; its indices are one number per dim."""
    array, *starts = shards
    is_here: Any = True
    for dim, (names, size) in enumerate(zip(axes, sizes, strict=True)):
        extent = array.shape[dim]
        last = extent * math.prod(map(jax.lax.axis_size, names)) - size
        (starts[dim],) = signed_positions(jnp.ravel(starts[dim]), [last], jax.lax.GatherScatterMode.CLIP)
        if names:
            starts[dim] -= extent * jax.lax.axis_index(tuple(names)).astype(starts[dim].dtype)
            is_here = is_here & (starts[dim] >= 0) & (starts[dim] < extent)
    rows = jax.lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)
    return jnp.where(is_here, rows, jnp.zeros((), rows.dtype))


def signed_positions(indices: jax.Array, last: Sequence[int], mode: jax.lax.GatherScatterMode) -> jax.Array:
    """The positions of a gather or scatter in a type in which -1 is out of bounds, clipped where its mode says so.

    Args:
        indices: of any integer type; what is clipped is clipped in this one.
        last: the last position that is within bounds, per indexed dim.
        mode: of the gather or scatter.
    """
    if mode == jax.lax.GatherScatterMode.CLIP:
        most = jnp.iinfo(indices.dtype).max
        indices = jnp.clip(indices, 0, _per_dim(jnp.array([min(one, most) for one in last], indices.dtype), indices))
    return indices.astype(jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32)


def _per_dim(numbers: jax.Array, indices: jax.Array) -> jax.Array:
    """One number per indexed dim with as many dims as the indices: JAX can be told to refuse arrays of unlike ranks."""
    return jnp.expand_dims(numbers, range(indices.ndim - 1))
