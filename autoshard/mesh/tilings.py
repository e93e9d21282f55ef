"""Which device holds which tile of an array, as XLA's SPMD partitioner has it, and how it turns one into another.

A tiling is written in one of two ways. `DigitTiling` is for meshes of which all axes are powers of one prime, as nearly
all are: a device's number is a row of digits, and each dim of the array is cut by some of them, so that nothing is
counted device by device. `DeviceTiling` holds every device in an array, and is for any mesh.

Docstrings name the functions of XLA (openxla/xla, xla/service/spmd) that ours follow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np

from autoshard.layout import Layout

Mesh = tuple[tuple[str, int], ...]  # axes and their sizes, in order
DeviceSets = Any  # sets of devices that talk to each other, as the tilings they come from write them
GroupSplit = Any  # how the devices of a tiling are shared out over groups, likewise


class Tiling(ABC):
    """Which device holds which tile. Devices are numbered 0, 1, ...; those of one tile hold copies of it."""

    shape: tuple[int, ...]  # into how many tiles each dim is cut; last, how many devices hold each tile
    tiles: tuple[int, ...]  # of these, the counts of the dims
    copies: int  # and that of the devices
    partial: bool  # whether tiles have copies
    replicated: bool  # whether there is one tile

    def _count(self, shape: tuple[int, ...]) -> None:
        """Sets all these, which are read far more often than tilings are made."""
        tiles, copies = shape[:-1], shape[-1]
        counted = {"shape": shape, "tiles": tiles, "copies": copies, "partial": copies > 1}
        self.__dict__.update(counted, replicated=max(tiles, default=1) == 1)

    def same(self, other: Self) -> bool:
        if self.replicated or other.replicated:
            return self.replicated and other.replicated
        return self.shape == other.shape and self.in_order_of(other)

    @abstractmethod
    def in_order_of(self, other: Self) -> bool:
        """Whether devices stand in the same order, tile after tile, whatever the dims of the tiles."""

    @abstractmethod
    def refines(self, coarse: Self) -> bool:
        """Whether each device's tile lies within the one that it holds in `coarse`; counts must divide."""

    @abstractmethod
    def split(self, dim: int, size: int) -> Self:
        """The tiling with dim `dim` as two dims, the first of `size` tiles."""

    @abstractmethod
    def spread(self, factors: Sequence[int]) -> Self:
        """Each dim cut into that many times more tiles, by the major copies of each tile."""

    @abstractmethod
    def unfolded(self, dim: int) -> Self:
        """The copies as tiles of `dim`, which is not cut."""

    @abstractmethod
    def swapped(self, before: int, after: int) -> Self:
        """GetAllToAllSharding: the minor tiles of dim `before` become the minor tiles of dim `after`."""

    @abstractmethod
    def copied(self, dim: int) -> Self:
        """PartiallyReplicateTiledShardingOnDims: the tiles along `dim` become copies."""

    @abstractmethod
    def among_minor(self, factors: Mapping[int, int]) -> DeviceSets:
        """Sets of devices that differ in the minor tiles of some dims alone; of each dim, how many tiles are minor."""

    @abstractmethod
    def moved(self, target: Self) -> DeviceSets:
        """Each device of this tiling with the one that holds the same tile in another of the same shape."""

    @abstractmethod
    def shared_out(self, counts: Sequence[int]) -> GroupSplit:
        """The devices of each group: those within one of the `counts` major parts of each dim."""

    @abstractmethod
    def inside(self, target: Self, counts: Sequence[int]) -> tuple[Self, Self]:
        """Both tilings inside the groups of each, of which the members are numbered as this tiling has them.

        The members of the target's groups have numbers of their own, if these are other groups.
        """

    @abstractmethod
    def rejoined(self, inner: Self, counts: Sequence[int]) -> Self:
        """The tiling that is `inner` in each of this tiling's groups."""


class Members(ABC):
    """The devices of some groups that do the same beside each other, by their numbers inside."""

    @abstractmethod
    def axes(self, talk: DeviceSets) -> tuple[str, ...]:
        """Over which mesh axes members talk, in mesh order."""

    @abstractmethod
    def shared_out(self, split: GroupSplit) -> Self:
        """The same devices in more groups: each group shared out."""


