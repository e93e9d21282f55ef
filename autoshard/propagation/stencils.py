"""A program in, the same with its stencils as single equations out.

A *stencil* shifts an array against itself: `jnp.roll`, a pad whose slices are added up, `jnp.gradient`, an update of
the interior. Between its sources and its result stand arrays of which no mesh axis divides the dims, a row shorter or
longer. So all that leads to the result is planned as one equation, `stencil`, for which devices exchange halos. Arrays
inside a stencil that others read, too, keep their own equations beside it.

The *grid* of a dim is the size from which slices and pads have led away. A value whose dims are as large as their grids
again is the result of a stencil.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.program import Equation, Program, Value
from autoshard.propagation.moves import MoveStep, Places, reads
from autoshard.propagation.padded_windows import padded_windows
from autoshard.propagation.parts import Operand, StencilPart, parts_of, shape_in
from autoshard.propagation.rules.windows import STENCIL, source_shapes, stencil
from autoshard.propagation.source_halos import shared_reads

_MOST_STEPS = 64  # of one stencil; what lies further back is a source of it

Grid = tuple[int | None, ...]  # dim of a step -> size; None: of no grid, as what is filled with one number


@dataclass(frozen=True)
class _InnerValue:
    """A value inside a stencil."""

    part: StencilPart
    grid: Grid

    @property
    def is_off_grid(self) -> bool:
        return any(size not in (None, whole) for size, whole in zip(self.grid, self.part.shape, strict=True))


# An operand inside a stencil that the equation can be a part of.
_Find = Callable[[Operand, Equation], _InnerValue | None]


def with_stencils(program: Program) -> Program:
    """`program` with one equation for each stencil; what nothing else reads of its inside has no equation.

    A stencil may end at one piece of a split, if nothing but stencils reads the others.
    """
    for at_splits in (True, False):
        found = _replaced(program, at_splits)
        if not at_splits or found is program or _is_whole(found):
            break
    return found


def _is_whole(program: Program) -> bool:
    """Whether every value that is read is there."""
    there = {value.id for value in (*program.arguments, *program.constants)} | program.makers.keys()
    return all(value in there for value in program.reads)


def _replaced(program: Program, at_splits: bool) -> Program:
    inner: dict[int, _InnerValue] = {}
    found: dict[int, Equation] = {}

    def find(operand: Operand, equation: Equation) -> _InnerValue | None:
        one = inner.get(operand.id) if isinstance(operand, Value) else None
        if one is None or program.scope(one.part.equation.path) != program.scope(equation.path):
            return None
        return one

    def part(operand: Operand, equation: Equation) -> StencilPart | None:
        one = find(operand, equation)
        return None if one is None else one.part

    for equation in program.equations:
        parts = parts_of(equation, functools.partial(part, equation=equation), program.makers)
        for made, value in zip(parts, equation.outputs, strict=bool(parts)):
            operands = [find(x, equation) for x in made.operands]
            grid = _grid(made, operands)
            if grid is None:
                continue
            entry = _InnerValue(made, grid)
            if entry.is_off_grid or not any(grid):
                inner[value.id] = entry
            elif (at_splits or len(parts) == 1) and equation.index not in found and _ends(made, operands):
                whole = _stencil(made, value, find)
                if whole is not None and stencil(whole).exchanged:
                    found[equation.index] = whole

    def unfold(value: Value) -> Equation | None:
        return _stencil(inner[value.id].part, value, find)

    off_grid = {value for value, one in inner.items() if one.is_off_grid}
    windows = padded_windows(program, off_grid, part, unfold)
    if not found and not windows:
        return program
    found = _sharing(program, found) | windows
    equations = [found.get(equation.index, equation) for equation in program.equations]
    inside = {one.part.equation.index for one in inner.values()} - found.keys()
    smaller = {value.id: value for one in windows.values() for value in one.outputs}
    values = tuple([smaller.get(value.id, value) for value in program.values])
    return replace(program, values=values).with_equations(equations, frozenset(inside))


def _sharing(program: Program, found: dict[int, Equation]) -> dict[int, Equation]:
    """Stencils that know what others read of their sources: all bring the same rows, which XLA then brings once."""
    of_sources: dict[int, list[tuple[tuple, list[Places]]]] = {}
    for index, one in found.items():
        places: dict[int, list[Places]] = defaultdict(list)
        for read in reads(one.params["steps"], source_shapes(one))[0]:
            places[read.source].append(read.places)
        alike = program.scope(one.path), one.outputs[0].shape
        of_sources[index] = [
            ((*alike, x.id if isinstance(x, Value) else (index, i), dims), places[i] if x.shape else [])
            for i, (x, dims) in enumerate(zip(one.inputs, one.params["dims"], strict=True))
        ]
    shared = shared_reads(of_sources)
    return {index: replace(one, params={**one.params, "shared": shared[index]}) for index, one in found.items()}


def _ends(part: StencilPart, operands: Sequence[_InnerValue | None]) -> bool:
    """Whether a stencil may end here: its result is on the grid, and something has moved."""
    moves = part.kind == "put" or part.kind == "put_add" or (part.kind == "pad" and any(map(any, part.moves)))
    return len(part.dims) == len(part.shape) and (moves or any(one and one.is_off_grid for one in operands))


def _grid(part: StencilPart, operands: Sequence[_InnerValue | None]) -> Grid | None:
    """The grids of what a part makes; None if operands that are inside a stencil have not the same.

    What is outside, and not as large as the grid, is read whole. Of several that are joined, the largest has the grid.
    """
    if part.kind == "fill":
        return (None,) * len(part.shape)
    first, *others = list(zip(part.operands, operands, strict=True))
    rank = len(part.shape)
    arrays = [first] if part.kind in ("slice", "pad", "same") else [first, *others]
    found: list[int | None] = []
    for dim in range(rank):
        inside = {one.grid[dim] for _, one in arrays if one and len(one.grid) == rank} - {None}
        outside = {
            shape_in(x.shape, reads, rank)[dim]
            for (x, one), reads in zip(arrays, part.reads or (part.dims,) * len(arrays), strict=False)
            if x.shape and one is None
        }
        if part.kind.startswith("put") and (first[1] is None or first[1].part.kind == "fill"):
            inside |= {part.shape[dim]}
        if len(inside) > 1:
            return None
        found.append(inside.pop() if inside else max(outside, default=None))
    return tuple(found)


def _stencil(end: StencilPart, made: Value, find: _Find) -> Equation | None:
    """The one equation for all that leads to the value that a part makes; None if that is too much."""
    rank = len(end.shape)
    steps: list[MoveStep] = []
    sources: list[Operand] = []
    dims: list[tuple[int | None, ...]] = []  # per source: its dims in steps
    refs: dict[tuple, int] = {}  # a value or literal, and its dims -> its step, or `~i` for the i-th source

    def ref(operand: Operand, reader: StencilPart, reads: tuple[int | None, ...]) -> int:
        if not operand.shape:
            reads = ()
        key = operand.id if isinstance(operand, Value) else -1 - id(operand), reads
        if key not in refs:
            one = find(operand, reader.equation)
            if one is not None and len(refs) <= _MOST_STEPS and _fits(one.part, reads, rank):
                refs[key] = add(replace(one.part, shape=_filled(one.part, reads, rank), dims=reads))
            else:
                sources.append(operand)
                dims.append(reads)
                refs[key] = ~(len(sources) - 1)
        return refs[key]

    def add(part: StencilPart) -> int:
        reads = part.reads or (part.dims,) * len(part.operands)
        if part.kind in ("slice", "pad", "same") and not part.reads:
            inside = find(part.operands[0], part.equation)
            known = inside.part.dims if inside else tuple(range(len(part.operands[0].shape)))
            reads = (known, ())[: len(part.operands)]
        refs = tuple(ref(x, part, one or ()) for x, one in zip(part.operands, reads, strict=True))
        function = ""
        if part.kind == "pointwise":
            params = ", ".join(f"{name}={value}" for name, value in sorted(part.equation.params.items()))
            function = f"{part.equation.primitive}({params if ' at 0x' not in params else ''})"
        steps.append(MoveStep(part.kind, part.shape, refs, part.inputs, part.moves, function))
        return len(steps) - 1

    add(end)
    if len(refs) > _MOST_STEPS or not any(isinstance(x, Value) and x.shape for x in sources):
        return None
    output = next(i for i, value in enumerate(end.equation.outputs) if value is made)
    params = {"steps": tuple(steps), "dims": tuple(dims), "output": output, "shared": ()}
    return replace(end.equation, primitive=STENCIL, params=params, inputs=tuple(sources), outputs=(made,))


def _fits(part: StencilPart, reads: tuple[int | None, ...], rank: int) -> bool:
    """Whether a part can be a step of this rank, of which its value has these dims."""
    return part.kind == "fill" or (part.dims == reads and len(part.shape) == rank)


def _filled(part: StencilPart, reads: tuple[int | None, ...], rank: int) -> tuple[int, ...]:
    """The shape of a part as a step of this rank."""
    return shape_in(part.equation.outputs[0].shape, reads, rank) if part.kind == "fill" else part.shape
