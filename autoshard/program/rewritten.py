"""`RewrittenPlaces`: what a program says of places that were rewritten by a law of algebra."""

from __future__ import annotations

from dataclasses import dataclass

_NAMED = 3  # lines that a remark names


@dataclass(frozen=True)
class RewrittenPlaces:
    """Places of a step that compute the same otherwise, by one law."""

    name: str  # of the law
    law: str  # in one line
    places: tuple[int, ...]  # among those where the law applied, in the order in which it looks at them
    lines: tuple[str, ...]  # of the user
    arguments: frozenset[int] = frozenset()  # that are read there

    @property
    def remark(self) -> str:
        """One line of a report.

        >>> RewrittenPlaces("common_factor", "A B + A C = A (B + C)", (0, 1), ("train.py:4",)).remark
        'rewrites: common_factor at train.py:4 (2 places): A B + A C = A (B + C).'
        """
        named = ", ".join(self.lines[:_NAMED]) or "unknown line"
        more = f" and {len(self.lines) - _NAMED} more lines" * (len(self.lines) > _NAMED)
        count = f" ({len(self.places)} places)" * (len(self.places) > 1)
        return f"rewrites: {self.name} at {named}{more}{count}: {self.law}."
