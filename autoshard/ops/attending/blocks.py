"""Attention of one device, block by block: the forward and the backward pass of FlashAttention in plain JAX.

Dao et al., "FlashAttention" (NeurIPS 2022), algorithms 1 and 4. The softmax of a row is kept as its largest logit `m`,
the sum `l` of ``exp(logit - m)``, and the sum `o` of the values under these weights. Keys may come in any order, so a
ring of devices goes on where the last one stopped (Liu et al., "Ring Attention", ICLR 2024).

Shapes: queries ``[b, t, g, r, d]``, keys ``[b, s, g, d]``, values ``[b, s, g, v]``; `g` groups of `r` heads share keys.
``m, l`` are ``[b, g, r, t]`` and ``o`` is ``[b, t, g, r, v]``, all in the `wide` type of the queries.

All of it is traced for every split that a planner prices. So blocks are written in `jax.lax`: functions of `jax.numpy`
are traced as calls of their own for each new shape, which takes several times as long.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.operations.sums import wide

MASKED = -0.7 * float(np.finfo(np.float32).max)  # as in jax.nn: a row that sees no key is the mean of all values
BLOCK_ELEMENTS = 2**26  # logits of one block on one device, all heads: 256 MiB in float32
MOST_ROWS = 4096  # of a block


class Softmax(NamedTuple):
    """The softmax of rows, over the keys that were seen so far."""

    m: jax.Array  # a constant in derivatives, as no output depends on it; `l` carries its own
    l: jax.Array  # noqa: E741 - the paper's name
    o: jax.Array

    @classmethod
    def empty(cls, query: jax.Array, value: jax.Array) -> Softmax:
        (b, t, g, r, _), dtype = query.shape, wide(query)
        rows, zeros = (b, g, r, t), jnp.zeros((b, t, g, r, value.shape[-1]), dtype)
        return cls(jnp.full(rows, jnp.finfo(dtype).min, dtype), jnp.zeros(rows, dtype), zeros)

    @property
    def output(self) -> jax.Array:
        return lax.div(self.o, by_value(self.l))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "query_positions",
        "key_positions",
        "bias",
        "mask",
        "query_segments",
        "key_segments",
        "key_lengths",
        "first_column",
    ],
    meta_fields=["is_causal", "window"],
)
@dataclass(frozen=True)
class Visibility:
    """Which keys which queries see, and what is added to their logits. Arrays may be None: then all are seen."""

    query_positions: jax.Array  # [t]
    key_positions: jax.Array  # [s]
    bias: jax.Array | None = None  # [b or 1, n or 1, t or 1, columns], added to logits
    mask: jax.Array | None = None  # the same shape, bool
    query_segments: jax.Array | None = None  # [b, t]
    key_segments: jax.Array | None = None  # [b, s]
    key_lengths: jax.Array | None = None  # [b]
    is_causal: bool = False
    window: tuple[int, int] | None = None  # how far back and ahead a query sees
    first_column: Any = 0  # of bias and mask: that of the first key

    def rows(self, start: Any, size: int) -> Visibility:
        """That of some queries."""
        return replace(
            self,
            query_positions=_cut(self.query_positions, start, size, 0),
            query_segments=_cut(self.query_segments, start, size, 1),
            bias=_cut_unless_one(self.bias, start, size, 2),
            mask=_cut_unless_one(self.mask, start, size, 2),
        )

    def keys(self, start: Any, size: int) -> Visibility:
        """That of some keys; bias and mask keep their columns."""
        return replace(
            self,
            key_positions=_cut(self.key_positions, start, size, 0),
            key_segments=_cut(self.key_segments, start, size, 1),
            first_column=self.first_column + start,
        )

    def seen(self) -> jax.Array | None:
        """Whether a query sees a key: ``[b or 1, g or 1, r or 1, t, s]``, or None for all."""
        found: list[jax.Array] = []
        count = self.key_positions.shape[0]
        if self.is_causal or self.window is not None:
            distance = lax.expand_dims(self.query_positions, (1,)) - lax.expand_dims(self.key_positions, (0,))
        if self.is_causal:
            found.append(lax.expand_dims(distance >= 0, (0, 1, 2)))
        if self.window is not None:
            back, ahead = self.window
            found.append(((distance <= back) & (distance >= -ahead))[None, None, None])
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[:, :, None] == self.key_segments[:, None, :]
            found.append(same[:, None, None])
        if self.key_lengths is not None:
            inside = self.key_positions[None, :] < self.key_lengths[:, None]
            found.append(inside[:, None, None, None, :])
        if self.mask is not None:
            found.append(_columns(self.mask, self.first_column, count))
        if not found:
            return None
        seen = found[0]
        for one in found[1:]:
            seen = seen & one
        return seen

    def added(self) -> jax.Array | None:
        """What is added to the logits: ``[b or 1, n or 1, 1, t or 1, s]``."""
        return None if self.bias is None else _columns(self.bias, self.first_column, self.key_positions.shape[0])


def _columns(x: jax.Array, start: Any, count: int) -> jax.Array:
    return lax.expand_dims(_cut_unless_one(x, start, count, 3), (2,))


def _cut(x: jax.Array | None, start: Any, size: int, dim: int) -> Any:
    if x is None or x.shape[dim] == size:
        return x
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, size, dim, allow_negative_indices=False)


def _cut_unless_one(x: jax.Array | None, start: Any, size: int, dim: int) -> Any:
    return x if x is None or x.shape[dim] == 1 else _cut(x, start, size, dim)


def _by_heads(x: jax.Array, groups: int, heads: int) -> jax.Array:
    """``[b, n or 1, 1, t, s]`` to ``[b, g or 1, r or 1, t, s]``."""
    b, n, _, t, s = x.shape
    return x if n == 1 else x.reshape(b, groups, heads, t, s)


def _logits(query: jax.Array, key: jax.Array, seeing: Visibility, scale: float) -> tuple[jax.Array, jax.Array | None]:
    """Logits of a block, masked ones `MASKED`, and which are seen."""
    _, _, g, r, _ = query.shape
    found = _scaled(_product("bsgd,btgrd->bgrts", key, query, wide(query)), scale)
    if (added := seeing.added()) is not None:
        found = found + _by_heads(added, g, r).astype(found.dtype)
    seen = seeing.seen()
    if seen is not None and seen.shape[1] not in (1, g):
        seen = _by_heads(seen.reshape(seen.shape[0], -1, 1, *seen.shape[3:]), g, r)
    return (found if seen is None else _where(seen, found, MASKED)), seen


def _where(seen: jax.Array, x: jax.Array, otherwise: float) -> jax.Array:
    """`jnp.where` of a mask whose dims are those of `x` or 1."""
    return lax.select(lax.broadcast_in_dim(seen, x.shape, range(x.ndim)), x, lax.full_like(x, otherwise))


def _product(notation: str, one: jax.Array, other: jax.Array, dtype: Any) -> jax.Array:
    """`jnp.einsum` of two arrays, in a wider type."""
    dims, order = _dims_of_product(notation)
    return lax.transpose(lax.dot_general(one, other, dims, preferred_element_type=dtype), order)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return lax.mul(x, x.dtype.type(scale))


@functools.cache
def _dims_of_product(notation: str) -> tuple[tuple[Any, Any], tuple[int, ...]]:
    """Contracted and batch dims as `lax.dot_general` takes them, and the order of its dims in the result."""
    operands, result = notation.split("->")
    one, other = operands.split(",")
    shared = [name for name in one if name in other]
    summed = [name for name in shared if name not in result]
    batch = [name for name in shared if name in result]
    made = [*batch, *(x for x in one if x not in other), *(x for x in other if x not in one)]
    places = [(tuple(map(one.index, names)), tuple(map(other.index, names))) for names in (summed, batch)]
    return (places[0], places[1]), tuple(map(made.index, result))


def _by_key(x: jax.Array) -> jax.Array:
    """What is known of rows, beside logits."""
    return lax.expand_dims(x, (4,))


def by_value(x: jax.Array) -> jax.Array:
    """The same, beside outputs: ``[b, g, r, t]`` to ``[b, t, g, r, 1]``."""
    return lax.expand_dims(lax.transpose(x, (0, 3, 1, 2)), (4,))


def attend(
    so_far: Softmax, query: jax.Array, key: jax.Array, value: jax.Array, seeing: Visibility, scale: float
) -> Softmax:
    """The softmax after one more block of keys."""
    logits, _ = _logits(query, key, seeing, scale)
    m = lax.stop_gradient(lax.max(so_far.m, lax.reduce_max(logits, (4,))))
    weights, kept = lax.exp(lax.sub(logits, _by_key(m))), lax.exp(lax.sub(so_far.m, m))
    l = lax.add(lax.mul(so_far.l, kept), lax.reduce_sum(weights, (4,)))  # noqa: E741
    more = _product("bsgv,bgrts->btgrv", value, lax.convert_element_type(weights, value.dtype), wide(query))
    return Softmax(m, l, lax.add(lax.mul(so_far.o, by_value(kept)), more))


class Gradients(NamedTuple):
    """Gradients that blocks add to, in the `wide` type."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None


