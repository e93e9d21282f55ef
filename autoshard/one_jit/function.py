"""`autoshard(pipeline=dict(..., backend="one_jit"))`: the step in equal stages as one jitted program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.decorated import Parameters, PlannedStep, Result, ShardedFunction
from autoshard.errors import ArgumentError, MemoryLimitError, MeshError, PlanError
from autoshard.jaxprs import as_function
from autoshard.layout import Layout, shards
from autoshard.lower import Lowering, Step
from autoshard.mesh.collectives import Collective
from autoshard.mesh.links import Link
from autoshard.one_jit.lockstep import Lockstep
from autoshard.one_jit.uniform import UniformStages, uniform_stages
from autoshard.one_jit.whole_step import WholeStep
from autoshard.options import Options
from autoshard.plans.annotations import Annotations
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.plans.prediction import Prediction
from autoshard.program import Program, context
from autoshard.replanning.planner import Planner
from autoshard.report.units import bytes_text
from autoshard.specs import fixed_layouts
from autoshard.stage_planning.planned_stage import stage_memory
from autoshard.stages.cutting import CuttableStep
from autoshard.stages.planning import PLANNING_ORDER, StagePlanner
from autoshard.stages.programs import LOOP, Key
from autoshard.stages.requests import PipelineRequest
from autoshard.stages.sub_meshes import stage_axis
from autoshard.user_plan import Plan
from autoshard.variants.variant import StepVariants, Variant


@dataclass(frozen=True, eq=False, repr=False)
class OneJitPlan(Plan):
    """How a step in equal stages lies, and what its program is predicted to take."""

    def dumps(self) -> str:
        """
        Raises:
            PlanError: always: files of plans have no such program.
        """
        self._refuse("saved")

    def explain(self, path: str) -> Any:
        """
        Raises:
            PlanError: always.
        """
        self._refuse("explained")

    def what_if(self, **wish: Any) -> Plan:
        """
        Raises:
            PlanError: always.
        """
        self._refuse("planned again under a wish")

    def _refuse(self, what: str) -> NoReturn:
        raise PlanError(
            f"the plan of {self.name} is for stages in one program (backend='one_jit'), and cannot be {what}.\n"
            "Its arguments' shardings can be written as code: plan.to_code()."
        )


class OneJitStep(Step):
    """The step in equal stages under `jax.jit`."""

    def __init__(self, program: Program, plan: PlanData, whole: WholeStep, **jit_keywords: Any):
        self._program, self._plan = program, plan
        count = len(plan.arguments)

        def run(*leaves: Any) -> tuple[Any, ...]:
            return tuple(whole(plan.mesh, leaves[:count]))

        self.flat = jax.jit(
            run,
            in_shardings=(*plan.flat_in_shardings, *plan.captured_shardings),
            out_shardings=plan.flat_out_shardings,
            donate_argnums=tuple(sorted(program.donated)),
            **jit_keywords,
        )

    @functools.cached_property
    def transformed(self) -> Callable[..., tuple]:
        """As it is written: under a transformation the step has no stages."""
        function = as_function(self._program.jaxpr)
        return jax.jit(lambda *leaves: tuple(function(*leaves)))


@dataclass(frozen=True, eq=False)
class OneJitLowering(Lowering):
    """The step in equal stages and its plan; called, it lowers them."""

    whole: WholeStep = field(kw_only=True)

    @functools.cached_property
    def step(self) -> Step:
        return OneJitStep(self.program, self.plan, self.whole, **self.jit_keywords)

    def __call__(self, mesh: Mesh | AbstractMesh | None = None) -> jax.stages.Lowered:
        if mesh is not None and mesh is not self.plan.mesh:
            return replace(self, plan=self.plan.on(mesh))()
        return super().__call__()


class OneJitFunction(ShardedFunction[Parameters, Result]):
    """A function that runs in equal stages, in lockstep, as one program."""

    def __init__(self, fn: Any, *, options: Options, jit_keywords: Mapping[str, Any], request: PipelineRequest) -> None:
        if options.microbatches != 1:
            raise ArgumentError(
                "pipeline= and microbatches= both say in how many parts the batch runs.\n"
                "Leave microbatches= out, and write pipeline=dict(stages=..., microbatches=...)."
            )
        # What a step says of layouts is said of the whole mesh, which no stage has.
        super().__init__(fn, options=replace(options, ignore_constraints=True), jit_keywords=jit_keywords)
        if self._group is not None:
            raise MeshError(
                "pipeline: backend='one_jit' runs in one process as yet, and the mesh has devices of several.\n"
                "Leave backend= out: stages as programs of their own run on several processes."
            )
        sizes = list(options.mesh.shape.items())
        self._axis, size = sizes[stage_axis(options.mesh, request.stages)]
        if size != request.stages:
            raise MeshError(
                f"pipeline: backend='one_jit' has a stage per device along a mesh axis; stages={request.stages}, and "
                f"{self._axis!r} has {size} devices.\nUse stages={size}, or a mesh with an axis of {request.stages}."
            )
        self._request = request

    def _fastest(self, traced: StepVariants, options: Options) -> PlannedStep:
        program, request = traced.program(Variant()), self._request
        with jax.sharding.use_abstract_mesh(traced.mesh):
            step = CuttableStep.of(traced.step, request.microbatches, program.carried, program.name)
            stages = uniform_stages(step, request.stages)
        plan = _plan(stages, program, options, self._axis, self._jit_keywords)
        if plan.predicted.peak_bytes > options.memory * options.backend.usable:
            raise MemoryLimitError(
                f"pipeline: {program.name} is predicted to hold {bytes_text(plan.predicted.peak_bytes)} per device, "
                f"and {bytes_text(options.memory)} are there.\nUse more stages or more memory.",
                budget=options.memory,
                needed=plan.predicted.peak_bytes / options.backend.usable,
            )
        whole = WholeStep(stages, self._axis)
        lowering = OneJitLowering(program, plan, self._jit_keywords, whole=whole)
        planner = Planner.of(program, options, self._jit_keywords, is_given=True)
        return PlannedStep(replace(plan, lowering=lowering), program, context(), planner)

    def _checked(self, compiled: PlannedStep) -> PlannedStep:
        """As it is: the compiler's own account is in `plan.verify()`."""
        return compiled


