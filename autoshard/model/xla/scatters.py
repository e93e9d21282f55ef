"""Reduce_scatters: where XLA's compilers have one, and the stages in which we run it where they do not.

The CPU compiler leaves an all_reduce and a slice what they are. The TPU compiler has no reduce_scatter over all devices
of a program, unless these are few. It makes one over slices and devices inside them an all_reduce inside. Several, one
inside the other, it runs as they are. Source: compiled v5e programs of 2x2, 2x4, 4x4, 8x8 and 16x16 devices, and v5p
programs of 2x2x1, 2x2x2 and 2x2x4. `tests/mesh/test_targets.py` compiles stages over one and two slices, and
`tests/model/xla/test_scatters.py` sums over all devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autoshard.layout import MeshShape, shards
from autoshard.model.xla.tiles import rows_and_columns
from autoshard.operations.reduce_scatter import LANES, fills_tiles, fits_turned, scattered_rows, sent_width
from autoshard.operations.sums import Stages, two_stages

if TYPE_CHECKING:
    from autoshard.model.xla.backends import Backend


@dataclass(frozen=True)
class Scatters:
    """Which reduce_scatters there are."""

    from_all_reduces: bool = True  # whether an all_reduce and a slice become a reduce_scatter
    over_all_up_to: float = math.inf  # devices of a program: one over all of more is an all_reduce, and a slice
    dtypes: frozenset[str] = frozenset()  # of sums that are scattered, as others are all_reduced; empty: of any
    chip_rows: int = 0  # of tiles, which a device's slice has to fill to be scattered (`fills_tiles`); 0: any slice is
    by_hand: bool = True  # whether we run those that the compiler does not have, as in programs that `lower` makes
    over_some_axes: bool = False  # whether one over some axes of a sum, and an all_reduce over the others, are a choice


def merges_slices(axes: tuple[str, ...], dtype: Any, mesh: MeshShape, backend: Backend) -> bool:
    """Whether the backend makes one reduce_scatter of an all_reduce over these axes and a slice."""
    merges = backend.scatters.from_all_reduces and scatters_at_once(axes, mesh, backend)
    return merges and is_scattered(dtype, backend)


def is_scattered(dtype: Any, backend: Backend) -> bool:
    """Whether the backend has a reduce_scatter of such numbers. TPU has none of float16 and of integers."""
    return not backend.scatters.dtypes or np.dtype(dtype).name in backend.scatters.dtypes


def scatters_at_once(axes: tuple[str, ...], mesh: MeshShape, backend: Backend) -> bool:
    """Whether the backend has a reduce_scatter over these axes: between slices, or of some devices of one slice."""
    between, inside = _levels(axes, mesh, backend)
    devices = math.prod(mesh.values())
    if not inside or (backend.slices == 1 and devices <= backend.scatters.over_all_up_to):
        return True
    everybody = shards(inside, mesh) * backend.slices >= devices
    return not (between or everybody)


class SentSlice(NamedTuple):
    """What one reduce_scatter leaves on a device, in elements."""

    elements: int  # of its slice as it is sent, padding included
    exchanged: int  # that it gets from its neighbours after that, since slices were padded


def sent_slices(
    shape: Sequence[int], dim: int, sizes: Sequence[int], dtype: Any, backend: Backend
) -> tuple[SentSlice, ...] | None:
    """What each stage sends of a sum that is scattered as `reduce_scatter` arranges it; None: it is all_reduced.

    Args:
        shape: of one device's part of the sum, whole.
        dim: which is cut.
        sizes: devices that talk to each other, per stage.
        dtype: of its elements; complex ones are scattered as their real and imaginary parts.
    """
    if not is_scattered(dtype, backend):
        return None
    itemsize = np.dtype(dtype).itemsize
    is_complex = np.issubdtype(dtype, np.complexfloating)
    if is_complex:
        shape, dim, itemsize = (2, *shape), dim + 1, itemsize // 2
    width, in_slices = sent_width(shape, dim, math.prod(sizes), itemsize)
    local, sent = math.prod(shape), []
    for size in sizes:
        local //= size
        one = _sent_slice(local, width, size, itemsize, backend, may_turn=not is_complex)
        if one is None or (in_slices and one.exchanged):  # those that are padded libtpu all_reduces
            return None
        sent.append(SentSlice(one.elements // 2, one.exchanged // 2) if is_complex else one)
    return tuple(sent)


def _sent_slice(
    elements: int, columns: int, devices: int, itemsize: int, backend: Backend, *, may_turn: bool = True
) -> SentSlice | None:
    """What a reduce_scatter of rows sends; None: the whole is all_reduced.

    Args:
        elements: of one device's slice.
        columns: of the matrix.
        devices: that talk to each other.
        itemsize: bytes of an element.
        backend: the compiler.
        may_turn: whether the matrix lies as it pads least, and is no part of something larger.
    """
    chip_rows = backend.scatters.chip_rows
    if not chip_rows:
        return SentSlice(elements, 0)
    rows = elements // columns
    # Where rows are lanes, those of a slice fill them, or nothing is scattered.
    if columns < LANES or (may_turn and _is_turned(rows * devices, columns, backend)):
        fits = fills_tiles(elements, columns, itemsize, chip_rows) and fits_turned(columns, devices)
        return SentSlice(elements, 0) if fits else None
    padded = scattered_rows(rows, columns, devices, chip_rows)
    return SentSlice(padded * columns, (padded - rows) * (devices - 1) * columns) if padded else None


def _is_turned(rows: int, columns: int, backend: Backend) -> bool:
    """Whether a matrix lies with its rows as the columns of tiles, since it is padded less so."""
    return backend.tile is not None and rows_and_columns((rows, columns), backend.tile)[1] == 0


def scattered_alone(
    axes: tuple[str, ...], devices: int, shape: Sequence[int], itemsize: int, mesh: MeshShape, backend: Backend
) -> SentSlice | None:
    """What the backend sends of a `psum_scatter` that it runs as one; None: it all_reduces the whole.

    Args:
        axes: what it runs over.
        devices: how many of those along the axes talk to each other.
        shape: of one device's part of the sum, whole.
        itemsize: bytes of an element.
    """
    in_groups = devices < shards(axes, mesh)
    if not in_groups and not scatters_at_once(axes, mesh, backend):
        return None
    columns = shape[-1] if len(shape) > 1 else 1
    return _sent_slice(math.prod(shape) // devices, columns, devices, itemsize, backend)


def axes_between_slices(mesh: MeshShape, slices: int) -> frozenset[str]:
    """The axes that join so many slices, not devices of one: the outermost."""
    between, count = set(), 1
    for axis, size in mesh.items():
        count *= size
        if size > 1 and slices % count == 0:
            between.add(axis)
    return frozenset(between)


def _levels(axes: tuple[str, ...], mesh: MeshShape, backend: Backend) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes that lie between slices, and the axes that go on inside one slice."""
    between = axes_between_slices(mesh, backend.slices)
    return tuple(axis for axis in axes if axis in between), tuple(axis for axis in axes if axis not in between)


def stages_of(axes: tuple[str, ...], mesh: MeshShape, backend: Backend) -> Stages:
    """One reduce_scatter over these axes, or several, over minor axes first, where a backend does not have it."""
    between, inside = _levels(axes, mesh, backend)
    if scatters_at_once(axes, mesh, backend):
        return ((axes, None),)
    stages: Stages = ((inside, None),) if scatters_at_once(inside, mesh, backend) else two_stages(inside, mesh)
    return (*stages, (between, None)) if between else stages


def scatter_stages(axes: tuple[str, ...], mesh: MeshShape) -> list[Stages]:
    """All ways in which a sum over these axes may be scattered, whatever the backend and the slices."""
    found: list[Stages] = [((axes, None),)]
    for count in range(len(axes)):
        between, inside = axes[:count], axes[count:]
        outside = ((between, None),) if between else ()
        found += [((inside, None), *outside), (*two_stages(inside, mesh), *outside)]
    return found
