"""Parts of a JSON document in, checked values out: what is of another kind than it should be has its place named."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from autoshard.program.paths import printable

T = TypeVar("T")
_NUMBER_LIMIT = 2**63  # sizes, places and numbers of bytes are smaller


@dataclass(frozen=True)
class Node:
    """A part of a document, and where it stands in it.

    >>> Node({"sizes": [4, "x"]})["sizes"].items(Node.count)
    Traceback (most recent call last):
        ...
    ValueError: sizes/1 is 'x', where a whole number from 0 on belongs
    """

    value: Any
    path: str = ""

    def wrong(self, wanted: str) -> ValueError:
        """The error for a part that is not what is wanted."""
        text = repr(self.value)
        shown = text if len(text) < 60 else f"{text[:50]}..."
        return ValueError(f"{self.path or 'the whole'} is {shown}, where {wanted} belongs")

    def __getitem__(self, key: str) -> Node:
        found = self.get(key)
        if found is None:
            raise ValueError(f"{self.path or 'it'} has no {key!r}")
        return found

    def get(self, key: str) -> Node | None:
        """A field, if it is there."""
        fields = self.fields()
        return self._below(key, fields[key]) if key in fields else None

    def fields(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object with fields")
        return self.value

    def entries(self) -> Iterator[tuple[str, Node]]:
        """Every field with its name."""
        return ((key, self._below(key, value)) for key, value in self.fields().items())

    def only(self, known: Collection[str]) -> None:
        """Refuses fields of other names."""
        if unknown := sorted(self.fields().keys() - set(known)):
            raise ValueError(f"{self.path or 'it'} has fields that are not known: {', '.join(map(repr, unknown))}")

    def parts(self, count: int | None = None) -> list[Node]:
        """The parts of a list, of so many if that is given."""
        if not isinstance(self.value, list) or count not in (None, len(self.value)):
            raise self.wrong("a list" if count is None else f"a list of {count}")
        return [self._below(i, value) for i, value in enumerate(self.value)]

    def items(self, read: Callable[[Node], T]) -> tuple[T, ...]:
        """The parts of a list, each read in one way."""
        return tuple(map(read, self.parts()))

    def optional(self, read: Callable[[Node], T]) -> T | None:
        return None if self.value is None else read(self)

    def text(self) -> str:
        """Words for people, which may have several lines."""
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return printable(self.value, kept="\n")

    def name(self) -> str:
        """A text of one line."""
        if not isinstance(self.value, str):
            raise self.wrong("a name")
        return printable(self.value)

    def count(self) -> int:
        if type(self.value) is not int or not 0 <= self.value < _NUMBER_LIMIT:
            raise self.wrong("a whole number from 0 on")
        return self.value

    def number(self) -> float:
        is_number = type(self.value) in (int, float) and abs(self.value) < _NUMBER_LIMIT
        if not is_number and not (isinstance(self.value, float) and math.isinf(self.value)):
            raise self.wrong("a number")
        return self.value  # an int stays one: it is written again as it was

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def one_of(self, known: Collection[str]) -> str:
        if not isinstance(self.value, str) or self.value not in known:
            raise self.wrong(f"one of {', '.join(known)}")
        return self.value

    def _below(self, key: Any, value: Any) -> Node:
        return Node(value, f"{self.path}/{printable(str(key))}" if self.path else printable(str(key)))


def number_of(key: str, path: str) -> int:
    """A place in a list that is the name of a field: ``"41"``."""
    if not key.isascii() or not key.isdigit() or len(key) > 18:
        raise ValueError(f"{path} has the field {key!r}, where the number of a value or equation belongs")
    return int(key)
