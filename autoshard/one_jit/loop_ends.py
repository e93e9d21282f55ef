"""A step in, the same step out in which the stages at both ends make what its loop over layers starts from and ends in.

Equal stages need one program. So the first reads its carry from the stage before, as all others do: where a carry
starts from the batch itself, from zeros or from a number, an *entrance* before the loop hands it on. And the last hands
on its carry as all others do: where a sum over microbatches or rows of the batch is what the loop ends in, as an
auxiliary loss or the gradient of weights that all layers share, an *exit* behind the loop makes them. Forward and
backward loops have ends of their own.

An end is an `optimization_barrier`, whose equation is held in its stage. It also reads an argument with rows of the
batch, so that it belongs to every microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from autoshard.jaxprs import ClosedJaxpr, JaxprEqn, Literal, Var, aval_of, equations_of, scan_counts
from autoshard.stages.cutting import CuttableStep
from autoshard.stages.roles import PipelineRoles, bytes_of


@dataclass(frozen=True, eq=False)
class LoopEnds:
    """A step whose loops have ends where they need them."""

    step: CuttableStep
    loop: int  # the forward loop over layers
    backward_entrances: frozenset[int]  # equations
    backward_exits: frozenset[int]


def with_loop_ends(step: CuttableStep, loop: int) -> LoopEnds:
    """The step with ends of all loops over the layers of `loop` that need them."""
    roles = step.roles
    loops = sorted(i for i, first in roles.stacks.items() if first == loop)
    entrances = {i for i in loops if _needs_entrance(roles, i)}
    exits = {i: carries for i in loops if (carries := _handed_carries(roles, i))}
    small = min(step.split.dims, key=lambda i: bytes_of(step.part.jaxpr.invars[i]))
    places = dict[int, int]()  # loop -> its place now
    new_entrances, new_exits = dict[int, int](), dict[int, int]()  # loop -> the place of its end
    added = 0
    for i in loops:
        if i in entrances:
            new_entrances[i] = i + added
            added += 1
        places[i] = i + added
        if i in exits:
            added += 1
            new_exits[i] = i + added
    made = replace(
        step,
        whole=_with_barriers(step.whole, entrances, exits, small),
        part=_with_barriers(step.part, entrances, exits, small),
        held=frozenset({*new_entrances.values(), *new_exits.values()}),
    )
    return LoopEnds(
        made if added else step,
        places[loop],
        frozenset(place for i, place in new_entrances.items() if i != loop),
        frozenset(place for i, place in new_exits.items() if i != loop),
    )


def _needs_entrance(roles: PipelineRoles, loop: int) -> bool:
    """Whether some carry of a loop starts from what no stage makes of its own values."""

    def is_constant(atom: Any) -> bool:
        if isinstance(atom, Literal) or atom not in roles.makers or roles.makers[atom] in roles.free:
            return True
        return all(map(is_constant, roles.made_in_loop(roles.makers[atom])))

    eqn = roles.step.equations[loop]
    return any(map(is_constant, eqn.invars[_carries(eqn)]))


def _handed_carries(roles: PipelineRoles, loop: int) -> tuple[int, ...]:
    """Which last carries of a loop are read after the last microbatch."""
    eqn = roles.step.equations[loop]
    handed = {*roles.step.needs.sums, *roles.step.needs.rows}
    return tuple(n for n, var in enumerate(eqn.outvars[: scan_counts(eqn)[1]]) if var in handed)


def _carries(eqn: JaxprEqn) -> slice:
    consts, carries = scan_counts(eqn)
    return slice(consts, consts + carries)


def _with_barriers(
    closed: ClosedJaxpr, entrances: set[int], exits: dict[int, tuple[int, ...]], small: int
) -> ClosedJaxpr:
    jaxpr, equations = closed.jaxpr, list[JaxprEqn]()
    renamed: dict[Any, Var] = {}

    def now(atoms: Sequence[Any]) -> list[Any]:
        return [renamed.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]

    for i, one in enumerate(equations_of(jaxpr)):
        eqn = one.replace(invars=now(one.invars)) if not renamed.keys().isdisjoint(_variables(one)) else one
        if i in entrances:
            barrier = _barrier([*eqn.invars[_carries(eqn)], jaxpr.invars[small]], eqn)
            equations.append(barrier)
            operands = list(eqn.invars)
            operands[_carries(eqn)] = barrier.outvars[:-1]
            eqn = eqn.replace(invars=operands)
        equations.append(eqn)
        if i in exits:
            left = [eqn.outvars[n] for n in exits[i]]
            barrier = _barrier([*left, jaxpr.invars[small]], eqn)
            equations.append(barrier)
            renamed |= zip(left, barrier.outvars[:-1], strict=True)
    made = jaxpr.replace(eqns=equations, outvars=now(jaxpr.outvars), debug_info=jaxpr.debug_info)
    return ClosedJaxpr(made, closed.consts)


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if isinstance(atom, Var)]


def _barrier(operands: Sequence[Any], like: JaxprEqn) -> JaxprEqn:
    """An `optimization_barrier` of operands, at the line of another equation."""
    operands = list(map(_strong, operands))
    avals = list(map(aval_of, operands))
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    (made,) = jax.make_jaxpr(lambda *arrays: jax.lax.optimization_barrier(arrays))(*types).jaxpr.eqns
    results = [Var(var.aval) for var in made.outvars]
    return made.replace(invars=list(operands), outvars=results, source_info=like.source_info)


def _strong(atom: Any) -> Any:
    """A number of the type that a loop carries it in: Python's own take the type of what they are added to."""
    if not isinstance(atom, Literal):
        return atom
    aval = aval_of(atom)
    return Literal(np.asarray(atom.val, aval.dtype), aval.update(weak_type=False))
