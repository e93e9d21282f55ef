"""Padding: the TPU compiler lays the two minor dims of an array out in tiles of 8 x 128, and fills these up.

Source: the layouts of compiled v5e programs. `tests/model/xla/test_backends.py` compiles arrays of many shapes and
compares their bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

Tile = tuple[int, int]  # elements: rows and columns
_ROW_WORD_BYTES = 4  # of a register's places


class RowsAndColumns(tuple[int, int]):
    """Two minor dims of an array: the first is the rows, and the second the columns, whichever way pads less."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowsAndColumns) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((RowsAndColumns, *self))


def padded_size(
    shape: tuple[int, ...], tile: Tile | None, minor: tuple[int, ...] | None = None, packed: int = 1
) -> int:
    """Elements that an array takes in memory, with those dims as the minor ones that pad least.

    Fewer rows than a tile has are padded to a power of two, and narrow ones to what fills words of 32 bits.

    Args:
        shape: of the array.
        tile: rows and columns; None if nothing is padded.
        minor: the dims among which the two minor ones are, if not any; or which those are (`RowsAndColumns`).
        packed: how many elements lie in one word of 32 bits, one below the other.

    >>> padded_size((257, 3), (8, 128)), padded_size((16, 16, 257, 257), (8, 128))
    (1536, 25264128)
    >>> padded_size((8, 256, 256, 64), (8, 128), minor=(0, 3)) // 256**2  # images, 64 channels of 128 lanes
    1024
    """
    size = math.prod(shape)
    if tile is None or not size:
        return size
    if len(shape) < 2:
        return _padded(size, tile[1] * packed)
    if isinstance(minor, RowsAndColumns):
        return _size_with(shape, *minor, tile, packed)
    return _least_size(shape, tile, None if minor is None else tuple(minor), packed)


@functools.lru_cache(maxsize=4096)  # a program's values have few shapes, and each is asked about per reader
def _least_size(shape: tuple[int, ...], tile: Tile, minor: tuple[int, ...] | None, packed: int) -> int:
    """Elements that an array takes whose minor dims are those of `minor`, or of all, that pad least."""
    dims = itertools.permutations(range(len(shape)) if minor is None else minor, 2)
    return min(_size_with(shape, row, column, tile, packed) for row, column in dims)


@functools.cache
def tiled_dims(shape: tuple[int, ...], tile: Tile) -> np.ndarray:
    """[other, rows, columns; dim]: whether that is what a dim can be where an array lies with the least padding.

    The outermost dim is neither rows nor columns if that takes no more: what reads a stack reads a layer at a time.

    >>> tiled_dims((24, 1024, 16, 64), (8, 128)).astype(int)  # weights of heads of 64, as columns half of them padding
    array([[1, 0, 1, 1],
           [0, 0, 1, 1],
           [0, 1, 0, 0]])
    """
    roles = np.zeros((3, len(shape)), dtype=bool)
    if not math.prod(shape):
        return ~roles
    sizes = {(a, b): _size_with(shape, a, b, tile) for a, b in itertools.permutations(range(len(shape)), 2)}
    least = min(sizes.values(), default=0)
    pairs = [pair for pair, size in sizes.items() if size == least]
    for row, column in [pair for pair in pairs if 0 not in pair] or pairs:
        others = [dim for dim in range(len(shape)) if dim not in (row, column)]
        roles[0, others] = roles[1, row] = roles[2, column] = True
    return roles


@functools.cache
def rows_and_columns(shape: tuple[int, ...], tile: Tile) -> RowsAndColumns:
    """The two minor dims of an argument: of those that pad least the last as columns, and then the last as rows.

    >>> rows_and_columns((16, 224, 224, 3), (8, 128)), rows_and_columns((128, 224, 224, 3), (8, 128))
    ((1, 2), (2, 0))
    """
    pairs = itertools.permutations(range(len(shape)), 2)
    return RowsAndColumns(min(pairs, key=lambda dims: (_size_with(shape, dims[0], dims[1], tile), -dims[1], -dims[0])))


def row_padding(shape: tuple[int, ...], window: Sequence[int], together: int, tile: Tile) -> float:
    """How many times larger the rows of an array are when each lies by itself.

    Args:
        shape: of all rows.
        window: the dims of one row.
        together: elements that the rows take side by side.
        tile: rows and columns.

    >>> row_padding((16, 64), (1,), 16 * 128, (8, 128)), row_padding((16, 16, 4), (1, 2), 2048, (8, 128))
    (1.0, 4.0)
    """
    row = tuple(shape[dim] for dim in window)
    apart = math.prod(shape) // max(1, math.prod(row)) * padded_size(row, tile)
    return max(1.0, apart / max(1, together))


def _size_with(shape: tuple[int, ...], row: int, column: int, tile: Tile, packed: int = 1) -> int:
    """Elements that an array takes with these dims as rows and columns."""
    rows, columns = tile
    rest = math.prod(shape) // (shape[row] * shape[column])
    least_rows = max(packed, min(rows, 1 << (shape[row] - 1).bit_length()))
    return rest * _padded(shape[row], least_rows) * _padded(shape[column], columns)


def elements_in_word(itemsize: float) -> int:
    """How many elements of so many bytes lie in one word of 32 bits.

    >>> [elements_in_word(itemsize) for itemsize in (8, 4, 2, 1, 0.5, 0.25)]
    [1, 1, 2, 4, 8, 16]
    """
    return max(1, int(_ROW_WORD_BYTES / itemsize))


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
