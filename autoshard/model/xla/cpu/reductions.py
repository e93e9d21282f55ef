"""Reductions on CPU: which of them compute elementwise work as they go, instead of reading it from memory.

Sums and extrema of the usual floating-point numbers go to a library, YNNPACK, with all work ahead of them that the
library has operators for, if nothing else reads it (xla/backends/cpu/ynn_support.cc). Other reductions over long dims
are done in windows, and read what is stored (xla/service/tree_reduction_rewriter.cc). Those over short dims, and
positions of extrema, are loops like elementwise work. `tests/model/test_workspaces.py` compiles all of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.primitives import facts_of
from autoshard.program import Equation, dtype_name

_WINDOW = 32  # elements of a dim, up to which a reduction is one loop
_LEAST_ELEMENTS = 4096  # from which on the library is used
_TYPES = {
    "reduce_max": ("bfloat16", "float16", "float32", "float64"),
    "reduce_min": ("bfloat16", "float16", "float32", "float64"),
    "reduce_sum": ("float32", "float64"),
}
_KNOWN_TYPES = ("bfloat16", "float32", "float64")
_ARITHMETIC = {"abs", "add", "add_any", "convert_element_type", "div", "max", "min", "mul", "neg", "sign", "sub"}
_POWERS = {"exp", "expm1", "integer_pow", "log", "log1p", "pow", "rsqrt", "sqrt", "square"}
_KNOWN = _ARITHMETIC | _POWERS | {"ceil", "erf", "floor", "logistic", "round", "tanh"}


def computes_as_it_reduces(reduction: Equation, made: Sequence[Equation], alone: bool, devices: int = 1) -> bool:
    """Whether a reduction does elementwise work ahead of it as it goes.

    Args:
        reduction: any equation.
        made: the elementwise work.
        alone: whether nothing else reads what it makes.
        devices: over how many it is split, as far as that is known.
    """
    if reduction.primitive in ("argmax", "argmin"):
        return True
    dims = reduction.params.get("axes") if reduction.primitive.startswith("reduce_") else None
    if dims is None:
        return False
    operand = reduction.inputs[0]
    is_large = math.prod(operand.shape) >= _LEAST_ELEMENTS * devices
    if is_large and dtype_name(operand.dtype) in _TYPES.get(reduction.primitive, ()):
        return alone and all(map(_is_known, made))
    return all(operand.shape[dim] <= _WINDOW for dim in dims)


def _is_known(equation: Equation) -> bool:
    """Whether the library has an operator for an equation."""
    values = (*equation.inputs, *equation.outputs)
    known = equation.primitive in _KNOWN or facts_of(equation.primitive).relabels
    return known and all(dtype_name(value.dtype) in _KNOWN_TYPES for value in values)
