"""A slice or a pad and how its result is to lie in, the rule by which XLA's partitioner splits it out.

In rules, a dim that is sliced or padded stays whole. The partitioner brings the operand into the layout of the result
instead, and devices exchange the rows that they lack (`propagation/shifts.py`). It does not exchange rows if one of the
dims has to be gathered. Then it gathers all that are sliced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.layout import Layout, MeshShape, shards
from autoshard.program import Equation
from autoshard.propagation.halos import Reach
from autoshard.propagation.rule import Rule
from autoshard.propagation.shifts import Shift


def as_slices(equation: Equation) -> Iterator[Equation]:
    """The equations that XLA has of one: of `split`, a slice per result."""
    if equation.primitive != "split":
        yield equation
        return
    axis, first = equation.params["axis"], 0
    (operand,) = equation.inputs
    for size, result in zip(equation.params["sizes"], equation.outputs, strict=True):
        starts = tuple(first * (dim == axis) for dim in range(len(operand.shape)))
        limits = tuple(start + size for start, size in zip(starts, result.shape, strict=True))
        params = {"start_indices": starts, "limit_indices": limits, "strides": None}
        yield replace(equation, primitive="slice", params=params, outputs=(result,))
        first += size


def with_shifts(
    equation: Equation, rule: Rule, operands: Sequence[Layout | None], results: Sequence[Layout], mesh: MeshShape
) -> Rule:
    """The rule of a slice or pad whose rows are exchanged; any other rule as it is.

    Args:
        operands: how they lie; None for literals.
        results: how they are to lie.
    """
    moved, operand = _moves(equation), next(iter(operands), None)
    if moved is None or operand is None:
        return rule
    (result,) = results
    shape, made = equation.inputs[0].shape, equation.outputs[0].shape
    found = []
    for dim, (start, stride) in enumerate(moved):
        pieces = shards(result[dim], mesh)
        if pieces == 1 or (start, stride, made[dim]) == (0, 1, shape[dim]):
            continue
        if equation.primitive == "pad" and not operand[dim]:
            continue  # each device pads its part of the whole
        shift = Shift(dim, rule.operands[0][dim][0], start, stride, made[dim])
        if shape[dim] % pieces or made[dim] % pieces or shift.is_gathered(shape[dim], pieces):
            return rule
        found.append(shift)
    return replace(rule, reaches=(Reach(0, tuple(found)),)) if found else rule


def _moves(equation: Equation) -> list[tuple[int, int]] | None:
    """Per dim, the row of the operand that is the result's first one, and from row to row of the result."""
    params = equation.params
    if equation.primitive == "slice":
        starts = params["start_indices"]
        return list(zip(starts, params["strides"] or [1] * len(starts), strict=True))
    if equation.primitive == "pad" and not any(between for _, _, between in params["padding_config"]):
        return [(-low, 1) for low, _, _ in params["padding_config"]]
    return None
