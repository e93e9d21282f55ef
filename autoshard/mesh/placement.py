"""Devices, or a machine by name, and mesh axes in; the links that each axis runs over out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from autoshard.layout import MeshShape
from autoshard.mesh.chips import CHIPS, Chip, chip_of
from autoshard.mesh.links import Link
from autoshard.mesh.machines import Machine

Parts = list[tuple[int, Link]]  # (devices, link), outermost first


def parts_of_machine(machine: Machine, axes: MeshShape) -> dict[str, Parts]:
    """What each axis of a mesh runs over, laid on a machine that is known by name."""
    chip = CHIPS[machine.chip]
    inside, parts, outside = {}, {}, machine.slices
    for axis, size in axes.items():
        slices = math.gcd(size, outside)
        outside //= slices
        inside[axis] = size // slices
        parts[axis] = [(slices, chip.network)]
    for axis, links in _laid_out(chip, machine.dims, inside).items():
        parts[axis] += links
    return parts


def _laid_out(chip: Chip, dims: Sequence[int], axes: MeshShape) -> dict[str, Parts]:
    """What each axis runs over inside one slice or host."""
    if not chip.torus_dims:
        return {axis: [(size, chip.link)] for axis, size in axes.items()}
    wires = [(size, chip.along(ring)) for size, ring in zip(dims, chip.rings(dims), strict=True)]
    wires = [(size, link) for size, link in [*wires, (chip.cores, chip.between_cores())] if size > 1]

    def laid(owners: Sequence[str | None]) -> dict[str, Parts]:
        owned = {axis: [wire for wire, owner in zip(wires, owners, strict=True) if owner == axis] for axis in axes}
        whole = {axis: math.prod(size for size, _ in owned[axis]) == axes[axis] for axis in axes}
        return {axis: owned[axis] for axis in axes if whole[axis]}

    # the inner axes are tried first for the inner wires; as many axes as possible get whole dims
    choices = itertools.product([*reversed(list(axes)), None], repeat=len(wires))
    best = max((laid(choice[::-1]) for choice in choices), key=len)
    owned = [link for parts in best.values() for _, link in parts]
    left = sum(link.bandwidth for _, link in wires) - sum(link.bandwidth for link in owned)
    line = replace(chip.along(), wires=("torus", left)) if left and len(best) < len(axes) - 1 else chip.along()
    return {axis: best.get(axis, [(size, line)]) for axis, size in axes.items()}


def shared_out(pieces: Sequence[int], products: Sequence[int]) -> list[int] | None:
    """Which product each piece is a factor of, so that the pieces of each make it up; None if there is no such way.

    >>> shared_out([16, 4, 4], [64, 4]), shared_out([16, 16], [64, 4])
    ([0, 0, 1], None)
    """
    if not pieces:
        return [] if all(product == 1 for product in products) else None
    piece, *rest = pieces
    for i, product in enumerate(products):
        if product % piece == 0:
            left = [*products[:i], product // piece, *products[i + 1 :]]
            if (others := shared_out(rest, left)) is not None:
                return [i, *others]
    return None


def parts_of_mesh(mesh: Mesh, chip: Chip) -> dict[str, Parts]:
    """What each axis of a mesh of devices runs over."""
    places = _places(mesh.devices.ravel().tolist(), chip)
    extents = [len(np.unique(column)) for column in places.T]
    # the link along each whole dim of the torus, and between the cores of a chip
    whole = [*(chip.along(ring) for ring in chip.rings(extents[1:-1])), chip.between_cores()]
    grid = places.reshape(*mesh.devices.shape, -1)
    lines = {axis: np.moveaxis(grid, dim, -2) for dim, axis in enumerate(mesh.axis_names)}
    return {axis: _parts_along(lines[axis], extents, whole, chip) for axis in lines}


def dims_of_devices(devices: Sequence[Any]) -> tuple[int, tuple[int, ...]]:
    """What devices are wired along: slices or hosts, and the devices along each dim inside one.

    Devices that do not fill such a grid are taken for one dim.
    """
    chip = chip_of(devices[0].device_kind) or CHIPS["cpu"]
    places = _places(devices, chip)
    groups, *inner = (len(np.unique(column)) for column in places.T)
    sizes = tuple(size for size in inner if size > 1) if chip.torus_dims else (len(devices) // groups,)
    fills = groups * math.prod(sizes) == len(devices)
    return (groups, sizes or (1,)) if fills else (1, (len(devices),))


def _parts_along(lines: np.ndarray, extents: Sequence[int], whole: Sequence[Link], chip: Chip) -> Parts:
    """What an axis runs over, from the places along it, [..., device, coordinate]."""
    size = lines.shape[-2]
    lines = np.sort(lines.reshape(-1, *lines.shape[-2:]), axis=1)
    counts = 1 + (np.diff(lines, axis=1) != 0).sum(axis=1)  # different values, [line, coordinate]
    slices = int(counts[:, 0].max())
    if size % slices:
        return [(size, chip.network)]
    parts = [(slices, chip.network)]
    if not chip.torus_dims:
        return [*parts, (size // slices, chip.link)]
    if (counts != counts[0]).any() or counts[0].prod() != size:
        return [*parts, (size // slices, chip.along())]
    for dim, link in enumerate(whole, start=1):
        count = int(counts[0, dim])
        if 1 < count < extents[dim]:
            stride = int(np.ptp(lines[0, :, dim])) // (count - 1)
            link = replace(
                chip.along(link.ring and count * stride == extents[dim], stride),
                wires=(f"dim {dim - 1}", link.bandwidth),
            )
        parts.append((count, link))
    return parts


def _places(devices: Sequence[Any], chip: Chip) -> np.ndarray:
    """Where devices are, [device, coordinate]: slice, host or process; on a torus then its coordinates and the core."""
    slices = [_slice_index(device) for device in devices]
    if chip.torus_dims:
        inside = [[*getattr(device, "coords", ()), getattr(device, "core_on_chip", 0)] for device in devices]
        return np.array([[index or 0, *place] for index, place in zip(slices, inside, strict=True)])
    processes = [device.process_index for device in devices]
    # a host of GPUs may have a process for each; XLA then gives them one slice_index
    process_per_gpu = len(set(processes)) == len(devices) and chip.kinds != ("cpu",)
    return np.array(slices if process_per_gpu and None not in slices else processes)[:, None]


def _slice_index(device: Any) -> int | None:
    numbers = (getattr(device, name, None) for name in ("slice_index", "partition_index"))
    return next((number for number in numbers if number is not None and number >= 0), None)
