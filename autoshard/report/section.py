"""What a report says, as data: its sections. `text.py` writes them as text, and knows nothing of plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from autoshard.layout import Layout


@dataclass(frozen=True)
class Bytes:
    """A size."""

    count: float


@dataclass(frozen=True)
class Seconds:
    """A duration."""

    seconds: float


@dataclass(frozen=True)
class Share:
    """A part of a whole, 1.0 being all of it."""

    share: float


@dataclass(frozen=True)
class RelativeChange:
    """How much more or less one figure is than another, as a share of the other."""

    figure: float
    other: float


@dataclass(frozen=True)
class ArrayCount:
    """How many arrays a row stands for."""

    count: int


@dataclass(frozen=True)
class Spec:
    """How an array lies on the mesh."""

    layout: Layout


@dataclass(frozen=True)
class NameList:
    """Names in order, mesh axes for example."""

    names: tuple[str, ...]


Piece: TypeAlias = str | int | Bytes | Seconds | Share | RelativeChange | ArrayCount | Spec | NameList
Phrase: TypeAlias = tuple[Piece, ...]  # pieces of one line; words bring their own spaces
Row: TypeAlias = tuple[Piece | Phrase, ...]  # one cell per column


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    heading: str
    is_number: bool = False  # whether its cells are figures, to be compared down the column


@dataclass(frozen=True)
class Section:
    """One part of a report: a table and lines below it. Without rows and lines it is left out."""

    title: Phrase = ()
    columns: tuple[Column, ...] = ()  # without the first one, above which the title stands
    rows: tuple[Row, ...] = ()
    lines: tuple[Phrase, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.rows and not self.lines
