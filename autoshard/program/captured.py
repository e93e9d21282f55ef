"""A jaxpr in, the same jaxpr with the large arrays that it closes over as its last arguments out.

JAX keeps an array that a function closes over as a constant of some jaxpr, be it that of a call deep inside, or as a
literal that holds an array. XLA would copy such a constant whole to every device. As an argument it can be split.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard.jaxprs import (
    HIDDEN_BODIES,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    array_bytes,
    called_jaxpr,
    capturing_call,
    equations_of,
    inner_jaxprs,
    is_array,
)
from autoshard.program.user_code import Source, source_of

# Arrays of at least so many bytes become arguments. An argument costs a call on 8 CPU devices about 1 us, and
# a thousand smaller arrays fill at most 64 MiB of a device.
LEAST_ARGUMENT_BYTES = 64 * 2**10


@dataclass(frozen=True)
class CapturedArray:
    """An array that a function closes over, and that is treated as an argument."""

    array: Any  # a jax.Array or NumPy array
    line: Source | None  # the innermost line of the user that reads the array first
    constant: int | None = None  # its place among the constants of the step's own jaxpr; None: it is one of a body too

    @property
    def type(self) -> str:
        """
        >>> CapturedArray(np.zeros((2, 3), np.float32), None).type
        'float32[2, 3]'
        """
        return f"{self.array.dtype}{list(self.array.shape)}"


def with_captured(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, tuple[CapturedArray, ...]]:
    """The jaxpr with its large closed-over arrays behind its arguments, and these arrays.

    >>> table = np.zeros((256, 256), np.float32)
    >>> closed = jax.make_jaxpr(lambda x: x @ table)(np.zeros((8, 256), np.float32))
    >>> taking, captured = with_captured(closed)
    >>> [var.aval.shape for var in taking.jaxpr.invars], [one.type for one in captured]
    ([(8, 256), (256, 256)], ['float32[256, 256]'])
    """
    search = _CaptureWalk()
    found = search.closed(closed)
    count = len(found.keys)
    if not count:
        return closed, ()
    jaxpr = found.closed.jaxpr
    invars = [*jaxpr.invars[count:], *jaxpr.invars[:count]]
    jaxpr = jaxpr.replace(invars=invars, debug_info=jaxpr.debug_info)
    places = _places(closed, found.closed)
    captured = tuple(CapturedArray(search.arrays[key], search.lines.get(key), places.get(key)) for key in found.keys)
    return ClosedJaxpr(jaxpr, found.closed.consts), captured


def _places(closed: ClosedJaxpr, taking: ClosedJaxpr) -> dict[Hashable, int]:
    """The constants of a jaxpr: identity -> place. None are known where a body in it has got more operands."""
    equations = zip(equations_of(closed.jaxpr), equations_of(taking.jaxpr), strict=True)
    if any(len(one.invars) != len(other.invars) for one, other in equations):
        return {}
    keys = list(map(identity_of, closed.consts))
    return {key: place for place, key in enumerate(keys) if keys.count(key) == 1}


def identity_of(array: Any) -> Hashable:
    """Equal for the same array, also where JAX has wrapped a NumPy array anew."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0], array.shape, array.strides, str(array.dtype)
    return id(array)


def constants_of(closed: ClosedJaxpr) -> Iterator[Any]:
    """The arrays that a jaxpr and those inside it hold as constants, or as literals."""
    yield from closed.consts
    for eqn in equations_of(closed.jaxpr):
        yield from (atom.val for atom in eqn.invars if isinstance(atom, Literal) and isinstance(atom.val, jax.Array))
        for inner in inner_jaxprs(eqn):
            yield from constants_of(inner)


@dataclass(frozen=True)
class _CapturingJaxpr:
    """A jaxpr whose first inputs are arrays that it closed over."""

    closed: ClosedJaxpr
    keys: tuple[Hashable, ...]  # of these arrays, by `identity_of`


