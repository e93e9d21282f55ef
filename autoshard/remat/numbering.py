"""Jaxprs in, out the same with one variable per value: what computes the same has the same variable, across loops.

Value numbering (Cocke and Schwartz 1970). A variable of a loop's body stands for the value of turn i. So a slice of
what another loop has stacked is the variable that was stacked there, and a constant of the body is that of outside.
What a `jax.checkpoint` of the user's computes again in a backward pass is thus the forward pass's own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.jaxprs import (
    REMAT,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    called_jaxpr,
    inner_jaxprs,
    is_kernel,
    scan_counts,
)
from autoshard.microbatches.inline_calls import opened

Atom = Var | Literal

LOOPS = frozenset({"scan", "while"})
# Another run would make other numbers, or would not be told apart by the parameters.
_NEVER_SAME = frozenset({"cond", "optimization_barrier", "rng_uniform", *LOOPS})


@dataclass(frozen=True)
class NumberedBody:
    """A jaxpr whose plain calls are opened, in the variables of a `Numbering`."""

    equations: tuple[JaxprEqn, ...]  # no two of them compute the same
    inputs: tuple[Atom, ...]
    results: tuple[Atom, ...]


@dataclass(frozen=True, eq=False)
class NumberedLoop:
    """A scan in the variables of a `Numbering`; those of its body stand for the value of one turn."""

    eqn: JaxprEqn
    consts: int
    carries: int
    body: NumberedBody

    @property
    def length(self) -> int:
        length: int = self.eqn.params["length"]
        return length

    @property
    def stacks(self) -> Sequence[Var]:
        """What it stacks, from the outside; `stacked_inside` has the values of one turn."""
        return self.eqn.outvars[self.carries :]

    @property
    def stacked_inside(self) -> Sequence[Atom]:
        return self.body.results[self.carries :]

    @property
    def sliced(self) -> Sequence[Atom]:
        """The stacks that it reads slice by slice; `slices` has the values of one turn."""
        return self.eqn.invars[self.consts + self.carries :]

    @property
    def slices(self) -> Sequence[Atom]:
        return self.body.inputs[self.consts + self.carries :]

    @property
    def carried(self) -> Sequence[Atom]:
        """What a turn takes over from the one before."""
        return self.body.inputs[self.consts : self.consts + self.carries]


@dataclass(eq=False)
class Numbering:
    """The variables of values, by what computes them."""

    made: dict[tuple, tuple[Var, ...]] = field(default_factory=dict)  # what is computed -> the results
    stacked: dict[tuple[int, Var], Atom] = field(default_factory=dict)  # (turns, stack) -> what lies at a turn's place
    constants: dict[Var, Any] = field(default_factory=dict)  # of the jaxprs
    constant_of: dict[int, Var] = field(default_factory=dict)  # id of a constant -> its variable
    loops: dict[Var, NumberedLoop] = field(default_factory=dict)  # first result of a scan -> the scan

    def body(self, closed: ClosedJaxpr, inputs: Sequence[Atom]) -> NumberedBody:
        """A jaxpr on these inputs.

        Marks of `jax.checkpoint` in a backward pass are opened, unless there are loops inside: what a loop computes
        again is not recognised.
        """
        plain = opened(closed, opens_too=_is_undone)
        names: dict[Var, Atom] = dict(zip(plain.jaxpr.invars, inputs, strict=True))
        for var, const in zip(plain.jaxpr.constvars, plain.consts, strict=True):
            names[var] = self.constant(var, const)
        equations, here = [], set[tuple]()
        for eqn in plain.jaxpr.eqns:
            read = [atom if isinstance(atom, Literal) else names[atom] for atom in eqn.invars]
            what = _computed(eqn, read)
            results = self.made.get(what) if what is not None else None
            if results is None:
                results = tuple(Var(var.aval) for var in eqn.outvars)
            if what is None or what not in here:
                equations.append(eqn.replace(invars=read, outvars=list(results)))
                if eqn.primitive.name == "scan" and results:
                    self.loop(equations[-1])
            if what is not None:
                self.made[what] = results
                here.add(what)
            names.update(zip(eqn.outvars, results, strict=True))
        ends = tuple(atom if isinstance(atom, Literal) else names[atom] for atom in plain.jaxpr.outvars)
        return NumberedBody(tuple(equations), tuple(inputs), ends)

    def loop(self, eqn: JaxprEqn) -> None:
        """Numbers the body of a scan, and remembers what it stacks."""
        (consts, carries), closed, turns = scan_counts(eqn), eqn.params["jaxpr"], eqn.params["length"]
        inputs: list[Atom] = [*eqn.invars[:consts]]
        for i, var in enumerate(closed.jaxpr.invars[consts:]):
            stack = eqn.invars[consts + i] if i >= carries else None
            slice_ = self.stacked.get((turns, stack)) if isinstance(stack, Var) else None
            if slice_ is None:
                slice_ = Var(var.aval)
                if isinstance(stack, Var):
                    self.stacked[turns, stack] = slice_
            inputs.append(slice_)
        loop = NumberedLoop(eqn, consts, carries, self.body(closed, inputs))
        self.loops[eqn.outvars[0]] = loop
        for stack, inside in zip(loop.stacks, loop.stacked_inside, strict=True):
            self.stacked[turns, stack] = inside

    def constant(self, var: Var, const: Any) -> Var:
        known = self.constant_of.get(id(const))
        if known is None:
            known = self.constant_of[id(const)] = var
            self.constants[var] = const
        return known


def variables(atoms: Sequence[Any]) -> list[Var]:
    """Those of the atoms that are variables."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def needed(equations: Sequence[JaxprEqn], wanted: Sequence[Any]) -> list[JaxprEqn]:
    """The equations, in their order, that some wanted value or an effect needs."""
    live, found = set(variables(wanted)), list[JaxprEqn]()
    for eqn in reversed(equations):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            found.append(eqn)
            live.update(variables(eqn.invars))
    return found[::-1]


def _is_undone(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in REMAT or not eqn.params["differentiated"]:
        return False
    called = called_jaxpr(eqn)
    assert called is not None, "a checkpoint calls one"
    return not has_loops(called.jaxpr)


def has_loops(jaxpr: Jaxpr) -> bool:
    """Whether a loop stands somewhere in a jaxpr."""
    return any(
        eqn.primitive.name in LOOPS or any(has_loops(inner.jaxpr) for inner in inner_jaxprs(eqn)) for eqn in jaxpr.eqns
    )


def _computed(eqn: JaxprEqn, read: Sequence[Atom]) -> tuple | None:
    """Equal for equations that compute the same; None for what is not compared."""
    if eqn.effects or eqn.primitive.name in _NEVER_SAME or is_kernel(eqn):
        return None
    types = tuple(
        (_text(aval_of(var)), aval_of(var).weak_type) for var in eqn.outvars if hasattr(var.aval, "weak_type")
    )
    what = eqn.primitive, tuple(map(_identity, read)), tuple(sorted(eqn.params.items())), types
    try:
        hash(what)
    except TypeError:  # a parameter that cannot be compared
        return None
    return what


@functools.lru_cache(maxsize=10_000)
def _text(aval: Any) -> str:
    """An array's type in words, which JAX takes long to write."""
    return str(aval)


def _identity(atom: Atom) -> Any:
    if isinstance(atom, Var):
        return atom
    value = np.asarray(atom.val) if isinstance(atom.val, int | float | complex | bool | np.generic) else None
    return (_text(aval_of(atom)), value.tobytes() if value is not None else id(atom.val))
