"""`autoshard.ops.matmul`: products whose gathers and scatters go in pieces behind them.

The decomposition is that of Wang et al., "Overlap communication with dependent computation via decomposition" (ASPLOS
2023). Pieces travel round a ring of devices, and each product of a piece runs while the next one travels:

=============  ========================================================================================================
`gathering`    rows of the left and columns of the right operand are split: instead of an all_gather before
`scattering`   what is summed is split, and rows of the result: instead of a reduce_scatter after
`rows`         rows are split before and after, and nothing travels
=============  ========================================================================================================
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.errors import ArgumentError
from autoshard.operations.operation import operation
from autoshard.operations.split import CallSplit
from autoshard.operations.sums import wide
from autoshard.ops.operands import arrays_of

RING = "ring"


def matmul(lhs: Any, rhs: Any) -> jax.Array:
    """`jnp.matmul` of rows and a matrix, which a plan may run as a ring of pieces.

    Under autoshard, the planner takes the way that is predicted to be fastest. Without autoshard it is plain JAX.

    Args:
        lhs: ``[..., M, K]``; M are the rows that may travel, as tokens of a sequence.
        rhs: ``[K, N]``.

    Returns:
        ``[..., M, N]``.

    Raises:
        ArgumentError: shapes do not fit together.

    >>> matmul(jnp.ones((2, 4, 3)), jnp.ones((3, 5))).shape
    (2, 4, 5)
    """
    lhs, rhs = arrays_of(lhs=lhs, rhs=rhs)
    if lhs.ndim < 2 or rhs.ndim != 2 or lhs.shape[-1] != rhs.shape[0]:
        raise ArgumentError(f"matmul takes [..., M, K] and [K, N], not {lhs.shape} and {rhs.shape}")
    dtype = jnp.result_type(lhs, rhs)
    made: jax.Array = _matmul(lhs.reshape(math.prod(lhs.shape[:-2]), *lhs.shape[-2:]).astype(dtype), rhs.astype(dtype))
    return made.reshape(*lhs.shape[:-1], rhs.shape[1])


@operation("b m k, k n -> b p n", reduction="k", need_replication="m p", name="matmul")
def _matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lhs @ rhs


@_matmul.backward
def _backward(lhs: Any, rhs: Any, made: Any, cotangent: Any) -> tuple[jax.Array, ...]:
    return cotangent @ rhs.T, jnp.einsum("bmk,bmn->kn", lhs, cotangent)


def _pairs(split: CallSplit, distance: int) -> list[tuple[int, int]]:
    """Each device, and the one so many places on in the ring."""
    count = split.count(RING)
    return [(i, (i + distance) % count) for i in range(count)]


def _pieces(split: CallSplit, piece: Any) -> Any:
    """Every device's piece, this one's first, with whose it is."""
    for step in range(split.count(RING)):
        yield (split.index(RING) + step) % split.count(RING), piece
        if step < split.count(RING) - 1:
            piece = lax.ppermute(piece, split.axes(RING), _pairs(split, -1))


def _put(whole: Any, piece: Any, index: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(whole, piece, index * piece.shape[1], axis=1)


def _rows_of(split: CallSplit, whole: Any, index: Any) -> jax.Array:
    each = whole.shape[1] // split.count(RING)
    return lax.dynamic_slice_in_dim(whole, index * each, each, axis=1)


def _scattered(split: CallSplit, whole: Any, rhs: Any) -> jax.Array:
    """Rows of a product that is summed over the ring: each device adds its part to what travels by."""
    count = split.count(RING)
    total: Any = None
    for step in range(count):
        index = (split.index(RING) - step - 1) % count  # whose rows travel by
        part = jnp.matmul(_rows_of(split, whole, index), rhs, preferred_element_type=_of_sums(whole))
        if total is not None:
            part += lax.ppermute(total, split.axes(RING), _pairs(split, 1)).astype(part.dtype)
        total = part.astype(whole.dtype)
    made: jax.Array = total
    return made


def _of_sums(x: Any) -> Any:
    """The type in which a device adds up pieces."""
    return wide(x) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


def _summed(total: Any, lhs: Any, cotangent: Any) -> jax.Array:
    """The gradient of a matrix so far, and that of one more piece."""
    made: jax.Array = total + jnp.einsum("bmk,bmn->kn", lhs, cotangent, preferred_element_type=total.dtype)
    return made


def _is_ring(split: CallSplit) -> bool:
    return split.count(RING) > 1


@_matmul.implementation(splits={RING: "m n"}, name="gathering", where=_is_ring)
def _gathering(split: CallSplit, lhs: Any, rhs: Any) -> jax.Array:
    made = jnp.zeros((lhs.shape[0], lhs.shape[1] * split.count(RING), rhs.shape[1]), lhs.dtype)
    for index, piece in _pieces(split, lhs):
        made = _put(made, piece @ rhs, index)
    return made


@_gathering.backward
def _gathering_backward(split: CallSplit, lhs: Any, rhs: Any, made: Any, cotangent: Any) -> tuple[jax.Array, ...]:
    of_rhs = jnp.zeros_like(rhs, _of_sums(rhs))
    for index, piece in _pieces(split, lhs):
        of_rhs = _summed(of_rhs, piece, _rows_of(split, cotangent, index))
    return _scattered(split, cotangent, rhs.T), of_rhs.astype(rhs.dtype)


@_matmul.implementation(splits={RING: "k p"}, name="scattering", where=_is_ring)
def _scattering(split: CallSplit, lhs: Any, rhs: Any) -> jax.Array:
    return _scattered(split, lhs, rhs)


@_scattering.backward
def _scattering_backward(split: CallSplit, lhs: Any, rhs: Any, made: Any, cotangent: Any) -> tuple[jax.Array, ...]:
    of_lhs, of_rhs = jnp.zeros_like(lhs), jnp.zeros_like(rhs, _of_sums(rhs))
    for index, piece in _pieces(split, cotangent):
        of_lhs = _put(of_lhs, piece @ rhs.T, index)
        of_rhs = _summed(of_rhs, _rows_of(split, lhs, index), piece)
    return of_lhs, of_rhs.astype(rhs.dtype)


@_matmul.implementation(splits={"rows": "m p"}, name="rows", where=lambda split: split.count("rows") > 1)
def _by_rows(split: CallSplit, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lhs @ rhs


@_by_rows.backward
def _rows_backward(split: CallSplit, lhs: Any, rhs: Any, made: Any, cotangent: Any) -> tuple[jax.Array, ...]:
    of_lhs, of_rhs = _backward(lhs, rhs, made, cotangent)
    return of_lhs, lax.psum(of_rhs, split.axes("rows"))