@cache
def tiling_of(layout: Layout, mesh: Mesh) -> Tiling:
    order = [*layout, _others(layout, mesh)]
    if prime := prime_of(mesh):
        digits = _digits_by_axis(mesh, prime)
        *dims, copied = (tuple(digit for axis in axes for digit in digits[axis]) for axes in order)
        return DigitTiling(prime, tuple(dims), copied)
    names, sizes = [axis for axis, _ in mesh], dict(mesh)
    devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    tiles = [math.prod(sizes[axis] for axis in axes) for axes in layout]
    return DeviceTiling(devices.transpose([names.index(axis) for axes in order for axis in axes]).reshape(*tiles, -1))


@cache
def members_of(mesh: Mesh) -> Members:
    """All devices as one group."""
    names, sizes = tuple(axis for axis, _ in mesh), tuple(size for _, size in mesh)
    if prime := prime_of(mesh):
        digits = _digits_by_axis(mesh, prime)
        return DigitMembers(names, tuple(axis for axis in names for _ in digits[axis]))
    return DeviceMembers(names, sizes, np.arange(math.prod(sizes))[None, :])


def _others(layout: Layout, mesh: Mesh) -> list[str]:
    used = {axis for axes in layout for axis in axes}
    return [axis for axis, _ in mesh if axis not in used]


@cache
def prime_of(mesh: Mesh) -> int:
    """The prime of which all axes are powers; 0 if there is none."""
    devices = math.prod(size for _, size in mesh)
    prime = next((n for n in range(2, devices + 1) if devices % n == 0), 2)
    return prime if prime ** round(math.log(devices, prime)) == devices else 0


@cache
def _digits_by_axis(mesh: Mesh, prime: int) -> dict[str, range]:
    found, start = {}, 0
    for axis, size in mesh:
        found[axis] = range(start, start + _power(size, prime))
        start = found[axis].stop
    return found


@cache
def _power(count: int, prime: int) -> int:
    """Of which power of `prime` a count is."""
    power = 0
    while count > 1:
        count, power = count // prime, power + 1
    return power


