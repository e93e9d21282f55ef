"""A jaxpr in, out a tree of its bodies, in which what two loops hand each other is one value.

So JAX writes the derivative of a scan: the forward scan stacks its residuals, and the backward scan reads a slice of
each. The slice in the one body and the value in the other have the same *origin*. Plain calls are opened, and so are
softmaxes, whose custom derivative hides what they compute. Marks of `jax.checkpoint` stay, with a body of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard.jaxprs import REMAT, ClosedJaxpr, DropVar, JaxprEqn, Literal, Var, called_jaxpr, scan_counts
from autoshard.microbatches.inline_calls import opened
from autoshard.recognition.equations import Equations

Atom = Var | Literal


@dataclass(eq=False)
class NestedBody:
    """The equations of the step, of a scan or of a `jax.checkpoint`, in variables that no other body has."""

    inputs: list[Var]
    equations: Equations
    results: list[Atom]
    constants: dict[Var, Any]
    like: ClosedJaxpr  # what it was made of
    parent: NestedBody | None = None
    call: JaxprEqn | None = None  # the equation of the parent that runs it
    inner: dict[int, NestedBody] = field(default_factory=dict)  # id of an equation -> what it runs

    def all(self) -> Iterator[NestedBody]:
        """This body and all below it."""
        yield self
        for body in self.inner.values():
            yield from body.all()


@dataclass(eq=False)
class BodyTree:
    """All bodies of a step, and the origins of their values."""

    root: NestedBody
    origins: dict[Var, Var]
    homes: dict[Var, tuple[NestedBody, JaxprEqn | None]]  # variable -> the body it belongs to, and what makes it
    numbers: dict[NestedBody, int] = field(init=False)  # how manyth of all bodies each is
    names: dict[Var, list[Var]] = field(init=False)  # origin -> the other variables that are the same value

    def __post_init__(self) -> None:
        self.numbers = {body: number for number, body in enumerate(self.root.all())}
        self.names = {}
        for var, origin in self.origins.items():
            self.names.setdefault(origin, []).append(var)

    @classmethod
    def of(
        cls,
        closed: ClosedJaxpr,
        body_of: Callable[[JaxprEqn], ClosedJaxpr | None] = called_jaxpr,
        *,
        opens_too: Callable[[JaxprEqn], bool] | None = None,
    ) -> BodyTree:
        """
        Args:
            body_of: what a call that is opened runs; None for what is no call.
            opens_too: calls that are opened beside plain ones; softmaxes by default.
        """
        made = _BodyWalk(body_of, opens_too or is_softmax)
        return cls(made.body(closed, None, None, {}), made.origins, made.homes)

    def origin(self, var: Any) -> Var:
        """What a variable is the same value as, in the body where that is made."""
        found: Var = self.origins.get(var, var)
        return found

    def hand(self, var: Var, origin: Var, body: NestedBody) -> None:
        """Says that a new variable of a body is the same value as one of another body."""
        self.origins[var], self.homes[var] = origin, (body, None)
        self.names.setdefault(origin, []).append(var)

    def names_in(self, origin: Var, body: NestedBody) -> list[Var]:
        """The variables that a value has in a body; one that was made there and is not any more is none."""
        here = [var for var in (origin, *self.names.get(origin, ())) if self._home(var) is body]
        return [var for var in here if self.homes[var][1] is None or var in body.equations.makers]

    def readers(self, origin: Var) -> list[tuple[NestedBody, JaxprEqn]]:
        """What reads a value, in all bodies, in their order."""
        here: dict[NestedBody, list[Var]] = {}
        for var in (origin, *self.names.get(origin, ())):
            if (body := self._home(var)) is not None:
                here.setdefault(body, []).append(var)
        return [
            (body, eqn)
            for body in sorted(here, key=self.numbers.__getitem__)
            for eqn in body.equations.readers(*here[body])
        ]

    def _home(self, var: Var) -> NestedBody | None:
        return self.homes[var][0] if var in self.homes else None


class _BodyWalk:
    """One walk over a jaxpr."""

    def __init__(
        self, body_of: Callable[[JaxprEqn], ClosedJaxpr | None], opens_too: Callable[[JaxprEqn], bool]
    ) -> None:
        self.body_of, self.opens_too = body_of, opens_too
        self.origins: dict[Var, Var] = {}
        self.homes: dict[Var, tuple[NestedBody, JaxprEqn | None]] = {}
        self.stacked: dict[Var, tuple[int, Var]] = {}  # stack -> turns of the scan that made it, the value in a turn
        self.slices: dict[tuple[int, Var], Var] = {}

    def body(
        self, closed: ClosedJaxpr, parent: NestedBody | None, call: JaxprEqn | None, same: dict[int, Var]
    ) -> NestedBody:
        """
        Args:
            same: input -> the value that it is, where it is another's.
        """
        plain = opened(closed, opens_too=self.opens_too, body_of=self.body_of)
        inputs = [Var(var.aval) for var in plain.jaxpr.invars]
        constants = {Var(var.aval): const for var, const in zip(plain.jaxpr.constvars, plain.consts, strict=True)}
        names: dict[Var, Any] = dict(zip(plain.jaxpr.invars, inputs, strict=True))
        names |= zip(plain.jaxpr.constvars, constants, strict=True)
        made = NestedBody(inputs, Equations(), [], constants, closed, parent, call)
        self.origins |= {inputs[i]: origin for i, origin in same.items()}
        self.homes |= dict.fromkeys((*inputs, *constants), (made, None))
        for eqn in plain.jaxpr.eqns:
            read = [atom if isinstance(atom, Literal) else names[atom] for atom in eqn.invars]
            written = [var if isinstance(var, DropVar) else Var(var.aval) for var in eqn.outvars]
            names.update(zip(eqn.outvars, written, strict=True))
            here = eqn.replace(invars=read, outvars=written)
            made.equations.append(here)
            self.homes |= {var: (made, here) for var in written if not isinstance(var, DropVar)}
            if here.primitive.name == "scan":
                self.scan(here, made)
            elif here.primitive.name in REMAT and (called := called_jaxpr(here)) is not None:
                origins = {i: self.origins.get(x, x) for i, x in enumerate(read) if isinstance(x, Var)}
                made.inner[id(here)] = self.body(called, made, here, origins)
        made.results = [atom if isinstance(atom, Literal) else names[atom] for atom in plain.jaxpr.outvars]
        return made

    def scan(self, eqn: JaxprEqn, outside: NestedBody) -> None:
        (consts, carries), turns, closed = scan_counts(eqn), eqn.params["length"], eqn.params["jaxpr"]
        origins, fresh = {}, dict[int, tuple[int, Var]]()
        for i, atom in enumerate(eqn.invars):
            if not isinstance(atom, Var) or consts <= i < consts + carries:
                continue
            outer = self.origins.get(atom, atom)
            if i < consts:
                origins[i] = outer
            elif outer in self.stacked and self.stacked[outer][0] == turns:
                origins[i] = self.stacked[outer][1]
            elif (turns, outer) in self.slices:
                origins[i] = self.slices[turns, outer]
            else:
                fresh[i] = turns, outer
        body = outside.inner[id(eqn)] = self.body(closed, outside, eqn, origins)
        self.slices |= {key: body.inputs[i] for i, key in fresh.items()}
        for stack, inside in zip(eqn.outvars[carries:], body.results[carries:], strict=True):
            if isinstance(inside, Var) and not isinstance(stack, DropVar):
                self.stacked[stack] = turns, self.origins.get(inside, inside)


def is_softmax(eqn: JaxprEqn) -> bool:
    """Whether a call with a custom derivative reduces exponentials."""
    if eqn.primitive.name != "custom_jvp_call" or (called := called_jaxpr(eqn)) is None:
        return False
    names = {one.primitive.name for one in opened(called).jaxpr.eqns}
    return {"exp", "reduce_max", "reduce_sum"} <= names


def values_needed(tree: BodyTree) -> set[Var]:
    """The values that some result or effect of the step needs."""
    live = set[Var]()

    def visit(body: NestedBody, results: Sequence[Atom]) -> None:
        live.update(atom for atom in results if isinstance(atom, Var))
        for eqn in reversed(body.equations):
            if not eqn.effects and live.isdisjoint(eqn.outvars):
                continue
            inside = body.inner.get(id(eqn))
            if inside is None:
                live.update(atom for atom in eqn.invars if isinstance(atom, Var))
                continue
            while True:  # what a turn hands on is read in the next
                before = len(live)
                visit(
                    inside,
                    [
                        one
                        for one, var in zip(inside.results, eqn.outvars, strict=True)
                        if var in live or _carries(eqn, var, inside, live)
                    ],
                )
                live.update(
                    atom
                    for atom, var in zip(eqn.invars, inside.inputs, strict=True)
                    if isinstance(atom, Var) and var in live
                )
                if len(live) == before:
                    break

    visit(tree.root, tree.root.results)
    return live


def _carries(eqn: JaxprEqn, result: Var, body: NestedBody, live: set[Var]) -> bool:
    """Whether a result is a carry that a turn reads."""
    if eqn.primitive.name != "scan":
        return False
    consts, carries = scan_counts(eqn)
    i = eqn.outvars.index(result)
    return i < carries and body.inputs[consts + i] in live
