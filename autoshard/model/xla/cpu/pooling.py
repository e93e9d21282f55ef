"""Gradients of max-pooling on CPU: XLA makes a reduce_window that carries positions, and a scatter.

The window goes over the operand and one array of positions per dim, and makes as many arrays of the source's size. The
scatter reads the source and the positions, and writes into zeros. Where the operand is padded, or its numbers are
widened, the operand and the zeros are arrays of their own. Source: programs compiled for CPU devices.
`tests/model/test_workspaces.py` compiles some.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autoshard.model.equations import is_computed

if TYPE_CHECKING:
    from autoshard.model.workspaces import ShardBytes
    from autoshard.program import Equation

COORDINATE_BYTES = 4  # of the position of an element along one dim
_WIDENED = frozenset({"bfloat16"})  # dtypes of which XLA's CPU backend takes no maximum


def pooling_bytes(shards: ShardBytes) -> float:
    """Bytes that a `select_and_scatter_add` holds beside its operands and its result."""
    equation = shards.equation
    source, operand = equation.inputs
    padded = _padded_elements(equation)
    is_widened = str(operand.dtype) in _WIDENED
    itemsize = 4 if is_widened else operand.dtype.itemsize
    elements = shards.operands[1] / operand.dtype.itemsize * padded / math.prod(operand.shape)
    made = shards.operands[0] / source.dtype.itemsize
    positions = COORDINATE_BYTES * len(operand.shape)
    apart = 2 * itemsize if is_widened or padded > math.prod(operand.shape) else 0
    stored = shards.operands[1] if apart and is_computed(operand) else 0.0  # instead of which its copy is
    return elements * (positions + apart) - stored + made * (positions + itemsize * (2 - is_computed(source)))


def positions_bytes(shards: ShardBytes) -> float:
    """Bytes of the positions of the operand's elements. XLA makes these of nothing, and so at the start."""
    operand = shards.equation.inputs[1]
    share = _padded_elements(shards.equation) / math.prod(operand.shape)
    return shards.operands[1] / operand.dtype.itemsize * share * COORDINATE_BYTES * len(operand.shape)


def _padded_elements(equation: Equation) -> int:
    """Elements of the operand, as the windows go over them."""
    pairs = zip(equation.inputs[1].shape, equation.params["padding"], strict=True)
    return math.prod(size + low + high for size, (low, high) in pairs)
