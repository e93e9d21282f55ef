"""Rows of a TPU core: what gathers pick and scatters add lies row by row, each row in tiles of its own.

XLA for TPU copies the array that rows are picked from, or added to, so that each row fills whole tiles: 16 numbers take
the 128 lanes of one. What is picked lies so, too, until it is read, and updates are copied so. Rows of more than half a
tile are always laid out so. Smaller ones are only while that copy takes 128 MiB at most; else they are gathered along
their columns, without padding. A copy of up to 64 MiB lies in the chip's own memory. Slices that a loop picks one by
one come from the array as it lies, and are padded whatever its size. Rows are added to an array of up to 512 MiB so, if
they are not few beside its own.

Source: the layouts of gathers and scatters of 2**8 to 2**20 rows of 2 to 64 numbers, compiled for v5e, and the cycles
that libtpu notes on copies of tables of 1,000 to 100,000 rows of 8 to 200 numbers.
`tests/model/xla/test_rows.py` compiles some.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.model.equations import is_computed, is_single_lookup
from autoshard.model.xla.backends import SCATTERS
from autoshard.model.xla.operations import LEAST_LOOP_ROWS, is_loop_over_rows
from autoshard.model.xla.tiles import RowsAndColumns, Tile, padded_size
from autoshard.program import Equation, Program

_TILE: Tile = (8, 128)
_MOST_ROW_BYTES = 2**27  # of an array in rows that are padded to more than twice their size
_MOST_BYTES_ADDED_TO = 2**29  # the same of an array that rows are added to; 1 GiB is not
_FEW = 2**-5  # of its own rows, from which on they are not few; 2**-9 are
_ROW_BYTES_IN_CHIP = 2**26  # such a copy lies in the chip; one of 2**27 does not
_WRITTEN_SHARE = 0.27  # of a copy in the chip's own memory: it is written so many times faster than memory copies
_ALWAYS_PADDED = 2.0  # times its size to which a row is padded at most, where all arrays are copied


def gathered_bytes(
    equation: Equation, operand: float, result: float, picked: Sequence[int], *, is_result: bool = False
) -> float:
    """Bytes that a gather takes beside its operand and its result, as other operations read and write these.

    Args:
        equation: the gather.
        operand: bytes of the array on one device.
        result: bytes of what is picked.
        picked: the shape of that on one device.
        is_result: whether the program returns that: then it is copied into the result's buffer.
    """
    window = equation.params["dimension_numbers"].offset_dims
    padding, is_loop = _padding([picked[dim] for dim in window]), is_loop_over_rows(equation)
    if padding == 1 or not (is_loop or (_is_vectorised(equation) and _is_in_rows(operand * padding, padding))):
        return 0.0
    apart = result * (padding if is_result else padding - 1)
    return apart if is_loop else apart + _outside_chip(operand * padding)


def scattered_bytes(equation: Equation, operand: float, updates: float, added: Sequence[int]) -> float:
    """Bytes that a scatter takes beside its operands, which other operations make as they do others.

    Args:
        equation: the scatter.
        operand: bytes of the array on one device.
        updates: bytes of what is added to it.
        added: the shape of that on one device.
    """
    numbers = equation.params["dimension_numbers"]
    padding = _padding([added[dim] for dim in numbers.update_window_dims])
    is_large = operand * padding <= _MOST_BYTES_ADDED_TO and updates >= _FEW * operand
    if padding == 1 or not _is_vectorised(equation) or not (is_large or _is_in_rows(operand * padding, padding)):
        return 0.0
    return updates * padding + _outside_chip(operand * padding)


def dims_of_rows(equation: Equation) -> tuple[int, ...]:
    """The dims of the array that a gather picks whole rows of, or a scatter adds them to; none if it has but parts."""
    numbers, shape = equation.params["dimension_numbers"], equation.inputs[0].shape
    if equation.primitive == "gather":
        single = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        window = [size for dim, size in enumerate(equation.params["slice_sizes"]) if dim not in single]
    else:
        single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window = [equation.inputs[2].shape[dim] for dim in numbers.update_window_dims]
    dims = tuple(dim for dim in range(len(shape)) if dim not in single)
    return dims if [shape[dim] for dim in dims] == window else ()


def lying_by_rows(program: Program) -> dict[int, RowsAndColumns]:
    """Tables that scatters make, as gradients of embeddings are -> their dims as rows and columns."""
    made = (one for one in program.equations if one.primitive in SCATTERS and is_computed(one.inputs[0]))
    return {one.outputs[0].id: RowsAndColumns((0, 1)) for one in made if dims_of_rows(one) == (1,)}


def copied_bytes(gather: Equation, shape: Sequence[int], itemsize: float) -> float:
    """Bytes of which memory could read as many and write as many while an array is copied so that it lies row by row.

    Args:
        gather: what picks rows of the array. A single one it slices off the array as that lies.
        shape: of the array on one device.
        itemsize: bytes of an element.
    """
    padding, operand = _padding([shape[dim] for dim in dims_of_rows(gather)]), math.prod(shape) * itemsize
    if is_single_lookup(gather) or padding == 1 or not _is_in_rows(operand * padding, padding):
        return 0.0
    return max(operand, operand * padding * _WRITTEN_SHARE)


def _padding(window: Sequence[int]) -> float:
    """How many times larger a row is than its elements; 1 of single elements, which are picked side by side."""
    size = math.prod(window)
    return padded_size(tuple(window), _TILE) / size if size > 1 else 1.0


def _is_vectorised(equation: Equation) -> bool:
    """Whether rows are not picked or added one after the other."""
    return math.prod(equation.inputs[1].shape[:-1]) >= LEAST_LOOP_ROWS


def _is_in_rows(padded: float, padding: float) -> bool:
    return padding <= _ALWAYS_PADDED or padded <= _MOST_ROW_BYTES


def _outside_chip(padded: float) -> float:
    return padded if padded > _ROW_BYTES_IN_CHIP else 0.0
