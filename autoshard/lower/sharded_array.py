"""An array of the running program, where its layouts are known, and the way back from the inside of a stencil."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from autoshard.jaxprs import ClosedJaxpr, JaxprEqn, Literal, called_jaxpr, called_operands
from autoshard.layout import Layout
from autoshard.propagation.moves import MoveStep

Made: TypeAlias = "tuple[JaxprEqn, list[ShardedArray]]"  # an equation and its operands


@dataclass(frozen=True)
class ShardedArray:
    """An array of the running program, with the resharded copy that its readers share."""

    array: Any
    layout: Layout | None = None  # None: the plan has no layout for the array
    copy: Any = None
    copy_layout: Layout | None = None
    made_by: Made | None = None  # inside a stencil

    @property
    def shell(self) -> ShardedArray:
        """Its layouts alone: what may outlive the trace that the arrays belong to."""
        return ShardedArray(None, self.layout, None, self.copy_layout)

    def holding(self, array: Any, copy: Any, made_by: Made | None = None) -> ShardedArray:
        """The same with other arrays: those of another trace, or behind a barrier."""
        return replace(self, array=array, copy=copy, made_by=made_by)


def handed_through(closed: ClosedJaxpr, operands: Sequence[Made | None]) -> list[Made | None]:
    """What made each result of a body of its own trace that the body hands on as it got it; None of all others.

    Args:
        operands: what made the body's arguments.
    """
    known = {var: made for var, made in zip(closed.jaxpr.invars, operands, strict=True) if made is not None}
    for eqn in closed.jaxpr.eqns if known else ():
        if (opened := called_jaxpr(eqn)) is not None:
            inside = [None if isinstance(atom, Literal) else known.get(atom) for atom in eqn.invars]
            found = zip(eqn.outvars, handed_through(opened, called_operands(eqn, inside)), strict=True)
            known |= {var: made for var, made in found if made is not None}
    return [None if isinstance(atom, Literal) else known.get(atom) for atom in closed.jaxpr.outvars]


def unfolded(
    steps: Sequence[MoveStep], eqn: JaxprEqn, operands: list[ShardedArray]
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
