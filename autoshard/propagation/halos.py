"""Halos: which rows of its neighbours' shards a device reads, where a rule's factor is split; and how they get there.

A window that moves over a dim reads a few rows beyond the shard of each device. So does what shifts a dim. A `Reach`
says which rows, in a way that holds for any number of devices. `hops` says which collective_permutes bring them.

>>> rows = HaloRows(dim=0, factor="i", before=1, after=1, first=0, last=32)
>>> for hop in hops(rows, size=32, pieces=4):
...     print(hop)
Hop(start=7, stop=8, pairs=((0, 1), (1, 2), (2, 3)), at=0)
Hop(start=0, stop=1, pairs=((1, 0), (2, 1), (3, 2)), at=9)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from autoshard.layout import MeshShape, shards
from autoshard.propagation.shifts import Factor, Permute, Shift

HALO_SHARE = 1 / 4  # of a shard, at most: a device that receives more had better have another part of the work


@dataclass(frozen=True)
class HaloRows(Generic[Factor]):
    """The rows of one operand that a device reads along one dim: its shard, and more or less at both ends."""

    dim: int
    factor: Factor
    before: int  # rows before the shard; negative: so many of the shard's first rows are not read
    after: int
    first: int  # of the whole array: rows before this one have no part in any result
    last: int  # and neither have rows from this one on
    wraps: bool = False  # whether the rows go on at the other end of the array
    padding: tuple[int, int] = (0, 0)  # of the window, on what a device has read

    def renamed(self, factor: int) -> HaloRows[int]:
        return HaloRows(self.dim, factor, self.before, self.after, self.first, self.last, self.wraps, self.padding)

    def permutes(self, size: int, pieces: int) -> Sequence[Permute]:
        return hops(self, size, pieces)

    def read(self, size: int, pieces: int) -> int:
        """Rows that one device has in the end."""
        return size // pieces + self.before + self.after


@dataclass(frozen=True)
class Reach(Generic[Factor]):
    """What a device reads of one operand, dim by dim: the rows of later dims are those of what earlier dims brought."""

    operand: int
    rows: tuple[HaloRows[Factor] | Shift[Factor], ...]
    is_hull: bool = False  # of several places, each of which is read by itself
    readers: int = 1  # equations that bring the same, of which XLA keeps one

    @property
    def halos(self) -> tuple[HaloRows[Factor], ...]:
        """Those that we exchange ourselves."""
        return tuple(rows for rows in self.rows if isinstance(rows, HaloRows))


@dataclass(frozen=True)
class Hop(Permute):
    """One collective_permute of a halo."""

    at: int  # where the rows stand in what the receiver reads


@dataclass(frozen=True)
class Transfer:
    """What one hop moves."""

    operand: int
    axes: tuple[str, ...]
    elements: int  # on one device
    rows: tuple  # which: equal for what is the same of the same array
    readers: int = 1  # `Reach.readers`


def hops(rows: HaloRows, size: int, pieces: int) -> list[Hop]:
    """The collective_permutes that bring a device its rows of a dim of this size, split into so many pieces."""
    shard = size // pieces
    begin, end = -rows.before, shard + rows.after
    found = []
    for distance in range(begin // shard, (end - 1) // shard + 1):
        starts, stops, pairs = [], [], []
        for device in range(pieces):
            sender = (device + distance) % pieces if rows.wraps else device + distance
            start, stop = max(begin, distance * shard), min(end, (distance + 1) * shard)
            if not rows.wraps:
                start, stop = max(start, rows.first - device * shard), min(stop, rows.last - device * shard)
            if sender != device and 0 <= sender < pieces and start < stop:
                starts.append(start)
                stops.append(stop)
                pairs.append((sender, device))
        if pairs:
            start, stop = min(starts), max(stops)
            found.append(Hop(start - distance * shard, stop - distance * shard, tuple(pairs), start - begin))
    return found


def transfers(
    reaches: Sequence[Reach[Factor]],
    shapes: Sequence[Sequence[int]],
    axes: Mapping[Factor, tuple[str, ...]],
    mesh: MeshShape,
) -> list[Transfer]:
    """All hops of an equation. What is read twice alike, along the first dims at least, is brought once.

    Args:
        reaches: of its rule.
        shapes: of its operands, on one device.
        axes: factor -> the mesh axes that split it.
        mesh: axis -> devices.
    """
    found: list[Transfer] = []
    brought: set[tuple] = set()
    for reach in reaches:
        local = list(shapes[reach.operand])
        so_far: tuple = (reach.operand,)  # what has been brought of it
        for rows in reach.rows:
            split = axes.get(rows.factor, ())
            pieces = shards(split, mesh)
            if pieces == 1:
                continue
            so_far, size = (*so_far, rows), local[rows.dim] * pieces
            if so_far not in brought:
                brought.add(so_far)
                others = math.prod(local[: rows.dim]) * math.prod(local[rows.dim + 1 :])
                for permute in rows.permutes(size, pieces):
                    same = (*so_far[1:-1], rows.dim, permute.start, permute.stop, permute.pairs)
                    found.append(Transfer(reach.operand, split, permute.rows * others, same, reach.readers))
            local[rows.dim] = rows.read(size, pieces)
    return found


def are_small(reaches: Sequence[Reach[Factor]], sizes: Sequence[Sequence[int]], pieces: Mapping[Factor, int]) -> bool:
    """Whether what devices receive is little against their shards, along every dim that is split.

    Of a hull, that is what comes from one side.

    What XLA's partitioner shifts is as large as it is.

    Args:
        reaches: of a rule.
        sizes: shapes of the whole operands.
        pieces: factor -> into how many pieces it is split.
    """
    return all(
        isinstance(rows, Shift)
        or (
            size % count == 0
            and rows.read(size, count) > 0
            and _received(reach, [hop.rows for hop in hops(rows, size, count)]) <= HALO_SHARE * (size // count)
        )
        for reach in reaches
        for rows in reach.rows
        for count in [pieces.get(rows.factor, 1)]
        if count > 1
        for size in [sizes[reach.operand][rows.dim]]
    )


def _received(reach: Reach[Factor], rows: Sequence[int]) -> int:
    return max(rows, default=0) if reach.is_hull else sum(rows)


def renamed(reaches: Sequence[Reach[str]], number: Mapping[str, int]) -> tuple[Reach[int], ...]:
    """The reaches of a rule in the factors of a group."""
    found = []
    for reach in reaches:
        rows = [one.renamed(number[one.factor]) for one in reach.rows if one.factor in number]
        if rows:
            found.append(Reach(reach.operand, tuple(rows), reach.is_hull, reach.readers))
    return tuple(found)


def window_rows(
    dim: int,
    factor: str,
    size: int,
    window: int,
    padding: int,
    *,
    stride: int = 1,
    dilation: int = 1,
    spread: int = 1,
    moves: int | None = None,
) -> HaloRows[str]:
    """What a device reads for its share of a window's positions, or of the window itself.

    A device that has `shard` rows reads from the first row of its first window to the last row of its last window:
    from `-padding` to `shard - step + reach - padding`, in rows that `spread` sets apart.

    Args:
        dim: of the operand.
        factor: of its positions or, if `moves` is given, of the window's own rows.
        size: of the dim.
        window: how many rows a window reads.
        padding: before the first row.
        stride: from window to window.
        dilation: from row to row inside a window.
        spread: from row to row of the operand.
        moves: positions of the window, if it is the window that is split.

    >>> window_rows(0, "i", 64, window=3, padding=1)
    HaloRows(dim=0, factor='i', before=1, after=1, first=0, last=64, wraps=False, padding=(0, 0))
    >>> window_rows(0, "i", 64, window=2, padding=0, stride=2)
    HaloRows(dim=0, factor='i', before=0, after=0, first=0, last=64, wraps=False, padding=(0, 0))
    """
    beyond = (window - 1) * dilation - stride if moves is None else (moves - 1) * stride - dilation
    beyond -= padding
    start, after = -(padding // spread), beyond // spread + 1
    return HaloRows(
        dim=dim,
        factor=factor,
        before=-start,
        after=after,
        first=0,
        last=size,
        padding=(padding + start * spread, beyond - (after - 1) * spread),
    )
