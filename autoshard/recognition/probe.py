"""What follows from a product of queries and keys, evaluated on a small array of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from autoshard.jaxprs import JaxprEqn, Literal, Var, aval_of
from autoshard.recognition.bodies import Atom, BodyTree
from autoshard.recognition.small_arrays import (
    ELEMENTWISE,
    EVALUATED,
    Roles,
    SmallArray,
    UnknownEquation,
    common,
    evaluated,
    number,
    shape_of,
)

FOLLOWED = EVALUATED - {"dot_general"}


@dataclass(eq=False)
class Probe:
    """Small random arrays in the place of some values, and what the program makes of them.

    A *leaf* is an array that does not follow from them and is no number: a mask or a bias. It is found when something
    that does follow from them meets it, which tells the roles of its dims.
    """

    tree: BodyTree
    true: dict[str, int]  # role -> elements in the program
    seed: int = 0
    flags: Mapping[Var, bool | None] = field(default_factory=dict)  # mask -> what it says everywhere; else at random
    known: dict[Var, SmallArray] = field(default_factory=dict)  # by origin
    leaves: dict[Var, Roles] = field(default_factory=dict)
    takes_leaves: bool = True
    stops_at_numbers: bool = False  # whether a leaf is the array of floating point that is met, whatever it is made of
    following: dict[Var, bool] = field(default_factory=dict)  # whether a value follows from what was put in
    uniform: dict[Var, bool] = field(default_factory=dict)  # whether a value is one number everywhere

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def put(self, var: Var, roles: Roles, array: np.ndarray | None = None) -> None:
        """Gives a value to what others follow from; at random if none is said."""
        origin = self.tree.origin(var)
        found = self.random.normal(size=shape_of(roles)) if array is None else array
        self.known[origin] = SmallArray(found, roles)
        self.following[origin] = True

    def forget(self) -> None:
        """Lets more follow, after more has been put in."""
        self.following = dict.fromkeys(self.known, True)

    def value(self, atom: Atom) -> SmallArray:
        """
        Raises:
            UnknownEquation: it cannot be evaluated.
        """
        if isinstance(atom, Literal):
            return number(atom.val)
        waiting = [self.tree.origin(atom)]
        while waiting:
            var = waiting[-1]
            eqn = self._maker(var)
            if var in self.known:
                waiting.pop()
                continue
            if eqn is None or not self._is_evaluated(var):
                raise UnknownEquation("a value that does not follow")
            before = [origin for origin in self._operands(eqn) if self._is_evaluated(origin)]
            missing = [origin for origin in before if origin not in self.known]
            if not missing:
                self.known[var] = self._evaluated(eqn)
            waiting += missing
        return self.known[self.tree.origin(atom)]

    def _operands(self, eqn: JaxprEqn | None) -> list[Var]:
        """The origins of what an equation reads, but for literals."""
        return [] if eqn is None else [self.tree.origin(one) for one in eqn.invars if isinstance(one, Var)]

    def _is_evaluated(self, atom: Atom) -> bool:
        return self.follows(atom) or self.is_uniform(atom)

    def _maker(self, var: Var) -> JaxprEqn | None:
        """The equation that makes a value, if it can be evaluated."""
        _, eqn = self.tree.homes.get(var, (None, None))
        if eqn is None or eqn.primitive.name not in FOLLOWED or len(eqn.outvars) != 1:
            return None
        return eqn

    def follows(self, atom: Atom) -> bool:
        """Whether a value is made of what was put in, by equations that can be evaluated."""
        if isinstance(atom, Literal):
            return False
        for var, eqn in self._unknown(atom, self.following):
            self.following[var] = any(self.following[one] for one in self._operands(eqn))
        return self.following[self.tree.origin(atom)]

    def is_uniform(self, atom: Atom) -> bool:
        """Whether all elements of a value are one number that the program says."""
        if isinstance(atom, Literal):
            return np.ndim(atom.val) == 0
        for var, eqn in self._unknown(atom, self.uniform):
            self.uniform[var] = eqn is not None and all(
                np.ndim(one.val) == 0 if isinstance(one, Literal) else self.uniform[self.tree.origin(one)]
                for one in eqn.invars
            )
        return self.uniform[self.tree.origin(atom)]

    def _unknown(self, atom: Var, known: Mapping[Var, bool]) -> Iterator[tuple[Var, JaxprEqn | None]]:
        """A value and all that it is made of, each behind its operands, as far as nothing is known yet."""
        waiting = [self.tree.origin(atom)]
        while waiting:
            var = waiting[-1]
            eqn = self._maker(var)
            missing = [] if var in known else [one for one in self._operands(eqn) if one not in known]
            waiting += missing
            if not missing:
                waiting.pop()
                if var not in known:
                    yield var, eqn

    def _evaluated(self, eqn: JaxprEqn) -> SmallArray:
        found: list[SmallArray | None] = [self.value(one) if self._is_evaluated(one) else None for one in eqn.invars]
        if None in found:
            if eqn.primitive.name not in ELEMENTWISE:
                raise UnknownEquation(f"{eqn.primitive.name} of a value that does not follow")
            roles = common([one for one in found if one is not None])
            found = [
                self._leaf(atom, roles) if one is None else one for one, atom in zip(found, eqn.invars, strict=True)
            ]
        return evaluated(eqn, [one for one in found if one is not None], self.true)

    def _leaf(self, atom: Atom, roles: Roles) -> SmallArray:
        """What meets a value with these roles: made of one leaf and numbers."""
        assert isinstance(atom, Var), "numbers are uniform"
        met = var = self.tree.origin(atom)
        steps = list[tuple[Var, JaxprEqn]]()  # back to the leaf
        while var not in self.known:
            aval = aval_of(var)
            if not aval.shape or len(roles) != len(aval.shape):
                raise UnknownEquation("a scalar that only the running program knows, or an array met by nothing known")
            roles = tuple(dim if size > 1 else () for dim, size in zip(roles, aval.shape, strict=True))
            eqn, under = self._maker(var), None
            if eqn is not None and not (self.stops_at_numbers and np.dtype(aval.dtype) != bool):
                under = self._under(eqn, roles)
            if eqn is None or under is None:
                self._new_leaf(var, roles)
                break
            steps.append((var, eqn))
            (var,) = (one for one in self._operands(eqn) if not self.is_uniform(one))
            roles = under
        for made, eqn in reversed(steps):
            operands = [self.value(one) if self.is_uniform(one) else self.known[var] for one in eqn.invars]
            self.known[made], var = evaluated(eqn, operands, self.true), made
        return self.known[met]

    def _under(self, eqn: JaxprEqn, roles: Roles) -> Roles | None:
        """The roles of the one operand of a leaf's last equation that is no number; None if there is no such."""
        operands = [one for one in eqn.invars if not self.is_uniform(one)]
        if len(operands) != 1:
            return None
        made, read = (np.dtype(aval_of(one).dtype) == bool for one in (eqn.outvars[0], operands[0]))
        if made and not read:  # random numbers hardly ever meet what they are compared with
            return None
        shape, out = aval_of(operands[0]).shape, aval_of(eqn.outvars[0]).shape
        if eqn.primitive.name in ELEMENTWISE and shape == out:
            return roles
        if eqn.primitive.name == "broadcast_in_dim":
            dims = eqn.params["broadcast_dimensions"]
            return tuple(roles[int(dim)] if size > 1 else () for dim, size in zip(dims, shape, strict=True))
        if eqn.primitive.name == "reshape" and [n for n in shape if n > 1] == [n for n in out if n > 1]:
            long = iter([dim for dim, size in zip(roles, out, strict=True) if size > 1])
            return tuple(next(long) if size > 1 else () for size in shape)
        return None

    def _new_leaf(self, var: Var, roles: Roles) -> None:
        kind = np.dtype(aval_of(var).dtype)
        if not self.takes_leaves or any(
            not dim and size > 1 for dim, size in zip(roles, aval_of(var).shape, strict=True)
        ):
            raise UnknownEquation("an array that the forward pass does not read")
        if kind.kind == "b":
            flag = self.flags.get(var)
            shape = shape_of(roles)
            array = self.random.random(shape) < 0.6 if flag is None else np.full(shape, flag)
        elif kind.kind == "f" or kind.name.startswith(("bfloat", "float")):
            array = self.random.normal(size=shape_of(roles))
        else:
            raise UnknownEquation(f"an array of {kind.name}")
        self.leaves[var] = roles
        self.known[var] = SmallArray(array, roles)
