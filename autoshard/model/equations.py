"""One equation in, what it is to a planner out: questions that several stages ask of the same primitives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from autoshard.program import Equation, Value, dtype_name, is_number


def is_computed(operand: Value | np.ndarray) -> TypeGuard[Value]:
    """Whether an equation makes an operand: it is neither a number of the program nor an argument."""
    return isinstance(operand, Value) and not operand.from_outside


def is_matrix_product(equation: Equation) -> bool:
    """Whether it sums products. Of a `dot_general` that sums none XLA makes an elementwise product."""
    if equation.primitive != "dot_general":
        return False
    (summed, _), _ = equation.params["dimension_numbers"]
    return any(equation.inputs[0].shape[dim] > 1 for dim in summed)


def is_kernel_gradient(equation: Equation) -> bool:
    """Whether it is a convolution that takes the batch for the features: XLA transposes both operands before it."""
    return equation.primitive == "conv_general_dilated" and equation.params["dimension_numbers"].lhs_spec[0] != 0


def sums_locally(equation: Equation) -> bool:
    """Whether it makes on the shards of one device what the device adds to a sum; convolutions if no pixel is split."""
    return equation.primitive == "reduce_sum" or contracts(equation) or is_lookup(equation)


def is_lookup(equation: Equation) -> bool:
    """Whether it reads numbers at positions: what is looked up in a split dim is a sum over devices."""
    return equation.primitive in ("dynamic_slice", "gather") and is_number(equation.inputs[0].dtype)


def is_single_lookup(equation: Equation) -> bool:
    """Whether it reads at one position."""
    if not is_lookup(equation):
        return False
    return equation.primitive == "dynamic_slice" or math.prod(equation.inputs[1].shape[:-1]) == 1


def is_grouped_convolution(equation: Equation) -> bool:
    """Whether it is a convolution whose channels, or whose batch, fall into groups."""
    counts = "feature_group_count", "batch_group_count"
    return equation.primitive == "conv_general_dilated" and any(equation.params[count] > 1 for count in counts)


def folds_by_hand(equation: Equation) -> bool:
    """Whether it reduces by what XLA's backends have no all_reduce for: `lower` finishes it where it is split."""
    if equation.primitive in ("reduce_and", "reduce_or"):
        return equation.inputs[0].dtype != np.bool_
    if equation.primitive in ("reduce_max", "reduce_min"):
        return np.issubdtype(equation.inputs[0].dtype, np.complexfloating)
    return equation.primitive in ("reduce", "reduce_xor")


def stays_whole(value: Value | np.ndarray) -> bool:
    """Whether it is never split: XLA's collectives mix up numbers of two bits."""
    return dtype_name(value.dtype) in ("int2", "uint2")


def contracts(equation: Equation) -> bool:
    """Whether it is a matrix product or a convolution."""
    return equation.primitive == "conv_general_dilated" or is_matrix_product(equation)


_INSERTED_OPERANDS = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter-max": 2, "scatter-min": 2,
             "scatter-mul": 2, "scatter-sub": 2}  # fmt: skip


def inserted_operand(equation: Equation) -> int | None:
    """Which operand an equation inserts into its first one; None if it inserts nothing."""
    return _INSERTED_OPERANDS.get(equation.primitive)


def only_widens(equations: Sequence[Equation]) -> bool:
    """Whether these are one conversion to a type of more bytes."""
    first, *others = equations
    if others or first.primitive != "convert_element_type" or not isinstance(first.inputs[0], Value):
        return False
    return first.inputs[0].itemsize < first.outputs[0].itemsize


def compute_dtype(equations: Sequence[Equation]) -> str:
    """The dtype that the arithmetic runs in: that of the first operand of the first equation that computes."""
    operands = (*equations[0].inputs, *equations[0].outputs)
    return dtype_name(operands[0].dtype) if operands else "bool"  # an effect alone