@dataclass(frozen=True)
class DigitTiling(Tiling):
    """By digits of the devices' numbers, which are told apart as 0, 1, ... from the most significant one on.

    >>> mesh = (("x", 4), ("y", 2))  # a device's number is x x y
    >>> tiling_of((("y",), ()), mesh)
    DigitTiling(prime=2, dims=((2,), ()), rest=(0, 1))
    """

    prime: int
    dims: tuple[tuple[int, ...], ...]  # digits that are the coordinate of a tile along each dim, major first
    rest: tuple[int, ...]  # those that tell the copies of a tile apart

    def __post_init__(self) -> None:
        self._count(tuple([self.prime ** len(digits) for digits in (*self.dims, self.rest)]))

    def _order(self) -> tuple[int, ...]:
        """All digits, major first: where each device stands."""
        return sum(self.dims, ()) + self.rest

    def _power(self, count: int) -> int:
        return _power(count, self.prime)

    def _with(self, changes: Mapping[int, tuple[int, ...]], rest: tuple[int, ...]) -> DigitTiling:
        dims = tuple([changes.get(dim, digits) for dim, digits in enumerate(self.dims)])
        return DigitTiling(self.prime, dims, rest)

    def in_order_of(self, other: DigitTiling) -> bool:
        return self._order() == other._order()

    def refines(self, coarse: DigitTiling) -> bool:
        return all(fine[: len(major)] == major for fine, major in zip(self.dims, coarse.dims, strict=True))

    def split(self, dim: int, size: int) -> DigitTiling:
        digits, major = self.dims[dim], self._power(size)
        dims = (*self.dims[:dim], digits[:major], digits[major:], *self.dims[dim + 1 :])
        return DigitTiling(self.prime, dims, self.rest)

    def spread(self, factors: Sequence[int]) -> DigitTiling:
        dims, rest = [], self.rest
        for digits, factor in zip(self.dims, factors, strict=True):
            more = self._power(factor)
            dims.append(digits + rest[:more])
            rest = rest[more:]
        return DigitTiling(self.prime, tuple(dims), rest)

    def unfolded(self, dim: int) -> DigitTiling:
        return self._with({dim: self.rest}, ())

    def swapped(self, before: int, after: int) -> DigitTiling:
        kept, digits = len(self.dims[after]), self.dims[before]
        return self._with({before: digits[:kept], after: self.dims[after] + digits[kept:]}, self.rest)

    def copied(self, dim: int) -> DigitTiling:
        return self._with({dim: ()}, tuple(sorted(self.dims[dim] + self.rest)))

    def among_minor(self, factors: Mapping[int, int]) -> DeviceSets:
        parts = [self.dims[dim][len(self.dims[dim]) - self._power(factor) :] for dim, factor in factors.items()]
        return [digit for digits in parts for digit in digits]

    def moved(self, target: DigitTiling) -> DeviceSets:
        place = {digit: number for number, digit in enumerate(target._order())}
        return [digit for number, digit in enumerate(self._order()) if place[digit] != number]

    def shared_out(self, counts: Sequence[int]) -> GroupSplit:
        """The digits of a member's number inside its group."""
        parts = [digits[self._power(count) :] for digits, count in zip(self.dims, counts, strict=True)]
        return sum(parts, ()) + self.rest

    def _outer(self, counts: Sequence[int]) -> list[tuple[int, ...]]:
        return [digits[: self._power(count)] for digits, count in zip(self.dims, counts, strict=True)]

    def _renumbered(self, counts: Sequence[int], number: Mapping[int, int]) -> DigitTiling:
        dims = tuple(
            tuple([number[digit] for digit in digits[self._power(count) :]])
            for digits, count in zip(self.dims, counts, strict=True)
        )
        return DigitTiling(self.prime, dims, tuple([number[digit] for digit in self.rest]))

    def inside(self, target: DigitTiling, counts: Sequence[int]) -> tuple[DigitTiling, DigitTiling]:
        number = {digit: place for place, digit in enumerate(self.shared_out(counts))}
        same = self._outer(counts) == target._outer(counts)
        theirs = number if same else {digit: place for place, digit in enumerate(target.shared_out(counts))}
        return self._renumbered(counts, number), target._renumbered(counts, theirs)

    def rejoined(self, inner: DigitTiling, counts: Sequence[int]) -> DigitTiling:
        digit = self.shared_out(counts)
        dims = tuple(
            major + tuple([digit[place] for place in places])
            for major, places in zip(self._outer(counts), inner.dims, strict=True)
        )
        return DigitTiling(self.prime, dims, tuple([digit[place] for place in inner.rest]))


@dataclass(frozen=True)
class DigitMembers(Members):
    """By the digits of a member's number inside its group."""

    axis_names: tuple[str, ...]
    axis_of: tuple[str, ...]  # of each digit, the mesh axis that it belongs to

    def axes(self, talk: DeviceSets) -> tuple[str, ...]:
        found = {self.axis_of[digit] for digit in talk}
        return tuple([axis for axis in self.axis_names if axis in found])

    def shared_out(self, split: GroupSplit) -> DigitMembers:
        return DigitMembers(self.axis_names, tuple(self.axis_of[digit] for digit in split))