def _plan(
    stages: UniformStages, program: Program, options: Options, axis: str, jit_keywords: Mapping[str, Any]
) -> OneJitPlan:
    """How arrays lie, by the plans of the programs of each stage on the other axes, and what the ticks take."""
    programs, sizes = stages.programs, dict(options.mesh.shape)
    part = {name: 1 if name == axis else size for name, size in sizes.items()}
    mesh = AbstractMesh(tuple(part.values()), tuple(part), axis_types=(AxisType.Auto,) * len(part))
    fixed = fixed_layouts(program, options.fixed, part)
    own = {i: layout for i, layout in fixed.items() if i < len(program.own_arguments)}
    plans = StagePlanner(programs, options, own, program.donated, jit_keywords).plans([mesh] * programs.stages)
    laid: dict[Key, Layout] = {}
    for one, plan in sorted(zip(programs.programs, plans, strict=True), key=lambda pair: PLANNING_ORDER[pair[0].kind]):
        arrays = zip((*one.inputs, *one.outputs), (*plan.arguments, *plan.results), strict=True)
        for key, array in arrays:
            laid.setdefault(key, array.layout)
    piece_of = {piece.argument: Key("piece", n) for n, piece in reversed(list(enumerate(programs.pieces)))}

    def placed(name: str, value: Any, key: Key | None, is_stack: bool) -> PlacedArray:
        layout = laid.get(key, ((),) * len(value.shape)) if key is not None else ((),) * len(value.shape)
        if is_stack:
            layout = ((axis,), *layout[1:])
        parts = math.prod(shards(axes, sizes) for axes in layout)
        size = math.prod(value.shape) * int(getattr(value.dtype, "itemsize", 4))
        return PlacedArray(name, tuple(value.shape), str(value.dtype), layout, size // parts)

    arguments = tuple(
        placed(value.name, value, piece_of.get(i, Key("argument", i)), i in piece_of)
        for i, value in enumerate(program.own_arguments)
    )
    captured = tuple(placed(value.name, value, None, False) for value in program.arguments[len(arguments) :])
    taken = {result: argument for argument, result in program.carried.items()}

    def result(number: int, name: str, value: Any) -> PlacedArray:
        if number in taken:
            like = arguments[taken[number]]
            return replace(like, name=name)
        keys = programs.results[number]
        keys = keys if isinstance(keys, tuple) else ()
        return placed(name, value, keys[0] if keys else None, len(keys) == stages.count)

    named = zip(program.result_names, program.results, strict=True)
    results = tuple(result(number, name, value) for number, (name, value) in enumerate(named))
    predicted = _predicted(stages, plans, axis, options.topology.links[axis])
    data = PlanData(
        name=program.name,
        mesh=options.mesh,
        fingerprint=program.fingerprint,
        arguments=arguments,
        results=results,
        carried=program.carried,
        predicted=predicted,
        status="feasible",
        bound=0.0,
        cost=predicted.step_seconds,
        memory=options.memory,
        warnings=(),
        annotations=Annotations({}, {}, {}),
        argument_tree=program.in_tree,
        result_tree=program.out_tree,
        captured=captured,
    )
    remark = (
        f"{stages.count} stages run in lockstep over {axis!r}: {programs.microbatches} microbatches take "
        f"{programs.microbatches + 2 * (stages.count - 1)} ticks, each of one forward and one backward pass."
    )
    return OneJitPlan(**{one.name: getattr(data, one.name) for one in fields(PlanData)}, remark=remark)


def _predicted(stages: UniformStages, plans: Sequence[Plan], axis: str, link: Link) -> Prediction:
    """What the program takes: ticks of one F and one B of a stage in the middle and of both ends, and what comes once.

    Of stages 1 to S, which work at a time, the first stands for all.
    """
    programs, counted = stages.programs, {stages.first, 1, stages.last}
    ticks = programs.microbatches + 2 * (stages.count - 1)
    own = [
        (ticks if one.kind in LOOP else 1, plan.predicted)
        for one, plan in zip(programs.programs, plans, strict=True)
        if one.stage in counted
    ]
    memory = {stage: stage_memory(programs, plans, stage) for stage in counted}
    held = sum(one.fixed for one in memory.values()) + max(one.working for one in memory.values())
    held += (2 * stages.count - 1) * (memory[1].microbatch + memory[stages.first].microbatch)
    # Every tick sends what stages hand to each other; XLA runs that before the next tick.
    ports = Lockstep(stages, axis).passed
    by_name = {one.name: plan for one, plan in zip(programs.programs, plans, strict=True)}
    sizes = [
        by_name[f"{kind} of stage 1"].results[port.number].local_bytes for kind in ("F", "B") for port in ports[kind]
    ]
    sent = ticks * sum((link.latency + size / link.one_way() for size in sizes), 0.0)
    permutes = tuple(
        Collective("collective_permute", (axis,), ticks * size, ticks, "", "what stages hand on") for size in sizes
    )
    return Prediction(
        step_seconds=sum(count * one.step_seconds for count, one in own) + sent,
        compute_seconds=sum(count * one.compute_seconds for count, one in own),
        communication_seconds=sum(count * one.communication_seconds for count, one in own) + sent,
        exposed_seconds=sum(count * one.exposed_seconds for count, one in own) + sent,
        peak_bytes=math.ceil(held),
        collectives=permutes
        + tuple(
            replace(found, count=found.count * count, bytes=found.bytes * count)
            for count, one in own
            for found in one.collectives
        ),
    )
