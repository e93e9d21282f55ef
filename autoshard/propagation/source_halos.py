"""What a stencil reads of its sources in, what is brought of each source out: every row once.

A stencil of high order reads a source at many places along a dim, all of which lie in one *hull*. Devices exchange the
hull, and each place is a slice of it. Along several dims, hulls are brought one after the other. The hull of a later
dim holds those of earlier dims only if some place lies beyond the shard along both, as a corner does.

>>> star = [SourceRead(0, (RowOffset(o, 0, 64), RowOffset(0, 0, 64))) for o in (-2, -1, 1, 2)]
>>> star += [SourceRead(0, (RowOffset(0, 0, 64), RowOffset(o, 0, 64))) for o in (-1, 1)]
>>> halos = SourceHalos(star, [(True, True)])
>>> [(rows.before, rows.after) for dim in (0, 1) for rows in halos.hulls(0, dim)]
[(2, 2), (1, 1)]
>>> corner = SourceRead(0, (RowOffset(1, 0, 64), RowOffset(1, 0, 64)))
>>> [(rows.dim, rows.before) for rows in SourceHalos([*star, corner], [(True, True)]).hulls(0, 1)]
[(0, 2), (1, 1)]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from autoshard.propagation.halos import HaloRows
from autoshard.propagation.moves import Places, RowOffset, SourceRead

# Per source what all stencils read that share it, one entry for each of them; nothing where there is but one.
SharedReads = tuple[tuple[tuple[Places, ...], ...], ...]

# Rows beyond a shard up to which stencils share what is brought: such as those of a high order read. What shifts an
# array further has little to do with its other readers.
_NEAR_ROWS = 16


class SourceHalos:
    """The rows that are brought of each source of a stencil."""

    def __init__(self, reads: Sequence[SourceRead], is_split: Sequence[Sequence[bool]], shared: SharedReads = ()):
        """
        Args:
            reads: of one stencil.
            is_split: per source and dim, whether devices have parts of it. Along other dims they have all rows.
            shared: what other stencils read, too.
        """

        def beyond(source: int, places: Places) -> SourceRead:
            pairs = zip(places, is_split[source], strict=True)
            return SourceRead(source, tuple(place if split else None for place, split in pairs))

        own = [beyond(read.source, read.places) for read in reads if read.places]
        others = (beyond(i, places) for i, each in enumerate(shared) for one in each for places in one)
        self.reads = list(dict.fromkeys([*own, *others]))
        self._dims = {dim for read in own for dim, place in enumerate(read.places) if is_moved(place)}
        self._shared = shared

    def readers(self, source: int, dim: int) -> int:
        """How many stencils bring the same rows of a source along a dim."""
        sharing = self._shared[source] if self._shared else ()
        return max(1, sum(any(is_moved(places[dim]) for places in one) for one in sharing))

    def hulls(self, source: int, dim: int) -> tuple[HaloRows[str], ...]:
        """What is brought, dim by dim, for the places that lie beyond a shard along this dim and no later one.

        Along dims in which this stencil moves nothing, nothing is brought for others. Nothing is of a
        source that is not read, or of a dim that is not split.
        """
        moved = [read.places for read in self.reads if read.source == source and is_moved(read.places[dim])]
        if not self._places(source, dim):
            return ()
        earlier = [one for one in sorted(self._dims) if one < dim and any(is_moved(places[one]) for places in moved)]
        return tuple(self._hull(source, one) for one in (*earlier, dim))

    def _places(self, source: int, dim: int) -> list[RowOffset]:
        places = (read.places[dim] for read in self.reads if read.source == source)
        return [place for place in places if place is not None]

    def _hull(self, source: int, dim: int) -> HaloRows[str]:
        found = self._places(source, dim)
        return HaloRows(
            dim,
            factor="",
            before=max(-place.offset for place in found),
            after=max(place.offset for place in found),
            first=min(place.first for place in found),
            last=max(place.last for place in found),
            wraps=any(place.wraps for place in found),
        )


def shared_reads(reads: Mapping[int, Sequence[tuple[Hashable, Sequence[Places]]]]) -> dict[int, SharedReads]:
    """What stencils read of sources that they share.

    Args:
        reads: stencil -> per source what it is, and the places at which it is read. What is equal is one source.

    >>> near, further, far = ((RowOffset(by, 0, 64),) for by in (1, 2, 40))
    >>> found = shared_reads({3: [("u", [near])], 5: [("u", [further])], 7: [("u", [far])]})
    >>> [len(one) for one in found[3]], found[3] == found[5], found[7]
    ([2], True, ((),))
    """
    sharing: dict[Hashable, list[tuple[Places, ...]]] = defaultdict(list)
    for sources in reads.values():
        for source, places in sources:
            if _is_near(places):
                sharing[source].append(tuple(places))
    return {
        stencil: tuple(
            tuple(sharing[source]) if _is_near(places) and len(sharing[source]) > 1 else ()
            for source, places in sources
        )
        for stencil, sources in reads.items()
    }


def _is_near(places: Iterable[Places]) -> bool:
    """Whether something lies beyond a shard, nothing far beyond, and nothing beyond a corner.

    Stencils that read corners bring rows in different orders, of which XLA merges few.
    """
    moved = [[abs(place.offset) for place in one if place is not None and is_moved(place)] for one in places]
    return any(moved) and all(len(one) <= 1 for one in moved) and max(map(max, filter(None, moved))) <= _NEAR_ROWS


def is_moved(place: RowOffset | None) -> bool:
    """Whether the rows at a place are not a device's own."""
    return place is not None and place.offset != 0
