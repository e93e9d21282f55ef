"""The equations of a body while it is edited: in order, with what makes and what reads each value."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoshard.jaxprs import DropVar, JaxprEqn, Var

Place = tuple[int, ...]  # places are compared as tuples; the last number is 0
_Placed = tuple[Place, JaxprEqn]


class UnavailableValue(Exception):
    """A value cannot be handed to a body that needs it."""


@dataclass(eq=False)
class Equations:
    """Equations of which each stands behind those that make its operands.

    An edit costs as much as it moves, however many equations there are: an equation that is put before another gets a
    place between that and the one before it, and all others keep theirs.
    """

    makers: dict[Var, JaxprEqn] = field(default_factory=dict)
    _readers: dict[Var, list[JaxprEqn]] = field(default_factory=dict)
    _placed: dict[int, _Placed] = field(default_factory=dict)  # id of an equation -> its place, and itself
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _in_order: list[JaxprEqn] | None = None  # None after an edit

    def __iter__(self) -> Iterator[JaxprEqn]:
        return iter(self._ordered())

    def __reversed__(self) -> Iterator[JaxprEqn]:
        return reversed(self._ordered())

    def __len__(self) -> int:
        return len(self._placed)

    def _ordered(self) -> list[JaxprEqn]:
        if self._in_order is None:
            self._in_order = [eqn for _, eqn in sorted(self._placed.values(), key=_place)]
        return self._in_order

    def readers(self, *variables: Var) -> list[JaxprEqn]:
        """The equations that read some of the variables, in order."""
        found = {id(eqn): eqn for var in variables for eqn in self._readers.get(var, ())}
        return sorted(found.values(), key=lambda eqn: self._placed[id(eqn)][0])

    def append(self, eqn: JaxprEqn) -> None:
        """Puts an equation at the end."""
        self._index(eqn)
        self._placed[id(eqn)] = (next(self._numbers), 0), eqn
        if self._in_order is not None:
            self._in_order.append(eqn)

    def exchange(self, gone: Sequence[JaxprEqn], new: Sequence[JaxprEqn]) -> None:
        """Equations in the place of others: each before the first that reads it, and behind what it reads.

        What they read is moved before them where it stands later. New ones that nobody reads go to the end.

        Raises:
            UnavailableValue: the new equations read what is made of them. Then nothing has changed.
        """
        for eqn in gone:
            self._forget(eqn)
        for eqn in new:
            self._index(eqn)
        own = {id(eqn) for eqn in new}
        read = {id(eqn): eqn for one in new for var in one.outvars for eqn in self._readers.get(var, ())}
        readers = [self._placed[here] for here in read if here not in own]
        moved = dict[int, _Placed]()
        try:
            for place, reader in sorted(readers, key=_place):
                if id(reader) not in moved:
                    self._pull(reader, place, moved)
            for eqn in new:
                if id(eqn) not in moved:
                    end = next(self._numbers), 0
                    self._pull(eqn, end, moved)
                    moved[id(eqn)] = end, eqn
        except UnavailableValue:
            for eqn in new:
                self._forget(eqn)
            for eqn in gone:
                self._index(eqn)
            raise
        for eqn in gone:
            del self._placed[id(eqn)]
        self._placed |= moved
        self._in_order = None

    def _pull(self, reader: JaxprEqn, place: Place, moved: dict[int, _Placed]) -> None:
        """Moves before an equation what it needs and what stands behind it, or nowhere yet."""
        waiting, begun = [reader], set[int]()
        while waiting:
            eqn = waiting[-1]
            before = [self.makers[atom] for atom in eqn.invars if isinstance(atom, Var) and atom in self.makers]
            missing = [one for one in before if not self._stands_before(one, place, moved)]
            if missing and id(eqn) in begun:
                raise UnavailableValue
            begun.add(id(eqn))
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if eqn is not reader and not self._stands_before(eqn, place, moved):
                moved[id(eqn)] = (*place[:-1], -1, next(self._numbers), 0), eqn

    def _stands_before(self, eqn: JaxprEqn, place: Place, moved: dict[int, _Placed]) -> bool:
        found = moved.get(id(eqn)) or self._placed.get(id(eqn))
        return found is not None and found[0] < place

    def _index(self, eqn: JaxprEqn) -> None:
        self.makers.update((var, eqn) for var in eqn.outvars if not isinstance(var, DropVar))
        for var in _read(eqn):
            self._readers.setdefault(var, []).append(eqn)

    def _forget(self, eqn: JaxprEqn) -> None:
        for var in eqn.outvars:
            if self.makers.get(var) is eqn:
                del self.makers[var]
        for var in _read(eqn):
            readers = self._readers[var]
            readers[:] = [one for one in readers if one is not eqn]


def _place(placed: _Placed) -> Place:
    return placed[0]


def _read(eqn: JaxprEqn) -> dict[Var, None]:
    """The variables that an equation reads, each once."""
    return dict.fromkeys(atom for atom in eqn.invars if isinstance(atom, Var))
