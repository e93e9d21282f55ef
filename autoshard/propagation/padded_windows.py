"""Convolutions over a padded array in, the same over the array itself out: what was padded is padding of the window.

No mesh axis divides the rows of `jnp.pad(u, 1, mode="wrap")`, but those of `u`. So the equation that makes the padded
array makes `u` instead, in the dims that the convolution reads, and the convolution says along which dims it goes on
at the other end (`WRAPS`). Padding by zeros adds to the padding that it has.

Only what convolutions alone read is taken for such an array.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.program import Equation, Program, Value
from autoshard.propagation.parts import Makers, Operand, StencilPart, constant_of
from autoshard.propagation.rules.windows import WRAPS, conv_general_dilated

UNPADDED = "unpadded"  # parameter of the equation that makes what was padded: its steps, and which source it is
_NOTHING = -1  # a row that pads with zeros

FindPart = Callable[[Operand, Equation], StencilPart | None]  # how a value inside a stencil is made


@dataclass(frozen=True)
class _Rim:
    """Rows that are put around those of an array along one dim."""

    before: int = 0
    after: int = 0
    wraps: bool = False  # those of the other end; or zeros

    @property
    def is_empty(self) -> bool:
        return not (self.before or self.after)


@dataclass(frozen=True)
class _PaddedArray:
    """A value that is an array with a rim, as convolutions read it."""

    value: Value
    array: Value
    rims: tuple[_Rim, ...]  # by dim of the value

    @cached_property
    def unpadded(self) -> Value:
        """The array, with the dims of the value."""
        shape = [size - rim.before - rim.after for size, rim in zip(self.value.shape, self.rims, strict=True)]
        return replace(self.value, shape=tuple(shape), bytes=self.value.itemsize * math.prod(shape))


def padded_windows(
    program: Program, candidates: Set[int], find: FindPart, unfold: Callable[[Value], Equation | None]
) -> dict[int, Equation]:
    """Indices of equations -> what stands in their places.

    Args:
        program: without stencils of its own.
        candidates: ids of values inside stencils.
        find: the part that makes a value.
        unfold: the stencil that ends at a value: its steps and sources.
    """
    readers: dict[int, list[Equation]] = defaultdict(list)
    for equation in program.equations:
        if equation.primitive == "conv_general_dilated" and _id(equation.inputs[0]) in candidates:
            readers[_id(equation.inputs[0])].append(equation)
    returned = {_id(one) for one in program.results}
    found: dict[int, Equation] = {}
    for id_, convolutions in readers.items():
        maker = program.makers[id_]
        if id_ in returned or program.reads[id_] != len(convolutions) or len(maker.outputs) != 1:
            continue
        padded = _padded(maker.outputs[0], maker, find, program.makers)
        over = [] if padded is None else [_over_array(equation, padded) for equation in convolutions]
        if padded is None or None in over or (whole := unfold(padded.value)) is None:
            continue
        source = next(i for i, one in enumerate(whole.inputs) if one is padded.array)
        params = {"new_sizes": padded.unpadded.shape, "dimensions": None, UNPADDED: (whole.params["steps"], source)}
        made = replace(maker, primitive="reshape", params=params, inputs=(padded.array,), outputs=(padded.unpadded,))
        found[maker.index] = made
        found.update({equation.index: equation for equation in over if equation is not None})
    return found


def _id(operand: Operand) -> int:
    return operand.id if isinstance(operand, Value) else -1


def _padded(value: Value, maker: Equation, find: FindPart, makers: Makers) -> _PaddedArray | None:
    """What a value is if it is an array with a rim; else None."""
    part = find(value, maker)
    if part is None:
        return None
    found = _rows(value, maker, find, makers)
    if found is None:
        return None
    array, rows = found
    rims = [_rim(one, size) for one, size in zip(rows, array.shape, strict=True)]
    of_dims = [_Rim() if dim is None else rims[dim] for dim in part.dims]
    known = tuple(rim for rim in of_dims if rim is not None)
    padded = _PaddedArray(value, array, known)
    is_one = len(known) == len(of_dims) and math.prod(padded.unpadded.shape) == math.prod(array.shape)
    return padded if is_one and not all(rim.is_empty for rim in known) else None


def _rim(rows: np.ndarray, size: int) -> _Rim | None:
    """The rim of rows that are all of an array, in order."""
    before = -int(rows[0]) % size if rows[0] != _NOTHING else int((rows != _NOTHING).argmax())
    wraps = rows[0] not in (_NOTHING, 0) or (rows[-1] not in (_NOTHING, size - 1))
    after = len(rows) - size - before
    if after < 0:
        return None
    around = np.arange(-before, size + after)
    expected = around % size if wraps else np.where((around >= 0) & (around < size), around, _NOTHING)
    return _Rim(before, after, wraps) if (rows == expected).all() else None


def _rows(operand: Operand, reader: Equation, find: FindPart, makers: Makers) -> tuple[Value, list[np.ndarray]] | None:
    """The array that slices and pads lead to, and which of its rows stand where, dim by dim."""
    part = find(operand, reader)
    if part is None:
        if not isinstance(operand, Value) or not operand.shape:
            return None
        return operand, [np.arange(size) for size in operand.shape]
    if part.kind not in ("slice", "same", "pad", "concatenate") or part.reads:
        return None
    of = part.operands if part.kind == "concatenate" else part.operands[:1]
    if part.dims != tuple(range(len(part.shape))) and any(find(one, part.equation) is None for one in of):
        return None  # the dims of an array that no stencil makes are not those of the step
    (found, *others) = [_rows(one, part.equation, find, makers) for one in of]
    if found is None or None in others:
        return None
    array, rows = found
    match part.kind:
        case "slice":
            starts = zip(rows, part.moves, part.shape, strict=True)
            return array, [one[start : start + size] for one, start, size in starts]
        case "pad" if _is_zero(part.operands[1], makers) and all(low >= 0 <= high for low, high in part.moves):
            pads = zip(rows, part.moves, strict=True)
            return array, [np.pad(one, pad, constant_values=_NOTHING) for one, pad in pads]
        case "concatenate":
            joined = [rows[part.moves]]
            for one in others:
                assert one is not None, "all are known"
                if one[0] is not array or not _are_alike(rows, one[1], part.moves):
                    return None
                joined.append(one[1][part.moves])
            return array, [*rows[: part.moves], np.concatenate(joined), *rows[part.moves + 1 :]]
        case "same":
            return array, rows
    return None


def _is_zero(operand: Operand, makers: Makers) -> bool:
    number = constant_of(operand, makers)
    return number is not None and not np.any(number)


def _are_alike(rows: Sequence[np.ndarray], others: Sequence[np.ndarray], but: int) -> bool:
    """Whether the same rows stand along all dims but one."""
    pairs = itertools.compress(zip(rows, others, strict=True), (dim != but for dim in range(len(rows))))
    return all(np.array_equal(one, other) for one, other in pairs)


def _over_array(equation: Equation, padded: _PaddedArray) -> Equation | None:
    """A convolution over what was padded; None if that would not help, or is none."""
    params: Mapping = equation.params
    batch, channels, *places = params["dimension_numbers"].lhs_spec
    rims = [padded.rims[dim] for dim in places]
    own = params["padding"]
    spread = any(n > 1 and not rim.is_empty for n, rim in zip(params["lhs_dilation"], rims, strict=True))
    has_both = any(rim.wraps and tuple(pad) != (0, 0) for rim, pad in zip(rims, own, strict=True))
    if spread or has_both or not (padded.rims[batch].is_empty and padded.rims[channels].is_empty):
        return None
    padding = tuple((int(a) + rim.before, int(b) + rim.after) for (a, b), rim in zip(own, rims, strict=True))
    wraps = tuple(rim.wraps for rim in rims)
    inputs = (padded.unpadded, *equation.inputs[1:])
    made = replace(equation, params={**params, "padding": padding, WRAPS: wraps}, inputs=inputs)
    halos = {rows.dim for reach in conv_general_dilated(made).reaches for rows in reach.halos}
    return made if any(dim in halos and not padded.rims[dim].is_empty for dim in places) else None
