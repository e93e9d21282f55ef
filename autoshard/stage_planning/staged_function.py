"""`autoshard(pipeline=...)`: a function that runs in stages, those that the user asks for or the best found."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard.decorated import Parameters, Result, ShardedFunction
from autoshard.errors import MemoryLimitError, MicrobatchError, StageError
from autoshard.layout import without_axes
from autoshard.options import Options
from autoshard.planning import lowered
from autoshard.processes.agreement import Claims, check_alike
from autoshard.program import Program
from autoshard.program.flattening import FlatCall, flattened
from autoshard.program.program import RewrittenPlaces
from autoshard.program.signature import Arguments
from autoshard.specs import check_agrees, fixed_layouts
from autoshard.stage_planning.choosing import (
    ChosenPipeline,
    CuttableSteps,
    PlanningTarget,
    SlowStagesError,
    choose_pipeline,
)
from autoshard.stage_planning.pipeline_plan import (
    PipelinePlan,
    check_fits,
    devices_over,
    figures_of,
    pipeline_plan,
    planned_stages,
)
from autoshard.stage_planning.recomputing.asked_stages import StageFigures, StageLevels
from autoshard.stage_planning.recomputing.levels import RecomputationLevels
from autoshard.stage_planning.space import DISPATCH_SECONDS
from autoshard.stages.pipelined_function import PipelinedFunction
from autoshard.stages.planned_pipeline import PlannedPipeline
from autoshard.stages.reading.plan_source import PlanSource
from autoshard.stages.requests import PipelineRequest
from autoshard.stages.running.runtime import PipelineRuntime
from autoshard.user_plan import Plan
from autoshard.variants.rewriting import RewriteSearch, as_planned
from autoshard.variants.variant import StepVariants, Variant

LEAST_STAGES_SHARE = 0.25  # of the time limit: what is left for stages, however long the plan without them has taken


class PlannedFunction(PipelinedFunction[Parameters, Result]):
    """A function in stages whose plans are given, kept on disk, or those of the process that leads."""

    def __init__(
        self,
        fn: Any,
        *,
        options: Options,
        jit_keywords: Mapping[str, Any],
        request: PipelineRequest,
        given: PipelinePlan | None = None,
    ) -> None:
        """
        Args:
            given: the plan to run by.
        """
        super().__init__(fn, options=options, jit_keywords=jit_keywords, request=request)
        self._given_stages = given
        self._offers: dict[int, tuple[Claims, Plan]] = {}  # by the ids of pipelines: what processes agree on

    def _plan_of(self, traced: StepVariants, program: Program, asked: str, make: Callable[[], Plan]) -> Plan:
        """The plan of a step, which may have stages.

        Args:
            asked: what the user asks of the pipeline.
            make: makes it if it is not there.
        """

        def bound(plan: Plan) -> Plan:
            return self._bound_pipeline(plan, traced, program) if isinstance(plan, PipelinePlan) else plan

        source = PlanSource(self._options, self._jit_keywords, self._group, self._given_stages)
        made, claims = source.plan(program, asked, make, bound)
        if claims is not None and isinstance(made, PipelinePlan):
            self._offers[id(made.pipeline)] = claims, made
        return made

    def _runtime(self, planned: PlannedPipeline) -> PipelineRuntime:
        if self._group is None or id(planned) in self._runtimes:
            return super()._runtime(planned)
        with self._group.joined(runs=True):
            check_alike(self._group, *self._offers[id(planned)])
            self._group.round += 1
            return super()._runtime(planned)

    def _bound_pipeline(self, plan: PipelinePlan, traced: StepVariants, program: Program) -> PipelinePlan:
        """A plan that was read, with the programs of the step.

        Raises:
            PlanError: it was made for another step.
            ConflictError: it contradicts `fixed=`.
        """
        assert plan.saved is not None, "plans of stages have it"
        checked, options = plan.bound_to(program), self._options
        written = as_planned(traced, plan.rewrites, options.mesh.size // plan.saved.stages)
        found = plan.saved.restored(
            written.step, traced.mesh, program, options.mesh, self._jit_keywords, options.topology
        )
        found = replace(found, rewritten=_places(written))
        made = pipeline_plan(found, options, DISPATCH_SECONDS, without=plan.without, bound=plan.bound)
        _check_fixed(made, program, options.fixed)
        return replace(made, warnings=checked.warnings, memory=checked.memory)


def _check_fixed(plan: PipelinePlan, program: Program, fixed: Mapping[str, PartitionSpec]) -> None:
    """
    Raises:
        ConflictError: an argument lies on the devices of a stage otherwise than `fixed=` says.
    """
    assert plan.saved is not None, "plans of stages have it"
    sizes = [{**dict.fromkeys(plan.mesh.shape, 1), **part.axes} for part in plan.saved.parts]
    asked = [fixed_layouts(program, fixed, one) for one in sizes]
    for i, parts in enumerate(plan.argument_parts):
        value = program.arguments[i]
        for part in parts:
            layout = asked[part.device].get(i)
            if layout is None or part.layout is None:
                continue
            if part.shape != value.shape:  # trips of a stack are never split
                layout = ((), *layout[1:])
            single = [axis for axis, size in sizes[part.device].items() if size == 1]
            check_agrees(value, without_axes(layout, single), without_axes(part.layout, single))


class StagedFunction(PlannedFunction[Parameters, Result]):
    """A function that runs in as many stages as the user asks for."""

    def __init__(self, fn: Any, **keywords: Any) -> None:
        super().__init__(fn, **keywords)
        self._plans: dict[int, Plan] = {}  # of pipelines, by their ids

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """How the step runs in stages, for arguments like these: arrays or ShapeDtypeStructs."""
        return self._plans[id(self.pipeline(*args, **kwargs))]

    def _pipeline_of(self, static: tuple[Any, ...], dynamic: Arguments, types: tuple[Any, ...]) -> PlannedPipeline:
        traced = self._traced(static, dynamic, types)
        program = traced.program(Variant())
        asked = str(self._request) + (f", remat={self._options.remat!r}" if self._options.remat else "")
        asked += f", rewrites={self._options.rewrites}" if self._options.rewrites else ""
        found = self._plan_of(traced, program, asked, lambda: self._fastest_rewritten_stages(traced, program))
        assert isinstance(found, PipelinePlan) and found.pipeline is not None, "it has stages"
        self._plans[id(found.pipeline)] = found
        return found.pipeline

    def _fastest_rewritten_stages(self, traced: StepVariants, program: Program) -> PipelinePlan:
        """The stages of the step rewritten as is fastest, if that is asked for."""
        options = self._options
        if not options.rewrites:
            return self._planned_to_fit(traced, program)

        def planned(variants: StepVariants, enough: float, share: float) -> _PlannedStages:
            try:
                return _PlannedStages(self._planned_to_fit(variants, program, until))
            except StageError as error:
                if variants is traced:
                    raise
                raise MicrobatchError(str(error)) from error  # it is not rewritten so

        devices, until = options.mesh.size // self._request.stages, options.deadline()
        return RewriteSearch(traced, options.rewrites, devices, options.topology, planned, until).fastest().plan

    def _planned_to_fit(self, traced: StepVariants, program: Program, until: float = math.inf) -> PipelinePlan:
        """
        Args:
            program: the step as it is written, which may be rewritten in `traced`.
            until: when planning ends, if not earlier by the time limit.

        Raises:
            MemoryLimitError: a stage holds more than the memory limit.
        """
        options = self._options
        if options.remat is None:
            pipeline = self._planned_stages(traced, program, until)
        else:
            asked = self._asked(traced, program, until)
            pipeline = StageLevels(asked, self._stage_figures, asked.until).fastest()
        pipeline = replace(pipeline, rewritten=_places(traced))
        check_fits(pipeline, options, DISPATCH_SECONDS)
        return pipeline_plan(pipeline, options, DISPATCH_SECONDS)

    def _stage_figures(self, pipeline: PlannedPipeline) -> StageFigures:
        figures = figures_of(pipeline, self._options, DISPATCH_SECONDS)
        work = [stage.seconds for stage in planned_stages(pipeline, figures)]
        return StageFigures(figures.seconds, work, devices_over(pipeline, self._options, DISPATCH_SECONDS))


@dataclass(frozen=True)
class _PlannedStages:
    """One way to write a step, planned in the stages that are asked for."""

    plan: PipelinePlan


@dataclass(frozen=True, eq=False)
class _FoundStages:
    """The best stages of a search."""

    pipeline: PlannedPipeline
    bound: float  # s per step: no stages that were searched are faster


def _number_of(found: _FoundStages) -> int:
    """How many parts of the mesh stages have."""
    return found.pipeline.schedule.stages


def _places(traced: StepVariants) -> tuple[RewrittenPlaces, ...]:
    """Where a step was rewritten by laws."""
    return traced.program(Variant()).rewritten


@dataclass(frozen=True, eq=False)
class _Choice:
    """What is best for one signature: a pipeline, or the plan without stages."""

    pipeline: PlannedPipeline | None
    plan: Plan


class AutomaticPipeline(PlannedFunction[Parameters, Result]):
    """A function that runs in stages where that is predicted to be faster, or alone fits the memory limit."""

    _plain_kind: type[ShardedFunction[..., Any]] = ShardedFunction  # of the step without stages

    def __init__(self, fn: Any, *, options: Options, jit_keywords: Mapping[str, Any]) -> None:
        super().__init__(fn, options=options, jit_keywords=jit_keywords, request=PipelineRequest(1, 1))
        self._plain = self._plain_kind(fn, options=options, jit_keywords=jit_keywords)
        self._choices: dict[Any, _Choice] = {}

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        leaves = flattened(self._static.split(args, kwargs)[1]).arrays
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if not is_traced and self._choice(args, kwargs, runs=True).pipeline is None:
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

    def _choice(self, args: Any, kwargs: Any, *, runs: bool = False) -> _Choice:
        static, dynamic = self._static.split(args, kwargs)
        flat = flattened(dynamic)
        key = self._key(static, dynamic, flat)
        # Threads that call the step first plan it once; processes that share its mesh know of each other.
        with self._lock if self._group is None else self._group.joined(runs=runs):
            if key not in self._choices:
                self._choices[key] = self._chosen(args, kwargs, static, dynamic, flat)
            return self._choices[key]

    def _chosen(self, args: Any, kwargs: Any, static: Any, dynamic: Arguments, flat: FlatCall) -> _Choice:
        traced = self._traced(static, dynamic, self._types(flat.arrays, static, dynamic))
        program = traced.program(Variant())
        asked = "auto" + (f", remat={self._options.remat!r}" if self._options.remat else "")
        asked += f", rewrites={self._options.rewrites}" if self._options.rewrites else ""
        made = self._plan_of(traced, program, asked, lambda: self._fastest_of_all(args, kwargs, traced, program))
        if not isinstance(made, PipelinePlan):
            return _Choice(None, replace(self._plain.plan(*args, **kwargs), warnings=made.warnings))
        assert made.pipeline is not None, "it is bound"
        self._pipelines[self._key(static, dynamic, flat)] = made.pipeline
        return _Choice(made.pipeline, made)

    def _fastest_of_all(self, args: Any, kwargs: Any, traced: StepVariants, program: Program) -> Plan:
        """The plan of the best pipeline; that without stages, with a remark, where it is faster or alone fits."""
        plain: Plan | MemoryLimitError
        begin, limit = time.monotonic(), self._options.time_limit
        try:
            plain = self._plain.plan(*args, **kwargs)
        except MemoryLimitError as error:
            plain = error
        try:
            until = max(begin + limit, time.monotonic() + LEAST_STAGES_SHARE * limit)
            # Of a step that may be rewritten, stages that are too slow may not be so afterwards.
            is_final = not self._options.rewrites
            enough = plain.predicted.step_seconds if isinstance(plain, Plan) and is_final else math.inf
            found = self._fastest_found(traced, program, until, enough)
        except SlowStagesError as error:
            return _without(plain, f"pipeline='auto': {error}")
        except (MicrobatchError, StageError) as error:
            return _without(plain, f"pipeline='auto': the step runs without stages, as it cannot be cut: {error}")
        if found is None:
            why = "was found that fits" if time.monotonic() <= until else "that fits was found within the time limit"
            return _without(plain, f"pipeline='auto': no pipeline {why}.")
        beside = plain.predicted if isinstance(plain, Plan) else str(plain).splitlines()[0]
        bound = min(found.bound, plain.bound if isinstance(plain, Plan) else found.bound)
        made = pipeline_plan(found.pipeline, self._options, DISPATCH_SECONDS, without=beside, bound=bound)
        if isinstance(plain, Plan) and plain.predicted.step_seconds <= made.predicted.step_seconds:
            seconds = made.predicted.step_seconds
            return _without(plain, f"pipeline='auto': the best pipeline found takes {seconds:.4g} s per step.")
        return made

    def _fastest_found(
        self, traced: StepVariants, program: Program, until: float, enough: float
    ) -> _FoundStages | None:
        """The best stages found of the step as it is written, or rewritten so that as many stages are faster."""
        first, options = self._found(traced, program, until, enough), self._options
        if first is None or not options.rewrites:
            return first
        count = _number_of(first)

        def planned(variants: StepVariants, enough: float, share: float) -> _PlannedStages:
            found = first if variants is traced else self._found_otherwise(variants, program, until, enough, count)
            bound = pipeline_plan(found.pipeline, options, DISPATCH_SECONDS, bound=found.bound)
            return _PlannedStages(bound)

        devices = options.mesh.size // count
        best = RewriteSearch(traced, options.rewrites, devices, options.topology, planned, until).fastest().plan
        assert best.pipeline is not None, "it was made here"
        return _FoundStages(best.pipeline, best.bound)

    def _found_otherwise(
        self, variants: StepVariants, program: Program, until: float, enough: float, count: int
    ) -> _FoundStages:
        """The best stages found of the rewritten step.

        Raises:
            MicrobatchError: there are none, or of another number, for whose devices laws apply in other places.
        """
        try:
            found = self._found(variants, program, until, enough)
        except StageError as error:
            raise MicrobatchError(str(error)) from error
        if found is None or _number_of(found) != count:
            raise MicrobatchError("the rewritten step has no such stages")
        return found

    def _found(self, traced: StepVariants, program: Program, until: float, enough: float) -> _FoundStages | None:
        options = self._options
        fixed = fixed_layouts(program, options.fixed, dict(options.mesh.shape))
        own = {i: layout for i, layout in fixed.items() if i < len(program.own_arguments)}
        levels = None if options.remat is None else RecomputationLevels.of(traced.step, options.topology)
        how: dict[str, Any] = {"tactics": options.tactics, "search": options.search}
        steps = CuttableSteps(traced.step, program, traced.mesh, own, levels, **how)
        machine = PlanningTarget(dict(options.mesh.shape), options.topology, options.backend, options.memory)
        again = None if levels is None else levels.seconds
        chosen = choose_pipeline(steps, machine, until=until, levels=again, enough=enough)
        if chosen is None:
            return None
        pipeline = planned_pipeline(chosen, program, options, self._jit_keywords)
        return _FoundStages(replace(pipeline, rewritten=_places(traced)), chosen.bound)


def _without(plain: Plan | MemoryLimitError, remark: str) -> Plan:
    """The plan without stages, and why it has none."""
    if isinstance(plain, MemoryLimitError):
        raise plain
    return replace(plain, warnings=(*plain.warnings, remark))


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
