"""Data that moves along dims: pads, slices, updates in, what each device reads of their sources out.

A `MoveStep` is one equation between the sources and the result. All steps of a move have the rank of the result, and
dims stand for the same dims. Along a dim that is split, a device has the same number of rows of every step's result,
from its own place plus an offset. Rows that are not there hold anything; a step never lets them pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Array = TypeVar("Array")


@dataclass(frozen=True)
class MoveStep:
    """One equation of a move."""

    kind: str  # "slice", "pad", "concatenate", "put", "put_add", "fill", "same" or "pointwise"
    shape: tuple[int, ...]  # of its result
    operands: tuple[int, ...]  # other steps, or `~i` for the i-th source
    inputs: tuple[int, ...]  # which operands of its equation these are
    moves: Any = 0  # first rows of a slice, (before, after) of a pad, dim of a concatenation, window of an update
    function: str = ""  # what a pointwise step computes


@dataclass(frozen=True)
class RowOffset:
    """Which rows of an array devices have along one dim: their own, so many rows further on."""

    offset: int
    first: int  # rows of the whole array that matter: from here
    last: int  # and before this one
    wraps: bool = False

    def moved(self, by: int, size: int) -> RowOffset:
        """The place in an array of this size whose row `i + by` is our row `i`; round the end if that moves nothing."""
        wraps = self.wraps and not by
        return RowOffset(self.offset + by, max(self.first + by, 0), min(self.last + by, size), wraps)


Places = tuple[RowOffset | None, ...]  # dim -> where; None: whole


class MoveVisitor(Protocol[Array]):
    """What is done at each step."""

    def source(self, index: int, places: Places) -> Array: ...

    def step(self, index: int, places: Places, operands: Sequence[Array]) -> Array:
        """A step by itself, along whole dims."""

    def choose(self, dim: int, place: RowOffset, first: int, last: int, inside: Array, outside: Array) -> Array:
        """Rows of `inside` from `first` and before `last`, else of `outside`, which may be one number."""


class MoveWalk:
    """The way from a move's result to its sources."""

    def __init__(self, steps: Sequence[MoveStep], sources: Sequence[tuple[int, ...]], work: MoveVisitor):
        """
        Args:
            steps: of the move; the last makes the result.
            sources: their shapes.
            work: what is done on the way.
        """
        self.steps, self.sources, self.work = steps, sources, work
        self.found: dict[tuple[int, Places], Any] = {}

    def result(self, split: Sequence[bool]) -> Any:
        """The result, each device's own rows along dims that are split."""
        shape = self.steps[-1].shape
        places = (RowOffset(0, 0, size) if one else None for size, one in zip(shape, split, strict=True))
        return self.at(len(self.steps) - 1, tuple(places))

    def shape(self, ref: int) -> tuple[int, ...]:
        return self.steps[ref].shape if ref >= 0 else self.sources[~ref]

    def at(self, ref: int, places: Places) -> Any:
        if (ref, places) not in self.found:
            self.found[ref, places] = self._made(ref, places)
        return self.found[ref, places]

    def _made(self, ref: int, places: Places) -> Any:
        if ref < 0:
            return self.work.source(~ref, places)
        step = self.steps[ref]
        match step.kind:
            case "slice":
                return self.work.step(ref, places, [self.at(step.operands[0], self._sliced(step, places))])
            case "pad":
                return self._padded(ref, step, places)
            case "put" | "put_add":
                return self._updated(ref, step, places)
            case "concatenate" if places[step.moves] is not None:
                return self._joined(step, places)
            case "same":
                return self.at(step.operands[0], places)
            case _:
                operands = (self.at(operand, places if self.shape(operand) else ()) for operand in step.operands)
                return self.work.step(ref, places, list(operands))

    def _sliced(self, step: MoveStep, places: Places) -> Places:
        shape, starts = self.shape(step.operands[0]), step.moves
        return tuple(
            place and place.moved(start, size) for place, start, size in zip(places, starts, shape, strict=True)
        )

    def _padded(self, ref: int, step: MoveStep, places: Places) -> Any:
        array, number = step.operands
        shape, config = self.shape(array), step.moves
        moved = (place and place.moved(-lo, size) for place, (lo, _), size in zip(places, config, shape, strict=True))
        outside = self.at(number, ())
        inside = self.work.step(ref, places, [self.at(array, tuple(moved)), outside])
        return self._within(places, [low for low, _ in config], shape, inside, outside)

    def _updated(self, ref: int, step: MoveStep, places: Places) -> Any:
        """An array of which one window is written over or added to."""
        array, update = step.operands
        starts, window = step.moves
        moved = (place and place.moved(-at, size) for place, at, size in zip(places, starts, window, strict=True))
        outside = self.at(array, places)
        written = self.at(update, tuple(moved) if self.shape(update) else ())
        inside = self.work.step(ref, places, [outside, written])
        return self._within(places, starts, window, inside, outside)

    def _within(self, places: Places, starts: Sequence[int], sizes: Sequence[int], inside: Any, outside: Any) -> Any:
        """`inside` in a window of these sizes, `outside` beyond it, along dims that are split."""
        for dim, (place, start, size) in enumerate(zip(places, starts, sizes, strict=True)):
            if place is not None and (place.first < start or place.last > start + size):
                inside = self.work.choose(dim, place, start, start + size, inside, outside)
        return inside

    def _joined(self, step: MoveStep, places: Places) -> Any:
        """A concatenation along a split dim. Pieces of one array that follow each other round a circle are one."""
        dim = step.moves
        place, start, pieces = places[dim], 0, []
        assert place is not None, "the dim is split"
        for operand in step.operands:
            size = self.shape(operand)[dim]
            if max(start, place.first) < min(start + size, place.last):
                moved = place.moved(-start, size)
                pieces.append((start, start + size, operand, (*places[:dim], moved, *places[dim + 1 :])))
            start += size
        if not pieces:
            return self.at(step.operands[0], places)
        ends = {self._origin(operand, at) for _, _, operand, at in pieces}
        origin = next(iter(ends))[0]
        circle = _circle(ends, dim, self.shape(origin))
        if len(ends) > 1 and circle is not None and self._has_all_rows(origin, dim):
            return self.at(origin, circle)
        *others, (_, _, operand, at) = pieces
        found = self.at(operand, at)
        for first, last, operand, at in reversed(others):
            found = self.work.choose(dim, place, first, last, self.at(operand, at), found)
        return found

    def _has_all_rows(self, ref: int, dim: int) -> bool:
        """Whether an array is made without anything moving along a dim, of sources that have all its rows.

        An array that was padded along the first dim, as that is by `jnp.pad(mode="wrap")`, is such along the second.
        One of which some rows were updated is not: rows that wrap round the end have left the window of the update.
        """
        if ref < 0:
            return True
        step = self.steps[ref]
        sizes = [self.shape(operand)[dim] for operand in step.operands if self.shape(operand)]
        moves = step.kind == "concatenate" and step.moves == dim
        moves |= step.kind == "pad" and any(step.moves[dim])
        moves |= step.kind in ("put", "put_add") and step.moves[1][dim] != step.shape[dim]
        if moves or any(size != step.shape[dim] for size in sizes):
            return False
        return all(self._has_all_rows(operand, dim) for operand in step.operands)

    def _origin(self, ref: int, places: Places) -> tuple[int, Places]:
        """What slices cut out, and where; along whole dims nothing may be cut."""
        if ref >= 0 and self.steps[ref].kind == "same":
            return self._origin(self.steps[ref].operands[0], places)
        if ref < 0 or self.steps[ref].kind != "slice":
            return ref, places
        step = self.steps[ref]
        sizes = zip(places, step.shape, self.shape(step.operands[0]), strict=True)
        if any(place is None and size != whole for place, size, whole in sizes):
            return ref, places
        return self._origin(step.operands[0], self._sliced(step, places))


