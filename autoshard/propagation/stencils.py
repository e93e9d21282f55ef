"""A program in, the same with its stencils as single equations out.

A *stencil* shifts an array against itself: `jnp.roll`, a pad whose slices are added up, `jnp.gradient`. Between its
sources and its result stand arrays of which no mesh axis divides the dims, a row shorter or longer. So all that leads
to the result is planned as one equation, `stencil`, for which devices exchange halos. Arrays inside a stencil that
others read, too, keep their own equations beside it.

The *grid* of a dim is the size from which slices and pads have led away. A value whose dims are as large as their grids
again is the result of a stencil.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.primitives import facts_of
from autoshard.program import Equation, Program, Value
from autoshard.propagation.moves import Step
from autoshard.propagation.rules.stencils import STENCIL, stencil

_MOST_STEPS = 64
_KEPT_PARAMS = {"slice": "start_indices", "pad": "padding_config", "concatenate": "dimension"}

Grid = tuple[int | None, ...]  # dim -> size; None: of no grid, as what is filled with one number
Operand = Value | np.ndarray


@dataclass(frozen=True)
class _Inner:
    """A value inside a stencil."""

    equation: Equation  # that makes it
    grid: Grid

    @property
    def is_off_grid(self) -> bool:
        return any(
            size not in (None, whole) for size, whole in zip(self.grid, self.equation.outputs[0].shape, strict=True)
        )


_Near = Callable[[Equation], list[_Inner | None]]  # what of an equation's operands is inside a stencil, as it may be


def with_stencils(program: Program) -> Program:
    """`program` with one equation for each stencil; what nothing else reads of its inside has no equation."""
    inner: dict[int, _Inner] = {}
    found: dict[int, Equation] = {}

    def near(equation: Equation) -> list[_Inner | None]:
        scope = program.scope(equation.path)
        known = (inner.get(x.id) if isinstance(x, Value) else None for x in equation.inputs)
        return [one if one and program.scope(one.equation.path) == scope else None for one in known]

    for equation in program.equations:
        operands = near(equation)
        grid = _grid(equation, operands)
        if grid is None:
            continue
        made = _Inner(equation, grid)
        if made.is_off_grid or not any(grid):
            inner[equation.outputs[0].id] = made
        elif equation.primitive == "pad" or any(one and one.is_off_grid for one in operands):
            whole = _stencil(equation, near)
            if whole is not None and stencil(whole).exchanged:
                found[equation.index] = whole
    if not found:
        return program
    equations = [found.get(equation.index, equation) for equation in program.equations]
    return program.with_equations(equations, frozenset(one.equation.index for one in inner.values()))


def _grid(equation: Equation, operands: Sequence[_Inner | None]) -> Grid | None:
    """The grids of what an equation makes; None if it is no part of a stencil."""
    name, params = equation.primitive, equation.params
    if name not in _KEPT_PARAMS and name != "broadcast_in_dim" and not any(operands):
        return None
    if len(equation.outputs) != 1:
        return None
    (made,), first = equation.outputs, equation.inputs[0]
    known = operands[0].grid if operands[0] else tuple(first.shape)
    if name == "broadcast_in_dim":
        return (None,) * len(made.shape) if made.shape and not first.shape else None
    if name == "slice":
        return known if set(params["strides"] or (1,)) == {1} else None
    if name == "pad":
        moves = any(tuple(config) != (0, 0, 0) for config in params["padding_config"])
        return known if moves and not any(inside for _, _, inside in params["padding_config"]) else None
    return _merged(equation, operands) if name == "concatenate" or _is_pointwise(equation) else None


def _is_pointwise(equation: Equation) -> bool:
    shapes = {tuple(x.shape) for x in equation.inputs} - {()}
    return facts_of(equation.primitive).is_pointwise and shapes == {equation.outputs[0].shape}


def _merged(equation: Equation, operands: Sequence[_Inner | None]) -> Grid | None:
    """The grids of several operands; None if those inside a stencil have not the same.

    What is outside, and not as large as the grid, is read whole. Of several that are joined, the largest has the grid.
    """
    found: list[int | None] = []
    for dim, _ in enumerate(equation.outputs[0].shape):
        inside = {one.grid[dim] for one in operands if one} - {None}
        others = {x.shape[dim] for x, one in zip(equation.inputs, operands, strict=True) if x.shape and one is None}
        if len(inside) > 1:
            return None
        found.append(inside.pop() if inside else max(others, default=None))
    return tuple(found)


def _stencil(equation: Equation, near: _Near) -> Equation | None:
    """The one equation for all that leads to the result of `equation`; None if that is too much."""
    steps: list[Step] = []
    sources: list[Operand] = []
    refs: dict[int, int] = {}  # id of a value or literal -> its step, or `~i` for the i-th source

    def ref(operand: Operand, one: _Inner | None) -> int:
        key = operand.id if isinstance(operand, Value) else -1 - id(operand)
        if key not in refs:
            outside = one is None or len(refs) > _MOST_STEPS
            if outside:
                sources.append(operand)
            refs[key] = ~(len(sources) - 1) if outside else add(one.equation)
        return refs[key]

    def add(made_by: Equation) -> int:
        operands = tuple(ref(x, one) for x, one in zip(made_by.inputs, near(made_by), strict=True))
        steps.append(_step(made_by, operands))
        return len(steps) - 1

    add(equation)
    if len(refs) > _MOST_STEPS or not any(isinstance(x, Value) for x in sources):
        return None
    return replace(equation, primitive=STENCIL, params={"steps": tuple(steps)}, inputs=tuple(sources))


def _step(equation: Equation, operands: tuple[int, ...]) -> Step:
    name, params = equation.primitive, equation.params
    kept = params.get(_KEPT_PARAMS.get(name, ""), 0)
    if name == "pad":
        kept = tuple((int(low), int(high)) for low, high, _ in kept)
    elif name == "slice":
        kept = tuple(map(int, kept))
    said = "" if name in _KEPT_PARAMS else ", ".join(f"{key}={value}" for key, value in sorted(params.items()))
    return Step(name, equation.outputs[0].shape, operands, kept, said if " at 0x" not in said else "")
