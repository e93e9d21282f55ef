"""Rows to the devices that have their groups' matrices, and back: all_to_alls of equal parts, as often as it takes.

Each device sorts its rows by group, so that rows for one device are a stretch. In one *round* it sends up to `capacity`
rows to every other device. Nothing is dropped: there are as many rounds as the fullest stretch needs. Balanced loads
need one.

Two devices, four groups, three rows on each, a capacity of two:

>>> groups_of_devices = {0: [0, 3, 1], 1: [2, 2, 3]}  # device 0 has the groups 0 and 1
>>> sent = {d: [sum(g // 2 == to for g in groups) for to in (0, 1)] for d, groups in groups_of_devices.items()}
>>> sent, -(-max(max(counts) for counts in sent.values()) // 2)
({0: [2, 1], 1: [0, 3]}, 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.jaxprs import aval_of
from autoshard.operations.split import CallSplit
from autoshard.operations.sums import scattered_sum
from autoshard.ops.dispatching.row_function import RowFunction, RowRole

EXPERTS = "experts"
DATA = "data"
CAPACITY_FACTOR = 1.25  # capacity of a round over the rows of an even load
_ROUND_TO = 8  # rows, which compilers keep together in registers


def capacity_of(rows: int, devices: int) -> int:
    """How many rows a device sends to each other one in a round.

    >>> capacity_of(4096, 8), capacity_of(6, 8)
    (640, 6)
    """
    even = -(-int(rows * CAPACITY_FACTOR) // devices)
    return min(rows, -(-even // _ROUND_TO) * _ROUND_TO)


@dataclass(frozen=True)
class Stretches:
    """This device's rows, sorted by group: which stretch of them goes to which device."""

    order: jax.Array  # [M]: the slot of each sorted row
    group: jax.Array  # [M]: its group
    starts: jax.Array  # [devices]: the first row of each stretch
    counts: jax.Array  # [devices]

    @classmethod
    def of(cls, groups: jax.Array, each: int, devices: int) -> Stretches:
        """
        Args:
            groups: ``[M]``, the group of each slot. Rows beyond the last group are of none; the last device gets them.
            each: groups per device.
        """
        order = jnp.argsort(groups)
        device = jnp.clip(groups // each, 0, devices - 1)
        counts = jnp.bincount(device, length=devices).astype(jnp.int32)
        return cls(order, groups[order], jnp.cumsum(counts) - counts, counts)

    def of_round(self, turn: Any, capacity: int) -> tuple[jax.Array, jax.Array]:
        """Per device and place of its part, the sorted row that is sent, and whether there is one."""
        place = (turn * capacity + jnp.arange(capacity, dtype=jnp.int32))[None]
        rows = self.starts[:, None] + place
        return jnp.minimum(rows, len(self.order) - 1), place < self.counts[:, None]


def exchanged(
    function: RowFunction, split: CallSplit, groups: jax.Array, arrays: Sequence[Any], *, scatters: bool
) -> list[jax.Array]:
    """What a row function makes of this device's tokens, by all devices along the axes of `EXPERTS`.

    Args:
        scatters: whether each device along the axes of `DATA` gets a part of the sums per group.
        groups: ``[T, K]``, the group of each slot of this device.
        arrays: this device's shards: its tokens, and the matrices of its groups.
    """
    axes, devices = split.axes(EXPERTS), split.count(EXPERTS)
    tokens, slots = groups.shape
    each = function.groups // devices
    stretches = Stretches.of(groups.reshape(-1), each, devices)
    capacity = capacity_of(tokens * slots, devices)
    most = lax.pmax(stretches.counts.max(), (*axes, *split.axes(DATA)))
    rounds = (most + capacity - 1) // capacity

    def traded(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, axes, 0, 0, tiled=True)

    def turn(state: tuple[Any, list[jax.Array]]) -> tuple[Any, list[jax.Array]]:
        number, totals = state
        rows, is_row = stretches.of_round(number, capacity)
        slot = stretches.order[rows]  # [devices, capacity]
        own = jnp.maximum(stretches.group[rows], 0)  # as `bincount` counts a negative key
        group = traded(jnp.where(is_row & (own < function.groups), own % each, each)).reshape(-1)
        order = jnp.argsort(group)
        sizes = jnp.bincount(group, length=each).astype(jnp.int32)
        read = [
            _sorted(function, var, traded(_fetched(x, kind, slot, slots)), order)
            if kind in (RowRole.TOKEN, RowRole.SLOT)
            else x
            for (var, kind), x in zip(function.inputs, arrays, strict=True)
        ]
        made = function(sizes, read, group.shape[0], wide=True)
        back = jnp.argsort(order)
        target = jnp.where(is_row, slot, tokens * slots).reshape(-1)  # beyond the end: a place that holds no row
        found = []
        for (var, kind), x, total in zip(function.outputs, made, totals, strict=True):
            if kind is RowRole.GROUP:
                found.append(total + x)
                continue
            x = jnp.moveaxis(x, function.row_dims[var], 0)[back]
            x = traded(x.reshape(devices, capacity, *x.shape[1:])).reshape(x.shape)
            found.append(total.at[target].set(x, mode="drop", unique_indices=False))
        return number + 1, found

    start = [_zeros(function, var, kind, tokens * slots, each) for var, kind in function.outputs]
    _, found = lax.while_loop(lambda state: state[0] < rounds, turn, (jnp.int32(0), start))
    results = []
    for (var, kind), x in zip(function.outputs, found, strict=True):
        if kind is RowRole.GROUP:
            results.append(summed(x.astype(aval_of(var).dtype), split, scatters=scatters))
        else:
            x = x.reshape(tokens, slots, *x.shape[1:])
            results.append(x.sum(1) if kind is RowRole.TOKEN else x)
    return results


def summed(x: jax.Array, split: CallSplit, *, scatters: bool) -> jax.Array:
    """The sum of what devices along the axes of `DATA` have, or a part of it on each."""
    axes = split.axes(DATA)
    if not axes:
        return x
    dim = scattered_dim(x.shape) if scatters else None
    return lax.psum(x, axes) if dim is None else scattered_sum(x, axes, dim, split.mesh)


def scattered_dim(shape: Sequence[int]) -> int | None:
    """The dim of a sum per group whose parts devices get: the first, whose parts lie together. None if there is none.

    >>> scattered_dim((8, 4096, 14336)), scattered_dim((8,))
    (1, None)
    """
    return 1 if len(shape) > 1 else None


def on_own_rows(function: RowFunction, groups: jax.Array, arrays: Sequence[Any]) -> list[jax.Array]:
    """What a row function makes of tokens where all matrices are."""
    tokens, slots = groups.shape
    flat = groups.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=function.groups).astype(jnp.int32)
    read = [
        jnp.moveaxis(_fetched(x, kind, order, slots), 0, function.row_dims[var])
        if kind in (RowRole.TOKEN, RowRole.SLOT)
        else x
        for (var, kind), x in zip(function.inputs, arrays, strict=True)
    ]
    back = jnp.argsort(order)
    results = []
    for (var, kind), x in zip(function.outputs, function(sizes, read, tokens * slots), strict=True):
        if kind is RowRole.GROUP:
            results.append(x)
            continue
        x = jnp.moveaxis(x, function.row_dims[var], 0)[back]
        x = x.reshape(tokens, slots, *x.shape[1:])
        results.append(x.sum(1) if kind is RowRole.TOKEN else x)
    return results


def _fetched(x: jax.Array, kind: RowRole, slot: jax.Array, slots: int) -> jax.Array:
    """The rows of some slots, first."""
    return x[slot // slots] if kind is RowRole.TOKEN else x.reshape(-1, *x.shape[2:])[slot]


def _sorted(function: RowFunction, var: Any, x: jax.Array, order: jax.Array) -> jax.Array:
    """Rows as they came, in the order of their groups."""
    return jnp.moveaxis(x.reshape(-1, *x.shape[2:])[order], 0, function.row_dims[var])


def _zeros(function: RowFunction, var: Any, kind: RowRole, rows: int, groups: int) -> jax.Array:
    """What the rounds are added to: a place per slot, or a sum in float32 per group."""
    aval = aval_of(var)
    if kind is RowRole.GROUP:
        return jnp.zeros((groups, *aval.shape[1:]), jnp.promote_types(aval.dtype, jnp.float32))
    return jnp.zeros((rows, *_without(aval.shape, function.row_dims[var])), aval.dtype)


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
