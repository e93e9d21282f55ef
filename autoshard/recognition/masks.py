"""What a mask that the program computes says: a causal order, a window, or only its own array.

A comparison of places is ``query - key >= least``, read from iotas through sums, broadcasts and `tril`'s select.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard.jaxprs import JaxprEqn, Literal, Var, aval_of
from autoshard.primitives import VIEWS
from autoshard.recognition.bodies import Atom, BodyTree
from autoshard.recognition.small_arrays import Roles

MOST_ELEMENTS = 2**26  # of a constant that is read
_EXACT = tuple(map(np.dtype, ("int32", "int64", "float32", "float64")))  # others round places, or wrap around
_EXACT_BELOW = 2**24  # numbers from here on are rounded in float32

Mask = tuple[Var, Roles, bool]  # its origin, the roles of its dims, and what it says where a key is seen


@dataclass(frozen=True)
class VisibleKeys:
    """Which keys queries see."""

    back: int | None = None  # how many places back at most; None: all
    ahead: int | None = None  # and ahead; 0 is a causal order
    rest: tuple[Mask, ...] = ()  # what only arrays tell

    def sees_a_key(self, rows: int, keys: int) -> bool:
        """Whether places alone decide, and leave a key to each of so many queries: at its own place, or the last."""
        reaches_last = self.back is None or rows - keys <= self.back
        return not self.rest and min(self.back or 0, self.ahead or 0) >= 0 and reaches_last


@dataclass(frozen=True)
class _Places:
    """``queries * query's place + keys * key's place + offset``."""

    rows: int
    keys: int
    offset: int


def visible(tree: BodyTree, masks: tuple[Mask, ...], rows: str, keys: str) -> VisibleKeys:
    """What masks say together."""
    found = VisibleKeys()
    for var, roles, flag in masks:
        reader = _MaskReader(tree, rows, keys)
        try:
            for low, high in reader.seen(var, roles, flag):
                if low is not None:
                    found = VisibleKeys(found.back, _least(found.ahead, -low), found.rest)
                if high is not None:
                    found = VisibleKeys(_least(found.back, high), found.ahead, found.rest)
        except LookupError:
            parts = reader.parts(var, roles) if flag else [(var, roles)]
            if len(parts) > 1:
                more = visible(tree, tuple((one, dims, True) for one, dims in parts), rows, keys)
                found = VisibleKeys(
                    _least(found.back, more.back), _least(found.ahead, more.ahead), (*found.rest, *more.rest)
                )
            else:
                found = VisibleKeys(found.back, found.ahead, (*found.rest, (var, roles, flag)))
    return found


def _least(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


@dataclass
class _MaskReader:
    tree: BodyTree
    rows: str
    keys: str

    def maker(self, var: Var) -> JaxprEqn:
        _, eqn = self.tree.homes.get(self.tree.origin(var), (None, None))
        if eqn is None:
            raise LookupError
        return eqn

    def parts(self, var: Var, roles: Roles) -> list[tuple[Var, Roles]]:
        """The operands of conjunctions, each as far as it is not broadcast."""
        try:
            eqn = self.maker(var)
        except LookupError:
            return [(self.tree.origin(var), roles)]
        if eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Var):
            return self.parts(eqn.invars[0], self.under(eqn, roles))
        if eqn.primitive.name == "and" and all(isinstance(one, Var) for one in eqn.invars):
            return [part for one in eqn.invars if isinstance(one, Var) for part in self.parts(one, roles)]
        return [(self.tree.origin(var), roles)]

    def under(self, eqn: JaxprEqn, roles: Roles) -> Roles:
        """The roles of the operand of an equation that moves dims."""
        operand, params, name = aval_of(eqn.invars[0]), eqn.params, eqn.primitive.name
        out = aval_of(eqn.outvars[0]).shape
        if name == "broadcast_in_dim":
            dims = params["broadcast_dimensions"]
            return tuple(roles[int(dim)] if size > 1 else () for dim, size in zip(dims, operand.shape, strict=True))
        if name == "transpose":
            return tuple(roles[params["permutation"].index(i)] for i in range(len(out)))
        if name in ("reshape", "squeeze") and [n for n in operand.shape if n > 1] == [n for n in out if n > 1]:
            long = iter([dim for dim, size in zip(roles, out, strict=True) if size > 1])
            return tuple(next(long) if size > 1 else () for size in operand.shape)
        raise LookupError

    def seen(self, atom: Atom, roles: Roles, flag: bool) -> list[tuple[int | None, int | None]]:
        """Bounds of ``query - key``, least and most, where a mask says `flag`.

        Raises:
            LookupError: it says anything else.
        """
        if isinstance(atom, Literal):
            if bool(atom.val) == flag:
                return []
            raise LookupError
        if (array := self.constant(atom)) is not None:
            return self.of_constant(array == flag, roles)
        eqn = self.maker(atom)
        name = eqn.primitive.name
        if name in VIEWS:
            return self.seen(eqn.invars[0], self.under(eqn, roles), flag)
        if name == "not":
            return self.seen(eqn.invars[0], roles, not flag)
        if name == ("and" if flag else "or"):
            return [one for operand in eqn.invars for one in self.seen(operand, self.of(operand, roles), flag)]
        if name == "select_n" and len(eqn.invars) == 3:  # as `tril` writes it
            which, no, yes = eqn.invars
            if self.is_all(no, not flag) and self.is_all(yes, flag):
                return self.seen(which, roles, True)
            if self.is_all(no, flag) and self.is_all(yes, not flag):
                return self.seen(which, roles, False)
        if name == "convert_element_type" and np.dtype(aval_of(eqn.invars[0]).dtype) == bool:
            return self.seen(eqn.invars[0], roles, flag)
        if name in ("ge", "gt", "le", "lt"):
            return [self.compared(eqn, roles, flag)]
        raise LookupError

    def constant(self, var: Var) -> np.ndarray | None:
        """An array that the step closes over; None for what is made or given."""
        origin = self.tree.origin(var)
        home, _ = self.tree.homes.get(origin, (None, None))
        array = None if home is None else home.constants.get(origin)
        if not isinstance(array, np.ndarray | jax.Array) or isinstance(array, jax.core.Tracer):
            return None
        if array.size > MOST_ELEMENTS or not getattr(array, "is_fully_addressable", True):
            return None
        return np.asarray(array)

    def of_constant(self, seen: np.ndarray, roles: Roles) -> list[tuple[int | None, int | None]]:
        """Bounds of ``query - key``, where these are all that an array says."""
        named = [dim[0] for dim in roles if dim]
        if any(len(dim) > 1 for dim in roles) or sorted(named) != sorted((self.rows, self.keys)):
            raise LookupError
        table = np.squeeze(seen) if named[0] == self.rows else np.squeeze(seen).T
        distance = np.arange(table.shape[0])[:, None] - np.arange(table.shape[1])
        there = distance[table]
        if not there.size or not np.array_equal(table, (distance >= there.min()) & (distance <= there.max())):
            raise LookupError
        low, high = int(there.min()), int(there.max())
        return [(None if low == distance.min() else low, None if high == distance.max() else high)]

    def of(self, operand: Atom, roles: Roles) -> Roles:
        return roles if aval_of(operand).shape else ()

    def is_all(self, atom: Atom, flag: bool) -> bool:
        while not isinstance(atom, Literal):
            try:
                eqn = self.maker(atom)
            except LookupError:
                return False
            if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
                return False
            atom = eqn.invars[0]
        return np.ndim(atom.val) == 0 and bool(atom.val) == flag

    def compared(self, eqn: JaxprEqn, roles: Roles, flag: bool) -> tuple[int | None, int | None]:
        left, right = (self.places(one, self.of(one, roles)) for one in eqn.invars)
        rows, keys, offset = left.rows - right.rows, left.keys - right.keys, left.offset - right.offset
        name = eqn.primitive.name if flag else {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge"}[eqn.primitive.name]
        if name in ("le", "lt"):  # as a comparison the other way round
            rows, keys, offset = -rows, -keys, -offset
        least = 1 if name in ("gt", "lt") else 0  # rows * q + keys * k + offset >= least
        if (rows, keys) == (1, -1):
            return least - offset, None
        if (rows, keys) == (-1, 1):
            return None, offset - least
        raise LookupError

    def places(self, atom: Atom, roles: Roles) -> _Places:
        if isinstance(atom, Literal):
            if np.ndim(atom.val) or not abs(atom.val) < _EXACT_BELOW or float(atom.val) != int(atom.val):
                raise LookupError
            return _Places(0, 0, int(atom.val))
        if np.dtype(aval_of(atom).dtype) not in _EXACT:
            raise LookupError
        eqn = self.maker(atom)
        name, params = eqn.primitive.name, eqn.params
        if name == "iota":
            dim = roles[params["dimension"]]
            return _Places(int(dim == (self.rows,)), int(dim == (self.keys,)), 0) if self.is_place(dim) else _none()
        if name in VIEWS:
            operand = eqn.invars[0]
            return self.places(operand, self.under(eqn, roles) if aval_of(operand).shape else ())
        if name in ("convert_element_type", "copy", "stop_gradient"):
            return self.places(eqn.invars[0], roles)
        if name in ("add", "sub"):
            one, other = (self.places(x, self.of(x, roles)) for x in eqn.invars)
            sign = 1 if name == "add" else -1
            return _Places(one.rows + sign * other.rows, one.keys + sign * other.keys, one.offset + sign * other.offset)
        raise LookupError

    def is_place(self, dim: tuple[str, ...]) -> bool:
        return dim in ((self.rows,), (self.keys,))


def _none() -> Any:
    raise LookupError
