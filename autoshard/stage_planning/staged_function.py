"""`autoshard(pipeline=...)`: a function that runs in stages, those that the user asks for or the best found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from autoshard.decorated import Parameters, Result, ShardedFunction
from autoshard.errors import MemoryLimitError, MicrobatchError, StageError
from autoshard.options import Options
from autoshard.planning import lowered
from autoshard.program import Program
from autoshard.program.flattening import FlatCall, flattened
from autoshard.program.signature import Arguments
from autoshard.report.units import bytes_text
from autoshard.specs import fixed_layouts
from autoshard.stage_planning.choosing import ChosenPipeline, CuttableSteps, Machine, choose_pipeline
from autoshard.stage_planning.pipeline_plan import figures_of, pipeline_plan
from autoshard.stage_planning.space import DISPATCH_SECONDS
from autoshard.stages.pipelined_function import PipelinedFunction, PlannedPipeline
from autoshard.stages.requests import PipelineRequest
from autoshard.user_plan import Plan
from autoshard.variants.variant import Variant


class StagedFunction(PipelinedFunction[Parameters, Result]):
    """A function that runs in as many stages as the user asks for."""

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """How the step runs in stages, for arguments like these: arrays or ShapeDtypeStructs."""
        made = self.pipeline(*args, **kwargs)
        return pipeline_plan(made, self._options, DISPATCH_SECONDS)

    def _pipeline_of(self, static: tuple[Any, ...], dynamic: Arguments, types: tuple[Any, ...]) -> PlannedPipeline:
        """
        Raises:
            MemoryLimitError: a stage holds more than the memory limit.
        """
        made, options = super()._pipeline_of(static, dynamic, types), self._options
        peaks = figures_of(made, options, DISPATCH_SECONDS).peak_bytes
        device = max(range(len(peaks)), key=peaks.__getitem__)
        usable = options.memory * options.backend.usable
        if peaks[device] > usable:
            raise MemoryLimitError(
                f"pipeline: stage {device} of {made.programs.name} is predicted to hold {bytes_text(peaks[device])} "
                f"per device, and {bytes_text(usable)} of {bytes_text(options.memory)} are usable.\n"
                "Use more stages, a schedule with fewer microbatches in flight, more memory, or pipeline='auto'.",
                budget=options.memory,
                needed=peaks[device] / options.backend.usable,
            )
        return made


@dataclass(frozen=True, eq=False)
class _Choice:
    """What is best for one signature: a pipeline, or the plan without stages."""

    pipeline: PlannedPipeline | None
    plan: Plan


class AutomaticPipeline(PipelinedFunction[Parameters, Result]):
    """A function that runs in stages where that is predicted to be faster, or alone fits the memory limit."""

    def __init__(self, fn: Any, *, options: Options, jit_keywords: Mapping[str, Any]) -> None:
        super().__init__(fn, options=options, jit_keywords=jit_keywords, request=PipelineRequest(1, 1))
        self._plain: ShardedFunction[Parameters, Result] = ShardedFunction(
            fn, options=options, jit_keywords=jit_keywords
        )
        self._choices: dict[Any, _Choice] = {}

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        leaves = flattened(self._static.split(args, kwargs)[1]).arrays
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if not is_traced and self._choice(args, kwargs).pipeline is None:
            return self._plain(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The faster of the best pipeline found and of the best plan without stages.

        Raises:
            MemoryLimitError: neither fits.
        """
        return self._choice(args, kwargs).plan

    def pipeline(self, *args: Any, **kwargs: Any) -> PlannedPipeline:
        """The stages for arguments like these: arrays or ShapeDtypeStructs.

        Raises:
            StageError: the step runs without stages.
        """
        found = self._choice(args, kwargs)
        if found.pipeline is None:
            raise StageError(
                f"pipeline='auto': {found.plan.name} runs without stages.\n"
                "plan(...) says why. Ask for stages with pipeline=dict(stages=...)."
            )
        return found.pipeline

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The annotated step, lowered, if it has no stages.

        Raises:
            StageError: it has stages, and so is several programs.
        """
        if self._choice(args, kwargs).pipeline is None:
            return self._plain.lower(*args, **kwargs)
        return super().lower(*args, **kwargs)

    def _choice(self, args: Any, kwargs: Any) -> _Choice:
        static, dynamic = self._static.split(args, kwargs)
        flat = flattened(dynamic)
        key = self._key(static, dynamic, flat)
        with self._lock:  # threads that call the step first plan it once
            if key not in self._choices:
                self._choices[key] = self._chosen(args, kwargs, static, dynamic, flat)
            return self._choices[key]

    def _chosen(self, args: Any, kwargs: Any, static: Any, dynamic: Arguments, flat: FlatCall) -> _Choice:
        plain: Plan | MemoryLimitError
        try:
            plain = self._plain.plan(*args, **kwargs)
        except MemoryLimitError as error:
            plain = error
        try:
            found = self._found(static, dynamic, flat)
        except (MicrobatchError, StageError) as error:
            return self._without(plain, f"pipeline='auto': the step runs without stages, as it cannot be cut: {error}")
        if found is None:
            return self._without(plain, "pipeline='auto': no pipeline was found that fits.")
        pipeline, chosen = found
        beside = plain.predicted if isinstance(plain, Plan) else str(plain).splitlines()[0]
        bound = min(chosen.bound, plain.bound if isinstance(plain, Plan) else chosen.bound)
        made = pipeline_plan(pipeline, self._options, DISPATCH_SECONDS, without=beside, bound=bound)
        if isinstance(plain, Plan) and plain.predicted.step_seconds <= made.predicted.step_seconds:
            seconds = made.predicted.step_seconds
            return self._without(plain, f"pipeline='auto': the best pipeline found takes {seconds:.4g} s per step.")
        self._pipelines[self._key(static, dynamic, flat)] = pipeline
        return _Choice(pipeline, made)

    def _without(self, plain: Plan | MemoryLimitError, remark: str) -> _Choice:
        if isinstance(plain, MemoryLimitError):
            raise plain
        return _Choice(None, replace(plain, warnings=(*plain.warnings, remark)))

    def _found(self, static: Any, dynamic: Arguments, flat: FlatCall) -> tuple[PlannedPipeline, ChosenPipeline] | None:
        options = self._options
        traced = self._traced(static, dynamic, self._types(flat.arrays, static, dynamic))
        program = traced.program(Variant())
        fixed = fixed_layouts(program, options.fixed, dict(options.mesh.shape))
        own = {i: layout for i, layout in fixed.items() if i < len(program.own_arguments)}
        steps = CuttableSteps(traced.step, program, traced.mesh, own)
        machine = Machine(dict(options.mesh.shape), options.topology, options.backend, options.memory)
        chosen = choose_pipeline(steps, machine)
        return None if chosen is None else (planned_pipeline(chosen, program, options, self._jit_keywords), chosen)


def planned_pipeline(
    chosen: ChosenPipeline, program: Program, options: Options, jit_keywords: Mapping[str, Any]
) -> PlannedPipeline:
    """A chosen pipeline as the runtime takes it."""
    found = chosen.pipeline
    stages, made = found.simulated.choice.stages, found.simulated.timeline.schedule
    first_of = [made.placement.index(device) for device in range(made.stages)]
    meshes = tuple(chosen.shapes[stages[v].table.shape.name].on(options.mesh, stages[v].start) for v in first_of)
    plans: dict[int, Plan] = {}
    for stage, cost in enumerate(found.costs):
        mesh: Any = meshes[made.placement[stage]]
        own = zip(found.cut.of_stage(stage), found.cut.traced(stage), cost.plans(mesh), strict=True)
        for stage_program, traced, data in own:
            plan = Plan.of(data).bound_to(traced)
            plans[id(stage_program)] = lowered(traced, replace(plan, name=traced.name), jit_keywords)
    order = found.cut.programs.programs
    layers = tuple(tuple(chosen.units[stage.first : stage.last]) for stage in stages)
    return PlannedPipeline(
        found.cut.programs,
        tuple(plans[id(one)] for one in order),
        made,
        meshes,
        program,
        layers,
        tuple(tuple(stages[v].devices) for v in first_of),
    )
