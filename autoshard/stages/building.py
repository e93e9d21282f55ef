"""Equations of one stage in, the program that computes them out: a jaxpr from named inputs to named outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.jaxprs import ClosedJaxpr, Jaxpr, JaxprEqn, Var, aval_of, evaluated, is_array
from autoshard.microbatches.canonical_forms import Form, StepForms, VariableNumbers
from autoshard.microbatches.loop import MicrobatchedStep
from autoshard.microbatches.microbatch import Microbatch
from autoshard.microbatches.relations import BatchRows, Invariant, PartialResult
from autoshard.microbatches.rows import MicrobatchPlace, taken
from autoshard.stages.placement.post_loop import PostLoopPlacement
from autoshard.stages.programs import MICROBATCH, Key, StageProgram
from autoshard.stages.roles import PipelineRoles, variables


@dataclass(frozen=True)
class VariableKeys:
    """Keys of variables of the whole step."""

    outside: Mapping[Var, Key]  # arguments, pieces and constants
    numbers: Mapping[Var, int]  # of all others

    @classmethod
    def of(cls, jaxpr: Jaxpr, pieces: Sequence[Var], equations: Sequence[JaxprEqn]) -> VariableKeys:
        outside = {var: Key("argument", i) for i, var in enumerate(jaxpr.invars)}
        outside |= {var: Key("constant", i) for i, var in enumerate(jaxpr.constvars)}
        outside |= {var: Key("piece", i) for i, var in enumerate(pieces)}
        made = dict.fromkeys(var for eqn in equations for var in eqn.outvars)
        return cls(outside, {var: i for i, var in enumerate(made)})

    def key(self, kind: str, var: Var) -> Key:
        return Key(kind, self.numbers[var])

    def late(self, var: Var) -> Key:
        return self.key("late", var)


@dataclass
class Builder:
    """Makes the programs of all stages of one step."""

    step: MicrobatchedStep
    names: VariableKeys
    roles: PipelineRoles
    apart: frozenset[int] = frozenset()  # equations before the loop that no program makes itself
    types: dict[Key, Any] = field(default_factory=dict)  # of all inputs and outputs so far
    _traced: dict[Form, ClosedJaxpr] = field(default_factory=dict, repr=False)  # like programs are one jaxpr

    @cached_property
    def forms(self) -> StepForms:
        return StepForms(self.step)

    @cached_property
    def bare(self) -> frozenset[int]:
        """Equations before the loop that read nothing, as counts and zeros: every program makes them itself."""
        found: set[int] = set()
        for i, eqn in enumerate(self.step.equations):
            if self.step.proof.places[i] is not Invariant.BEFORE or eqn.effects or i in self.apart:
                continue
            if all(self.step.makers.get(var) in found for var in variables(eqn.invars)):
                found.add(i)
        return frozenset(found)

    def sources_before_loop(self, wanted: Iterable[Var]) -> list[Var]:
        """The arguments, pieces and constants that values known before the loop are made of."""
        todo, seen = list(wanted), dict[Var, None]()
        while todo:
            var = todo.pop()
            if var in seen or self.step.in_loop(var):
                continue
            seen[var] = None
            if var not in self.names.outside:
                todo += self.roles.inputs(self.step.makers[var])
        return [var for var in seen if var in self.names.outside]

    def closure(self, wanted: Iterable[Var], among: Collection[int]) -> list[int]:
        """The equations of `among` that variables are made by, in their order."""
        found: set[int] = set()
        todo = [var for var in wanted if var not in self.names.outside]
        while todo:
            i = self.step.makers.get(todo.pop())
            if i is not None and i in among and i not in found:
                found.add(i)
                todo += [var for var in self.roles.inputs(i) if var not in self.names.outside]
        return sorted(found)

    def program(
        self, kind: str, stage: int, run: Callable[..., Any], form: Form, inputs: Sequence[Key], outputs: Sequence[Key]
    ) -> StageProgram:
        """A program of a function of arrays.

        Args:
            form: equal for functions that make the same of arrays of the same types.
        """
        avals = [self.types[key] for key in inputs]
        known = *form, *avals
        if known not in self._traced:
            self._traced[known] = jax.make_jaxpr(run)(*avals)
        closed = self._traced[known]
        for key, aval in zip(outputs, closed.out_avals, strict=True):
            self.types.setdefault(key, _struct(aval))
        return StageProgram(kind, stage, closed, tuple(inputs), tuple(outputs))

    # Loop programs.

    def loop_program(
        self, kind: str, stage: int, own: Sequence[int], handed: Collection[Var], again: Sequence[int]
    ) -> StageProgram | None:
        """The program of one microbatch; None if it makes nothing that others read.

        Args:
            own: equations of this program alone.
            handed: values that other programs read, among those of all equations.
            again: equations of programs before that it computes, too.
        """
        step, roles, names = self.step, self.roles, self.names
        made = [var for i in own for var in step.equations[i].outvars]
        values = [var for var in made if var in handed]
        rows = [var for var in step.needs.rows if step.makers[var] in own]
        sums = [var for var in step.needs.sums if step.makers[var] in own]
        effects = [i for i in own if step.equations[i].effects]
        if not values and not rows and not sums and not effects:
            return None
        start = [*values, *rows, *sums, *(var for i in effects for var in roles.inputs(i))]
        equations = sorted({*self.closure(start, {*own, *again, *roles.free}), *effects})
        here = {var for i in equations for var in step.equations[i].outvars}
        read = [var for var in variables(a for i in equations for a in step.equations[i].invars) if var not in here]
        bare = self.closure(read, self.bare)
        made_bare = [var for i in bare for var in step.equations[i].outvars]
        read = [var for var in read if var not in made_bare]
        keys = [names.outside.get(var) or names.key("value" if step.in_loop(var) else "early", var) for var in read]
        summed = [var for var in sums if isinstance(step.proof.relations[var], PartialResult)]
        for var, key in zip(read, keys, strict=True):
            self.types.setdefault(key, _struct(aval_of(step.twins[var] if step.in_loop(var) else var)))
        for var in summed:
            self.types.setdefault(names.key("sum", var), _struct(jax.eval_shape(lambda var=var: step.start(var))))
        self.types[MICROBATCH] = jax.ShapeDtypeStruct((), jnp.int32)
        taken_rows = [not step.in_loop(var) and isinstance(step.proof.relations[var], BatchRows) for var in read]
        asks = Microbatch(step.proof, step.split, MicrobatchPlace(0, 0)).is_touched
        has_index = any(taken_rows) or any(asks((i,)) for i in equations)

        def run(*arrays: Any) -> list[Any]:
            place = MicrobatchPlace(arrays[0] if has_index else 0, 0)
            arrays = arrays[has_index:]
            env: dict[Var, Any] = {}
            for var, array, has_rows in zip(read, arrays, taken_rows, strict=False):
                env[step.twins[var]] = taken(array, step.relation(var), step.split, place) if has_rows else array
            known = evaluated([step.equations[i] for i in bare], {}, made_bare)
            env |= {step.twins[var]: x for var, x in zip(made_bare, known, strict=True)}
            wanted = [*values, *rows, *sums]
            pairs = [(step.equations[i], step.small[i], (i,)) for i in equations]
            results = Microbatch(step.proof, step.split, place).run(pairs, env, [step.twins[var] for var in wanted])
            totals = dict(zip(summed, arrays[len(read) :], strict=True))
            return [
                step.added(var, totals.get(var), one) if n >= len(values) + len(rows) else one
                for n, (var, one) in enumerate(zip(wanted, results, strict=True))
            ]

        number = VariableNumbers()
        relations = [step.relation(var) if has_rows else None for var, has_rows in zip(read, taken_rows, strict=True)]
        form = (
            "loop",
            has_index,
            *(tuple(number(step.twins[var]) for var in some) for some in (read, made_bare)),
            tuple(relations),
            tuple(number.equation(step.equations[i]) for i in bare),
            tuple(number(var) for var in made_bare),
            tuple(self.forms.in_microbatch(i, number) for i in equations),
            *(tuple(number(step.twins[var]) for var in some) for some in (values, rows, sums)),
            tuple((var in summed, self.forms.total(var)) for var in sums),
        )
        inputs = [*[MICROBATCH] * has_index, *keys, *(names.key("sum", var) for var in summed)]
        outputs = [
            *(names.key("value", var) for var in values),
            *(names.key("rows", var) for var in rows),
            *(names.key("sum", var) for var in sums),
        ]
        return self.program(kind, stage, run, form, inputs, outputs)

    def before_program(self, stage: int, programs: Sequence[StageProgram]) -> StageProgram | None:
        """What a stage computes before its first microbatch; None if that is nothing."""
        step, names = self.step, self.names
        wanted = dict.fromkeys(key for program in programs for key in program.inputs if key.kind in ("early", "sum"))
        if not wanted:
            return None
        by_number = {number: var for var, number in names.numbers.items()}
        early = [by_number[key.number] for key in wanted if key.kind == "early"]
        sums = [by_number[key.number] for key in wanted if key.kind == "sum"]
        # Sums over the batch that microbatches need are made of all of its rows, by equations of the loop, too.
        equations = [step.equations[i] for i in self.closure(early, range(len(step.equations)))]
        read = [var for var in variables(a for eqn in equations for a in eqn.invars) if var in names.outside]
        for var in read:
            self.types.setdefault(names.outside[var], _struct(aval_of(var)))

        def run(*arrays: Any) -> list[Any]:
            made = evaluated(equations, dict(zip(read, arrays, strict=True)), early)
            return [*made, *map(step.start, sums)]

        number = VariableNumbers()
        variables_of = tuple(map(number, read)), tuple(map(number.equation, equations)), tuple(map(number, early))
        form = "before", *variables_of, tuple(map(self.forms.total, sums))
        outputs = [*(names.key("early", var) for var in early), *(names.key("sum", var) for var in sums)]
        return self.program("before", stage, run, form, [names.outside[var] for var in read], outputs)

    # After the last microbatch.

    def after_programs(
        self, placed: PostLoopPlacement, results: Sequence[Any], located: Mapping[Var, int]
    ) -> tuple[StageProgram, ...]:
        """The programs that make the results of the step.

        Args:
            results: variables that are results of the step, or pieces of one.
            located: sums and rows -> their stage.
        """
        step, names = self.step, self.names
        ends = dict.fromkeys(var for var in results if isinstance(var, Var) and var not in names.outside)
        loop = {*step.needs.sums, *step.needs.rows}
        groups: list[tuple[int, list[int], list[Var]]] = [(one.stage, [*one.equations], []) for one in placed.groups]
        alone: dict[int, list[Var]] = {}
        last = max(located.values(), default=0)
        for var in ends:
            if var in loop:
                alone.setdefault(located[var], []).append(var)
            elif step.makers[var] in placed.floating:
                alone.setdefault(last, []).append(var)
        for stage, wanted in sorted(alone.items()):
            own = [group for group in groups if group[0] == stage]
            if own:
                own[0][2].extend(wanted)
            else:
                groups.append((stage, [], wanted))
        read_by: dict[Var, set[int]] = {}
        for n, (_, equations, _) in enumerate(groups):
            for i in equations:
                for var in self.roles.inputs(i):
                    read_by.setdefault(var, set()).add(n)
        found = []
        for n, (stage, equations, wanted) in enumerate(groups):
            made = [var for i in equations for var in step.equations[i].outvars]
            handed = [var for var in made if var in ends or read_by.get(var, set()) - {n}]
            program = self.after_program(stage, equations, [*handed, *wanted], placed.floating, loop)
            if program.outputs or program.jaxpr.jaxpr.effects:
                found.append(program)
        return tuple(found)

    def after_program(
        self, stage: int, own: Sequence[int], wanted: Sequence[Var], floating: Collection[int], loop: Collection[Var]
    ) -> StageProgram:
        step, names = self.step, self.names
        reads = [*wanted, *(var for i in own for var in self.roles.inputs(i))]
        equations = sorted({*own, *self.closure((var for var in reads if var not in loop), floating)})
        here = {var for i in equations for var in step.equations[i].outvars}
        read = [
            var
            for var in variables([*(a for i in equations for a in step.equations[i].invars), *wanted])
            if var not in here
        ]
        inputs: list[Key] = []
        for var in read:
            if var in loop:
                has_rows = step.is_stacked(var)
                inputs += [names.key("rows" if has_rows else "sum", var)] * (step.split.count if has_rows else 1)
            else:
                inputs.append(names.outside.get(var) or names.late(var))
                self.types.setdefault(inputs[-1], _struct(aval_of(var)))

        def run(*arrays: Any) -> list[Any]:
            env, rest = {}, list(arrays)
            for var in read:
                if var not in loop:
                    env[var] = rest.pop(0)
                elif step.is_stacked(var):
                    several = [rest.pop(0) for _ in range(step.split.count)]
                    env[var] = step.joined(var, jnp.stack(several))
                else:
                    env[var] = step.total(var, rest.pop(0))
            return step.late(equations, env, wanted)

        number = VariableNumbers()
        form = (
            "after",
            tuple((number(var), (step.relation(var), self.forms.total(var)) if var in loop else None) for var in read),
            tuple((number.equation(step.equations[i]), i in step.proof.running.equations) for i in equations),
            tuple(map(number, wanted)),
            tuple((number(var), number(made)) for var, made in step.proof.running.results.items() if var in read),
        )
        return self.program("after", stage, run, form, inputs, [names.late(var) for var in wanted])


def _struct(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) if is_array(aval) else aval
