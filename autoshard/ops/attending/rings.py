"""Attention whose keys travel round a ring of devices, forward and backward.

*Ring*: each device has one stretch of the sequence. Keys and values go from device to device while the softmax goes on
(Liu et al., "Ring Attention with Blockwise Transformers", ICLR 2024). While a block is computed, the next keys travel.

*Zigzag*: under a causal mask, the device with the first stretch sees few keys and the last sees all. So device `i` of
`n` takes half stretches `i` and ``2n - 1 - i``; then all compute the same, and half as much (Brandon et al., "Striped
Attention", 2023; the order by halves is that of Llama 3's context parallelism). Halves change places before and after.
In each later turn two of the four pairs of halves are seen, and whole:

==============================  =======================================
keys come from an earlier device  both halves of the queries, low half of the keys
keys come from a later device     the high half of the queries, both halves of the keys
==============================  =======================================

So the high queries always meet the low keys, and the second pair is picked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.operations.split import CallSplit
from autoshard.ops.attending.blocks import Blocks, Gradients, Softmax, SoftmaxResiduals, swept, swept_back
from autoshard.ops.attending.operands import AttentionOperands

ROLE = "ring"


def _sent_on(split: CallSplit, tree: Any, by: int = 1) -> Any:
    """Arrays from each device to the one `by` places further round the ring."""
    count, axes = split.count(ROLE), split.axes(ROLE)
    pairs = [(i, (i + by) % count) for i in range(count)]
    return jax.tree.map(lambda x: lax.ppermute(x, axes, pairs), tree)


def _turned(turn: Callable[[Any, Any], tuple[Any, None]], start: Any, steps: range) -> Any:
    """The carry after all steps. A single one is no loop, so that XLA can merge it with one of another pass."""
    if len(steps) == 1:
        return turn(start, steps[0])[0]
    return lax.scan(turn, start, jnp.arange(steps.start, steps.stop))[0]


def _hops(split: CallSplit, call: AttentionOperands) -> int:
    """How often keys go on: all round, unless a causal window ends before."""
    count, variant = split.count(ROLE), call.variant
    is_square = call.query.shape[1] == call.key.shape[1]  # stretches of queries and of keys are then at the same places
    if is_square and variant.is_causal and variant.window is not None and variant.sees_itself:
        return min(count - 1, math.ceil(variant.window[0] / call.key.shape[1]))
    return count - 1


def _at(call: AttentionOperands, moved: Any, step: Any, split: CallSplit) -> AttentionOperands:
    """The call with the keys that have arrived after so many steps."""
    key, value, segments = moved
    count, own, size = split.count(ROLE), split.index(ROLE), call.key.shape[1]
    origin = lax.rem(own - step + count, count)  # no more than a round: what `%` adds for less is left out
    positions = call.seeing.key_positions + (origin - own) * size
    seeing = replace(call.seeing, key_positions=positions, key_segments=segments, first_column=origin * size)
    return replace(call, key=key, value=value, seeing=seeing)


def ring(split: CallSplit, call: AttentionOperands) -> Softmax:
    """The softmax of a device's queries over all keys."""
    hops, blocks = _hops(split, call), Blocks.of(call.query, call.key)

    def met(state: Softmax, moved: Any, step: Any) -> Softmax:
        here = _at(call, moved, step, split)
        return swept(state, *here.arrays, here.seeing, scale=call.variant.scale, blocks=blocks)

    def turn(carry: Any, step: Any) -> tuple[Any, None]:
        state, moved = carry
        return (met(state, moved, step), _sent_on(split, moved)), None

    start = Softmax.empty(call.query, call.value), (call.key, call.value, call.seeing.key_segments)
    state, moved = _turned(turn, start, range(hops))
    return met(state, moved, hops)


def ring_backward(split: CallSplit, call: AttentionOperands, saved: SoftmaxResiduals) -> Gradients:
    """The gradients of a device's queries, keys and values; those of keys travel with the keys."""
    hops, blocks, none = _hops(split, call), Blocks.of(call.query, call.key), call.no_gradients

    def met(own: Any, moved: Any, of_moved: Any, step: Any) -> tuple[Any, Any]:
        here = _at(call, moved, step, split)
        so_far = Gradients(own[0], of_moved[0], of_moved[1], own[1])
        found = swept_back(so_far, *here.arrays, saved, here.seeing, scale=call.variant.scale, blocks=blocks)
        return (found.query, found.bias), (found.key, found.value)

    def turn(carry: Any, step: Any) -> tuple[Any, None]:
        own, moved, of_moved = carry
        own, of_moved = met(own, moved, of_moved, step)
        return (own, _sent_on(split, moved), _sent_on(split, of_moved)), None

    start = (none.query, none.bias), (call.key, call.value, call.seeing.key_segments), (none.key, none.value)
    own, moved, of_moved = _turned(turn, start, range(hops))
    (query, bias), of_moved = met(own, moved, of_moved, hops)
    key, value = _sent_on(split, of_moved, -hops)
    return Gradients(query, key, value, bias)


