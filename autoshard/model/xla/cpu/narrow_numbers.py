"""Numbers of 16 and 8 bits on CPU: windows and scatters go over copies of twice their width.

XLA's CPU backend has no bfloat16 and no float8: it converts what an operation reads, and converts back what it makes.
Conversions join elementwise loops and reductions, but neither windows nor scatters, so the copies are stored. A scatter
works in place on the copy of its operand. Source: programs compiled for CPU devices.
`tests/model/test_workspaces.py` compiles windows, running sums and scatters of such numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autoshard.model.equations import is_computed
from autoshard.primitives import WINDOW_REDUCTIONS
from autoshard.program import Equation

if TYPE_CHECKING:
    from autoshard.model.workspaces import ShardBytes

WIDER_BYTES: Mapping[str, int] = {"bfloat16": 4, "float8_e4m3fn": 2, "float8_e5m2": 2}  # dtype -> of its copies
MOVES_WINDOWS = WINDOW_REDUCTIONS | {"cummax", "cummin", "cumprod", "cumsum"}


def window_copies(shards: ShardBytes) -> float:
    """Bytes of the wider copies of operand and result that an operation over windows holds."""
    if _is_reduction(shards.equation):
        return 0.0
    return scatter_copies(shards) + _wider(shards.equation) * shards.whole


def scatter_copies(shards: ShardBytes) -> float:
    """Bytes of the wider copy of the first operand. What is computed is stored as that copy alone."""
    is_made = is_computed(shards.equation.inputs[0])
    return max(0.0, _wider(shards.equation) - is_made) * shards.operands[0]


def _wider(equation: Equation) -> float:
    """How many times larger a copy is; 0 if there is none."""
    dtype = equation.outputs[0].dtype
    return WIDER_BYTES.get(str(dtype), 0) / getattr(dtype, "itemsize", 1)


def _is_reduction(equation: Equation) -> bool:
    """Whether windows lie side by side and cover the operand: XLA splits its dims in two, and reduces."""
    params = equation.params
    if "window_dimensions" not in params:
        return False
    windows, shape = tuple(params["window_dimensions"]), equation.inputs[0].shape
    is_plain = not any(low or high for low, high in params["padding"])
    is_plain &= {*params["window_dilation"], *params["base_dilation"]} == {1}
    is_whole = all(size % window == 0 for size, window in zip(shape, windows, strict=True))
    return is_plain and is_whole and windows == tuple(params["window_strides"])
