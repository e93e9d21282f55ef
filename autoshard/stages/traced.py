"""The programs of a stage to the planner's own `Program`s."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.jaxprs import ClosedJaxpr, Jaxpr, Literal, aval_of
from autoshard.microbatches.opening import opened
from autoshard.program import Program
from autoshard.program.tracing import traced_step
from autoshard.propagation.registry import has_rule
from autoshard.stages.programs import Key, StageProgram


def program_of(
    stage_program: StageProgram, name: str, carried: Mapping[Key, Key], donated: Collection[Key] = ()
) -> Program:
    """One program of a stage as the planner takes it: an argument per input, a result per output, in their order.

    A sum takes its own place, and its memory. A value that takes the place of an argument in the next step lies as
    that argument.

    Args:
        name: of the step.
        carried: argument or piece -> the value that takes its place in the next step.
        donated: arguments and pieces whose memory such a value may take.
    """
    closed = opened(stage_program.jaxpr)

    def results(*_: Any) -> tuple[Any, ...]:
        return tuple(jnp.zeros(aval.shape, aval.dtype) for aval in closed.out_avals)

    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in closed.in_avals]
    traced = traced_step(results, tuple(structs), {}, has_rule=has_rule)
    jaxpr = closed.jaxpr.replace(debug_info=traced.closed.jaxpr.debug_info)  # what arguments are called
    program = traced.read(ClosedJaxpr(jaxpr, closed.consts))
    taken, given = replaced_inputs(stage_program, carried, donated)
    return replace(program, name=f"{name}, {stage_program.name}", carried=taken, donated=given)


def replaced_inputs(
    stage_program: StageProgram, carried: Mapping[Key, Key], donated: Collection[Key] = ()
) -> tuple[dict[int, int], frozenset[int]]:
    """Input -> the output that takes its place, and the inputs whose memory it may take; see `program_of`."""
    places = {key: i for i, key in enumerate(stage_program.outputs)}
    taken = {
        i: places[key if key in places else carried[key]]
        for i, key in enumerate(stage_program.inputs)
        if key in places or carried.get(key) in places
    }
    given = frozenset(i for i in taken if stage_program.inputs[i] in places or stage_program.inputs[i] in donated)
    return taken, given


def form_of(closed: ClosedJaxpr) -> tuple[Any, ...]:
    """Equal for jaxprs that are written alike, but for their functions: their programs have one fingerprint."""
    jaxpr = closed.jaxpr
    number: dict[Any, int] = {var: n for n, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}

    def read(atom: Any) -> Any:
        return (repr(atom.val), atom.aval) if isinstance(atom, Literal) else number[atom]

    equations = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        number |= {var: len(number) + n for n, var in enumerate(eqn.outvars)}
        params = tuple((name, _form(value)) for name, value in sorted(eqn.params.items()))
        equations.append((eqn.primitive.name, operands, tuple(map(aval_of, eqn.outvars)), params))
    return tuple(closed.in_avals), tuple(map(id, closed.consts)), tuple(equations), tuple(map(read, jaxpr.outvars))


def _form(parameter: Any) -> Any:
    """Of a parameter: equal for those that say the same."""
    if isinstance(parameter, tuple | list):
        return tuple(map(_form, parameter))
    if isinstance(parameter, Jaxpr | ClosedJaxpr):
        return form_of(parameter if isinstance(parameter, ClosedJaxpr) else ClosedJaxpr(parameter, ()))
    return None if callable(parameter) else repr(parameter)
