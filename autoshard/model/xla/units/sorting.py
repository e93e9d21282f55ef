"""Sorts of a TPU, and what keeps the largest elements of rows: which are kernels, and how arrays lie for the others.

libtpu has a kernel that keeps few elements of long rows of a matrix. All else is sorted with the positions of the
elements, of bfloat16 as one number of 32 bits. Rows of several are turned for that, so that the elements of one lie in
different registers, and what is read of the sorted ones is turned back. Of small arrays, all that lies in the chip.

Source: v5e programs of sorts and of the 1 to 128 largest of 64 to 65,536 elements, in one to three dims.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from autoshard.program import Equation

_ROW_PER_KEPT = 64  # elements of a row for each that the kernel keeps
WORD_BYTES = 4  # of a position, or of a bfloat16 number with its position


def keeps_by_kernel(equation: Equation) -> bool:
    """Whether a kernel keeps the largest elements.

    Args:
        equation: a `top_k`.
    """
    operand, kept = equation.inputs[0], equation.params["k"]
    is_few = kept == 1 or operand.shape[equation.params["axis"]] >= _ROW_PER_KEPT * kept + (kept > 2)
    return len(operand.shape) == 2 and operand.dtype != np.float16 and is_few


def sorts_in_halves(equation: Equation) -> bool:
    """Whether XLA for TPU finds the best without a sort that has unread results: of bfloat16, with its own halves."""
    return equation.primitive == "top_k" and equation.inputs[0].dtype == jnp.bfloat16


def turns_rows(equation: Equation) -> bool:
    """Whether rows are turned before and after: of a `sort`, or of a `top_k` that is no kernel."""
    if equation.primitive not in ("sort", "top_k") or len(equation.inputs[0].shape) < 2:
        return False
    return equation.primitive == "sort" or not keeps_by_kernel(equation)


def turned_copies(equation: Equation, made: int) -> int:
    """How many arrays are turned that do not fit into the chip: what is sorted, and what is made of it.

    Args:
        equation: it turns rows.
        made: how many results it has.
    """
    if sorts_in_halves(equation):
        return 1
    return (len(equation.inputs) if equation.primitive == "sort" else 1) + made


def best_bytes(equation: Equation, operand: float, are_read: tuple[bool, bool], *, is_kept: bool) -> float:
    """Bytes that a `top_k` holds beside its operand and results on one device.

    Args:
        equation: the `top_k`.
        operand: bytes of it.
        are_read: whether something reads the largest elements, and their places.
        is_kept: whether nothing may be written over the operand.
    """
    words = operand / equation.inputs[0].dtype.itemsize * WORD_BYTES
    if sorts_in_halves(equation):
        return words * (1 + turns_rows(equation))
    if not all(are_read):
        return operand if are_read[1] else words
    if keeps_by_kernel(equation):
        return 0.0
    return words * (1 + turns_rows(equation)) + operand * is_kept
