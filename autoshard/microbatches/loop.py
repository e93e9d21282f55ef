"""A step's two traces and their proof in, one jaxpr out: what comes before, a scan over microbatches, what comes after.

Parts of sums are added up in the carry of the scan. With groups of rows (`Microbatches.groups`) every microbatch is
mapped over these, and each group has a sum of its own, to be added up once after the scan: split over the devices,
such sums wait with their communication until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.errors import MicrobatchError
from autoshard.jaxprs import (
    ClosedJaxpr,
    Jaxpr,
    Var,
    at_line_of,
    aval_of,
    equations_of,
    evaluated,
    with_live_equations,
)
from autoshard.microbatches.inline_calls import opened
from autoshard.microbatches.microbatch import Microbatch
from autoshard.microbatches.proof import Proof, proof
from autoshard.microbatches.relations import OWN, BatchRows, Invariant, PartialResult
from autoshard.microbatches.rows import Microbatches, MicrobatchPlace, stacked, unstacked
from autoshard.microbatches.statistics import evaluated_late

_COMBINED = {
    "add": jax.lax.add,
    "max": jax.lax.max,
    "min": jax.lax.min,
    "and": jax.lax.bitwise_and,
    "or": jax.lax.bitwise_or,
}
_OVER_GROUPS: Mapping[str, Callable[..., Any]] = {
    "add": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "and": jnp.bitwise_and.reduce,
    "or": jnp.bitwise_or.reduce,
}
_LAST = "last"  # of a value that is the same in all microbatches
# Sums in so few bits would lose what a microbatch adds.
_SUMMED_IN = {np.dtype(jnp.bfloat16): np.dtype(np.float32), np.dtype(np.float16): np.dtype(np.float32)}


def looped(whole: ClosedJaxpr, part: ClosedJaxpr, split: Microbatches) -> tuple[ClosedJaxpr, str]:
    """The jaxpr of a step, computed microbatch by microbatch, and what is said of statistics that these have.

    Args:
        whole: the step.
        part: the step traced for the rows of one microbatch.
        split: which arguments have rows.

    Raises:
        MicrobatchError: some line needs all rows of the batch at once.
    """
    whole, part = (opened(with_live_equations(one)) for one in (whole, part))
    found = proof(whole, part, split)
    if found.own and split.groups > 1:
        raise MicrobatchError(
            f"microbatches={split.count}: statistics of a microbatch are of all its rows, which are summed up in "
            f"{split.groups} groups.\nUse groups=1."
        )
    steps = MicrobatchedStep(whole.jaxpr, part.jaxpr, split, found)
    variables = [*whole.jaxpr.constvars, *whole.jaxpr.invars]
    avals = map(aval_of, variables)
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    made = jax.make_jaxpr(steps.run)(*types)
    constants = len(whole.jaxpr.constvars)
    jaxpr = made.jaxpr.replace(
        constvars=[*made.jaxpr.constvars, *made.jaxpr.invars[:constants]],
        invars=made.jaxpr.invars[constants:],
        debug_info=whole.jaxpr.debug_info,
    )
    return ClosedJaxpr(jaxpr, [*made.consts, *whole.consts]), found.remark


@dataclass(frozen=True)
class Needs:
    """Which values of the whole step each of its three parts makes for others."""

    before: frozenset[Var]
    sums: tuple[Var, ...]
    rows: tuple[Var, ...]  # and statistics of which each microbatch has its own
    after: frozenset[int]  # equations
    looped: tuple[int, ...]  # equations


class MicrobatchedStep:
    """The three parts of a step that runs in microbatches: before the first, in each, and after the last."""

    def __init__(self, whole: Jaxpr, part: Jaxpr, split: Microbatches, found: Proof):
        self.whole, self.part, self.split, self.proof = whole, part, split, found
        self.equations, self.small = equations_of(whole), equations_of(part)
        self.makers = {var: i for i, eqn in enumerate(self.equations) for var in eqn.outvars}
        self.twins: dict[Var, Var] = dict(
            zip((*whole.constvars, *whole.invars), (*part.constvars, *part.invars), strict=True)
        )
        for eqn, small in zip(self.equations, self.small, strict=True):
            self.twins.update(zip(eqn.outvars, small.outvars, strict=True))
        self.needs = self.needed()

    # What is needed where.

    def in_loop(self, var: Var) -> bool:
        """Whether every microbatch makes a value of its own."""
        return var in self.makers and self.proof.places[self.makers[var]] is None and var not in self.proof.ahead

    def is_stacked(self, var: Var) -> bool:
        """Whether what all microbatches make of a value is kept: rows of the batch, or statistics of each."""
        return isinstance(self.proof.relations[var], BatchRows) or self.is_own(var)

    def needed(self) -> Needs:
        before, looping = set[Var](), set[Var]()
        after = set[int]()

        def want(atoms: Iterable[Any]) -> None:
            for var in (atom for atom in atoms if isinstance(atom, Var)):
                if self.in_loop(var):
                    looping.add(var)
                elif var in self.makers and self.proof.places[self.makers[var]] is Invariant.AFTER:
                    wanted.add(var)
                else:
                    before.add(var)

        wanted = set[Var]()
        want(self.whole.outvars)
        places = self.proof.places
        for i in reversed(range(len(self.equations))):
            eqn = self.equations[i]
            if places[i] is Invariant.AFTER and (eqn.effects or not wanted.isdisjoint(eqn.outvars)):
                after.add(i)
                want(eqn.invars)
        outside = frozenset(looping)
        looped = []
        for i in reversed(range(len(self.equations))):
            eqn = self.equations[i]
            if places[i] is None and (eqn.effects or not looping.isdisjoint(eqn.outvars)):
                looped.append(i)
                want(eqn.invars)
        handed = [var for eqn in self.equations for var in eqn.outvars if var in outside]
        return Needs(
            before=frozenset(before),
            sums=tuple(var for var in handed if not self.is_stacked(var)),
            rows=tuple(var for var in handed if self.is_stacked(var)),
            after=frozenset(after),
            looped=tuple(looped[::-1]),
        )

    def made_before(self) -> list[int]:
        """The equations that run on the whole batch, or on none of it, before the first microbatch."""
        wanted, found = set(self.needs.before), []
        for i in reversed(range(len(self.equations))):
            eqn = self.equations[i]
            has_effect = bool(eqn.effects) and self.proof.places[i] is Invariant.BEFORE
            if has_effect or not wanted.isdisjoint(eqn.outvars):
                found.append(i)
                wanted |= {atom for atom in eqn.invars if isinstance(atom, Var)}
        return found[::-1]

    # The step.

    def run(self, *values: Any) -> list[Any]:
        env: dict[Var, Any] = dict(zip((*self.whole.constvars, *self.whole.invars), values, strict=True))
        early = self.made_before()
        made = [var for i in early for var in self.equations[i].outvars if var in self.needs.before]
        env.update(zip(made, evaluated([self.equations[i] for i in early], env, made), strict=True))
        if self.needs.looped:
            env |= self.loop(env)
        results = list(dict.fromkeys(atom for atom in self.whole.outvars if isinstance(atom, Var)))
        known = dict(zip(results, self.late(self.needs.after, env, results), strict=True))
        return [known[atom] if isinstance(atom, Var) else atom.val for atom in self.whole.outvars]

    def late(self, equations: Iterable[int], env: Mapping[Var, Any], wanted: Sequence[Var]) -> list[Any]:
        """What equations after the last microbatch make of sums, rows and statistics."""
        last = set(self.proof.handed_on.values())
        env = {var: array[-1] if var in last and self.is_own(var) else array for var, array in env.items()}
        stacks = {var: array for var, array in env.items() if self.is_own(var) and var not in last}
        known = {var: array for var, array in env.items() if var not in stacks}
        return evaluated_late({i: self.equations[i] for i in equations}, known, stacks, wanted, self.proof.running)

    def is_own(self, var: Var) -> bool:
        """Whether every microbatch has a value of its own, which is handed on in a stack of all."""
        return var in self.makers and self.proof.relations.get(var) in OWN

    def loop(self, env: Mapping[Var, Any]) -> dict[Var, Any]:
        """What all microbatches together make."""
        split = self.split
        read = {atom for i in self.needs.looped for atom in self.equations[i].invars if isinstance(atom, Var)}
        rows = {var: relation for var in env if var in read and isinstance(relation := self.relation(var), BatchRows)}
        known = {self.twins[var]: env[var] for var in env if var in read and var not in rows}
        equations = [(self.equations[i], self.small[i], (i,)) for i in self.needs.looped]
        wanted = [self.twins[var] for var in (*self.needs.sums, *self.needs.rows)]

        def of_group(place: MicrobatchPlace, slices: list[Any]) -> list[Any]:
            inner = known | {self.twins[var]: one for var, one in zip(rows, slices, strict=True)}
            return Microbatch(self.proof, split, place).run(equations, inner, wanted)

        def of_all_groups(index: Any, slices: list[Any]) -> list[Any]:
            if split.groups == 1:
                return of_group(MicrobatchPlace(index, 0), slices)
            return jax.vmap(of_group, in_axes=(MicrobatchPlace(None, 0), 0))(
                MicrobatchPlace(index, jnp.arange(split.groups)), slices
            )

        ops = list(map(self.op, self.needs.sums))

        states = self.proof.handed_on
        places = [len(ops) + self.needs.rows.index(result) for result in states.values()]

        def microbatch(carry: list[list[Any]], turn: tuple[Any, list[Any]]) -> tuple[list[list[Any]], list[Any]]:
            totals, before = carry
            known.update({self.twins[var]: one for var, one in zip(states, before, strict=True)})
            made = of_all_groups(*turn)
            parts = zip(self.needs.sums, totals, made[: len(ops)], strict=True)
            return [[self.added(*one) for one in parts], [made[place] for place in places]], made[len(ops) :]

        turns = jnp.arange(split.count), [stacked(env[var], one, split) for var, one in rows.items()]
        start = [list(map(self.start, self.needs.sums)), [env[var] for var in states]]
        (totals, _), made = jax.lax.scan(microbatch, start, turns)
        sums = {var: self.total(var, total) for var, total in zip(self.needs.sums, totals, strict=True)}
        pairs = zip(self.needs.rows, made, strict=True)
        return sums | {var: self.joined(var, one) for var, one in pairs}

    def joined(self, var: Var, stack: Any) -> Any:
        """The rows of all microbatches where they are in the batch; statistics stay a stack."""
        return stack if self.is_own(var) else unstacked(stack, self.relation(var), self.split)

    def relation(self, var: Var) -> Any:
        return self.proof.relations[var]

    def total(self, var: Var, total: Any) -> Any:
        """A sum over all groups, in the type that it has in the step."""
        op, dtype = self.op(var), aval_of(var).dtype

        def made(total: Any) -> Any:
            if self.split.groups > 1:
                total = total[0] if op == _LAST else _OVER_GROUPS[op](total, axis=0)
            return jax.lax.convert_element_type(total, dtype)

        return at_line_of(self.equations[self.makers[var]], made, total)

    def added(self, var: Var, total: Any, part: Any) -> Any:
        """What is summed up once one more microbatch has run."""
        op = self.op(var)

        def made(total: Any, part: Any) -> Any:
            return _COMBINED[op](total, jax.lax.convert_element_type(part, total.dtype))

        return part if op == _LAST else at_line_of(self.equations[self.makers[var]], made, total, part)

    def op(self, var: Var) -> str:
        relation = self.proof.relations[var]
        return relation.op if isinstance(relation, PartialResult) else _LAST

    def start(self, var: Var) -> Any:
        """What a sum is before the first microbatch."""
        op, type_ = self.op(var), aval_of(var)
        dtype = _SUMMED_IN.get(type_.dtype, type_.dtype) if op == "add" else type_.dtype
        shape = (self.split.groups, *type_.shape) if self.split.groups > 1 else type_.shape
        if op == _LAST:  # of any type, as keys of random numbers
            return jnp.zeros(shape, dtype)
        number: Any = {"add": 0, "or": 0, "and": -1}.get(op)
        if number is None:
            number = _limits(dtype)[op == "min"]
        return jax.lax.full(shape, np.asarray(number, dtype), dtype)


def _limits(dtype: Any) -> tuple[Any, Any]:
    """The least and the greatest number of a type."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf, np.inf
    return (False, True) if dtype.kind == "b" else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
