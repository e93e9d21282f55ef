"""One microbatch: the equations of the smaller trace, run with the numbers of the whole step.

What is made of nothing, as random bits are, is made for the whole batch; each microbatch takes its rows of that. So
dropout drops what it drops in the whole step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.jaxprs import (
    REMAT,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    at_line_of,
    aval_of,
    called_jaxpr,
    called_operands,
    capturing_call,
    equations_of,
    evaluated,
    implementation_of,
    scan_counts,
)
from autoshard.microbatches.proof import Path, Proof
from autoshard.microbatches.relations import BatchRows
from autoshard.microbatches.row_numbers import renumbered
from autoshard.microbatches.rows import Microbatches, MicrobatchPlace, taken


class Microbatch:
    """The equations of one microbatch, run with the numbers of the whole step's literals."""

    def __init__(self, found: Proof, split: Microbatches, place: MicrobatchPlace):
        self.proof, self.split, self.place = found, split, place

    def run(
        self, equations: Sequence[tuple[JaxprEqn, JaxprEqn, Path]], env: dict[Var, Any], wanted: Sequence[Any]
    ) -> list[Any]:
        for is_touched, several in itertools.groupby(equations, lambda one: self.is_touched(one[2])):
            if is_touched:
                for eqn, small, path in several:
                    operands = [_value(env, other, atom) for atom, other in zip(eqn.invars, small.invars, strict=True)]
                    env.update(zip(small.outvars, self.equation(eqn, small, operands, path), strict=True))
            else:
                alike = [with_numbers_of(eqn, small) for eqn, small, _ in several]
                made = [var for eqn in alike for var in eqn.outvars if not isinstance(var, DropVar)]
                env.update(zip(made, evaluated(alike, env, made), strict=True))
        return [env[atom] if isinstance(atom, Var) else atom.val for atom in wanted]

    def is_touched(self, path: Path) -> bool:
        found = self.proof
        return path in found.touched or path in found.drawn or path in found.counted or path in found.own

    def body(self, whole: ClosedJaxpr, part: ClosedJaxpr, operands: Sequence[Any], path: Path) -> list[Any]:
        env = dict(zip((*part.jaxpr.invars, *part.jaxpr.constvars), (*operands, *whole.consts), strict=True))
        pairs = zip(equations_of(whole.jaxpr), equations_of(part.jaxpr), strict=True)
        equations = [(eqn, small, (*path, i)) for i, (eqn, small) in enumerate(pairs)]
        results = self.run(equations, env, [atom for atom in part.jaxpr.outvars if isinstance(atom, Var)])
        known = iter(results)
        return [
            next(known) if isinstance(atom, Var) else _number(other)
            for atom, other in zip(part.jaxpr.outvars, whole.jaxpr.outvars, strict=True)
        ]

    def equation(self, eqn: JaxprEqn, small: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        if path in self.proof.drawn:
            return self.drawn(eqn, small, operands)
        if (column := self.proof.counted.get(path)) is not None:
            return self.with_rows_of_microbatch(eqn, small, operands, column)
        if path in self.proof.own:
            return self.statistics(eqn, small, operands, is_sum=self.proof.own[path])
        name = eqn.primitive.name
        if name in REMAT:
            return self.remat(eqn, small, operands, path)
        special = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(name)
        if special is not None:
            return special(eqn, small, operands, path)
        called, other = called_jaxpr(eqn), called_jaxpr(small)
        if called is None or other is None:
            called, other = implementation_of(eqn), implementation_of(small)
        assert called is not None and other is not None, "something is drawn inside"
        return self.body(called, other, called_operands(small, operands), path)

    def drawn(self, eqn: JaxprEqn, small: JaxprEqn, operands: list[Any]) -> list[Any]:
        """What is made of nothing is made for all rows, as the whole step makes it; then those of the microbatch."""
        inputs = {atom: x for atom, x in zip(eqn.invars, operands, strict=True) if isinstance(atom, Var)}
        kept = [var for var in eqn.outvars if not isinstance(var, DropVar)]
        made = dict(zip(kept, evaluated([eqn], inputs, kept), strict=True))
        return [
            made.get(var) if made.get(var) is None else self.taken(made[var], aval_of(other).shape)
            for var, other in zip(eqn.outvars, small.outvars, strict=True)
        ]

    def with_rows_of_microbatch(self, eqn: JaxprEqn, small: JaxprEqn, operands: list[Any], column: int) -> list[Any]:
        """A gather or scatter whose indices count the rows of the whole batch."""
        operands[1] = renumbered(operands[1], column, self.split)
        alike = with_numbers_of(eqn, small)
        inputs = {atom: x for atom, x in zip(alike.invars, operands, strict=True) if isinstance(atom, Var)}
        return evaluated([alike], inputs, alike.outvars)

    def statistics(self, eqn: JaxprEqn, small: JaxprEqn, operands: list[Any], *, is_sum: bool) -> list[Any]:
        """What the microbatch reduces over its own rows; of a sum, what all microbatches with such rows would have."""
        alike = with_numbers_of(eqn, small)
        inputs = {atom: x for atom, x in zip(alike.invars, operands, strict=True) if isinstance(atom, Var)}
        (made,) = evaluated([alike], inputs, alike.outvars)
        count = np.asarray(self.split.count, made.dtype)
        return [at_line_of(eqn, lambda x: jax.lax.mul(x, count), made) if is_sum else made]

    def taken(self, array: Any, shape: tuple[int, ...]) -> Any:
        dims = [dim for dim, (long, short) in enumerate(zip(array.shape, shape, strict=True)) if long != short]
        if not dims:
            return array
        rows = BatchRows(dims[0], array.shape[dims[0]] // self.split.batch)
        return taken(array, rows, self.split, self.place)

    def remat(self, eqn: JaxprEqn, small: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        """A checkpointed call stays one; which rows are run are two more operands of it."""
        whole, part = called_jaxpr(eqn), called_jaxpr(small)
        assert whole is not None and part is not None, "it is a call"

        def body(microbatch: Any, group: Any, *inputs: Any) -> list[Any]:
            place = MicrobatchPlace(microbatch, group)
            return Microbatch(self.proof, self.split, place).body(whole, part, inputs, path)

        values = [*map(jnp.asarray, self.place), *operands]
        called = jax.make_jaxpr(body)(*values)
        inputs = [Var(jax.typeof(value)) for value in values]
        call = small.replace(params=capturing_call(small, called, len(self.place)), invars=[*inputs])
        kept = [var for var in small.outvars if not isinstance(var, DropVar)]
        made = iter(evaluated([call], dict(zip(inputs, values, strict=True)), kept))
        return [None if isinstance(var, DropVar) else next(made) for var in small.outvars]

    def scan(self, eqn: JaxprEqn, small: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        consts, carries = scan_counts(small)
        whole, part, params = eqn.params["jaxpr"], small.params["jaxpr"], small.params

        def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            made = self.body(whole, part, [*operands[:consts], *carry, *slices], path)
            return made[:carries], made[carries:]

        final, stacked = jax.lax.scan(
            body,
            operands[consts : consts + carries],
            operands[consts + carries :],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*final, *stacked]

    def while_loop(self, eqn: JaxprEqn, small: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        params, other = eqn.params, small.params
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        return list(
            jax.lax.while_loop(
                lambda carry: self.body(
                    params["cond_jaxpr"], other["cond_jaxpr"], [*operands[:tests], *carry], (*path, "test")
                )[0],
                lambda carry: self.body(
                    params["body_jaxpr"], other["body_jaxpr"], [*operands[tests : tests + consts], *carry],
                    (*path, "body"),
                ),
                operands[tests + consts :],
            )
        )  # fmt: skip

    def cond(self, eqn: JaxprEqn, small: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        pairs = zip(eqn.params["branches"], small.params["branches"], strict=True)

        def branch(b: int, whole: ClosedJaxpr, part: ClosedJaxpr) -> Callable[..., list[Any]]:
            return lambda *inputs: self.body(whole, part, inputs, (*path, b))

        branches = [branch(b, *pair) for b, pair in enumerate(pairs)]
        return list(jax.lax.switch(operands[0], branches, *operands[1:]))


def _value(env: Mapping[Var, Any], atom: Any, whole: Any) -> Any:
    return _number(whole) if isinstance(atom, Literal) else env[atom]


def _number(literal: Any) -> Any:
    return np.asarray(literal.val, literal.aval.dtype) if not getattr(literal.aval, "weak_type", False) else literal.val


def with_numbers_of(eqn: JaxprEqn, small: JaxprEqn) -> JaxprEqn:
    """An equation of the smaller trace with the literals of the whole one, those of inner jaxprs included.

    A mean over the batch divides by its rows: a microbatch adds its part of the whole mean.
    """
    inputs = [one if isinstance(one, Literal) else other for one, other in zip(eqn.invars, small.invars, strict=True)]
    params = {name: _with_numbers(eqn.params.get(name), value) for name, value in small.params.items()}
    if inputs == small.invars and all(params[name] is value for name, value in small.params.items()):
        return small
    return small.replace(invars=inputs, params=params)


def _with_numbers(whole: Any, part: Any) -> Any:
    if isinstance(part, ClosedJaxpr) and part.jaxpr is not part:  # JAX 0.10; later both are one type
        jaxpr = _with_numbers(whole.jaxpr, part.jaxpr)
        return part if jaxpr is part.jaxpr and part.consts == whole.consts else ClosedJaxpr(jaxpr, whole.consts)
    if isinstance(part, tuple | list) and any(isinstance(one, Jaxpr | ClosedJaxpr) for one in part):
        several = [_with_numbers(one, other) for one, other in zip(whole, part, strict=True)]
        is_same = all(one is other for one, other in zip(several, part, strict=True))
        return part if is_same else type(part)(several)
    if not isinstance(part, Jaxpr):
        return part
    equations = [with_numbers_of(*pair) for pair in zip(whole.eqns, part.eqns, strict=True)]
    results = [
        one if isinstance(one, Literal) else other for one, other in zip(whole.outvars, part.outvars, strict=True)
    ]
    is_same = all(one is other for one, other in zip(equations, part.eqns, strict=True)) and results == part.outvars
    made = part if is_same else part.replace(eqns=equations, outvars=results, debug_info=part.debug_info)
    consts: Sequence[Any] = getattr(whole, "consts", ())
    if not consts or all(one is other for one, other in zip(consts, getattr(part, "consts", ()), strict=True)):
        return made
    return ClosedJaxpr(made, consts)
