"""Sections of a report in, HTML tables out: as `report/text.py`, for a browser."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.layout import Layout
from autoshard.report.html.elements import Html, element, joined
from autoshard.report.html.style import AXES
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
from autoshard.report.text import written

Colours = Mapping[str, int]  # mesh axis -> which of the colours of axes is its


def section_html(section: Section, colours: Colours) -> Html:
    """A section with its title, its table and its lines; nothing if it is empty."""
    if section.is_empty:
        return Html()
    title = element("h2", written(section.title)) if section.title else Html()
    return element("section", title, table_html(section, colours), *(lines_html(section, colours)))


def table_html(section: Section, colours: Colours) -> Html:
    """The rows of a section as a table that scrolls by itself where the screen is narrow."""
    if not section.rows:
        return Html()
    columns = (Column(""), *section.columns)
    used = [i for i in range(len(columns)) if columns[i].heading or any(written(row[i]) for row in section.rows)]
    heads = [element("th", columns[i].heading, class_=_class_of(columns, i)) for i in used]
    rows = [
        element("tr", *(element("td", cell_html(row[i], colours), class_=_class_of(columns, i)) for i in used))
        for row in section.rows
    ]
    has_heads = any(columns[i].heading for i in used)
    head = element("thead", element("tr", *heads)) if has_heads else Html()
    return element("div", element("table", head, element("tbody", *rows)), class_="scroll")


def lines_html(section: Section, colours: Colours) -> list[Html]:
    """The lines of a section as paragraphs."""
    return [element("p", cell_html(line, colours)) for line in section.lines]


def cell_html(piece: Piece | Phrase, colours: Colours) -> Html:
    """One cell or line."""
    match piece:
        case tuple():
            return joined(*(cell_html(one, colours) for one in piece))
        case Spec(layout):
            return spec_html(layout, colours)
        case NameList(names):
            return joined(*(axis_html(name, colours) for name in names))
        case Bytes() | Seconds() | Share() | RelativeChange() | ArrayCount() | int():
            return joined(written(piece))
        case _:
            is_over = piece == "over the limit"
            return element("span", piece, class_="over") if is_over else joined(piece)


def spec_html(layout: Layout, colours: Colours) -> Html:
    """A PartitionSpec, its axes in their colours.

    >>> spec_html((("data",), ()), {"data": 0})
    '<code>P(<span class="axis axis0">data</span>)</code>'
    """
    entries = [joined(*(axis_html(axis, colours) for axis in axes)) if axes else Html("&middot;") for axes in layout]
    while entries and entries[-1] == "&middot;":
        entries.pop()
    inside = [part for entry in entries for part in (Html(", "), entry)][1:]
    return element("code", "P(", *inside, ")")


def axis_html(axis: str, colours: Colours) -> Html:
    """The name of a mesh axis in its colour."""
    return element("span", axis, class_=f"axis axis{colours.get(axis, 0) % AXES}")


def _class_of(columns: tuple[Column, ...], index: int) -> str:
    if columns[index].is_number:
        return "number"
    is_words = index == len(columns) - 1 and index > 0
    return "path" if index == 0 else "words" if is_words else "cell"
