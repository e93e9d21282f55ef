"""Stencils: what shifts an array against itself, as one equation (`propagation/stencils.py`)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from autoshard.program import Equation
from autoshard.propagation.halos import Reach, Rows, hops
from autoshard.propagation.moves import Place, Read, Step, reads
from autoshard.propagation.parts import shape_in
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, Shape
from autoshard.propagation.rules.elementwise import shapes_of

STENCIL = "stencil"
_REACH_SHARE = 1 / 8  # of a dim: more at once is no halo, as where the halves of a dim trade places


@rule(STENCIL)
def stencil(equation: Equation) -> Rule:
    """`h w, r w -> h w`, h expensive, r whole: what moves along a dim is exchanged, if it is little."""
    operands, (result,) = shapes_of(equation)
    return _stencil(equation.params["steps"], equation.params["dims"], operands, result)


def source_shapes(equation: Equation) -> list[Shape]:
    """The shapes of a stencil's sources as its steps have them."""
    rank = len(equation.outputs[0].shape)
    pairs = zip(equation.inputs, equation.params["dims"], strict=True)
    return [shape_in(x.shape, dims, rank) if x.shape else () for x, dims in pairs]


@lru_cache(maxsize=4096)
def _stencil(
    steps: tuple[Step, ...], dims: tuple[tuple[int | None, ...], ...], operands: tuple[Shape, ...], result: Shape
) -> Rule:
    sources = tuple(
        shape_in(shape, where, len(result)) if shape else () for shape, where in zip(operands, dims, strict=True)
    )
    found, moved = reads(steps, sources)
    builder, names = RuleBuilder(operands, [result]), []
    for dim, size in enumerate(result):
        here = [(i, where.index(dim)) for i, where in enumerate(dims) if dim in where]
        alike = [(i, at) for i, at in here if operands[i][at] == size]
        names.append(builder.factor(size, alike, [(0, dim)], "permutation" if dim in moved else ""))
        for i, at in here:
            if operands[i][at] != size:
                builder.factor(operands[i][at], [(i, at)], [], "need_replication")
    small = [dim for dim in moved if _is_small(dim, found, sources, result[dim])]
    reaches = (
        Reach(
            read.source,
            tuple(
                replace(_rows_of(read, dim, names[dim]), dim=dims[read.source].index(dim))
                for dim in sorted(small)
                if sources[read.source][dim] == result[dim] and dim in dims[read.source]
            ),
        )
        for read in found
        if sources[read.source]
    )
    return builder.build(list(dict.fromkeys(reach for reach in reaches if reach.rows)))


def rows_at(place: Place, dim: int, factor: str) -> Rows[str]:
    """The rows that devices read at a place along a dim that is split."""
    return Rows(dim, factor, -place.offset, place.offset, place.first, place.last, place.wraps)


def _rows_of(read: Read, dim: int, factor: str) -> Rows[str]:
    place = read.places[dim]
    assert place is not None, "all dims were taken for split"
    return rows_at(place, dim, factor)


def _is_small(dim: int, found: list[Read], sources: tuple[Shape, ...], size: int) -> bool:
    """Whether little moves along a dim, if it is split in as few pieces as can be."""
    pieces = next((n for n in (2, 3, 5, 7) if size % n == 0), None)
    if pieces is None:
        return False
    rows = {_rows_of(read, dim, "") for read in found if sources[read.source][dim:][:1] == (size,)}
    most = max((sum(hop.stop - hop.start for hop in hops(one, size, pieces)) for one in rows), default=size)
    return most <= _REACH_SHARE * size