@dataclass(frozen=True)
class DeviceTiling(Tiling):
    """By devices, [tile coordinates..., copy]."""

    devices: np.ndarray

    def __post_init__(self) -> None:
        self._count(self.devices.shape)

    def in_order_of(self, other: DeviceTiling) -> bool:
        return bool((self.devices.ravel() == other.devices.ravel()).all())

    def _coordinates(self) -> np.ndarray:
        """The tile coordinates of each device, [device, dim]."""
        where = np.empty((self.devices.size, len(self.tiles)), dtype=int)
        where[self.devices.ravel()] = np.indices(self.devices.shape)[:-1].reshape(len(self.tiles), -1).T
        return where

    def refines(self, coarse: DeviceTiling) -> bool:
        factors = [fine // count for fine, count in zip(self.tiles, coarse.tiles, strict=True)]
        return bool((self._coordinates() // factors == coarse._coordinates()).all())

    def split(self, dim: int, size: int) -> DeviceTiling:
        shape = self.shape
        return DeviceTiling(self.devices.reshape(*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :]))

    def spread(self, factors: Sequence[int]) -> DeviceTiling:
        devices = self.devices.reshape(*self.tiles, *factors, -1)
        return DeviceTiling(_dims_joined(devices, [a * b for a, b in zip(self.tiles, factors, strict=True)]))

    def unfolded(self, dim: int) -> DeviceTiling:
        return DeviceTiling(np.swapaxes(self.devices, dim, -1))

    def swapped(self, before: int, after: int) -> DeviceTiling:
        keep, shape = self.tiles[after], list(self.shape)
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
        return DeviceTiling(np.swapaxes(self.devices.reshape(split), places[before], places[after]).reshape(shape))

    def copied(self, dim: int) -> DeviceTiling:
        shape = list(self.shape)
        shape[-1] *= shape[dim]
        shape[dim] = 1
        return DeviceTiling(np.sort(np.moveaxis(self.devices, dim, -2).reshape(shape)))

    def among_minor(self, factors: Mapping[int, int]) -> DeviceSets:
        """[set, number in the group]"""
        tiling, minor = self, list[int]()
        for dim in sorted(factors, reverse=True):
            tiling = tiling.split(dim, tiling.shape[dim] // factors[dim])
            minor = [dim + 1, *(place + 1 for place in minor)]
        talk = np.moveaxis(tiling.devices, minor, range(-len(minor), 0))
        return talk.reshape(-1, math.prod(factors.values()))

    def moved(self, target: DeviceTiling) -> DeviceSets:
        """[set, number in the group]"""
        return np.stack([self.devices.ravel(), target.devices.ravel()], axis=1)

    def _shape_inside(self, counts: Sequence[int]) -> list[int]:
        return [tiles // count for tiles, count in zip(self.tiles, counts, strict=True)] + [self.copies]

    def shared_out(self, counts: Sequence[int]) -> GroupSplit:
        """[group, number inside]: a device."""
        rank = len(counts)
        split = [size for pair in zip(counts, self._shape_inside(counts), strict=False) for size in pair]
        order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2), 2 * rank]
        return self.devices.reshape(*split, self.copies).transpose(order).reshape(math.prod(counts), -1)

    def inside(self, target: DeviceTiling, counts: Sequence[int]) -> tuple[DeviceTiling, DeviceTiling]:
        before, after = self.shared_out(counts), target.shared_out(counts)
        numbers = np.arange(before.shape[-1])
        source = DeviceTiling(numbers.reshape(self._shape_inside(counts)))
        if (np.sort(before) == np.sort(after)).all():  # the same groups
            rising = np.argsort(before[0])
            numbers = rising[np.searchsorted(before[0][rising], after[0])]
        return source, DeviceTiling(numbers.reshape(target._shape_inside(counts)))

    def rejoined(self, inner: DeviceTiling, counts: Sequence[int]) -> DeviceTiling:
        devices = self.shared_out(counts)[:, inner.devices].reshape(*counts, *inner.shape)
        return DeviceTiling(_dims_joined(devices, [a * b for a, b in zip(counts, inner.tiles, strict=True)]))


def _dims_joined(devices: np.ndarray, tiles: Sequence[int]) -> np.ndarray:
    """[outer part per dim..., inner part per dim..., copies] -> [dim..., copies]"""
    rank = len(tiles)
    order = [place for dim in range(rank) for place in (dim, rank + dim)]
    return devices.transpose(*order, 2 * rank).reshape(*tiles, devices.shape[-1])


@dataclass(frozen=True)
class DeviceMembers(Members):
    """By devices, [group, number inside]."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    members: np.ndarray

    def axes(self, talk: DeviceSets) -> tuple[str, ...]:
        coordinates = np.unravel_index(self.members[:, talk].reshape(-1, talk.shape[-1]), self.axis_sizes)
        pairs = zip(self.axis_names, coordinates, strict=True)
        return tuple(axis for axis, where in pairs if (where != where[:, :1]).any())

    def shared_out(self, split: GroupSplit) -> DeviceMembers:
        members = self.members[:, split].reshape(-1, split.shape[-1])
        return DeviceMembers(self.axis_names, self.axis_sizes, members)


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
