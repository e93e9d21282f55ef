"""The distributed implementations of attention, as `autoshard.operation` takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.operations.operation import Operation
from autoshard.operations.split import CallSplit
from autoshard.ops.attending import heads, rings
from autoshard.ops.attending.blocks import Gradients, Softmax, SoftmaxResiduals, by_value
from autoshard.ops.attending.heads import Exchange
from autoshard.ops.attending.operands import AttentionOperands, AttentionVariant, QueryRows, gradients_like, saved_of

PARTS = "parts"
_EITHER = frozenset("bg")  # a batch of sequences, or of groups of heads: blocks of them are computed alike


class _Kind(NamedTuple):
    """One way to go over the keys of a ring's stretch."""

    forward: Callable[[CallSplit, AttentionOperands], QueryRows]
    backward: Callable[[CallSplit, AttentionOperands, SoftmaxResiduals], Gradients]


def _of_ring() -> _Kind:
    return _Kind(lambda split, call: QueryRows.of(rings.ring(split, call), call.query), rings.ring_backward)


def _of_zigzag() -> _Kind:
    def forward(split: CallSplit, call: AttentionOperands) -> QueryRows:
        found = QueryRows.of(rings.zigzag(split, rings.in_zigzag(split, call)), call.query)
        return QueryRows(*(rings.from_zigzag(split, x, dim) for x, dim in zip(found, (1, 3, 3), strict=True)))

    def backward(split: CallSplit, call: AttentionOperands, saved: SoftmaxResiduals) -> Gradients:
        in_order, dims = rings.in_zigzag(split, call), (3, 3, 3, 1)
        moved = SoftmaxResiduals(*(rings.to_zigzag(split, x, dim) for x, dim in zip(saved, dims, strict=True)))
        found = rings.zigzag_backward(split, in_order, moved)
        pairs = zip(found[:3], call.arrays, strict=True)
        query, key, value = (rings.from_zigzag(split, one.astype(like.dtype), 1) for one, like in pairs)
        return Gradients(query, key, value, None)

    return _Kind(forward, backward)


def _of_device() -> _Kind:
    return _Kind(
        lambda split, call: QueryRows.of(call.forward(whole=True), call.query),
        lambda split, call, saved: call.backward(saved, whole=True),
    )


def _is_stretch(split: CallSplit) -> bool:
    """Whether the heads' axes are minor to those of the ring, so that what comes together is one stretch."""
    order = list(split.mesh)
    inner, outer = split.axes(heads.ROLE), split.axes(rings.ROLE)
    return not inner or not outer or min(map(order.index, inner)) > max(map(order.index, outer))