# Zigzag.


def _half_moves(split: CallSplit) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(sender, receiver) of the first and of the second halves."""
    count = split.count(ROLE)

    def home(half: int) -> int:
        return half if half < count else 2 * count - 1 - half

    return [(i, home(2 * i)) for i in range(count)], [(i, home(2 * i + 1)) for i in range(count)]


def to_zigzag(split: CallSplit, x: jax.Array, dim: int) -> jax.Array:
    """A stretch of the sequence to the two halves that a device works on, low and high."""
    first, second = _half_moves(split)
    axes, halves = split.axes(ROLE), jnp.split(x, 2, dim)
    even, odd = lax.ppermute(halves[0], axes, first), lax.ppermute(halves[1], axes, second)
    is_even = _is_even(split)
    return jnp.concatenate([_picked(is_even, even, odd), _picked(is_even, odd, even)], dim)


def _is_even(split: CallSplit) -> Any:
    return lax.rem(split.index(ROLE), 2) == 0


def from_zigzag(split: CallSplit, x: jax.Array, dim: int) -> jax.Array:
    """The way back of `to_zigzag`."""
    first, second = _half_moves(split)
    axes, (low, high), is_even = split.axes(ROLE), jnp.split(x, 2, dim), _is_even(split)
    even, odd = _picked(is_even, low, high), _picked(is_even, high, low)
    back = [lax.ppermute(half, axes, [(b, a) for a, b in moves]) for half, moves in ((even, first), (odd, second))]
    return jnp.concatenate(back, dim)


def in_zigzag(split: CallSplit, call: AttentionOperands) -> AttentionOperands:
    """The call on the halves of this device. Positions are those of the halves; only segments hide anything else."""
    size = call.query.shape[1] // 2
    own, count = split.index(ROLE), split.count(ROLE)
    half = jnp.arange(size, dtype=jnp.int32)
    positions = jnp.concatenate([own * size + half, (2 * count - 1 - own) * size + half])
    query, key, value = (to_zigzag(split, x, 1) for x in call.arrays)
    segments = call.seeing.query_segments
    moved = None if segments is None else to_zigzag(split, segments, 1)
    seeing = replace(
        call.seeing,
        query_positions=positions,
        key_positions=positions,
        query_segments=moved,
        key_segments=moved,
    )
    return replace(call, query=query, key=key, value=value, seeing=seeing)


def _all_seen(call: AttentionOperands) -> AttentionOperands:
    """A call of whole halves: no place decides any more."""
    variant = replace(call.variant, is_causal=False)
    return replace(call, variant=variant, seeing=replace(call.seeing, is_causal=False))


def _halves(call: AttentionOperands) -> list[AttentionOperands]:
    size = call.query.shape[1] // 2
    return [call.rows(0, size), call.rows(size, size)]


def _keys(call: AttentionOperands, moved: Any) -> list[AttentionOperands]:
    """The call with the low keys, and with the high keys, of those that have arrived."""
    key, value, segments = moved
    size = key.shape[1] // 2
    here = replace(call, key=key, value=value, seeing=replace(call.seeing, key_segments=segments))
    return [here.keys(0, size), here.keys(size, size)]


def _picked(flag: Any, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: lax.select(flag, a, b), one, other)


def _rows_of(saved: SoftmaxResiduals, size: int) -> list[SoftmaxResiduals]:
    """What is known of the low and of the high rows."""
    dims = (3, 3, 3, 1)
    return [
        SoftmaxResiduals(
            *(lax.slice_in_dim(x, start, start + size, axis=dim) for x, dim in zip(saved, dims, strict=True))
        )
        for start in (0, size)
    ]


def _second(call: AttentionOperands, keys: list[AttentionOperands], is_earlier: Any) -> AttentionOperands:
    """The pair that is picked: low queries and low keys, or high queries and high keys."""
    low, high = _halves(keys[0])[0], _halves(keys[1])[1]
    arrays = _picked(is_earlier, low.arrays, high.arrays)
    segments = _picked(
        is_earlier,
        (low.seeing.query_segments, low.seeing.key_segments),
        (high.seeing.query_segments, high.seeing.key_segments),
    )
    seeing = replace(high.seeing, query_segments=segments[0], key_segments=segments[1])
    return replace(call, query=arrays[0], key=arrays[1], value=arrays[2], seeing=seeing)


def _is_earlier(split: CallSplit, step: Any) -> Any:
    """Whether the keys that arrive in a later turn come from an earlier device."""
    return step <= split.index(ROLE)


def zigzag(split: CallSplit, call: AttentionOperands) -> Softmax:
    """The softmax of a device's two halves of the queries, low and high, of a call in zigzag order."""
    count, scale, seen = split.count(ROLE), call.variant.scale, _all_seen(call)
    moved = call.key, call.value, call.seeing.key_segments

    def over(state: Softmax, one: AttentionOperands) -> Softmax:
        return swept(state, *one.arrays, one.seeing, scale=scale, blocks=one.blocks(whole=True))

    low_keys, high_keys = _keys(call, moved)
    low, high = (Softmax.empty(half.query, half.value) for half in _halves(low_keys))
    low = over(low, _halves(low_keys)[0])
    high = over(over(high, _halves(_keys(seen, moved)[0])[1]), _halves(high_keys)[1])

    def turn(carry: Any, step: Any) -> tuple[Any, None]:
        low, high, moved = carry
        moved = _sent_on(split, moved)
        is_earlier = _is_earlier(split, step)
        keys = _keys(seen, moved)
        high = over(high, _halves(keys[0])[1])
        found = over(_picked(is_earlier, low, high), _second(seen, keys, is_earlier))
        return (_picked(is_earlier, found, low), _picked(is_earlier, high, found), moved), None

    low, high, _ = _turned(turn, (low, high, moved), range(1, count))
    dims = (3, 3, 1)
    return Softmax(*(jnp.concatenate(both, dim) for *both, dim in zip(low, high, dims, strict=True)))


