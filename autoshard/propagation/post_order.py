"""A program in, the order in which XLA runs Shardy over its equations out.

Where two dims want one mesh axis, the first to come wins. Shardy by itself goes through a function as JAX wrote it.
XLA writes the function down anew before, in *post-order* (openxla/xla, `HloComputation::MakeInstructionPostOrder`).
Each operation stands behind its operands, the first operand first, and the first result comes first. So what only a
late result needs comes late, wherever it stands in the user's function. Bodies of loops have orders of their own.
Branches keep the order of the program here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jax.lax import GatherScatterMode

from autoshard.program import Equation, Program, Value

_Operand = Value | np.ndarray


def in_post_order(program: Program) -> list[int]:
    """The indices of all equations, in the order of XLA."""
    return _Body(program, 0, len(program.equations)).ordered(program.results)


class _Body:
    """The equations of a program, or of one turn of a loop. Loops inside are steps of their own."""

    def __init__(self, program: Program, first: int, end: int):
        self.program, self.first = program, first
        self.steps: list[tuple[int, int]] = []  # (first equation, one past the last)
        self.makers: dict[int, int] = {}  # value id -> its step
        index = first
        while index < end:
            loop = self._loop_at(index, (first, end))
            past = loop[1] if loop else index + 1
            made = (value.id for one in program.equations[index:past] for value in one.outputs)
            self.makers |= dict.fromkeys(made, len(self.steps))
            self.steps.append((index, past))
            index = past

    def _loop_at(self, index: int, around: tuple[int, int]) -> tuple[int, int] | None:
        loop = self.program.equations[index].loop
        return loop if loop not in (None, around) else None

    def ordered(self, results: Iterable[_Operand]) -> list[int]:
        """What the results need, and what nothing needs behind it."""
        found: list[int] = []
        seen: set[int] = set()
        roots = (self.makers[x.id] for x in results if isinstance(x, Value) and x.id in self.makers)
        for root in (*roots, *range(len(self.steps))):
            self._visit(root, seen, found)
        return found

    def _visit(self, root: int, seen: set[int], found: list[int]) -> None:
        stack = [(root, False)]
        while stack:
            step, has_operands = stack.pop()
            if has_operands:
                found += self._inside(step)
            elif step not in seen:
                seen.add(step)
                stack.append((step, True))
                read = (self.makers.get(x.id) for x in self._read(step) if isinstance(x, Value))
                stack += [(maker, False) for maker in reversed(list(read)) if maker is not None and maker not in seen]

    def _read(self, step: int) -> Sequence[_Operand]:
        first, end = self.steps[step]
        equation = self.program.equations[first]
        if end == first + 1:
            return () if self._is_border(equation) else _in_xlas_order(equation)
        border = [one for one in self.program.equations[first:end] if one.loop == (first, end)]
        carried = [one.inputs[0] for one in border if one.primitive == "scan_carry"]
        return [*carried, *(x for one in border if one.primitive != "scan_carry" for x in one.inputs)]

    def _is_border(self, equation: Equation) -> bool:
        """Whether it hands values in, so that nothing of this turn comes before it."""
        return equation.primitive in ("scan_const", "scan_carry", "scan_slice") and equation.loop is not None

    def _inside(self, step: int) -> Iterable[int]:
        first, end = self.steps[step]
        border = [one for one in self.program.equations[first:end] if one.loop == (first, end)]
        if end == first + 1 or not any(one.primitive == "scan_carry" for one in border):
            return range(first, end)
        carried = [one.inputs[1] for one in border if one.primitive == "scan_carry"]
        stacked = [one.outputs[0] for one in border if one.primitive == "scan_stack"]
        return _Body(self.program, first, end).ordered([*carried, *stacked])


def _in_xlas_order(equation: Equation) -> Sequence[_Operand]:
    """The operands, as XLA's operation has them."""
    if equation.primitive == "select_n" and len(equation.inputs) == 3:
        which, on_false, on_true = equation.inputs
        return which, on_true, on_false
    if equation.primitive == "gather" and equation.params.get("mode") == GatherScatterMode.FILL_OR_DROP:
        return equation.inputs[::-1]  # the positions decide first where to fill in
    return equation.inputs