def _shares_heads(split: CallSplit) -> bool:
    groups, each = (split.sizes[name] // split.count(name) for name in ("g", "r"))
    return heads.can_share_out(groups, each, split.count(heads.ROLE))


def _add(
    operation: Operation, variant: AttentionVariant, name: str, roles: tuple[str, ...], kind: _Kind, fits: Any
) -> None:
    def where(split: CallSplit) -> bool:
        shared = heads.ROLE not in roles or _shares_heads(split)
        return all(split.count(role) > 1 for role in roles) and shared and _is_stretch(split) and fits(split)

    def local(split: CallSplit, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        call = AttentionOperands.of(variant, *arrays)
        if heads.ROLE not in roles:
            return kind.forward(split, call).results
        exchange = Exchange.of(split, call)
        found = kind.forward(split, exchange.call(call))
        statistics = exchange.statistics_back(found.m), exchange.statistics_back(found.l)
        return QueryRows(exchange.queries_back(found.output), *statistics).results

    made = operation.implementation(splits=dict.fromkeys(roles, "q k"), name=name, where=where)(local)
    if heads.ROLE not in roles:  # those share out what a device has of the heads
        made.interchangeable = _EITHER

    @made.backward
    def backward(split: CallSplit, *arrays: Any) -> tuple[jax.Array, ...]:
        *inputs, output, statistics, cotangent, of_statistics = arrays
        call = AttentionOperands.of(variant, *inputs)
        saved = saved_of(output, statistics, cotangent, of_statistics, call.key.shape[2])
        if heads.ROLE in roles:
            exchange = Exchange.of(split, call)
            found = kind.backward(split, exchange.call(call), exchange.saved(saved))
            found = exchange.gradients_back(found, call)
        else:
            found = kind.backward(split, call, saved)
        return _finished(split, found, call, inputs)


def _finished(split: CallSplit, found: Gradients, call: AttentionOperands, inputs: Any) -> tuple[jax.Array, ...]:
    """Gradients as the operation returns them. A bias that all rows share has the sum of all devices."""
    bias, axes = call.seeing.bias, split.axes(rings.ROLE)
    if bias is not None and bias.shape[2] == 1 and axes:
        found = found._replace(bias=lax.psum(found.bias, axes))
    return gradients_like(found, inputs)


def _add_split_keys(operation: Operation, variant: AttentionVariant) -> None:
    """Keys in parts and all queries on each device, as one token reads a long cache (Dao, "Flash-Decoding", 2023).

    The parts' outputs are summed up: 8 bytes an element, in float32. Where queries are split instead, keys, values and
    outputs are gathered, of 4 bytes an element at most. These are fewer if a group has twice as many queries as keys.
    """

    def moves_less(split: CallSplit) -> bool:
        sizes = split.sizes
        return bool(sizes["q"] % split.count(PARTS)) or sizes["q"] * sizes["r"] < 2 * sizes["k"]

    def part(split: CallSplit, arrays: Any) -> AttentionOperands:
        call = AttentionOperands.of(variant, *arrays)
        first = split.index(PARTS) * call.key.shape[1]
        return replace(call, seeing=replace(call.seeing, first_column=first))

    def local(split: CallSplit, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        found, axes = part(split, arrays).forward(whole=False), split.axes(PARTS)
        m = lax.pmax(found.m, axes)
        kept = jnp.exp(found.m - m)
        l = lax.psum(found.l * kept, axes)  # noqa: E741
        o = lax.psum(found.o * by_value(kept), axes)
        return QueryRows.of(Softmax(m, l, o), arrays[0]).results

    made = operation.implementation(splits={PARTS: "k"}, name="split_keys", where=moves_less)(local)
    made.interchangeable = _EITHER

    @made.backward
    def backward(split: CallSplit, *arrays: Any) -> tuple[jax.Array, ...]:
        *inputs, output, statistics, cotangent, of_statistics = arrays
        call, axes = part(split, inputs), split.axes(PARTS)
        saved = saved_of(output, statistics, cotangent, of_statistics, call.key.shape[2])
        found = call.backward(saved, whole=False)
        bias = None if found.bias is None else lax.psum(found.bias, axes)
        return gradients_like(found._replace(query=lax.psum(found.query, axes), bias=bias), inputs)


def add_implementations(operation: Operation, variant: AttentionVariant) -> None:
    """Adds all of them to the operation of one variant. Where zigzag can run, a ring would compute twice as much."""

    def always(split: CallSplit) -> bool:
        return True

    def has_halves(split: CallSplit) -> bool:
        same = split.sizes["q"] == split.sizes["k"] and split.sizes["q"] % (2 * split.count(rings.ROLE)) == 0
        return same and variant.is_plainly_causal

    def has_none(split: CallSplit) -> bool:
        return not has_halves(split)

    operation.interchangeable = _EITHER
    _add(operation, variant, "ulysses", (heads.ROLE,), _of_device(), always)
    for name, kind, fits in (("ring", _of_ring(), has_none), ("zigzag", _of_zigzag(), has_halves)):
        _add(operation, variant, name, (rings.ROLE,), kind, fits)
        _add(operation, variant, f"ulysses_{name}", (heads.ROLE, rings.ROLE), kind, fits)
    _add_split_keys(operation, variant)