def zigzag_backward(split: CallSplit, call: AttentionOperands, saved: SoftmaxResiduals) -> Gradients:
    """The gradients of a device's halves, of a call in zigzag order."""
    count, scale = split.count(ROLE), call.variant.scale
    seen, none = _all_seen(call), call.no_gradients
    size = call.query.shape[1] // 2
    low_rows, high_rows = _rows_of(saved, size)
    moved = call.key, call.value, call.seeing.key_segments

    def of(one: AttentionOperands, rows: SoftmaxResiduals) -> Gradients:
        return swept_back(one.no_gradients, *one.arrays, rows, one.seeing, scale=scale, blocks=one.blocks(whole=True))

    def both(low: Any, high: Any) -> jax.Array:
        return jnp.concatenate([low, high], 1)

    low_keys, high_keys = _keys(call, moved)
    ll, hl = of(_halves(low_keys)[0], low_rows), of(_halves(_keys(seen, moved)[0])[1], high_rows)
    hh = of(_halves(high_keys)[1], high_rows)
    query = both(ll.query, hl.query + hh.query)
    of_moved = both(ll.key + hl.key, hh.key), both(ll.value + hl.value, hh.value)

    def turn(carry: Any, step: Any) -> tuple[Any, None]:
        query, moved, of_moved = carry
        moved, of_moved = _sent_on(split, moved), _sent_on(split, of_moved)
        is_earlier = _is_earlier(split, step)
        keys = _keys(seen, moved)
        first = of(_halves(keys[0])[1], high_rows)
        second = of(_second(seen, keys, is_earlier), _picked(is_earlier, low_rows, high_rows))
        to_low = _picked(is_earlier, second, jax.tree.map(jnp.zeros_like, second))
        to_high = jax.tree.map(jnp.subtract, second, to_low)
        query = query + both(to_low.query, first.query + to_high.query)
        more = both(first.key + to_low.key, to_high.key), both(first.value + to_low.value, to_high.value)
        return (query, moved, jax.tree.map(jnp.add, of_moved, more)), None

    query, _, of_moved = _turned(turn, (query, moved, of_moved), range(1, count))
    key, value = _sent_on(split, of_moved)
    return Gradients(query, key, value, none.bias)
