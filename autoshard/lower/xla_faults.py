"""An equation and its operands in, those with which XLA's partitioner computes the same: see docs/xla_faults.md.

This file knows JAX and `lookups.py` alone: exported code has both, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.lower.lookups import signed_positions


def safely_split(
    run: Callable[[Any, Sequence[Any]], list],
    eqn: Any,
    arrays: Sequence[Any],
    layout: Sequence[tuple[str, ...]] | None,
    mesh: Mapping[str, int],
) -> list:
    """What an equation makes.

    Args:
        run: runs an equation on operands.
        eqn: the equation as it is written.
        arrays: its operands.
        layout: of its first result, if the plan says it.
        mesh: devices per axis.
    """
    if eqn.primitive.name == "dynamic_update_slice":
        return run(eqn, _within_bounds(arrays, layout))
    if eqn.primitive.name.startswith("scatter"):
        numbers, indices = eqn.params["dimension_numbers"], arrays[1]
        indexed = numbers.scatter_dims_to_operand_dims
        may_be_split = bool(indexed) if layout is None else any(layout[dim] for dim in indexed)
        taken = {axis for dim in indexed for axis in layout[dim]} if layout else {}
        parts = math.prod(size for axis, size in mesh.items() if axis not in taken)  # that indices may be split into
        if may_be_split and math.prod(indices.shape[:-1]) <= parts:
            return [_beside_idle_update(eqn, *arrays)]
    if eqn.primitive.name == "mulhi":
        return [_upper_halves(*arrays)]
    return run(eqn, arrays)


def _upper_halves(left: jax.Array, right: jax.Array) -> jax.Array:
    """The upper half of the bits of products of integers, by products of half as many bits."""
    bits = jnp.iinfo(left.dtype).bits
    half, unsigned = bits // 2, jnp.dtype(f"uint{bits}")
    upper = functools.partial(jax.lax.shift_right_logical, y=jnp.full(left.shape, half, unsigned))
    a, b = (jax.lax.bitcast_convert_type(x, unsigned) for x in (left, right))
    low = jnp.full(left.shape, 2**half - 1, unsigned)
    a_low, b_low, a_high, b_high = a & low, b & low, upper(a), upper(b)
    crossed = a_low * b_high, a_high * b_low
    carried = upper(upper(a_low * b_low) + (crossed[0] & low) + (crossed[1] & low))
    made = a_high * b_high + upper(crossed[0]) + upper(crossed[1]) + carried
    if jnp.issubdtype(left.dtype, jnp.signedinteger):  # as unsigned numbers they are larger by 2**bits
        nothing = jnp.zeros_like(made)
        made = made - jnp.where(left < 0, b, nothing) - jnp.where(right < 0, a, nothing)
    return jax.lax.bitcast_convert_type(made, left.dtype)


def _within_bounds(arrays: Sequence[Any], layout: Sequence[tuple[str, ...]] | None) -> list:
    """Operands of a `dynamic_update_slice`, an update of one element along a dim that may be split inside the array.

    XLA's partitioner drops such an update if it is out of bounds; the operation itself moves it to the nearest element.

    Args:
        arrays: the array, the update, and where it starts along each dim.
        layout: of the result, if the plan says it.
    """
    array, update, *starts = arrays
    split = [True] * array.ndim if layout is None else map(bool, layout)
    return [array, update, *(
        jnp.clip(start, 0, min(size - 1, jnp.iinfo(start.dtype).max)) if one == 1 < size and may_be else start
        for start, size, one, may_be in zip(starts, array.shape, update.shape, split, strict=True)
    )]  # fmt: skip


def _beside_idle_update(eqn: Any, array: Any, indices: Any, update: Any) -> jax.Array:
    """What a scatter makes that gives a device a single update, with another for each, which is out of bounds.

    XLA makes a `dynamic_update_slice` of a scatter of one update, which writes back what lies there if the update is
    out of bounds. XLA for TPU and GPU does so before it partitions the program, and then gathers the whole array to
    read that. XLA for CPU does so on each device, which has one update of several where these are split. If the shard
    is sliced out of a larger array, it makes one slice of both and forgets the edge of the shard: it writes back an
    element of another one. It makes nothing of two updates.
    """
    numbers, mode = eqn.params["dimension_numbers"], jax.lax.GatherScatterMode.from_any(eqn.params["mode"])
    apart = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = iter(numbers.update_window_dims)
    sizes = [1 if dim in apart else update.shape[next(windows)] for dim in range(array.ndim)]
    last = [array.shape[dim] - sizes[dim] for dim in numbers.scatter_dims_to_operand_dims]
    indices = signed_positions(indices, last, mode)
    behind = numbers._replace(
        update_window_dims=tuple(dim + 1 for dim in numbers.update_window_dims),
        scatter_indices_batching_dims=tuple(dim + 1 for dim in numbers.scatter_indices_batching_dims),
    )
    dropping = jax.lax.GatherScatterMode.FILL_OR_DROP
    both = {"dimension_numbers": behind, "indices_are_sorted": False, "mode": dropping}
    params = eqn.primitive.get_bind_params({**eqn.params, **both})
    pairs = jnp.stack([indices, jnp.full_like(indices, -1)]), jnp.stack([update, update])
    return eqn.primitive.bind(array, *pairs, **params)
