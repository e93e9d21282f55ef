"""Sections of a report in, text for a terminal out."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoshard.layout import spec_text
from autoshard.program.paths import printable
from autoshard.report.section import ArrayCount, Bytes, Names, Phrase, Piece, Seconds, Section, Share, Spec
from autoshard.report.units import bytes_text, seconds_text

WIDTH = 110  # columns


def text_of(sections: Iterable[Section]) -> str:
    """The sections that say something, an empty line between two; tables `WIDTH` columns wide, without colours."""
    return "\n\n".join(_section_text(section) for section in sections if not section.is_empty)


def _section_text(section: Section) -> str:
    title = [_table_text(section)] if section.rows else [_written(section.title)] if section.title else []
    return "\n".join([*title, *map(_written, section.lines)])


def _table_text(section: Section) -> str:
    """A table without lines: figures to the right, all else to the left."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column(Text(_written(section.title)), overflow="fold")
    for column in section.columns:
        table.add_column(
            Text(_written(column.heading)), justify="right" if column.is_number else "left", overflow="fold"
        )
    for row in section.rows:
        table.add_row(*(Text(_written(cell)) for cell in row))
    plain: dict[str, Any] = {
        "color_system": None,
        "force_terminal": False,
        "force_jupyter": False,
        "legacy_windows": False,
    }
    printed = io.StringIO()
    console = Console(file=printed, width=WIDTH, **plain)
    console.print(table)
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def _written(piece: Piece | Phrase) -> str:
    """
    >>> _written(("at most ", Share(0.0123), " slower, ", Bytes(1536)))
    'at most 1.23% slower, 1.5 KiB'
    """
    match piece:
        case tuple():
            return "".join(map(_written, piece))
        case Bytes(size):
            return bytes_text(size)
        case Seconds(seconds):
            return seconds_text(seconds)
        case Share(share):
            return f"{share:.2%}"
        case ArrayCount(count):
            return f"x{count}" if count > 1 else ""
        case Spec(layout):
            return printable(spec_text(layout))
        case Names(names):
            return printable(", ".join(names))
        case _:
            return printable(str(piece), kept="\n")