def _circle(ends: set[tuple[int, Places]], dim: int, shape: tuple[int, ...]) -> Places | None:
    """The places of one array all round, if all of `ends` are parts of that."""
    refs, offsets, others = set(), set(), set()
    size = shape[dim]
    for ref, places in ends:
        place = places[dim]
        if place is None or place.wraps:
            return None
        refs.add(ref)
        offsets.add(place.offset % size)
        others.add((*places[:dim], *places[dim + 1 :]))
    if len(refs) > 1 or len(offsets) > 1 or len(others) > 1:
        return None
    (offset,), (left,) = offsets, others
    offset -= size if offset > size // 2 else 0
    return (*left[:dim], RowOffset(offset, 0, size, wraps=True), *left[dim:])


@dataclass(frozen=True)
class SourceRead:
    """One source, as a device reads it."""

    source: int
    places: Places


class _Reads:
    """Notes what is read."""

    def __init__(self) -> None:
        self.found: list[SourceRead] = []
        self.chosen: set[int] = set()  # dims along which rows are chosen

    def source(self, index: int, places: Places) -> None:
        self.found.append(SourceRead(index, places))

    def step(self, index: int, places: Places, operands: Sequence[None]) -> None:
        pass

    def choose(self, dim: int, place: RowOffset, first: int, last: int, inside: None, outside: None) -> None:
        self.chosen.add(dim)


def reads(steps: Sequence[MoveStep], sources: Sequence[tuple[int, ...]]) -> tuple[list[SourceRead], set[int]]:
    """What a device reads of each source if all dims are split, and the dims along which anything moves."""
    noted = _Reads()
    shape = steps[-1].shape
    MoveWalk(steps, sources, noted).result([True] * len(shape))
    moved = set(noted.chosen)
    for read in noted.found:
        for dim, place in enumerate(read.places):
            if place is not None and (place.offset or place.wraps or place.last - place.first < shape[dim]):
                moved.add(dim)
    return noted.found, moved
