"""Operands of an equation in, operands with which XLA's partitioner computes the same: see docs/xla_faults.md.

This file knows JAX alone: exported code has it, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def within_bounds(arrays: Sequence[Any], layout: Sequence[tuple[str, ...]] | None = None) -> list:
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


def apart_from_slices(eqn: Any, arrays: Sequence[Any], layout: Sequence[tuple[str, ...]] | None = None) -> list:
    """Operands of a scatter; what a single update goes into along a split dim is not simplified with what made it.

    A device whose shard the update misses reads and writes back an element of the edge. If the shard is sliced out of a
    larger array, XLA makes one slice of both and forgets the edge: it writes back an element of another shard.

    Args:
        eqn: the scatter.
        arrays: the array, the indices and the updates.
        layout: of the result, if the plan says it.
    """
    array, indices, *updates = arrays
    indexed = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    may_be_split = layout is None or any(layout[dim] for dim in indexed)
    if may_be_split and math.prod(indices.shape[:-1]) == 1:
        array = jax.lax.optimization_barrier(array)
    return [array, indices, *updates]
