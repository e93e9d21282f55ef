"""The programs of a stage to the planner's own `Program`s.

What one plan of a stage says of named values holds for the programs after it. Planning a stage, reading a saved one and
explaining it all make its programs here, so that they are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from autoshard.jaxprs import ClosedJaxpr, Jaxpr, Var, constraint_like
from autoshard.layout import Layout, spec_of
from autoshard.microbatches.inline_calls import opened
from autoshard.plans.plan import PlanData
from autoshard.program import Program
from autoshard.program.tracing import traced_step
from autoshard.propagation.registry import has_rule
from autoshard.stages.programs import Key, StageProgram, StagePrograms

# Which program of a stage says first how arguments lie.
PLANNING_ORDER = {"B": 0, "F": 1, "W": 2, "after": 3, "before": 4}


def program_of(
    stage_program: StageProgram,
    name: str,
    carried: Mapping[Key, Key],
    donated: Collection[Key] = (),
    wanted: Mapping[Key, NamedSharding] | None = None,
) -> Program:
    """One program of a stage as the planner takes it: an argument per input, a result per output, in their order.

    A sum takes its own place, and its memory. A value that takes the place of an argument in the next step lies as
    that argument.

    Args:
        name: of the step.
        carried: argument or piece -> the value that takes its place in the next step.
        donated: arguments and pieces whose memory such a value may take.
        wanted: how outputs have to lie. They get constraints, which the planner prices; but of those that take an
            input's place, the input says it.
    """
    closed = opened(stage_program.jaxpr)

    def results(*_: Any) -> tuple[Any, ...]:
        return tuple(jnp.zeros(aval.shape, aval.dtype) for aval in closed.out_avals)

    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in closed.in_avals]
    traced = traced_step(results, tuple(structs), {}, has_rule=has_rule)
    taken, given = replaced_inputs(stage_program, carried, donated)
    replacing, places = set(taken.values()), {key: i for i, key in enumerate(stage_program.outputs)}
    ends = {places[key]: one for key, one in (wanted or {}).items() if key in places and places[key] not in replacing}
    jaxpr = closed.jaxpr.replace(debug_info=traced.closed.jaxpr.debug_info)  # what arguments are called
    program = traced.read(ClosedJaxpr(_constrained(jaxpr, ends), closed.consts))
    return replace(program, name=f"{name}, {stage_program.name}", carried=taken, donated=given)


def _constrained(jaxpr: Jaxpr, wanted: Mapping[int, NamedSharding]) -> Jaxpr:
    """The jaxpr with a constraint on each of these results."""
    makers = {made: eqn for eqn in jaxpr.eqns for made in eqn.outvars}
    equations, ends = list(jaxpr.eqns), list[Any](jaxpr.outvars)
    for i, sharding in wanted.items():
        end = ends[i]
        if isinstance(end, Var):
            ends[i] = Var(end.aval)
            equations.append(constraint_like(end, ends[i], sharding, makers.get(end)))
    return jaxpr.replace(eqns=equations, outvars=ends, debug_info=jaxpr.debug_info)


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


def in_planning_order(programs: StagePrograms, stage: int) -> list[tuple[int, StageProgram]]:
    """The programs of a stage in the order in which they are planned, with their places in `StagePrograms.programs`."""
    own = [(n, program) for n, program in enumerate(programs.programs) if program.stage == stage]
    return sorted(own, key=lambda pair: (PLANNING_ORDER[pair[1].kind], pair[0]))


@dataclass(frozen=True)
class StageLayouts:
    """What is known of how the values of one stage lie."""

    programs: StagePrograms
    donated: Collection[int]  # arguments of the step
    known: dict[Key, Layout] = field(default_factory=dict)

    def program(self, one: StageProgram, mesh: Any, fingerprint: str | None = None) -> Program:
        """A program for the planner, with constraints on those of its results that lie as other programs have them.

        Stages that were planned together, programs and all, have none: the plans agree anyhow.

        Args:
            mesh: of the stage.
            fingerprint: of the program that a plan was made for, if there is one: it tells which of both it is.
        """
        how = self.programs.name, self.programs.carried, self.programs.given(frozenset(self.donated))
        wanted = {key: NamedSharding(mesh, spec_of(self.known[key])) for key in one.outputs if key in self.known}
        if fingerprint is not None and wanted:
            plain = program_of(one, *how)
            if plain.fingerprint == fingerprint:
                return plain
        return program_of(one, *how, wanted)

    def add(self, one: StageProgram, plan: PlanData) -> None:
        """What the plan of a program says joins what is known."""
        arrays = zip((*one.inputs, *one.outputs), (*plan.arguments, *plan.results), strict=True)
        for key, placed in arrays:
            self.known.setdefault(key, placed.layout)
