"""A scan in, out its trips as an operation that devices may split, if no trip needs what another one computes.

A carry that is only added to is a sum, and each device has a partial one. A carry that a number is added to in every
trip is a counter, and follows from the trip. A carry that stays is a constant. Any other makes a trip wait for the one
before it.
"""

from __future__ import annotations

import enum
import hashlib
import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.jaxprs import (
    CONSTRAINTS,
    HIDDEN_BODIES,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    array_bytes,
    as_function,
    aval_of,
    call_of,
    inner_jaxprs,
    is_array,
    on_host,
    scan_counts,
)
from autoshard.microbatches.inline_calls import opened
from autoshard.operations.operation import Operation
from autoshard.operations.primitive import OPERATION
from autoshard.propagation.rule import Rule, Shape

TRIP = "trip"  # the factor of an operation's rule that devices split
# What says how arrays lie, or is for all devices together.
_STAYS = CONSTRAINTS | HIDDEN_BODIES | {OPERATION, "custom_partitioning", "device_put", "shard_map"}
_ADDS = {"add", "add_any"}

# digest -> the operation, while some step has it: equal loops are priced once
_KNOWN: weakref.WeakValueDictionary[str, Operation] = weakref.WeakValueDictionary()


class CarryKind(enum.Enum):
    """What a loop whose trips do not need each other does with a carry."""

    SUM = "sum"
    COUNTER = "counter"
    CONSTANT = "constant"


@dataclass(frozen=True)
class Carry:
    """One carry of a loop whose trips do not need each other."""

    kind: CarryKind
    step: int = 0  # what a trip adds to a counter


