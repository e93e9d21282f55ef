"""An array of the running program, where its layouts are known, and the way back from the inside of a stencil."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.jaxprs import JaxprEqn
from autoshard.layout import Layout
from autoshard.propagation.moves import Step


@dataclass(frozen=True)
class ShardedArray:
    """An array of the running program, with the resharded copy that its readers share."""

    array: Any
    layout: Layout | None = None  # None: the plan has no layout for the array
    copy: Any = None
    copy_layout: Layout | None = None
    made_by: tuple[JaxprEqn, list[ShardedArray]] | None = None  # inside a stencil: the equation and its operands

    def holding(self, array: Any, copy: Any) -> ShardedArray:
        """The same with other arrays: those of another trace, or behind a barrier."""
        return replace(self, array=array, copy=copy)


def shells(made: Sequence[ShardedArray], operands: Sequence[ShardedArray]) -> list[ShardedArray]:
    """What a body of its own trace makes, without arrays of that trace.

    What the body hands on as it got it still knows what made it.
    """
    outside = {id(entry.made_by) for entry in operands}
    return [
        replace(entry, array=None, copy=None, made_by=entry.made_by if id(entry.made_by) in outside else None)
        for entry in made
    ]


def unfolded(
    steps: Sequence[Step], eqn: JaxprEqn, operands: list[ShardedArray]
) -> tuple[dict[int, JaxprEqn], dict[int, ShardedArray]]:
    """The equation of each step of a stencil, and its sources by their place."""
    equations: dict[int, JaxprEqn] = {}
    sources: dict[int, ShardedArray] = {}
    waiting = [(len(steps) - 1, eqn, operands)]
    while waiting:
        index, made_by, entries = waiting.pop()
        equations[index] = made_by
        for ref, operand in zip(steps[index].operands, steps[index].inputs, strict=True):
            entry = entries[operand]
            if ref < 0:
                sources[~ref] = entry
            elif ref not in equations:
                assert entry.made_by is not None, "what is inside a stencil knows what made it"
                waiting.append((ref, *entry.made_by))
    return equations, sources
