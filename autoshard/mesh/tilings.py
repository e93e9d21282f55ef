"""Which device holds which tile of an array, as XLA's SPMD partitioner has it, and how it turns one into another.

Docstrings name the functions of XLA (openxla/xla, xla/service/spmd) that ours follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.layout import Layout


@dataclass(frozen=True)
class Tiling:
    """Which device holds which tile: devices by tile coordinates, and last by copy."""

    devices: np.ndarray

    @property
    def tiles(self) -> tuple[int, ...]:
        return self.devices.shape[:-1]

    @property
    def copies(self) -> int:
        return self.devices.shape[-1]

    @property
    def partial(self) -> bool:
        return self.copies > 1

    @property
    def replicated(self) -> bool:
        return self.copies == self.devices.size

    def coordinates(self) -> np.ndarray:
        """The tile coordinates of each device, [device, dim]."""
        where = np.empty((self.devices.size, len(self.tiles)), dtype=int)
        where[self.devices.ravel()] = np.indices(self.devices.shape)[:-1].reshape(len(self.tiles), -1).T
        return where

    def same(self, other: Tiling) -> bool:
        if self.replicated or other.replicated:
            return self.replicated and other.replicated
        return self.devices.shape == other.devices.shape and bool((self.devices == other.devices).all())

    def split(self, dim: int, size: int) -> Tiling:
        """The tiling with dim `dim` as two dims, the first of `size` tiles."""
        shape = self.devices.shape
        return Tiling(self.devices.reshape(*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :]))


def tiling_of(layout: Layout, mesh: tuple[tuple[str, int], ...]) -> Tiling:
    names = [axis for axis, _ in mesh]
    sizes = dict(mesh)
    used = [axis for axes in layout for axis in axes]
    order = used + [axis for axis in names if axis not in used]
    devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    tiles = [math.prod(sizes[axis] for axis in axes) for axes in layout]
    return Tiling(devices.transpose([names.index(axis) for axis in order]).reshape(*tiles, -1))


def shape_inside(tiling: Tiling, counts: Sequence[int]) -> list[int]:
    """The shape of a tiling's devices within one of `counts` parts of each dim."""
    return [tiles // count for tiles, count in zip(tiling.tiles, counts, strict=True)] + [tiling.copies]


def devices_by_group(tiling: Tiling, counts: Sequence[int]) -> np.ndarray:
    """Devices by their place among the `counts` major parts of each dim, [group, member]."""
    rank = len(counts)
    split = [size for pair in zip(counts, shape_inside(tiling, counts), strict=False) for size in pair]
    order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2), 2 * rank]
    return tiling.devices.reshape(*split, tiling.copies).transpose(order).reshape(math.prod(counts), -1)


def swaps(source: Tiling, target: Tiling) -> list[tuple[int, int]] | None:
    """GetReshardAllToAllSourceTargetDims: pairs (from dim, to dim) whose tile counts trade places."""
    differ = [dim for dim, counts in enumerate(zip(source.tiles, target.tiles, strict=True)) if counts[0] != counts[1]]
    if not differ or sorted(source.tiles) != sorted(target.tiles):
        return None
    places: dict[int, list[int]] = {}
    for dim in differ:
        places.setdefault(source.tiles[dim], []).append(dim)
    pairs = []
    while places:
        count = min(places)
        dim = places[count][-1]
        wanted = target.tiles[dim]
        if wanted == count:
            _remove(places, count, dim)
            continue
        candidates = places[wanted]
        if count == 1:
            useful = [other for other in candidates if target.tiles[other] != 1]
        elif wanted % count == 0:
            useful = [other for other in candidates if target.tiles[other] == count]
        else:
            return None
        other = useful[0] if useful else candidates[-1]
        pairs.append((other, dim))
        places[count][-1] = other
        _remove(places, wanted, other)
    return pairs


def _remove(places: dict[int, list[int]], count: int, dim: int) -> None:
    places[count].remove(dim)
    if not places[count]:
        del places[count]


def swapped(tiling: Tiling, before: int, after: int) -> Tiling:
    """GetAllToAllSharding: the minor tiles of dim `before` become the minor tiles of dim `after`."""
    keep, shape = tiling.tiles[after], list(tiling.devices.shape)
    split, places = [], {}
    for dim, count in enumerate(shape):
        if dim == before:
            split += [keep, count // keep]
        elif dim == after:
            split += [count, 1]
        else:
            split.append(count)
        places[dim] = len(split) - 1
    shape[before], shape[after] = shape[after], shape[before]
    return Tiling(np.swapaxes(tiling.devices.reshape(split), places[before], places[after]).reshape(shape))


def copy_dim(tiling: Tiling, dim: int) -> Tiling:
    """PartiallyReplicateTiledShardingOnDims: the tiles along `dim` become copies."""
    shape = list(tiling.devices.shape)
    shape[-1] *= shape[dim]
    shape[dim] = 1
    return Tiling(np.sort(np.moveaxis(tiling.devices, dim, -2).reshape(shape)))


def split_or_merge(source: Tiling, target: Tiling) -> tuple[Tiling, Tiling] | None:
    """PatternMatchMergeOrSplitSharding: both with one dim split in two, so that part of it can move to another."""
    if source.copies != target.copies:
        return None
    differ = [dim for dim, counts in enumerate(zip(source.tiles, target.tiles, strict=True)) if counts[0] != counts[1]]
    before, after = source.tiles, target.tiles
    for place, first in enumerate(differ):
        for second in differ[place + 1 :]:
            ones = [before[first], before[second], after[first], after[second]].count(1)
            same = before[first] * before[second] == after[first] * after[second]
            i, j = first, second
            if ones == 0:
                if before[i] < after[i]:
                    i, j = j, i
                if before[i] % after[i] or not (same or before[i] == after[i] * after[j]):
                    continue
            elif ones == 1 and same:
                if 1 in (before[i], after[i]):
                    i = j
            else:
                continue
            size = min(before[i], after[i])
            return source.split(i, size), target.split(i, size)
    return None
