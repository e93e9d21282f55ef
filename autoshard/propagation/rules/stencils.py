"""Stencils: what shifts an array against itself, as one equation (`propagation/stencils.py`)."""

from __future__ import annotations

from functools import lru_cache

from autoshard.program import Equation
from autoshard.propagation.halos import Reach, Rows, hops
from autoshard.propagation.moves import Place, Read, Step, reads
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, Shape
from autoshard.propagation.rules.elementwise import shapes_of

STENCIL = "stencil"
_REACH_SHARE = 1 / 16  # of a dim, at most, if all devices together are to send it


@rule(STENCIL)
def stencil(equation: Equation) -> Rule:
    """`h w, r w -> h w`, h expensive, r whole: what moves along a dim is exchanged, if it is little."""
    operands, (result,) = shapes_of(equation)
    return _stencil(equation.params["steps"], operands, result)


@lru_cache(maxsize=4096)
def _stencil(steps: tuple[Step, ...], sources: tuple[Shape, ...], result: Shape) -> Rule:
    found, moved = reads(steps, sources)
    builder, names = RuleBuilder(sources, [result]), []
    for dim, size in enumerate(result):
        alike = [(i, dim) for i, shape in enumerate(sources) if shape and shape[dim] == size]
        names.append(builder.factor(size, alike, [(0, dim)], "permutation" if dim in moved else ""))
        for i, shape in enumerate(sources):
            if shape and shape[dim] != size:
                builder.factor(shape[dim], [(i, dim)], [], "need_replication")
    small = [dim for dim in moved if _is_small(dim, found, sources, result[dim])]
    reaches = (
        Reach(
            read.source,
            tuple(_rows_of(read, dim, names[dim]) for dim in sorted(small) if sources[read.source][dim] == result[dim]),
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
    rows = {(read.source, _rows_of(read, dim, "")) for read in found if sources[read.source][dim:][:1] == (size,)}
    sent = sum(hop.stop - hop.start for _, one in rows for hop in hops(one, size, pieces))
    return bool(rows) and sent <= _REACH_SHARE * size
