"""Equations evaluated on arrays of a few elements in float64: what two ways to compute something are compared by.

A *role* is a dim of the mathematics: rows of queries, rows of keys, one that is contracted. Each dim of an array is a
product of roles, and has as many elements as its roles are given here. A dim along which all is the same is kept with
one element and no role. Shapes in parameters follow from the roles; nothing else of an equation depends on sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.jaxprs import JaxprEqn, Literal, Var, aval_of
from autoshard.primitives import VIEWS

Roles = tuple[tuple[str, ...], ...]  # per dim

# Elements of a role, by its first letter. All are different, so that dims that are mixed up do not fit together.
SMALL = {"b": 2, "d": 3, "v": 4, "x": 5, "y": 7}


class UnknownEquation(Exception):
    """An equation cannot be evaluated on other sizes."""


@dataclass(frozen=True)
class SmallArray:
    """A small array that stands for one of the program."""

    array: np.ndarray
    roles: Roles


_UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "is_finite": np.isfinite,
    "log": np.log,
    "log1p": np.log1p,
    "name": lambda x: x,
    "neg": np.negative,
    "not": np.logical_not,
    "optimization_barrier": lambda x: x,
    "reduce_precision": lambda x: x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "stop_gradient": lambda x: x,
    "tanh": np.tanh,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "add_any": np.add,
    "and": np.logical_and,
    "div": np.divide,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "or": np.logical_or,
    "pow": np.power,
    "sub": np.subtract,
}
_REDUCE: dict[str, Callable[..., Any]] = {"reduce_max": np.max, "reduce_min": np.min, "reduce_sum": np.sum}
ELEMENTWISE = frozenset({*_UNARY, *_BINARY, "convert_element_type", "integer_pow", "select_n"})
EVALUATED = ELEMENTWISE | _REDUCE.keys() | VIEWS | {"dot_general"}


def number(value: Any) -> SmallArray:
    """A scalar."""
    return SmallArray(_widest(np.asarray(value)), ())


def _widest(x: np.ndarray) -> np.ndarray:
    if x.dtype == bool:
        return x
    return x.astype(np.int64 if x.dtype.kind in "iu" else np.float64)


def shape_of(roles: Roles) -> tuple[int, ...]:
    """The small shape of an array with these roles."""
    return tuple(math.prod(SMALL[role[0]] for role in dim) for dim in roles)


def evaluated(eqn: JaxprEqn, operands: Sequence[SmallArray], true: Mapping[str, int]) -> SmallArray:
    """The only result of an equation.

    Args:
        true: how many elements each role has in the program.

    Raises:
        UnknownEquation: it cannot be evaluated on small arrays.
    """
    name, params = eqn.primitive.name, eqn.params
    if len(eqn.outvars) != 1 or name not in EVALUATED or not all(map(_is_real, (*eqn.invars, *eqn.outvars))):
        raise UnknownEquation(name)
    shapes = [aval_of(atom).shape for atom in eqn.invars]
    first = operands[0]
    with np.errstate(all="ignore"):
        if name in ELEMENTWISE:
            return _elementwise(eqn, operands)
        if name in _REDUCE:
            return _reduced(name, params["axes"], first, shapes[0])
        if name == "transpose":
            order = params["permutation"]
            return SmallArray(first.array.transpose(order), tuple(first.roles[i] for i in order))
        if name == "dot_general":
            return _product(params["dimension_numbers"], (first, operands[1]), shapes)
    out: tuple[int, ...] = aval_of(eqn.outvars[0]).shape
    if name == "broadcast_in_dim":
        sources = dict(zip(map(int, params["broadcast_dimensions"]), range(len(shapes[0])), strict=True))
        roles = tuple(first.roles[sources[i]] if i in sources else () for i in range(len(out)))
        small = tuple(first.array.shape[sources[i]] if i in sources else 1 for i in range(len(out)))
        return SmallArray(first.array.reshape(small), roles)
    return _reshaped(first, shapes[0], out, true)


def _is_real(atom: Var | Literal) -> bool:
    """Whether the elements of an array are real numbers or truth values."""
    dtype = aval_of(atom).dtype
    return isinstance(dtype, np.dtype) and dtype.kind != "c"


def _elementwise(eqn: JaxprEqn, operands: Sequence[SmallArray]) -> SmallArray:
    name, arrays = eqn.primitive.name, [one.array for one in operands]
    roles = common(operands)
    if name == "convert_element_type":
        kind = np.dtype(aval_of(eqn.outvars[0]).dtype)
        found = arrays[0].astype(bool if kind.kind == "b" else np.int64 if kind.kind in "iu" else float)
    elif name == "integer_pow":
        found = arrays[0] ** float(eqn.params["y"])
    elif name == "select_n":
        if len(arrays) != 3 or arrays[0].dtype != bool:
            raise UnknownEquation(name)
        rank = max(x.ndim for x in arrays)
        which = arrays[0] if arrays[0].ndim else arrays[0].reshape((1,) * rank)
        found = np.where(which, arrays[2], arrays[1])
    elif name in _UNARY:
        found = np.asarray(_UNARY[name](arrays[0]))
    else:
        found = np.asarray(_BINARY[name](*arrays))
    return SmallArray(found, roles)


def common(operands: Sequence[SmallArray]) -> Roles:
    ranks = [one.roles for one in operands if one.array.ndim]
    if not ranks:
        return ()
    found = []
    for dims in zip(*ranks, strict=True):
        names = {dim for dim in dims if dim}
        if len(names) > 1:
            raise UnknownEquation("dims of different roles meet")
        found.append(names.pop() if names else ())
    return tuple(found)


def _reduced(name: str, axes: Sequence[int], x: SmallArray, shape: Sequence[int]) -> SmallArray:
    gone = tuple(map(int, axes))
    if name == "reduce_sum" and any(shape[i] > 1 and not x.roles[i] for i in gone):
        raise UnknownEquation("a sum over a dim of which only one element is kept")
    kept = tuple(dim for i, dim in enumerate(x.roles) if i not in gone)
    return SmallArray(np.asarray(_REDUCE[name](x.array, axis=gone)), kept)


def _product(numbers: Any, operands: tuple[SmallArray, SmallArray], shapes: Sequence[Sequence[int]]) -> SmallArray:
    (x, y), (of_x, of_y) = operands, shapes
    (x_gone, y_gone), (x_both, y_both) = numbers
    letters = iter(range(52))
    x_names = [next(letters) for _ in of_x]
    y_names = [next(letters) for _ in of_y]
    for i, j in (*zip(x_gone, y_gone, strict=True), *zip(x_both, y_both, strict=True)):
        if x.roles[i] != y.roles[j] or (of_x[i] > 1 and not x.roles[i]):
            raise UnknownEquation("a product over dims of different roles")
        y_names[j] = x_names[i]
    x_free = [i for i in range(len(of_x)) if i not in (*x_gone, *x_both)]
    y_free = [j for j in range(len(of_y)) if j not in (*y_gone, *y_both)]
    out = [*(x_names[i] for i in x_both), *(x_names[i] for i in x_free), *(y_names[j] for j in y_free)]
    roles = [*(x.roles[i] for i in x_both), *(x.roles[i] for i in x_free), *(y.roles[j] for j in y_free)]
    return SmallArray(np.einsum(x.array, x_names, y.array, y_names, out), tuple(roles))


def _reshaped(x: SmallArray, shape: Sequence[int], out: Sequence[int], true: Mapping[str, int]) -> SmallArray:
    long = [i for i, size in enumerate(shape) if size > 1]
    if [shape[i] for i in long] == [size for size in out if size > 1]:  # dims of one element come and go
        kept = iter(long)
        dims = [next(kept) if size > 1 else None for size in out]
        roles = tuple(() if i is None else x.roles[i] for i in dims)
        small = tuple(1 if i is None else x.array.shape[i] for i in dims)
        return SmallArray(x.array.reshape(small), roles)
    if any(not x.roles[i] for i in long):
        raise UnknownEquation("a reshape of a dim of which only one element is kept")
    waiting = [role for i in long for role in x.roles[i]]
    found = []
    for size in out:
        own, so_far = [], 1
        while so_far < size and waiting:
            own.append(waiting.pop(0))
            so_far *= true[own[-1]]
        if so_far != size:
            raise UnknownEquation("a reshape across roles")
        found.append(tuple(own))
    if waiting:
        raise UnknownEquation("a reshape across roles")
    return SmallArray(x.array.reshape(shape_of(tuple(found))), tuple(found))
