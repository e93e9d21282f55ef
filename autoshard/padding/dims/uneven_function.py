"""`autoshard(pad="auto")`: a decorated function whose dims are padded, where that is faster."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from autoshard.arrays.arguments import type_of
from autoshard.decorated import Parameters, Result, ShardedFunction
from autoshard.errors import MemoryLimitError, MicrobatchError, PlanError
from autoshard.options import Options
from autoshard.padding.batches import uneven_batch
from autoshard.padding.dims.classes import DimClasses, Node, PaddedClass
from autoshard.padding.dims.rewriting import UnevenStep
from autoshard.padding.flat_step import FlatStep, is_traced_for
from autoshard.program import Program
from autoshard.program.flattening import flattened
from autoshard.program.signature import Arguments
from autoshard.user_plan import Plan

MOST_CLASSES = 3  # that are tried, those with the most work
Chosen = tuple[ShardedFunction[..., Any] | None, str]  # the step in its best way, None if there is one; and a remark


class _StepOfPaddedDims(ShardedFunction[Parameters, Result]):
    """The step that pads dims inside."""

    def _finished(self, program: Program) -> Program:
        return replace(super()._finished(program), departure="dims are padded inside the step (pad='auto')")


class UnevenFunction(ShardedFunction[Parameters, Result]):
    """A function some dims of which are padded inside the step. Arguments and results keep their shapes."""

    def __init__(
        self, fn: Any, *, options: Options, jit_keywords: Mapping[str, Any], given: Plan | None = None
    ) -> None:
        super().__init__(fn, options=options, jit_keywords=jit_keywords, given=given)
        self._given_keywords = dict(jit_keywords)
        self._steps: dict[Any, Chosen] = {}

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        step, _ = self._chosen(args, kwargs)
        if step is None:
            return super().__call__(*args, **kwargs)
        made: Result = step(*args, **kwargs)
        return made

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """How the step is sharded for arguments like these, its dims padded where that is faster."""
        step, remark = self._chosen(args, kwargs)
        made = super().plan(*args, **kwargs) if step is None else step.plan(*args, **kwargs)
        advice = uneven_batch(self.trace(*args, **kwargs), self._options.mesh.shape)  # to pad, as is done here
        warnings = [one for one in (*made.warnings, remark) if one and one not in advice]
        return replace(made, warnings=tuple(warnings))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The annotated step as it was chosen, lowered."""
        step, _ = self._chosen(args, kwargs)
        return super().lower(*args, **kwargs) if step is None else step.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The step's program as it was chosen."""
        step, _ = self._chosen(args, kwargs)
        return super().trace(*args, **kwargs) if step is None else step.trace(*args, **kwargs)

    def _chosen(self, args: Any, kwargs: Any) -> Chosen:
        static, dynamic = self._static.split(args, kwargs)
        flat = flattened(dynamic)
        key = static, tuple(map(type, static)), flat.structure, tuple(map(type_of, flat.arrays))
        if key not in self._steps:
            self._steps[key] = self._as_chosen(args, kwargs, static, dynamic)
        return self._steps[key]

    def _as_chosen(self, args: Any, kwargs: Any, static: tuple, dynamic: Arguments) -> Chosen:
        """The step as written or padded, whichever is predicted to be fastest within the memory limit."""
        as_written = FlatStep(self._fn, self._static, static, dynamic)
        closed = as_written.traced()
        classes = DimClasses(closed)
        uneven = list(classes.uneven(self._options.mesh.shape).items())[:MOST_CLASSES]
        if not uneven:
            return None, ""
        carried = super().trace(*args, **kwargs).carried.values()
        ways: list[Mapping[Node, PaddedClass]] = [{}, dict(uneven)]
        ways += [{root: one} for root, one in uneven if len(uneven) > 1]
        options = replace(self._options, time_limit=self._options.time_limit / len(ways))  # one limit for all of them
        best: tuple[float, Chosen] | None = None
        errors: list[MemoryLimitError | MicrobatchError | PlanError] = []
        for padded in ways:
            uneven_step = UnevenStep(closed, classes, padded, carried)
            fn = as_written.running(functools.partial(_run, as_written, uneven_step)) if padded else self._fn
            kind = _StepOfPaddedDims if padded else ShardedFunction
            step = kind(fn, options=options, jit_keywords=self._given_keywords, given=self._given)
            try:
                plan = step.plan(*args, **kwargs)
            except (MemoryLimitError, MicrobatchError, PlanError) as error:
                if isinstance(error, PlanError) and self._given is None:
                    raise
                errors.append(error)  # a given plan is of one of the ways; in microbatches the batch cannot be padded
                continue
            if best is None or plan.predicted.step_seconds < best[0]:
                best = plan.predicted.step_seconds, (step, _remark(padded.values()))
        if best is None:
            raise errors[0]
        return best[1]


def _run(as_written: FlatStep, step: UnevenStep, *arrays: Any) -> list[Any]:
    """The padded step on arrays, which in a microbatch have fewer rows than those that it was traced for."""
    if not is_traced_for(step.closed, arrays):
        step = step.traced_as(as_written.traced(arrays))
    return step(*arrays)


def _remark(padded: Any) -> str:
    sizes = ", ".join(f"{one.members} to {one.padded}" for one in padded)
    return f"pad='auto': dims are padded inside the step, from {sizes}, which the devices divide." if sizes else ""
