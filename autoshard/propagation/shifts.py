"""A slice or a pad along a split dim, and the collective_permutes by which XLA's partitioner brings devices their rows.

The rows of a result stand elsewhere in the operand, so a device reads rows of other devices. The partitioner says how
many rows before and after its own shard each device needs. It then sends the most that any device needs to all, one
permute per distance (openxla/xla, xla/service/spmd/spmd_partitioner_util.cc: `ExchangeHalo`). Where devices need rows
from far away, and few of them, it sends each shard's rows to those who read them (`ExchangeHaloCompact`). Where devices
need nearly everything, it gathers the dim.

>>> half = Shift(dim=0, factor="i", start=8, stride=1, made=8)  # x[8:16] of 16 rows
>>> for permute in half.permutes(size=16, pieces=4):
...     print(permute)
Permute(start=0, stop=2, pairs=((2, 0), (3, 2)))
Permute(start=2, stop=4, pairs=((2, 1),))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

Factor = TypeVar("Factor", str, int)  # a rule's have names, those of a group numbers


@dataclass(frozen=True)
class Permute:
    """One collective_permute: rows of a device's shard that another device reads."""

    start: int  # of the sender's shard
    stop: int
    pairs: tuple[tuple[int, int], ...]  # (sender, receiver)

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Shift(Generic[Factor]):
    """The rows of one operand that a device reads for its share of a result: row `i` is row ``start + i * stride``."""

    dim: int
    factor: Factor
    start: int  # negative: so many rows of padding come first
    stride: int
    made: int  # rows of the whole result

    def renamed(self, factor: int) -> Shift[int]:
        return Shift(self.dim, factor, self.start, self.stride, self.made)

    def read(self, size: int, pieces: int) -> int:
        """Rows that one device has in the end: from the first to the last of which it makes something."""
        return self.stride * (self.made // pieces - 1) + 1

    def is_gathered(self, size: int, pieces: int) -> bool:
        """Whether the partitioner gathers the dim instead."""
        return self._found(size, pieces) is None

    def permutes(self, size: int, pieces: int) -> Sequence[Permute]:
        """What brings devices their rows of a dim of this size, split into so many pieces."""
        return self._found(size, pieces) or ()

    def _found(self, size: int, pieces: int) -> list[Permute] | None:
        shard, read, step = size // pieces, self.read(size, pieces), self.stride * (self.made // pieces)

        def before(device: int) -> int:
            return shard * device - self.start - step * device

        def after(device: int) -> int:
            return self.start + step * device + read - shard * (device + 1)

        ends = (0, pieces - 1)  # where what grows or falls with the device is largest
        if max(map(before, ends)) <= 2 * read >= max(map(after, ends)):
            return _permutes_by_distance(before, after, shard, pieces)
        if 2 * read >= size:
            return None
        return _permutes_by_reader(lambda device: self.start + step * device, read, shard, pieces)


def _permutes_by_distance(
    before: Callable[[int], int], after: Callable[[int], int], shard: int, pieces: int
) -> list[Permute] | None:
    """Permutes from every device to the one so many places further, and to the one so many places before."""
    last = pieces - 1
    most_before, most_after = max(before(1), before(last)), max(after(0), after(last - 1))
    if most_before + most_after + shard >= shard * pieces and max(most_before, most_after) > shard:
        return None
    begin, end = -max(before(0), before(last)), shard + max(after(0), after(last))  # rows that anybody reads
    if begin >= end:
        return None
    found = []
    for distance in range(-(-most_before // shard), 0, -1):
        first = max(0, shard * distance - most_before)
        stop = shard - max(0, shard * (1 - distance) - end)
        if -distance * shard < end and first < stop:
            found.append(Permute(first, stop, tuple((i - distance, i) for i in range(distance, pieces))))
    skipped = min(max(begin - shard, 0), max(most_after, 0)) // shard
    for distance in range(skipped + 1, -(-most_after // shard) + 1):
        first = max(0, begin - distance * shard)
        stop = min(shard, most_after - shard * (distance - 1))
        if first < stop:
            found.append(Permute(first, stop, tuple((i, i - distance) for i in range(distance, pieces))))
    return found


@dataclass(frozen=True)
class _Piece:
    """Rows of one shard that one device reads."""

    reader: int
    offset: int  # in what the reader reads
    start: int  # of the shard
    stop: int


def _permutes_by_reader(first_row: Callable[[int], int], read: int, shard: int, pieces: int) -> list[Permute]:
    """Permutes in which every shard's next reader gets its rows, with no reader twice in one permute."""
    wanted: list[list[_Piece]] = [[] for _ in range(pieces)]  # by sender
    for device in range(pieces):
        begin = first_row(device)
        for sender in range(pieces):
            start, stop = max(begin, sender * shard), min(begin + read, (sender + 1) * shard)
            if sender != device and start < stop:
                rows = _Piece(device, start - begin, start - sender * shard, stop - sender * shard)
                wanted[sender].append(rows)
    for of in wanted:
        of.sort(key=lambda piece: piece.offset)
    found = []
    while any(wanted):
        permute, readers = Permute(shard, 0, ()), set()
        for sender, of in enumerate(wanted):
            if not of or of[0].reader in readers or (permute.pairs and _are_opposite(permute, of[0], shard)):
                continue
            piece = of.pop(0)
            readers.add(piece.reader)
            start, stop = min(permute.start, piece.start), max(permute.stop, piece.stop)
            permute = replace(permute, start=start, stop=stop, pairs=(*permute.pairs, (sender, piece.reader)))
        found.append(permute)
    return found


def _are_opposite(permute: Permute, piece: _Piece, shard: int) -> bool:
    """Whether the one has rows at the end of shards, and the other at the beginning: together they would be all."""
    if permute.start > piece.stop:
        return permute.stop == shard and piece.start == 0
    return permute.stop < piece.start and permute.start == 0 and piece.stop == shard
