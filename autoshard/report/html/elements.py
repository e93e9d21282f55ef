"""HTML elements from their names, attributes and children: whatever is not HTML already is escaped."""

from __future__ import annotations

from html import escape

_EMPTY = frozenset({"br", "col", "meta", "rect", "path", "line"})  # elements that have no children


class Html(str):
    """Text that is HTML already."""


def element(name: str, /, *children: str | Html, **attributes: str | float | bool) -> Html:
    """One element. Attributes that Python has other words for end in ``_``, and hyphens are written as ``_``.

    >>> element("td", "a < b", element("b", "x"), class_="path", data_axis='"')
    '<td class="path" data-axis="&quot;">a &lt; b<b>x</b></td>'
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items()
        if value is not False
    )
    if name in _EMPTY and not children:
        return Html(f"<{name}{written}>" if name in ("br", "col", "meta") else f"<{name}{written}/>")
    return Html(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: str | Html) -> Html:
    """Several elements or texts, one after the other."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))
