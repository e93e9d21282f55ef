"""Sections of a report in, text for a terminal out."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, Literal

from autoshard.layout import spec_text
from autoshard.program.paths import printable
from autoshard.report.section import (
    ArrayCount,
    Bytes,
    Column,
    NameList,
    Phrase,
    Piece,
    RelativeChange,
    Seconds,
    Section,
    Share,
    Spec,
)
from autoshard.report.units import bytes_text, change_text, seconds_text

WIDTH = 110  # columns; a table whose paths and figures need more is as wide as that
_WORDS = 30  # columns for what is wrapped, at least
_TITLE = 40  # columns of a title that stands above the first column though all that is there is shorter


def text_of(sections: Iterable[Section]) -> str:
    """The sections that say something, an empty line between two; tables `WIDTH` columns wide, without colours."""
    return "\n\n".join(_section_text(section) for section in sections if not section.is_empty)


def _section_text(section: Section) -> str:
    title = [_table_text(section)] if section.rows else [written(section.title)] if section.title else []
    return "\n".join([*title, *map(written, section.lines)])


def _table_text(section: Section) -> str:
    """A table without lines: figures to the right, all else to the left. Only words of the last column are wrapped."""
    from rich.console import Console  # takes as long to import as half of autoshard
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    cells = [[written(cell) for cell in row] for row in section.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    title = written(section.title)
    above = [title] if len(title) > max(widths[0], _TITLE) else []
    headings = ["" if above else title, *(column.heading for column in section.columns)]
    widths = [max(width, len(heading)) for width, heading in zip(widths, headings, strict=True)]
    for heading, column in zip(headings, [Column(""), *section.columns], strict=True):
        wraps = column is section.columns[-1] and not column.is_number
        justify: Literal["right", "left"] = "right" if column.is_number else "left"
        table.add_column(Text(heading), justify=justify, no_wrap=not wraps, overflow="fold")
    words = max((len(word) for row in cells for word in row[-1].split()), default=0)
    last = widths[-1] if section.columns[-1].is_number else max(min(widths[-1], _WORDS), words)
    needed = sum(widths[:-1]) + 2 * len(widths) + last
    for row in cells:
        table.add_row(*map(Text, row))
    plain: dict[str, Any] = {
        "color_system": None,
        "force_terminal": False,
        "force_jupyter": False,
        "legacy_windows": False,
    }
    printed = io.StringIO()
    console = Console(file=printed, width=max(WIDTH, needed), **plain)
    console.print(table)
    return "\n".join([*above, *(line.rstrip() for line in printed.getvalue().splitlines())])


def written(piece: Piece | Phrase) -> str:
    """A piece or phrase as words.

    >>> written(("at most ", Share(0.0123), " slower, ", Bytes(1536)))
    'at most 1.23% slower, 1.5 KiB'
    """
    match piece:
        case tuple():
            return "".join(map(written, piece))
        case Bytes(size):
            return bytes_text(size)
        case Seconds(seconds):
            return seconds_text(seconds)
        case Share(share):
            return f"{share:.2%}"
        case RelativeChange(figure, other):
            return change_text(figure, other)
        case ArrayCount(count):
            return f"x{count}" if count > 1 else ""
        case Spec(layout):
            return printable(spec_text(layout))
        case NameList(names):
            return printable(", ".join(names))
        case _:
            return printable(str(piece), kept="\n")
