"""Partial sums on all devices in, each device's slice of the sum out. It knows JAX alone: exported code has it, too."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

LANES = 128  # of a TPU's vector registers: columns of a tile
_CHIP_ROWS = (16, 8)  # rows of tiles that a device sends at a time: of a chip of two cores as one device, of one core
_MOST_PADDING = 1 / 16  # of a device's rows: less is scattered, and exchanged a little; XLA all_reduces from 3/8
# Columns that do not fill lanes: how many at least, and the bytes of each per row of tiles. A few fit below that.
_LEAST_COLUMNS, _COLUMN_BYTES = 8, 64
_MOST_WIDTHS = 64  # numbers of columns that are tried
# Tiles of 8 x 128 that fit in the memory of libtpu's reduce_scatter: a part from each device, and four more.
_TILES_OF_PARTS, _OTHER_PARTS = 3648, 4
_MOST_PIECES = 19  # into which libtpu cuts columns; not into 23
_LEAST_TURNED = 8  # tiles of a piece of columns that lie as rows; pieces of 5 are not made


def reduce_scatter(partial: jax.Array, dim: int, stages: Sequence[tuple[Any, Any]], others: Sequence[str]) -> jax.Array:
    """This device's slice of a sum, of which the device has a part.

    What is scattered are the rows of a matrix that has many rows, and columns for all lanes of a TPU. TPU turns any
    other scatter into an all_reduce. It does so, too, where it turns the matrix, since the slice is read in the order
    of the sum, as by the rows of a table: then rows are lanes, and few of them fill none. A matrix of another width
    than the slice is not turned. A stage scatters inside each of the slices that the stages after it make.

    Args:
        partial: what this device has of the whole sum.
        dim: the dim that is sliced.
        stages: mesh axes, and groups of devices along them, if it is not all of them.
        others: mesh axes over which the slices are all_reduced.
    """
    if np.iscomplexobj(partial):  # the TPU compiler has none of these, and a device's bytes are the same
        parts = jax.numpy.stack([partial.real, partial.imag])
        return jax.lax.complex(*reduce_scatter(parts, dim + 1, stages, others))
    sizes = [len(groups[0]) if groups else jax.lax.axis_size(axes) for axes, groups in stages]
    columns, in_slices = sent_width(partial.shape, dim, math.prod(sizes), partial.dtype.itemsize)
    if in_slices:
        return _in_slices(partial, dim, stages, others, sizes, columns)
    rest = _others(partial.shape, dim)
    order, shape = (dim, *rest), [partial.shape[other] for other in rest]
    count = partial.shape[dim]
    whole, at = partial, dim
    for i, (axes, groups) in enumerate(stages):
        later = math.prod(sizes[i + 1 :])
        rows = _split_first(whole, at, later, sizes[i], rest if i == 0 else range(1, whole.ndim))
        sliced = jax.lax.psum_scatter(
            rows.reshape(-1, columns) if shape else rows, axes, axis_index_groups=groups, tiled=True
        )
        count //= sizes[i]
        whole, at = sliced.reshape(count, *shape), 0
    mine = whole.transpose(np.argsort(order))
    return jax.lax.psum(mine, tuple(others)) if others else mine


def scatters_second(dimension_numbers: Any, rank: int, dim: int) -> bool:
    """Whether the first of a product's dims that come from its second operand is scattered, behind other dims.

    Args:
        dimension_numbers: of the `dot_general`.
        rank: of its first operand.
        dim: of its result, which is scattered.

    >>> [scatters_second((((0,), (0,)), ((), ())), 2, dim) for dim in (0, 1)]
    [False, True]
    """
    ((contracted, _), (batch, _)) = dimension_numbers
    before: int = rank - len(contracted) - len(batch)
    return not batch and 0 < before == dim


def scattered_product(
    params: Mapping[str, Any], operands: Sequence[jax.Array], stages: Sequence[tuple[Any, Any]], others: Sequence[str]
) -> jax.Array:
    """This device's slice of a sum of products, sliced along the first dim that comes from the second operand.

    The operands change places, so that the dim is the first. Rows of the product are scattered as they are made then,
    and only slices are turned. Those of a gradient that is transposed next are not turned at all. XLA for TPU would
    copy the whole product in its other order, and, of a loop that stacks the slices, the stack.

    Args:
        params: of the `dot_general`.
        operands: what this device has of them.
        stages: as for `reduce_scatter`, as are `others`.
    """
    (contracted, batch), (first, second) = params["dimension_numbers"], operands
    precision = params["precision"]
    turned = jax.lax.dot_general(
        second,
        first,
        (contracted[::-1], batch[::-1]),
        precision=precision[::-1] if isinstance(precision, tuple) else precision,
        preferred_element_type=params["preferred_element_type"],
    )
    count = second.ndim - len(contracted[1])  # dims that come from it
    mine = reduce_scatter(turned, 0, stages, others)
    return mine.transpose(*range(count, mine.ndim), *range(count))


def sent_width(shape: Sequence[int], dim: int, pieces: int, itemsize: int) -> tuple[int, bool]:
    """The columns of the matrix as which a sum is scattered, and whether each slice is made such a matrix by itself.

    >>> sent_width((128, 256), 0, 8, 4), sent_width((8, 4096), 0, 8, 4), sent_width((1600, 50257), 0, 8, 4)
    ((256, False), (256, True), (50257, False))

    Args:
        shape: of one device's part of the sum, whole.
        dim: which is cut.
        pieces: of how many devices each gets one.
        itemsize: bytes of an element.
    """
    least, columns = math.prod(shape) // pieces, columns_of_other_dims(shape, dim)
    if not fills_tiles(least, columns, itemsize):
        width = tiled_width(least, itemsize)
        return width or columns, width > 0
    if math.prod(shape[:dim]) > 1 and shape[dim] // pieces % LANES:
        columns = tiled_width(least, itemsize, but=columns) or columns
    return columns, False


def scattered_rows(rows: int, columns: int, devices: int, chip_rows: int = _CHIP_ROWS[0]) -> int:
    """The rows of each device's slice as XLA for TPU scatters them, with padding; 0: it all_reduces the whole instead.

    Rows come in tiles of 8, two tiles at a time where the columns fill an odd number of lanes. A device sends them in
    equal parts, so many that one part from each device fits in fast memory. Columns are cut into equal pieces if they
    do not fit otherwise: those of 239 lanes cannot be cut. Devices exchange rows after that, to have those that are
    theirs. If a third of the rows is padding, XLA all_reduces.
    Source: programs compiled for v5e:2x4 and 4x4, v5p:2x2x1, 2x2x2 and 2x2x4, in float32 and bfloat16, which come out
    alike. `tests/model/xla/test_scatters.py` compiles some.

    >>> [scattered_rows(*slice, chip_rows=8) for slice in ((96, 768, 8), (200, 1600, 8), (200, 1600, 4), (9, 256, 8))]
    [96, 224, 208, 0]
    >>> [scattered_rows(128, lanes * LANES, 8, chip_rows=8) for lanes in (235, 239, 240)]
    [144, 0, 128]

    Args:
        rows: of a device's slice.
        columns: 128 at least; fewer are turned.
        devices: that talk to each other.
        chip_rows: as for `fills_tiles`.
    """
    lanes, room = -(-columns // LANES), _TILES_OF_PARTS // (devices + _OTHER_PARTS)
    widths = [lanes // pieces for pieces in range(1, _MOST_PIECES + 1) if lanes % pieces == 0]
    steps = ((chip_rows * (1 + width % 2), width) for width in widths)
    fitting = ((rows, rows // 8 * width) for rows, width in steps if rows // 8 * width <= room)
    together, tiles = next(fitting, (0, 0))
    if not together:
        return 0
    units = -(-rows // together)
    parts = -(-units // (room // tiles))
    padded = parts * -(-units // parts) * together
    return padded if 2 * padded <= 3 * rows else 0


def fits_turned(columns: int, devices: int) -> bool:
    """Whether XLA for TPU can cut columns, which lie as rows, into equal pieces of which one of each device fits.

    >>> [fits_turned(columns, 8) for columns in (3000, 16008, 16040, 50265)]
    [True, True, False, False]
    """
    tiles, room = -(-columns // 8), _TILES_OF_PARTS // (devices + _OTHER_PARTS)
    return any(tiles % piece == 0 for piece in range(min(tiles, _LEAST_TURNED), room + 1))


def columns_of_other_dims(shape: Sequence[int], dim: int) -> int:
    """The columns of the matrix whose rows are scattered when a dim is: enough other dims for all lanes, or all.

    >>> columns_of_other_dims((64, 4, 32), 0), columns_of_other_dims((64, 256), 0), columns_of_other_dims((64,), 0)
    (128, 256, 1)
    """
    sizes = [shape[other] for other in reversed(_others(shape, dim))]
    widths = itertools.accumulate(sizes, operator.mul)
    return next((width for width in widths if width >= LANES), math.prod(sizes))


def _others(shape: Sequence[int], dim: int) -> list[int]:
    """The other dims, those that are columns last."""
    return sorted((other for other in range(len(shape)) if other != dim), key=lambda other: shape[other] >= LANES)


def tiled_width(elements: int, itemsize: int, chip_rows: Sequence[int] = _CHIP_ROWS, but: int = 0) -> int:
    """The columns of a matrix of so many elements that TPU scatters, one such matrix to each device; 0: there is none.

    >>> [tiled_width(elements, 4) for elements in (4096, 2048, 1024, 9 * 256, 48 * 128)]
    [256, 256, 0, 0, 256]

    Args:
        elements: of one device's slice of the sum.
        itemsize: bytes of each.
        chip_rows: as for `fills_tiles`; those of the first are preferred.
        but: columns that the matrix is not to have.
    """
    widths = [2 * LANES, LANES, *(LANES * count for count in range(3, _MOST_WIDTHS))]
    widths = [width for width in widths if width != but]
    fitting = (width for rows in chip_rows for width in widths if fills_tiles(elements, width, itemsize, rows, 0))
    return next(fitting, 0)


def fills_tiles(
    elements: int, columns: int, itemsize: int, chip_rows: int = _CHIP_ROWS[0], most_padding: float = _MOST_PADDING
) -> bool:
    """Whether XLA for TPU scatters a sum of which each device gets a matrix of so many elements in so many columns.

    It cuts the rows of each device into parts of whole tiles. If it pads them, devices exchange rows, too. If much of
    them is padding, it all_reduces.
    Source: programs compiled for v5e:2x4, v5e:4x4, v5p:2x2x1 and v5p:2x2x2 in float32 and bfloat16.

    >>> fills_tiles(8 * 256, 256, 4, 8), fills_tiles(8 * 128, 128, 4, 8), fills_tiles(9 * 256, 256, 4, 8)
    (True, False, False)

    Args:
        elements: of one device's slice of the sum.
        columns: of the matrix that is scattered by its rows.
        itemsize: bytes of an element.
        chip_rows: 8 rows of a chip of one core, 16 of a chip whose two cores are one device.
        most_padding: of the rows, as a share.
    """
    if not elements or elements % columns:
        return False
    rows = elements // columns
    if columns % LANES:
        return columns >= _LEAST_COLUMNS and rows * itemsize % (_COLUMN_BYTES * chip_rows) == 0
    together = chip_rows * (1 + columns // LANES % 2)
    return -rows % together <= most_padding * rows


def _in_slices(
    partial: jax.Array,
    dim: int,
    stages: Sequence[tuple[Any, Any]],
    others: Sequence[str],
    sizes: Sequence[int],
    width: int,
) -> jax.Array:
    """The slice of a sum whose slices are matrices of few columns, or few rows: each is sent in rows of `width`."""
    whole = partial
    for i, (axes, groups) in enumerate(stages):
        later, before, after = math.prod(sizes[i + 1 :]), whole.shape[:dim], whole.shape[dim + 1 :]
        count = whole.shape[dim] // (later * sizes[i])
        pieces = whole.reshape(*before, later, sizes[i], count, *after)
        rows = jax.numpy.moveaxis(pieces, dim + 1, 0).reshape(-1, width)
        sliced = jax.lax.psum_scatter(rows, axes, axis_index_groups=groups, tiled=True)
        whole = sliced.reshape(*before, later * count, *after)
    return jax.lax.psum(whole, tuple(others)) if others else whole


def _split_first(whole: jax.Array, dim: int, later: int, size: int, others: Iterable[int]) -> jax.Array:
    """A dim cut into `later * size` pieces, the pieces of all `size` devices first, then the other dims.

    This takes one copy, or none.
    """
    count = whole.shape[dim] // (later * size)
    pieces = whole.reshape(*whole.shape[:dim], later, size, count, *whole.shape[dim + 1 :])
    return pieces.transpose(dim + 1, dim, dim + 2, *(other + 2 * (other > dim) for other in others))
