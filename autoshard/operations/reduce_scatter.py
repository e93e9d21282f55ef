"""Partial sums on all devices in, each device's slice of the sum out. It knows JAX alone: exported code has it, too."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

_LANES = 128  # of a TPU's vector registers: columns of a tile


def reduce_scatter(partial: jax.Array, dim: int, stages: Sequence[tuple[Any, Any]], others: Sequence[str]) -> jax.Array:
    """This device's slice of a sum, of which the device has a part.

    What is scattered are the rows of a matrix that has many rows, and columns for all lanes of a TPU. TPU turns any
    other scatter into an all_reduce. A stage scatters inside each of the slices that the stages after it make.

    Args:
        partial: what this device has of the whole sum.
        dim: the dim that is sliced.
        stages: mesh axes, and groups of devices along them, if it is not all of them.
        others: mesh axes over which the slices are all_reduced.
    """
    rest = [other for other in range(partial.ndim) if other != dim]
    rest.sort(key=lambda other: partial.shape[other] >= _LANES)
    order, shape = (dim, *rest), [partial.shape[other] for other in rest]
    count = partial.shape[dim]
    sizes = [len(groups[0]) if groups else jax.lax.axis_size(axes) for axes, groups in stages]
    if shape:
        widths = itertools.accumulate(reversed(shape), operator.mul)
        columns = [next((width for width in widths if width >= _LANES), math.prod(shape))]
    else:
        columns = [_LANES] if count % (_LANES * math.prod(sizes)) == 0 else []
    whole, at = partial, dim
    for i, (axes, groups) in enumerate(stages):
        later = math.prod(sizes[i + 1 :])
        rows = _split_first(whole, at, later, sizes[i], rest if i == 0 else range(1, whole.ndim))
        sliced = jax.lax.psum_scatter(rows.reshape(-1, *columns), axes, axis_index_groups=groups, tiled=True)
        count //= sizes[i]
        whole, at = sliced.reshape(count, *shape), 0
    mine = whole.transpose(np.argsort(order))
    return jax.lax.psum(mine, tuple(others)) if others else mine


def _split_first(whole: jax.Array, dim: int, later: int, size: int, others: Iterable[int]) -> jax.Array:
    """A dim cut into `later * size` pieces, the pieces of all `size` devices first, then the other dims.

    This takes one copy, or none.
    """
    count = whole.shape[dim] // (later * size)
    pieces = whole.reshape(*whole.shape[:dim], later, size, count, *whole.shape[dim + 1 :])
    return pieces.transpose(dim + 1, dim, dim + 2, *(other + 2 * (other > dim) for other in others))