class _CaptureWalk:
    """One walk over a jaxpr and those that its equations open into."""

    def __init__(self) -> None:
        self.arrays: dict[Hashable, Any] = {}
        self.lines: dict[Hashable, Source] = {}
        # Addresses of a jaxpr and its constants -> these, kept so that no other gets its address, and what was found.
        self.known: dict[tuple[int, ...], tuple[ClosedJaxpr, _CapturingJaxpr]] = {}

    def closed(self, closed: ClosedJaxpr) -> _CapturingJaxpr:
        address = id(closed.jaxpr), *map(id, closed.consts)
        if address not in self.known:
            self.known[address] = closed, self.searched(closed)
        return self.known[address][1]

    def searched(self, closed: ClosedJaxpr) -> _CapturingJaxpr:
        jaxpr, taken = closed.jaxpr, _CapturedInputs(self)
        kept = [
            (var, const)
            for var, const in zip(jaxpr.constvars, closed.consts, strict=True)
            if not taken.takes_constant(var, const)
        ]
        equations = equations_of(jaxpr)
        rewritten = [self.equation(eqn, taken) for eqn in equations]
        outvars = [taken.read(atom, None) for atom in jaxpr.outvars]
        if not taken.vars:
            return _CapturingJaxpr(closed, ())
        jaxpr = jaxpr.replace(
            constvars=[var for var, _ in kept],
            invars=[*taken.vars.values(), *jaxpr.invars],
            outvars=outvars,
            eqns=rewritten,
            debug_info=jaxpr.debug_info,
        )
        return _CapturingJaxpr(ClosedJaxpr(jaxpr, [const for _, const in kept]), tuple(taken.vars))

    def equation(self, eqn: JaxprEqn, taken: _CapturedInputs) -> JaxprEqn:
        line = source_of(eqn)
        inputs = [taken.read(atom, line) for atom in eqn.invars]
        open_loop = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(eqn.primitive.name, self.call)
        params, inputs = open_loop(eqn, inputs, lambda keys: [taken.var(key) for key in keys])
        is_same = params is eqn.params and all(new is old for new, old in zip(inputs, eqn.invars, strict=True))
        return eqn if is_same else eqn.replace(invars=inputs, params=dict(params))

    def call(self, eqn: JaxprEqn, inputs: list, vars_of: VarsOf) -> tuple[Mapping[str, Any], list]:
        called = None if eqn.primitive.name in HIDDEN_BODIES else called_jaxpr(eqn)
        found = None if called is None else self.closed(called)
        if found is None or not found.keys:
            return eqn.params, inputs
        return capturing_call(eqn, found.closed, len(found.keys)), [*vars_of(found.keys), *inputs]

    def scan(self, eqn: JaxprEqn, inputs: list, vars_of: VarsOf) -> tuple[Mapping[str, Any], list]:
        found = self.closed(eqn.params["jaxpr"])
        if not found.keys:
            return eqn.params, inputs
        return {**eqn.params, "jaxpr": found.closed}, [*vars_of(found.keys), *inputs]

    def while_loop(self, eqn: JaxprEqn, inputs: list, vars_of: VarsOf) -> tuple[Mapping[str, Any], list]:
        params = eqn.params
        test, body = self.closed(params["cond_jaxpr"]), self.closed(params["body_jaxpr"])
        if not test.keys and not body.keys:
            return params, inputs
        tests = params["cond_nconsts"]
        counts = {
            "cond_nconsts": tests + len(test.keys),
            "body_nconsts": params["body_nconsts"] + len(body.keys),
        }
        params = {**params, **counts, "cond_jaxpr": test.closed, "body_jaxpr": body.closed}
        return params, [*vars_of(test.keys), *inputs[:tests], *vars_of(body.keys), *inputs[tests:]]

    def cond(self, eqn: JaxprEqn, inputs: list, vars_of: VarsOf) -> tuple[Mapping[str, Any], list]:
        branches = list(map(self.closed, eqn.params["branches"]))
        keys = tuple(dict.fromkeys(key for found in branches for key in found.keys))
        if not keys:
            return eqn.params, inputs
        of_all = vars_of(keys)
        taking = tuple(_taking(found, keys, of_all) for found in branches)
        return {**eqn.params, "branches": taking}, [inputs[0], *of_all, *inputs[1:]]


VarsOf = Callable[[Sequence[Hashable]], list[Var]]


class _CapturedInputs:
    """The inputs that one jaxpr gets for arrays that it closed over."""

    def __init__(self, search: _CaptureWalk) -> None:
        self.search = search
        self.vars: dict[Hashable, Var] = {}
        self.keys: dict[Var, Hashable] = {}  # of constants of the jaxpr that are such arrays

    def takes_constant(self, var: Var, const: Any) -> bool:
        """Whether a constant becomes an input."""
        if not _is_large(const, var.aval):
            return False
        key = identity_of(const)
        self.search.arrays.setdefault(key, const)
        self.vars.setdefault(key, var)
        self.keys[var] = key
        return True

    def var(self, key: Hashable) -> Var:
        if key not in self.vars:
            aval: Any = jax.typeof(self.search.arrays[key])
            self.vars[key] = Var(aval)
        return self.vars[key]

    def read(self, atom: Any, line: Source | None) -> Any:
        """An operand, which is an input if it is such an array."""
        if isinstance(atom, Literal):
            if not _is_large(atom.val, atom.aval):
                return atom
            key = identity_of(atom.val)
            self.search.arrays.setdefault(key, atom.val)
        elif atom in self.keys:
            key = self.keys[atom]
        else:
            return atom
        if line is not None:
            self.search.lines.setdefault(key, line)
        return self.var(key)


def _taking(found: _CapturingJaxpr, keys: Sequence[Hashable], like: Sequence[Var]) -> ClosedJaxpr:
    """The jaxpr of a branch with an input for each of these arrays."""
    jaxpr, count = found.closed.jaxpr, len(found.keys)
    own = dict(zip(found.keys, jaxpr.invars, strict=False))
    first = [own[key] if key in own else Var(var.aval) for key, var in zip(keys, like, strict=True)]
    jaxpr = jaxpr.replace(invars=[*first, *jaxpr.invars[count:]], debug_info=jaxpr.debug_info)
    return ClosedJaxpr(jaxpr, found.closed.consts)


def _is_large(const: Any, aval: Any) -> bool:
    if isinstance(const, jax.core.Tracer) or not isinstance(const, jax.Array | np.ndarray) or not is_array(aval):
        return False
    return array_bytes(aval) >= LEAST_ARGUMENT_BYTES
