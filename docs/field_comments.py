"""An extension of griffe: the comment behind a dataclass's field is its docstring in the reference.

Units and shapes stand there: `bandwidth: float  # bytes/s`.
"""

from __future__ import annotations

import io
import tokenize
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Gives fields that have no docstring the comment behind them."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is None and attr.parent is not None and attr.parent.is_class and (text := comment(attr)):
            attr.docstring = griffe.Docstring(text, lineno=attr.lineno, parent=attr)


def comment(attribute: griffe.Attribute) -> str:
    """What stands behind the `#` on the lines of an attribute."""
    tokens = tokenize.generate_tokens(io.StringIO(attribute.source + "\n").readline)
    found = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return " ".join(found).strip()
