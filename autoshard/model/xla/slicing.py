"""Slices: a device that cuts its part out of what it has whole runs an operation of its own for that on TPU.

A slice of a loop is copied at part of the memory's bandwidth, and a loop whose slices come over from other slices of
TPUs clears what it stacks. Source: the cycles that libtpu notes on compiled v5e programs.
`tests/mesh/test_targets.py` compiles a slice and reads its cycles.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autoshard.program import Equation, Program


@dataclass(frozen=True)
class Slicing:
    """What slices cost."""

    least_seconds: float = 0.0  # of an operation that cuts a slice, however small
    loop_bandwidth_share: float = 1.0  # of the memory's bandwidth, at which a loop copies what it slices


def stacked_beside(program: Program) -> dict[int, int]:
    """Values that are made in loops -> bytes of all that the innermost loop around them stacks."""
    stacks: dict[tuple[int, int], list[Equation]] = defaultdict(list)
    for equation in program.equations:
        if equation.primitive == "scan_stack":
            assert equation.loop is not None, "boundaries of loops know theirs"
            stacks[equation.loop].append(equation)
    found: dict[int, int] = {}
    for (start, end), stacked in sorted(stacks.items(), key=lambda item: (item[0][0], -item[0][1])):  # from outside in
        inside = (made for equation in program.equations[start:end] for made in equation.outputs)
        size = sum(equation.outputs[0].bytes for equation in stacked)
        found |= {made.id: size for made in inside if made.trips >= stacked[0].trips}
    return found
