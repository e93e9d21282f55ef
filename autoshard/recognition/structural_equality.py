"""Whether values are made alike: by the same equations of operands of the same types, whatever their names.

What small arrays show of one attention they show of all that are made alike. So a model of many layers is proven once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from autoshard.jaxprs import JaxprEqn, Literal, Var
from autoshard.recognition.bodies import Atom, BodyTree
from autoshard.recognition.probe import FOLLOWED

_Shown = TypeVar("_Shown")
_READ = FOLLOWED | {"iota"}  # what a probe evaluates, and what a mask is read from


@dataclass(frozen=True)
class ValueStructure:
    """How values are computed. `structure` is equal for values computed alike, whose `values` correspond."""

    structure: Hashable
    values: tuple[Var, ...]  # by origin

    @classmethod
    def of(cls, tree: BodyTree, ends: Sequence[Var], values: Sequence[Var], *context: Hashable) -> ValueStructure:
        """
        Args:
            ends: origins of values; what they are made of is left out.
            values: all that is compared, as far as the equations go that a probe evaluates and that lead to it.
            context: what must be equal beside.
        """
        walk = _LikenessWalk(tree)
        leaves = [walk.leaf(end, None) for end in ends if walk.is_new(end)]
        for value in values:
            walk.number(value)
        for value in walk.waiting:  # it grows
            leaves.append(walk.made(value))
        places = tuple(walk.numbers[tree.origin(one)] for one in (*ends, *values))
        return cls((context, places, tuple(leaves)), tuple(walk.numbers))

    def renamed(self, other: ValueStructure) -> Mapping[Var, Var]:
        """What the values of this one are called in another that is made alike."""
        return dict(zip(self.values, other.values, strict=True))


@dataclass(eq=False)
class Proofs:
    """What was shown in one tree, each once."""

    _shown: dict[Hashable, Any] = field(default_factory=dict)
    _kinds: dict[Hashable, int] = field(default_factory=dict)

    def once(self, kind: Hashable, show: Callable[[], _Shown]) -> _Shown:
        """What `show` returns, called for the first of a kind."""
        if kind not in self._shown:
            self._shown[kind] = show()
        found: _Shown = self._shown[kind]
        return found

    def kind(self, like: ValueStructure) -> int:
        """A number that values have in common that are made alike."""
        return self._kinds.setdefault(like.structure, len(self._kinds))


@dataclass
class _LikenessWalk:
    tree: BodyTree
    numbers: dict[Var, int] = field(default_factory=dict)
    waiting: list[Var] = field(default_factory=list)

    def is_new(self, var: Var) -> bool:
        """Whether a value had no number; it has one now."""
        origin = self.tree.origin(var)
        if origin in self.numbers:
            return False
        self.numbers[origin] = len(self.numbers)
        return True

    def number(self, var: Var) -> int:
        """That of a value whose equation is part of the comparison."""
        if self.is_new(var):
            self.waiting.append(self.tree.origin(var))
        return self.numbers[self.tree.origin(var)]

    def made(self, origin: Var) -> Hashable:
        home, eqn = self.tree.homes.get(origin, (None, None))
        if eqn is None or eqn.primitive.name not in _READ or len(eqn.outvars) != 1:
            constant = None if home is None else home.constants.get(origin)
            return self.leaf(origin, (eqn and eqn.primitive.name, id(constant)))
        return eqn.primitive.name, parameters_and_types(eqn), type_of(origin), tuple(map(self.operand, eqn.invars))

    def operand(self, atom: Atom) -> Hashable:
        return literal_value(atom) if isinstance(atom, Literal) else self.number(atom)

    def leaf(self, origin: Var, made: Hashable) -> Hashable:
        return type_of(origin), made


def parameters_and_types(eqn: JaxprEqn) -> Hashable:
    """The parameters of an equation, and the types of its operands; unlike any other's if they cannot be compared."""
    described = tuple(eqn.params.items()), tuple(map(type_of, eqn.invars))
    try:
        hash(described)
    except TypeError:
        return id(eqn)
    return described


def literal_value(literal: Literal) -> Hashable:
    """The number that a literal is."""
    return type_of(literal), np.asarray(literal.val).tobytes()


def type_of(atom: Any) -> Hashable:
    """Shape and dtype; what has none is like itself alone."""
    aval = atom.aval
    return (aval.shape, aval.dtype) if hasattr(aval, "shape") and hasattr(aval, "dtype") else id(atom)