class SoftmaxResiduals(NamedTuple):
    """What the backward pass knows of rows: ``m`` and ``l`` of the softmax, what weights' gradients have too much."""

    m: jax.Array
    l: jax.Array  # noqa: E741
    delta: jax.Array
    cotangent: jax.Array  # [b, t, g, r, v]


def gradients_of_block(
    query: jax.Array, key: jax.Array, value: jax.Array, saved: SoftmaxResiduals, seeing: Visibility, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What one block adds to the gradients of queries, keys, values and logits."""
    (logits, seen), dtype = _logits(query, key, seeing, scale), wide(query)
    weights = lax.div(lax.exp(lax.sub(logits, _by_key(saved.m))), _by_key(saved.l))
    of_weights = _product("bsgv,btgrv->bgrts", value, saved.cotangent, dtype)
    of_logits = lax.mul(weights, lax.sub(of_weights, _by_key(saved.delta)))
    if seen is not None:
        of_logits = _where(seen, of_logits, 0.0)
    narrow = lax.convert_element_type(of_logits, query.dtype)
    of_query = _scaled(_product("bsgd,bgrts->btgrd", key, narrow, dtype), scale)
    of_key = _scaled(_product("btgrd,bgrts->bsgd", query, narrow, dtype), scale)
    of_value = _product("btgrv,bgrts->bsgv", saved.cotangent, lax.convert_element_type(weights, value.dtype), dtype)
    return of_query, of_key, of_value, of_logits


@dataclass(frozen=True)
class Blocks:
    """Which blocks of a device's queries and keys meet."""

    rows: int  # queries per block
    keys: int
    pairs: tuple[tuple[int, int], ...]  # (block of queries, block of keys), in the order in which they are computed

    @classmethod
    def of(
        cls, query: jax.Array, key: jax.Array, meets: Callable[[tuple[int, int], tuple[int, int]], bool] | None = None
    ) -> Blocks:
        """All blocks, or those that can meet.

        Args:
            meets: whether a range of queries sees any of a range of keys, as far as places in the arrays tell.
        """
        b, t, g, r, _ = query.shape
        most = min(MOST_ROWS, max(128, math.isqrt(BLOCK_ELEMENTS // max(1, b * g * r))))
        rows, keys = block_size(t, most), block_size(key.shape[1], most)
        if meets is not None and rows == t > 256:  # several blocks, of which some need not be computed
            rows = keys = block_size(t, max(128, t // 8))
        pairs = tuple(
            (i, j)
            for i in range(t // rows)
            for j in range(key.shape[1] // keys)
            if meets is None or meets((i * rows, (i + 1) * rows), (j * keys, (j + 1) * keys))
        )
        return cls(rows, keys, pairs)


def block_size(size: int, most: int) -> int:
    """The largest divisor of a size that is no more than `most`; the whole, if there is none of a useful size.

    >>> block_size(4096, 1000), block_size(1009, 512)
    (512, 1009)
    """
    found = next(n for n in range(min(size, most), 0, -1) if size % n == 0)
    return found if found >= min(size, 64) else size


# A ring sweeps over blocks of equal shapes several times. JAX traces what is jitted once for these, and `inline` leaves
# no call behind.
@functools.partial(jax.jit, static_argnames=("scale", "blocks"), inline=True)
def swept(
    so_far: Softmax,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seeing: Visibility,
    *,
    scale: float,
    blocks: Blocks,
) -> Softmax:
    """The softmax after all blocks of these keys."""
    if len(blocks.pairs) == 1 and blocks.rows == query.shape[1] and blocks.keys == key.shape[1]:
        return attend(so_far, query, key, value, seeing, scale)

    def turn(state: Softmax, pair: jax.Array) -> tuple[Softmax, None]:
        row, column = pair[0] * blocks.rows, pair[1] * blocks.keys
        here = Softmax(*(_cut(x, row, blocks.rows, dim) for x, dim in zip(state, (3, 3, 1), strict=True)))
        sees = seeing.rows(row, blocks.rows).keys(column, blocks.keys)
        own = _cut(query, row, blocks.rows, 1)
        found = attend(here, own, _cut(key, column, blocks.keys, 1), _cut(value, column, blocks.keys, 1), sees, scale)
        dims = (3, 3, 1)
        put = [_put(x, new, row, dim) for x, new, dim in zip(state, found, dims, strict=True)]
        return Softmax(*put), None

    found, _ = lax.scan(turn, so_far, jnp.array(blocks.pairs, jnp.int32))
    return found


def _put(x: jax.Array, new: jax.Array, start: Any, dim: int) -> jax.Array:
    return (
        new
        if x.shape == new.shape
        else lax.dynamic_update_slice_in_dim(x, new, start, dim, allow_negative_indices=False)
    )


def _added_to(x: jax.Array, more: jax.Array, start: Any, dim: int) -> jax.Array:
    return _put(x, lax.add(_cut(x, start, more.shape[dim], dim), more), start, dim)


@functools.partial(jax.jit, static_argnames=("scale", "blocks"), inline=True)
def swept_back(
    so_far: Gradients,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    saved: SoftmaxResiduals,
    seeing: Visibility,
    *,
    scale: float,
    blocks: Blocks,
) -> Gradients:
    """The gradients after all blocks of these keys."""

    def turn(state: Gradients, pair: Any) -> tuple[Gradients, None]:
        row, column = pair[0] * blocks.rows, pair[1] * blocks.keys
        sees = seeing.rows(row, blocks.rows).keys(column, blocks.keys)
        here = SoftmaxResiduals(*(_cut(x, row, blocks.rows, dim) for x, dim in zip(saved, (3, 3, 3, 1), strict=True)))
        own = _cut(query, row, blocks.rows, 1)
        met = _cut(key, column, blocks.keys, 1), _cut(value, column, blocks.keys, 1)
        of_query, of_key, of_value, of_logits = gradients_of_block(own, *met, here, sees, scale)
        of_bias = state.bias
        if of_bias is not None:
            of_bias = _with_bias(of_bias, of_logits, row, sees.first_column)
        return Gradients(
            _added_to(state.query, of_query, row, 1),
            _added_to(state.key, of_key, column, 1),
            _added_to(state.value, of_value, column, 1),
            of_bias,
        ), None

    if len(blocks.pairs) == 1:
        return turn(so_far, (0, 0))[0]
    found, _ = lax.scan(turn, so_far, jnp.array(blocks.pairs, jnp.int32))
    return found


def _with_bias(so_far: jax.Array, of_logits: jax.Array, row: Any, column: Any) -> jax.Array:
    """The gradient of a bias with that of a block's logits; dims of size 1 are summed up."""
    b, g, r, t, s = of_logits.shape
    found = of_logits.reshape(b, g * r, t, s)
    for dim in range(4):
        if so_far.shape[dim] == 1 < found.shape[dim]:
            found = found.sum(dim, keepdims=True)
    start = [0, 0, row if so_far.shape[2] > 1 else 0, column if so_far.shape[3] > 1 else 0]
    start = [jnp.asarray(one, jnp.int32) for one in start]
    return lax.dynamic_update_slice(so_far, lax.dynamic_slice(so_far, start, found.shape) + found, start)
