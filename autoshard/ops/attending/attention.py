"""`autoshard.ops.attention`: `jax.nn.dot_product_attention` with distributed implementations."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import ArgumentError
from autoshard.errors.kinds import checks_kinds
from autoshard.operations.operation import Operation, operation
from autoshard.ops.attending.implementations import add_implementations
from autoshard.ops.attending.operands import AttentionOperands, AttentionVariant, QueryRows, gradients_like, saved_of
from autoshard.ops.operands import arrays_of


@checks_kinds("scale", "is_causal", "local_window_size")
def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: Any = None,
) -> jax.Array:
    """Attention with the arguments and numbers of `jax.nn.dot_product_attention`, which a plan may split any way.

    Under autoshard, the planner takes heads and batch apart, gathers keys, or runs one of `ulysses`, `ring`, `zigzag`,
    `ulysses_ring`, `ulysses_zigzag` and `split_keys`, as is predicted to be fastest. Without autoshard it is plain JAX.
    Logits are computed block by block, forward and backward, so that memory grows with the sequence, not its square.

    Args:
        query: ``[B, T, N, H]``, or without the batch.
        key: ``[B, S, K, H]``; `N` is a multiple of `K`.
        value: the same, but for the last dim, which may be another.
        bias: added to the logits, ``[B or 1, N or 1, T or 1, S or 1]``.
        mask: bool, of such a shape: whether a query sees a key.
        scale: of the logits; by default ``1 / sqrt(H)``.
        is_causal: whether a query sees no later key.
        query_seq_lengths: ``[B]``, how many rows count.
        key_value_seq_lengths: ``[B]``, how many keys count.
        local_window_size: how many keys back and ahead a query sees.
        segment_ids: ``[B, T]`` for queries and keys that are the same tokens, or a pair of ``[B, T]`` and ``[B, S]``: a
            query sees keys of its own segment.

    Returns:
        An array of the query's shape and dtype, with the last dim of the values.

    Raises:
        ArgumentError: shapes or types do not fit together.
    """
    query, key, value = arrays_of(query=query, key=key, value=value)
    is_batch = query.ndim == 4
    if not is_batch:
        query, key, value = query[None], key[None], value[None]
    _check(query, key, value)
    whole = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
    bias, mask = (_of_logits(name, x, whole) for name, x in (("bias", bias), ("mask", mask)))
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        bias = bias.astype(jnp.float32)
    if mask is not None and mask.dtype != bool:
        raise ArgumentError(f"mask is {mask.dtype}, not bool: what is added to logits is the bias")
    segments = _segments(segment_ids, is_batch, query.shape[:2], key.shape[:2])
    query_seq_lengths = _lengths("query_seq_lengths", query_seq_lengths, query.shape[0])
    key_value_seq_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0])
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    variant = AttentionVariant(
        bias=() if bias is None else tuple(size > 1 for size in bias.shape),
        mask=() if mask is None else tuple(size > 1 for size in mask.shape),
        has_segments=segments is not None,
        same_segments=segments is not None and segments[0] is segments[1],
        has_lengths=key_value_seq_lengths is not None,
        is_causal=is_causal,
        window=None if window is None else (int(window[0]), int(window[1])),
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
    )
    others = [x for x in (bias, mask, *(segments or ())) if x is not None]
    if key_value_seq_lengths is not None:
        others.append(key_value_seq_lengths)
    others += [jnp.arange(size, dtype=jnp.int32) for size in (query.shape[1], key.shape[1])]
    output, _ = attention_operation(variant, query.shape[1:2] + key.shape[1:2])(query, key, value, *others)
    if query_seq_lengths is not None:
        counts = jnp.arange(query.shape[1])[None] < query_seq_lengths[:, None]
        output = output * counts[..., None, None].astype(output.dtype)
    attended: jax.Array = output if is_batch else output[0]
    return attended


def _of_logits(name: str, x: Any, whole: tuple[int, ...]) -> jax.Array | None:
    """A bias or mask with all four dims.

    Args:
        whole: sizes of the logits.
    """
    if x is None:
        return None
    [array] = arrays_of(**{name: x})
    shape = (1,) * (4 - array.ndim) + array.shape
    if len(shape) > 4 or any(size not in (1, most) for size, most in zip(shape, whole, strict=True)):
        raise ArgumentError(f"{name} {array.shape} does not broadcast to the logits {whole}")
    return array.reshape(shape)


def _lengths(name: str, lengths: Any, batch: int) -> jax.Array | None:
    if lengths is None:
        return None
    found = jnp.atleast_1d(arrays_of(**{name: lengths})[0])
    if found.shape != (batch,) or not jnp.issubdtype(found.dtype, jnp.integer):
        raise ArgumentError(
            f"{name} is {found.dtype}{list(found.shape)}: attention takes {batch} integers, one a sequence"
        )
    return found


def _segments(
    segments: Any, is_batch: bool, of_queries: tuple[int, ...], of_keys: tuple[int, ...]
) -> tuple[jax.Array, jax.Array] | None:
    """Segments of queries and of keys, one array if they are the same tokens.

    Args:
        of_queries, of_keys: their shapes.
    """
    if segments is None:
        return None
    is_pair = isinstance(segments, tuple | list)
    given = {f"segment_ids[{i}]": one for i, one in enumerate(segments)} if is_pair else {"segment_ids": segments}
    pair = tuple(arrays_of(**given)) * (1 if is_pair else 2)
    if not is_batch:
        pair = tuple(x[None] for x in pair) if pair[0] is not pair[-1] else (pair[0][None],) * 2
    is_whole = all(jnp.issubdtype(x.dtype, jnp.integer) for x in pair)
    if tuple(x.shape for x in pair) != (of_queries, of_keys) or not is_whole:
        found = ", ".join(f"{x.dtype}{list(x.shape)}" for x in pair)
        raise ArgumentError(
            f"segment_ids are {found}: attention takes integers {list(of_queries)} for queries and {list(of_keys)} for "
            "keys"
        )
    return pair[0], pair[1]


def _check(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = f"queries {query.shape}, keys {key.shape}, values {value.shape}"
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ArgumentError(f"attention takes arrays of 3 or 4 dims, not {shapes}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ArgumentError(
            f"{shapes} do not fit together: attention takes [B, T, N, H], [B, S, K, H] and [B, S, K, V]"
        )
    if query.shape[2] % key.shape[2]:
        raise ArgumentError(f"{query.shape[2]} heads of queries are no multiple of {key.shape[2]} heads of keys")


@functools.lru_cache(maxsize=256)
def attention_operation(variant: AttentionVariant, lengths: tuple[int, ...]) -> Operation:
    """The operation from queries, keys, values and what a variant has beside to output and softmax statistics.

    Args:
        lengths: how many queries and keys there are in all. A device that has as many has the whole sequence.
    """
    operands, results, whole = variant.notation()

    def has_all(call: AttentionOperands) -> bool:
        return (call.query.shape[1], call.key.shape[1]) == lengths

    @operation(f"{operands} -> {results}", need_replication=whole, name="attention")
    def computed(query: Any, key: Any, value: Any, *others: Any) -> tuple[jax.Array, jax.Array]:
        call = AttentionOperands.of(variant, query, key, value, *others)
        return QueryRows.of(call.forward(whole=has_all(call)), query).results

    @computed.backward
    def backward(*arrays: Any) -> tuple[jax.Array, ...]:
        *inputs, output, statistics, cotangent, of_statistics = arrays
        call = AttentionOperands.of(variant, *inputs)
        saved = saved_of(output, statistics, cotangent, of_statistics, call.key.shape[2])
        return gradients_like(call.backward(saved, whole=has_all(call)), inputs)

    computed.identity = repr(variant)
    add_implementations(computed, variant)
    return computed
