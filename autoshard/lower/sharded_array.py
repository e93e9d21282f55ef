"""An array of the running program, where its layouts are known, and the way back from the inside of a stencil."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    @property
    def shell(self) -> ShardedArray:
        """Its layouts alone: what may outlive the trace that the arrays belong to."""
        return ShardedArray(None, self.layout, None, self.copy_layout)


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
