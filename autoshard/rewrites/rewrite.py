"""`Rewrite`, a law of algebra that steps can be rewritten by; where one applies; and the registry of all.

A rewrite looks at one body of a step at a time (`BodyGraph`): the step itself, or what a loop, a branch or a
`jax.checkpoint` runs. It yields `Match`es. Which of them are applied, the planner's price decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import ArgumentError
from autoshard.errors.kinds import checks_kinds
from autoshard.jaxprs import JaxprEqn, Var, aval_of
from autoshard.rewrites.graph import BodyGraph
from autoshard.rewrites.product import Atom


@dataclass(frozen=True, eq=False)
class Match:
    """A place where a law applies: some variables of a body, and how to compute them otherwise."""

    results: tuple[Var, ...]  # that are computed otherwise
    inputs: tuple[Atom, ...]  # of `build`; none may depend on a result
    build: Callable[..., Sequence[Any]]  # arrays for `inputs` -> arrays of the types of `results`
    form: Hashable = ()  # places are rewritten together if their form, and the types of inputs and results, are alike

    @property
    def types(self) -> tuple[Any, ...]:
        """Shapes and dtypes of inputs and results."""
        return tuple((aval_of(atom).shape, str(aval_of(atom).dtype)) for atom in (*self.inputs, *self.results))


@dataclass(frozen=True)
class Rewrite:
    """A law of algebra.

    Attributes:
        name: what plans call it.
        law: one line, as ``"X A + X B = X (A + B)"``.
        find: yields the places of a body where it applies. All it yields must hold for all numbers, up to rounding.
    """

    name: str
    law: str
    find: Callable[[BodyGraph], Iterable[Match]]


REWRITES: dict[str, Rewrite] = {}
"""The laws by name, in the order in which they were registered."""


@checks_kinds()
def register(name: str, law: str) -> Callable[[Callable[[BodyGraph], Iterable[Match]]], Rewrite]:
    """Makes a function that finds places the rewrite of this name. `rewrites="auto"` tries it from then on.

    The same function may be registered again, as when a cell of a notebook is run twice.

    Raises:
        ArgumentError: there is another one of this name.
    """

    def registered(find: Callable[[BodyGraph], Iterable[Match]]) -> Rewrite:
        before = REWRITES[name].find if name in REWRITES else find
        if (before.__module__, before.__qualname__) != (find.__module__, find.__qualname__):
            raise ArgumentError(f"there is a rewrite {name!r} already: {REWRITES[name].law}.\nChoose another name.")
        REWRITES[name] = Rewrite(name, law, find)
        return REWRITES[name]

    return registered


def maker_of(graph: BodyGraph, match: Match) -> JaxprEqn:
    """The equation that makes the first result of a match."""
    return graph.makers[match.results[0]]
