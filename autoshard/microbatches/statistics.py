"""Statistics of which each microbatch has its own, and the states of a step that they change.

With ``statistics="microbatch"`` a microbatch takes the sums over rows that it needs of its own rows, times the number
of microbatches: that is what the sum over the batch would be if all microbatches had such rows. All else is as in any
step in microbatches, so gradients and losses are those of a loop over microbatches that takes their mean.

A state that such statistics change, as the running mean of a batch normalisation, goes through the microbatches one
after the other: ``m = 0.9 m + 0.1 mean`` is computed for each of them in turn. That needs the statistics alone, so it
is done after the last microbatch. All else that comes then reads the mean of what the microbatches have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import StageError
from autoshard.jaxprs import DropVar, Jaxpr, JaxprEqn, Var, aval_of, equations_of, evaluated
from autoshard.microbatches.relations import Invariant, Relation

_LINES_IN_REMARK = 3  # that a remark names
_KNOWN = frozenset({Invariant.ZERO, Invariant.BEFORE, Invariant.OWN})


def is_backward(eqn: JaxprEqn) -> bool:
    """Whether an equation is of the backward pass, as JAX says in its names."""
    return "transpose(" in str(eqn.source_info.name_stack)


@dataclass(frozen=True)
class RunningStates:
    """States that statistics of microbatches change, one microbatch after the other."""

    results: Mapping[Var, Var] = field(default_factory=dict)  # an argument -> the value that takes its place
    equations: frozenset[int] = frozenset()  # that make the latter of the former
    made: frozenset[Var] = frozenset()  # by these

    @classmethod
    def of(
        cls,
        jaxpr: Jaxpr,
        states: Mapping[Var, Var],
        relations: Mapping[Var, Relation],
        places: Sequence[Invariant | None],
    ) -> RunningStates:
        """Those of some states that are changed by statistics and by nothing else, and that no microbatch reads.

        Args:
            jaxpr: of the whole step.
            states: an argument -> the value that takes its place.
            relations: of all variables, before any state is known to be one of these.
            places: when each equation is computed.
        """
        equations = equations_of(jaxpr)
        live = _live(jaxpr)
        while states:
            chosen = _equations_between_states(equations, states)
            late = {var for i in chosen for var in equations[i].outvars}
            bad = {
                var
                for i, eqn in enumerate(equations)
                for var in _variables(eqn)
                if i in live
                if (i in chosen and relations[var] not in _KNOWN)
                or (i not in chosen and var in late | {*states} and places[i] is not Invariant.AFTER)
            }
            changed = {var for i in chosen for var in _variables(equations[i])}
            good = [var for var in states if var in changed and not bad & {var, *_made_of(equations, var)}]
            fine = {var: states[var] for var in good}
            if fine == states:
                return cls(states, frozenset(chosen), frozenset(late))
            states = fine
        return cls()


def in_pieces(running: RunningStates, pieces: Mapping[Var, Var]) -> RunningStates:
    """The same states where some are in pieces, each on the stage of its own.

    Args:
        pieces: part of a state -> what takes its place.
    """
    return RunningStates({**running.results, **pieces}, running.equations, running.made - set(pieces))


def remark_of(lines: Collection[str], states: int) -> str:
    """What a plan says of statistics of which each microbatch has its own; nothing if there are none.

    Args:
        lines: of the user, in which they are made.
        states: how many arrays of state they change.
    """
    if not lines:
        return ""
    first = sorted(lines)[:_LINES_IN_REMARK]
    more = f" and {len(lines) - len(first)} more lines" if len(lines) > len(first) else ""
    turns = f" {states} arrays of state are changed by each of them in turn." if states else ""
    return (
        f"statistics='microbatch': each microbatch takes sums over its own rows at {', '.join(first)}{more}; "
        f"losses and gradients are means over microbatches.{turns}"
    )


def _live(jaxpr: Jaxpr) -> set[int]:
    """The equations whose results are read; taking loops apart leaves others."""
    equations, found = equations_of(jaxpr), set[int]()
    wanted = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    for i in reversed(range(len(equations))):
        if equations[i].effects or not wanted.isdisjoint(equations[i].outvars):
            found.add(i)
            wanted |= set(_variables(equations[i]))
    return found


def changed_states(jaxpr: Jaxpr, carried: Mapping[int, int], relations: Mapping[Var, Relation]) -> dict[Var, Var]:
    """Arguments of a step that statistics change, and the values that take their places."""
    pairs = ((jaxpr.invars[i], jaxpr.outvars[j]) for i, j in carried.items())
    return {
        var: atom
        for var, atom in pairs
        if isinstance(atom, Var) and atom is not var and relations[atom] is Invariant.OWN
    }


def late_inputs(eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn], relations: Mapping[Var, Relation]) -> set[Var]:
    """What an equation reads that is made after the last microbatch, of sums, and what that is made of."""
    todo, found = _variables(eqn), set[Var]()
    while todo:
        var = todo.pop()
        if relations[var] is Invariant.AFTER and var not in found:
            found.add(var)
            todo += _variables(makers[var])
    return found


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if isinstance(atom, Var)]


def _kept(equations: Sequence[JaxprEqn]) -> list[Var]:
    return [var for eqn in equations for var in eqn.outvars if not isinstance(var, DropVar)]


def _made_of(equations: Sequence[JaxprEqn], start: Var) -> set[Var]:
    """All that is made of a variable."""
    found = {start}
    for eqn in equations:
        if not found.isdisjoint(_variables(eqn)):
            found |= set(eqn.outvars)
    return found - {start}


def _equations_between_states(equations: Sequence[JaxprEqn], states: Mapping[Var, Var]) -> set[int]:
    """The equations on the ways from states to what takes their places."""
    made = {var for state in states for var in (state, *_made_of(equations, state))}
    wanted, found = set(states.values()), set[int]()
    for i in reversed(range(len(equations))):
        if not wanted.isdisjoint(equations[i].outvars) and not made.isdisjoint(_variables(equations[i])):
            found.add(i)
            wanted |= {var for var in _variables(equations[i]) if var in made}
    return found


def mean(stack: Any, type_: Any) -> Any:
    """What all microbatches together have of a value of which each has its own: [microbatches, ...] -> [...]."""
    if jnp.issubdtype(type_.dtype, jnp.inexact):
        wide = jnp.promote_types(type_.dtype, jnp.float32)
        return jnp.mean(stack.astype(wide), axis=0).astype(type_.dtype)
    if type_.dtype == jnp.bool_:
        return jnp.all(stack, axis=0)
    return jnp.sum(stack, axis=0) // len(stack)


def evaluated_late(
    equations: Mapping[int, JaxprEqn],
    known: Mapping[Var, Any],
    stacks: Mapping[Var, Any],
    wanted: Sequence[Var],
    running: RunningStates,
) -> list[Any]:
    """What equations after the last microbatch make.

    Args:
        equations: by their number in the step.
        known: values that they read.
        stacks: of other values that they read, those of each microbatch: (microbatches, ...).
        wanted: the variables that are asked for.
        running: the states that change from microbatch to microbatch.
    """
    means = {var: mean(stack, aval_of(var)) for var, stack in stacks.items()}
    env = {**known, **means}
    in_turn = [i for i in sorted(equations) if i in running.equations]
    if not in_turn:
        return evaluated([equations[i] for i in sorted(equations)], env, wanted)
    late = {var for i in in_turn for var in equations[i].outvars}
    if any(not late.issuperset(running.made.intersection(_variables(equations[i]))) for i in in_turn):
        raise StageError(
            "statistics='microbatch': a state that every microbatch changes is made by several stages.\n"
            "Make it where its statistics are made, or leave pipeline= out."
        )
    first = list[int]()
    for i in sorted(set(equations) - set(in_turn)):
        if late.isdisjoint(_variables(equations[i])):
            first.append(i)
        else:
            late |= set(equations[i].outvars)
    made = _kept([equations[i] for i in first])
    env.update(zip(made, evaluated([equations[i] for i in first], env, made), strict=True))
    env |= _in_turn([equations[i] for i in in_turn], env, stacks, running)
    rest = [equations[i] for i in sorted(set(equations) - {*first, *in_turn})]
    return evaluated(rest, env, wanted)


def _in_turn(
    equations: Sequence[JaxprEqn], env: Mapping[Var, Any], stacks: Mapping[Var, Any], running: RunningStates
) -> dict[Var, Any]:
    """What the equations make of states, one microbatch after the other, at the last of them."""
    made = _kept(equations)
    read = {var for eqn in equations for var in _variables(eqn)}
    states = [var for var, result in running.results.items() if var in read and result in made]
    own = [var for var in stacks if var in read]
    fixed = {var: env[var] for var in read if var in env and var not in own and var not in states}

    def turn(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], None]:
        inner = {**fixed, **dict(zip(states, carry, strict=False)), **dict(zip(own, slices, strict=True))}
        results = dict(zip(made, evaluated(equations, inner, made), strict=True))
        return [*(results[running.results[var]] for var in states), *(results[var] for var in made)], None

    start = [env[var] for var in states] + [jnp.zeros(aval_of(var).shape, aval_of(var).dtype) for var in made]
    final, _ = jax.lax.scan(turn, start, [stacks[var] for var in own])
    return dict(zip(made, final[len(states) :], strict=True))