@dataclass(frozen=True, eq=False)
class IndependentTrips:
    """A scan whose trips do not need each other."""

    eqn: JaxprEqn
    body: ClosedJaxpr  # plain calls opened
    constants: int  # operands that all trips read
    carries: tuple[Carry, ...]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> IndependentTrips | None:
        """The scan that an equation is; None if it is none, or a trip needs another one."""
        if eqn.primitive.name != "scan" or not _may_move(eqn):
            return None
        body = opened(eqn.params["jaxpr"])
        if any(math.prod(jnp.shape(const)) > 1 for const in body.consts):
            return None
        constants, count = scan_counts(eqn)
        uses = _Uses.of(body.jaxpr)
        carries = [uses.carry(body.jaxpr.invars[constants + i], body.jaxpr.outvars[i]) for i in range(count)]
        known = tuple(one for one in carries if one is not None)
        found = cls(eqn, body, constants, known)
        return found if len(known) == count and found.length > 1 and found.rows else None

    @property
    def length(self) -> int:
        """How many trips there are."""
        length: int = self.eqn.params["length"]
        return length

    @property
    def rows(self) -> int:
        """How many operands of the operation have a row per trip."""
        stacked = len(self.eqn.invars) - self.constants - len(self.carries)
        return stacked + len(self._of_kind(CarryKind.COUNTER))

    @property
    def whole_bytes(self) -> int:
        """Bytes of each device at least, if devices share out the trips: what all trips read, and sums."""
        read = {id(atom): aval_of(atom) for atom in self.eqn.invars[: self.constants]}
        carried = (self.body.in_avals[self.constants + i] for i in range(len(self.carries)))
        return sum(map(array_bytes, (*read.values(), *carried)))

    def call(self) -> JaxprEqn:
        """One equation that computes what the scan does, by an operation that devices may split."""
        inputs = [aval_of(atom) for atom in self.eqn.invars]
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in inputs]
        return call_of(self.eqn, jax.make_jaxpr(self._computed)(*types), self.eqn.invars, self.eqn.outvars)

    def _of_kind(self, kind: CarryKind) -> list[int]:
        return [i for i, one in enumerate(self.carries) if one.kind is kind]

    def _computed(self, *operands: Any) -> list[Any]:
        first = self.constants + len(self.carries)
        constants, initial, stacked = operands[: self.constants], operands[self.constants : first], operands[first:]
        trips = jnp.arange(self.length)[:: -1 if self.eqn.params["reverse"] else 1]
        counted = [
            initial[i] + jnp.asarray(self.carries[i].step * trips, initial[i].dtype)
            for i in self._of_kind(CarryKind.COUNTER)
        ]
        kept = [initial[i] for i in self._of_kind(CarryKind.CONSTANT)]
        made = iter(self.operation(*constants, *kept, *counted, *stacked))
        finals = []
        for start, carry in zip(initial, self.carries, strict=True):
            if carry.kind is CarryKind.SUM:
                finals.append(start + next(made))
            else:
                finals.append(start + jnp.asarray(carry.step * self.length, start.dtype) if carry.step else start)
        return [*finals, *made]

    @property
    def operation(self) -> Operation:
        """From what all trips read, and a row of the rest per trip, to sums over the trips, and a row per trip."""
        if (found := _KNOWN.get(self.digest)) is None:
            found = Operation("trips", self._trips, self._rule, sums_shared=True, identity=self.digest)
            _KNOWN[self.digest] = found
        return found

    @cached_property
    def digest(self) -> str:
        """Equal for loops that compute the same."""
        ways = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        described = str(self.body.jaxpr), [str(const) for const in self.body.consts], self.constants, self.carries, ways
        return hashlib.sha256(repr(described).encode()).hexdigest()[:16]

    def _trips(self, *operands: Any) -> tuple[Any, ...]:
        """As many trips as there are rows."""
        shared = len(operands) - self.rows
        constants, kept, rows = operands[: self.constants], operands[self.constants : shared], operands[shared:]
        sums, count = self._of_kind(CarryKind.SUM), len(self.carries)
        avals = [self.body.in_avals[self.constants + i] for i in sums]

        def trip(totals: list[Any], own: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            values, stays, drawn = iter(totals), iter(kept), iter(own)
            given = {CarryKind.SUM: values, CarryKind.CONSTANT: stays, CarryKind.COUNTER: drawn}
            carried = [next(given[carry.kind]) for carry in self.carries]
            made = as_function(self.body)(*constants, *carried, *drawn)
            return [made[i] for i in sums], made[count:]

        zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
        reverse, unroll = self.eqn.params["reverse"], self.eqn.params["unroll"]
        totals, stacked = jax.lax.scan(trip, zeros, list(rows), reverse=reverse, unroll=unroll)
        return (*totals, *stacked)

    def _rule(self, operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
        """Trips may be split; what else there is stays whole."""
        sums = len(self._of_kind(CarryKind.SUM))
        shared = len(operands) - self.rows
        has_trips = [i >= shared for i in range(len(operands))] + [i >= sums for i in range(len(results))]
        sizes, dims = {TRIP: operands[-1][0]}, []
        for has, shape in zip(has_trips, (*operands, *results), strict=True):
            names = [TRIP] * has
            for size in shape[has:]:
                names.append(f"whole{len(sizes)}")
                sizes[names[-1]] = size
            dims.append(tuple((name,) for name in names))
        count = len(operands)
        whole = frozenset(sizes) - {TRIP}
        return Rule(tuple(dims[:count]), tuple(dims[count:]), sizes, frozenset(), whole, frozenset())


def _may_move(eqn: JaxprEqn) -> bool:
    """Whether an equation may run on one device of several, as may what is inside it."""
    arrays = (aval_of(atom) for atom in (*eqn.invars, *eqn.outvars))
    return (
        not eqn.effects
        and eqn.primitive.name not in _STAYS
        and all(is_array(aval) and not on_host(aval) for aval in arrays)
        and all(_may_move(one) for closed in inner_jaxprs(eqn) for one in closed.jaxpr.eqns)
    )


@dataclass(frozen=True, eq=False)
class _Uses:
    """What makes and what reads the variables of a body."""

    makers: Mapping[Var, JaxprEqn]
    readers: Mapping[Var, Sequence[JaxprEqn]]  # an equation as often as it reads the variable
    ends: Counter[Var]  # how many results a variable is

    @classmethod
    def of(cls, body: Jaxpr) -> _Uses:
        makers, readers = dict[Var, JaxprEqn](), dict[Var, list[JaxprEqn]]()
        for eqn in body.eqns:
            makers.update((var, eqn) for var in eqn.outvars)
            for atom in eqn.invars:
                if isinstance(atom, Var):
                    readers.setdefault(atom, []).append(eqn)
        return cls(makers, readers, Counter(atom for atom in body.outvars if isinstance(atom, Var)))

    def carry(self, before: Var, after: Var | Literal) -> Carry | None:
        """What becomes of a carry; None if a trip may need what the one before made of it."""
        if after is before:
            return Carry(CarryKind.CONSTANT)
        if isinstance(after, Literal):
            return None
        if (step := self.step(before, after)) is not None:
            return Carry(CarryKind.COUNTER, step)
        value = before
        while value is not after:
            reading = self.readers.get(value, ())
            if len(reading) != 1 or self.ends[value] or reading[0].primitive.name not in _ADDS:
                return None
            (value,) = reading[0].outvars
            if aval_of(value).shape != aval_of(before).shape or aval_of(value).dtype != aval_of(before).dtype:
                return None
        return Carry(CarryKind.SUM) if self.ends[after] == 1 and after not in self.readers else None

    def step(self, before: Var, after: Var) -> int | None:
        """What a trip adds to a counter; None if the carry is none."""
        maker = self.makers.get(after)
        if maker is None or aval_of(before).shape != () or not jnp.issubdtype(aval_of(before).dtype, jnp.integer):
            return None
        match maker.primitive.name, maker.invars:
            case "add" | "add_any", [first, Literal() as number] if first is before:
                return int(number.val)
            case "add" | "add_any", [Literal() as number, second] if second is before:
                return int(number.val)
            case "sub", [first, Literal() as number] if first is before:
                return -int(number.val)
        return None
