"""One equation in, what it does inside a stencil out: the kinds of steps, and the dims that they are of.

All steps of a stencil have the rank of its result. A dim of size 1 that an equation drops, as `u[0]` does, stays a dim
of the step; `StencilPart.dims` says which dims of the step those of the value are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.primitives import applies_function, facts_of
from autoshard.program import Equation, Value

Operand = Value | np.ndarray
Shape = tuple[int, ...]


@dataclass(frozen=True)
class StencilPart:
    """One result of an equation, as a step."""

    equation: Equation
    kind: str  # "slice", "pad", "concatenate", "put", "put_add", "fill", "same" or "pointwise"
    inputs: tuple[int, ...]  # which operands of the equation it reads as arrays
    shape: Shape  # of the step
    dims: tuple[int | None, ...]  # dim of the value -> dim of the step; None for a dim of size 1 that no step has
    moves: Any = 0  # `MoveStep.moves`
    reads: tuple[tuple[int | None, ...], ...] = ()  # per operand: its dims, if they are not those of the value

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(self.equation.inputs[i] for i in self.inputs)


KnownPart = Callable[[Operand], StencilPart | None]  # how a value inside a stencil is made
Makers = Mapping[int, Equation]


def parts_of(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    """What each result of an equation is inside a stencil; empty if it is no part of one."""
    if not all(math.prod(made.shape) and made.shape for made in equation.outputs):
        return []
    found = _PARTS.get(equation.primitive)
    if found is not None:
        return found(equation, known, makers)
    return _pointwise(equation, known) if facts_of(equation.primitive).is_pointwise else []


def shape_in(array: Sequence[int], dims: Sequence[int | None], rank: int) -> Shape:
    """The shape of an array of this shape as a step of this rank."""
    shape = [1] * rank
    for dim, size in zip(dims, array, strict=True):
        if dim is not None:
            shape[dim] = size
    return tuple(shape)


def _of(operand: Operand, known: KnownPart) -> tuple[Shape, tuple[int | None, ...]]:
    """The shape and dims of an array as a step."""
    part = known(operand)
    return (part.shape, part.dims) if part is not None else (tuple(operand.shape), tuple(range(len(operand.shape))))


def _has_all_dims(array: Operand, known: KnownPart) -> bool:
    """Whether the dims of an array are those of its step."""
    part = known(array)
    return part is None or part.dims == tuple(range(len(part.shape)))


def _cut(
    equation: Equation, operand: Operand, starts: Sequence[int], known: KnownPart, output: int = 0
) -> StencilPart | None:
    """The part that is a slice of an operand."""
    shape, dims = _of(operand, known)
    moved, size = [0] * len(shape), list(shape)
    for dim, start, length in zip(dims, starts, equation.outputs[output].shape, strict=True):
        if dim is not None:
            moved[dim], size[dim] = int(start), length
    return StencilPart(equation, "slice", (0,), tuple(size), dims, tuple(moved))


def _slice(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    params = equation.params
    if any(stride != 1 for stride in params["strides"] or ()):
        return []
    return _some(_cut(equation, equation.inputs[0], params["start_indices"], known))


def _split(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    (operand,), axis, sizes = equation.inputs, equation.params["axis"], equation.params["sizes"]
    starts = [[0] * len(operand.shape) for _ in sizes]
    for start, at in zip(starts, itertools.accumulate(sizes, initial=0), strict=False):
        start[axis] = at
    return _some(*(_cut(equation, operand, start, known, i) for i, start in enumerate(starts)))


def _dynamic_slice(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    operand, *starts = equation.inputs
    at = _numbers(starts, makers)
    if at is None:
        return []
    sizes = zip(at, operand.shape, equation.outputs[0].shape, strict=True)
    return _some(_cut(equation, operand, [min(max(a, 0), n - m) for a, n, m in sizes], known))


def _pad(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    operand, _ = equation.inputs
    shape, dims = _of(operand, known)
    config, size = [(0, 0)] * len(shape), list(shape)
    for dim, (low, high, inside) in zip(dims, equation.params["padding_config"], strict=True):
        if inside or (dim is None and (low or high)):
            return []
        if dim is not None:
            config[dim] = int(low), int(high)
            size[dim] += int(low) + int(high)
    return [StencilPart(equation, "pad", (0, 1), tuple(size), dims, tuple(config))]


def _concatenate(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    axis = equation.params["dimension"]
    inputs = tuple(i for i, x in enumerate(equation.inputs) if x.shape[axis])
    operands = [equation.inputs[i] for i in inputs]
    inside = [part for part in map(known, operands) if part is not None and part.kind != "fill"]
    dims = inside[0].dims if inside else tuple(range(len(operands[0].shape)))
    if not operands or dims[axis] is None:
        return []
    shape = list(inside[0].shape if inside else operands[0].shape)
    shape[dims[axis]] = equation.outputs[0].shape[axis]
    kind = "concatenate" if len(operands) > 1 else "same"
    return [StencilPart(equation, kind, inputs, tuple(shape), dims, dims[axis])]


def _broadcast(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    (operand, *_), (made,) = equation.inputs, equation.outputs
    if not operand.shape:
        return [StencilPart(equation, "fill", (0,), made.shape, tuple(range(len(made.shape))))] if made.shape else []
    return _renamed(equation, known, makers)


def _renamed(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    """What only drops or adds dims of size 1. Only the inside of a stencil has any use for it."""
    part, (made,) = known(equation.inputs[0]), equation.outputs
    if part is None:
        return []
    dims: tuple[int | None, ...] = tuple(range(len(part.shape)))
    if made.shape != part.shape:
        wide = [dim for dim, size in enumerate(part.shape) if size != 1]
        if [size for size in made.shape if size != 1] != [part.shape[dim] for dim in wide]:
            return []
        left = iter(wide)
        dims = tuple(None if size == 1 else next(left) for size in made.shape)
    return [StencilPart(equation, "same", (0,), part.shape, dims)]


def _summed(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    """A sum over dims of one element, as gradients of broadcasts may be."""
    (operand,) = equation.inputs
    alone = all(operand.shape[dim] == 1 for dim in equation.params["axes"])
    return _renamed(equation, known, makers) if alone else []


def _reversed(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    """One row is the same the other way round."""
    turned = (equation.outputs[0].shape[dim] for dim in equation.params["dimensions"])
    part = known(equation.inputs[0])
    if part is None or any(size != 1 for size in turned):
        return []
    return [replace(part, equation=equation, kind="same", inputs=(0,), moves=0, reads=())]


def _pointwise(equation: Equation, known: KnownPart) -> list[StencilPart]:
    shapes = {tuple(x.shape) for x in equation.inputs} - {()}
    inside = [part for part in map(known, equation.inputs) if part is not None]
    if len(equation.outputs) != 1 or shapes != {equation.outputs[0].shape} or not inside:
        return []
    first = next((part for part in inside if part.kind != "fill"), inside[0])
    return [StencilPart(equation, "pointwise", tuple(range(len(equation.inputs))), first.shape, first.dims)]


def _put(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    """A scatter of one window at a place that is known."""
    array, indices, update = equation.inputs
    numbers = equation.params["dimension_numbers"]
    if len(indices.shape) != 1 or numbers.operand_batching_dims or not _has_all_dims(array, known):
        return []
    if applies_function(equation.primitive, equation.params):
        return []
    window = [dim for dim in range(len(array.shape)) if dim not in numbers.inserted_window_dims]
    shape = shape_in(update.shape, window, len(array.shape))
    starts = _window_starts(array, indices, numbers.scatter_dims_to_operand_dims, shape, makers)
    if starts is None:
        return []
    kind = "put" if equation.primitive == "scatter" else "put_add"
    whole = tuple(range(len(array.shape)))
    return [StencilPart(equation, kind, (0, 2), tuple(array.shape), whole, (starts, shape), (whole, tuple(window)))]


def _dynamic_update_slice(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    array, update, *starts = equation.inputs
    at = _numbers(starts, makers)
    if at is None or not _has_all_dims(array, known):
        return []
    sizes = zip(at, array.shape, update.shape, strict=True)
    moves = tuple(min(max(a, 0), n - m) for a, n, m in sizes), tuple(update.shape)
    whole = tuple(range(len(array.shape)))
    return [StencilPart(equation, "put", (0, 1), tuple(array.shape), whole, moves, (whole, whole))]


def _gather(equation: Equation, known: KnownPart, makers: Makers) -> list[StencilPart]:
    """A gather of one window at a place that is known."""
    (array, indices), params = equation.inputs, equation.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    if len(indices.shape) != 1 or numbers.operand_batching_dims or not _has_all_dims(array, known):
        return []
    starts = _window_starts(array, indices, numbers.start_index_map, sizes, makers)
    if starts is None:
        return []
    kept = tuple(dim for dim in range(len(array.shape)) if dim not in numbers.collapsed_slice_dims)
    return [StencilPart(equation, "slice", (0,), tuple(sizes), kept, starts, (tuple(range(len(array.shape))),))]


def _window_starts(
    array: Operand, indices: Operand, dims: Sequence[int], sizes: Sequence[int], makers: Makers
) -> tuple[int, ...] | None:
    """Where one window of these sizes starts, if the indices along these dims are known and it lies inside."""
    at = constant_of(indices, makers)
    if at is None:
        return None
    starts = [0] * len(array.shape)
    for dim, start in zip(dims, at.tolist(), strict=True):
        starts[dim] = int(start)
    fits = (0 <= start <= n - m for start, n, m in zip(starts, array.shape, sizes, strict=True))
    return tuple(starts) if all(fits) else None


def _numbers(operands: Sequence[Operand], makers: Makers) -> list[int] | None:
    """One number each; None if one of them depends on an argument."""
    found = [constant_of(operand, makers) for operand in operands]
    return None if any(x is None for x in found) else [int(x) for x in found if x is not None]


def constant_of(operand: Operand, makers: Makers) -> np.ndarray | None:
    """The numbers of an index that does not depend on any argument."""
    if not isinstance(operand, Value):
        return np.asarray(operand)
    made_by = makers.get(operand.id)
    if made_by is None or not made_by.inputs or made_by.primitive not in _FOLDED:
        return None
    inputs = [constant_of(x, makers) for x in made_by.inputs]
    known = [x for x in inputs if x is not None]
    if len(known) < len(inputs):
        return None
    if made_by.primitive == "concatenate":
        return np.concatenate(known, made_by.params["dimension"])
    (one,) = known
    if one.size == 1:
        return np.broadcast_to(one.reshape(()), operand.shape)
    return None if made_by.primitive == "broadcast_in_dim" else one.reshape(operand.shape)


_FOLDED = frozenset(
    {"branch_const", "broadcast_in_dim", "concatenate", "convert_element_type", "reshape", "scan_const"}
)


def _some(*parts: StencilPart | None) -> list[StencilPart]:
    return [part for part in parts if part is not None]


_PARTS: Mapping[str, Callable[[Equation, KnownPart, Makers], list[StencilPart]]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "reduce_sum": _summed,
    "reshape": _renamed,
    "rev": _reversed,
    "scatter": _put,
    "scatter-add": _put,
    "slice": _slice,
    "split": _split,
    "squeeze": _renamed,
}
