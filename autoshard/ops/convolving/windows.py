"""One dim of a convolution in, which rows of the image each device reads for its share of the positions, out.

Devices share out the positions of the window evenly, the last of them positions beyond the end. So sizes need not be
multiples of anything. A device reads `count` rows from `first + index * step` on, and pads what it has read by
`padding`. These are the same on every device, which a program for all of them needs.

>>> of_positions(WindowMoves(size=64, window=3, positions=62, stride=1, padding=0, spread=1, dilation=1), 8)
PositionShare(positions=8, first=0, step=8, count=10, padding=(0, 0))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.operations.split import Axes


@dataclass(frozen=True)
class WindowMoves:
    """How a window moves along one dim of an image."""

    size: int  # of the image
    window: int  # rows that it reads
    positions: int
    stride: int
    padding: int  # before the first row; negative: so many rows are left out
    spread: int  # from row to row of the image
    dilation: int  # from row to row inside the window

    @property
    def is_regular(self) -> bool:
        """Whether devices that have as many rows each have as many positions each, and read the same beyond them."""
        return self.positions * self.stride == self.size * self.spread and self.positions % 8 == self.size % 8 == 0


@dataclass(frozen=True)
class PositionShare:
    """One device's part of the positions along a dim."""

    positions: int  # per device
    first: int  # row of the image that device 0 begins to read at; negative: before its first row
    step: int  # rows from device to device
    count: int  # rows that a device reads
    padding: tuple[int, int]  # before and after these, once they are spread


def of_positions(moves: WindowMoves, pieces: int) -> PositionShare | None:
    """Each device's share; None if the devices' shares are not of one form.

    Where devices do not divide the positions, each gets as many more as make the rows that it reads lie alike.
    """
    positions = -(-moves.positions // pieces)
    period = moves.spread // math.gcd(moves.spread, moves.stride)
    if moves.positions % pieces:
        positions += -positions % period
    elif positions % period:
        return None
    start = -moves.padding
    stop = start + (positions - 1) * moves.stride + (moves.window - 1) * moves.dilation + 1
    first, last = -(-start // moves.spread), (stop - 1) // moves.spread
    if last < first:
        return None
    padding = first * moves.spread - start, stop - 1 - last * moves.spread
    return PositionShare(positions, first, positions * moves.stride // moves.spread, last - first + 1, padding)


def rows_read(x: Any, dim: int, share: PositionShare, axes: Axes, pieces: int, *, is_split: bool) -> jax.Array:
    """The rows that this device reads; those beyond the image are zeros.

    Args:
        x: the device's shard of the image, or the whole image.
        is_split: whether it is a shard.
    """
    size, index = x.shape[dim], lax.axis_index(axes)
    places = [share.first + i * (share.step - size * is_split) for i in range(pieces)]  # in the array that it has
    before, after = max(0, -min(places)), max(0, max(places) + share.count - size)
    x = _with_neighbours(x, dim, before, after, axes, pieces) if is_split else _padded(x, dim, before, after)
    if len(set(places)) == 1:
        return lax.slice_in_dim(x, places[0] + before, places[0] + before + share.count, axis=dim)
    start = index * (share.step - size * is_split) + (share.first + before)
    return lax.dynamic_slice_in_dim(x, start, share.count, axis=dim)


def _padded(x: Any, dim: int, before: int, after: int) -> jax.Array:
    return jnp.pad(x, [(before, after) if i == dim else (0, 0) for i in range(x.ndim)])


def _with_neighbours(x: Any, dim: int, before: int, after: int, axes: Axes, pieces: int) -> jax.Array:
    """A shard with so many rows of the devices before and after; zeros where there are none."""
    size = x.shape[dim]
    parts = [x]
    for distance in range(1, -(-before // size) + 1):
        count = min(size, before - (distance - 1) * size)
        parts.insert(0, _rows_from_earlier_device(x, dim, size - count, size, distance, axes, pieces))
    for distance in range(1, -(-after // size) + 1):
        count = min(size, after - (distance - 1) * size)
        parts.append(_rows_from_earlier_device(x, dim, 0, count, -distance, axes, pieces))
    return jnp.concatenate(parts, dim) if len(parts) > 1 else x


def _rows_from_earlier_device(
    x: Any, dim: int, start: int, stop: int, distance: int, axes: Axes, pieces: int
) -> jax.Array:
    """Rows of the device so many places before this one; zeros if there is none."""
    rows = lax.slice_in_dim(x, start, stop, axis=dim)
    pairs = [(i, i + distance) for i in range(pieces) if 0 <= i + distance < pieces]
    return lax.ppermute(rows, axes, pairs) if pairs else jnp.zeros_like(rows)
