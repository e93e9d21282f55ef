"""One device's shards of the operands of an equation in, what the device reads for its results out: halos exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.layout import MeshShape, shards
from autoshard.propagation.halos import Rows, hops
from autoshard.propagation.rule import Rule


def with_halos(
    arrays: Sequence[jax.Array],
    rule: Rule,
    axes: Mapping[str, tuple[str, ...]],
    mesh: MeshShape,
    neutral: Callable[[Any], Any],
) -> list[jax.Array]:
    """Operands with the rows that this device reads of its neighbours.

    Args:
        arrays: the shards.
        rule: what is read.
        axes: factor -> the mesh axes that split it.
        mesh: axis -> devices.
        neutral: dtype -> what rows beyond the array count as.
    """
    found = list(arrays)
    for reach in rule.reaches:
        for rows in reach.rows:
            if split := axes.get(rows.factor, ()):
                array = found[reach.operand]
                found[reach.operand] = exchanged(array, rows, split, shards(split, mesh), neutral(array.dtype))
    return found


def exchanged(array: jax.Array, rows: Rows, axes: tuple[str, ...], pieces: int, beyond: Any = 0) -> jax.Array:
    """The rows of an array that this device reads.

    Args:
        array: the device's shard.
        rows: along which dim, and which.
        axes: the mesh axes that split the dim.
        pieces: how many devices these are.
        beyond: what rows of no device count as.
    """
    dim, shard = rows.dim, array.shape[rows.dim]
    begin, end = -rows.before, shard + rows.after
    parts = {max(begin, 0): jax.lax.slice_in_dim(array, max(begin, 0), min(end, shard), axis=dim)}
    for hop in hops(rows, shard * pieces, pieces):
        sent = jax.lax.slice_in_dim(array, hop.start, hop.stop, axis=dim)
        parts[begin + hop.at] = jax.lax.ppermute(sent, axes, hop.pairs)
    found = _joined(parts, begin, end, dim)
    if beyond == 0 or (begin >= 0 and end <= shard):  # whoever receives nothing has zeros
        return found
    place = jax.lax.broadcasted_iota(jnp.int32, found.shape, dim) + jax.lax.axis_index(axes) * shard + begin
    inside = (place >= rows.first) & (place < rows.last)
    return jnp.where(inside, found, jnp.asarray(beyond, found.dtype))


def _joined(parts: Mapping[int, jax.Array], begin: int, end: int, dim: int) -> jax.Array:
    """Parts that start at these rows, with zeros between them."""
    row, pieces = begin, []
    for start in sorted(parts):
        part = parts[start]
        if start > row:
            pieces.append(jnp.zeros((*part.shape[:dim], start - row, *part.shape[dim + 1 :]), part.dtype))
        if part.shape[dim]:
            pieces.append(part)
        row = start + part.shape[dim]
    if row < end:
        pieces.append(jnp.zeros((*part.shape[:dim], end - row, *part.shape[dim + 1 :]), part.dtype))
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, dim)
