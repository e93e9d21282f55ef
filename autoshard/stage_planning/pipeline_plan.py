"""`PipelinePlan`: the plan of a step that runs in stages, each on its part of the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.compiled.verification import Verification, compiled, verification
from autoshard.errors import MemoryLimitError, PlanError
from autoshard.layout import local_shape, replicated
from autoshard.options import Options
from autoshard.plans.annotations import Annotations
from autoshard.plans.files import from_json, to_json, to_text
from autoshard.plans.nodes import Node
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.plans.prediction import Prediction
from autoshard.report.html.elements import Html, joined
from autoshard.report.html.tables import section_html
from autoshard.report.section import Section
from autoshard.report.units import bytes_text
from autoshard.stage_planning.pipeline_file import (
    PIPELINE,
    ArrayPart,
    ArrayParts,
    axes_of_arrays,
    devices_at,
    pipeline_from_json,
    pipeline_to_json,
    stacked,
)
from autoshard.stage_planning.planned_stage import PipelineFigures, PlannedStage, TaskCosts, pipeline_figures
from autoshard.stage_planning.report import recomputation_remarks, stages_section, tactics_remarks, timeline_html
from autoshard.stages.planned_pipeline import PlannedPipeline
from autoshard.stages.programs import LOOP, Key
from autoshard.stages.reading.stages_planner import StagesPlanner
from autoshard.stages.requests import PipelineRequest
from autoshard.stages.running.transfers import line_of
from autoshard.stages.saved_pipeline import MeshPart, SavedPipeline
from autoshard.user_plan import Plan


@dataclass(frozen=True, eq=False)
class StageVerification:
    """What XLA makes of every program of a pipeline, beside what is predicted."""

    programs: Mapping[str, Verification]  # "F of stage 0" -> its own

    def __str__(self) -> str:
        return "\n\n".join(f"{name}\n{found}" for name, found in self.programs.items())


@dataclass(frozen=True, eq=False, repr=False)
class PipelinePlan(Plan):
    """How a step runs in stages, what that is predicted to cost, and the best plan without stages beside it.

    `arguments` say how each array lies on the mesh of the stage that keeps it, and `in_shardings` where that is.
    """

    bound_is_of: ClassVar[str] = "the best choice searched, by the costs of layers"

    pipeline: PlannedPipeline | None = field(repr=False, default=None)  # None: loaded, not yet bound
    saved: SavedPipeline | None = field(repr=False, default=None)  # what files and other processes get of it
    costs: TaskCosts | None = field(repr=False, default=None)  # what its timeline is made of
    argument_parts: tuple[ArrayParts, ...] = field(repr=False, default=())  # per flat argument
    result_parts: tuple[ArrayParts, ...] = field(repr=False, default=())  # per flat result
    without: Prediction | str | None = None  # the best plan without stages, or why there is none; None: nobody looked

    @cached_property
    def flat_in_shardings(self) -> tuple[NamedSharding, ...]:
        """One sharding per flat argument: on the mesh of the stage that keeps it; over all stages, of a stack."""
        return tuple(map(self._sharding_of_parts, self.arguments, self.argument_parts))

    @cached_property
    def flat_out_shardings(self) -> tuple[NamedSharding, ...]:
        """One sharding per flat result, likewise. Between processes a number that no next step takes lies on all."""
        places = dict.fromkeys(place for part in self._parts for place in part.devices)
        devices = devices_at(self.mesh, tuple(places)) if isinstance(self.mesh, Mesh) else ()
        is_shared = len({device.process_index for device in devices}) > 1
        taken = set(self.carried.values())
        return tuple(
            NamedSharding(line_of(devices), PartitionSpec())
            if is_shared and not one.shape and number not in taken and parts
            else self._sharding_of_parts(one, parts)
            for number, (one, parts) in enumerate(zip(self.results, self.result_parts, strict=True))
        )

    @property
    def _held(self) -> PlannedPipeline:
        if self.pipeline is None:
            raise PlanError(
                "a plan that was loaded from a file knows no step to compile.\n"
                "Give it to autoshard(step, mesh=..., plan=...) and ask `.plan(...)` of that."
            )
        return self.pipeline

    @property
    def request(self) -> PipelineRequest:
        """What asks for such stages."""
        assert self.saved is not None, "it is made of a pipeline"
        return PipelineRequest(self.saved.stages, self.saved.microbatches, self.saved.schedule, self.saved.chunks)

    @cached_property
    def argument_bytes(self) -> int:
        """What the arguments take of the memory of the device that has most of them."""
        held = [0.0] * len(self._parts)
        for one, parts in zip(self.arguments, self.argument_parts, strict=True):
            sizes = [self._local_size(part) for part in parts]
            for part, size in zip(parts, sizes, strict=True):  # `local_bytes` are those of the largest part
                held[part.device] += one.local_bytes * size / max(sizes) if size else 0.0
        return round(max(held, default=0.0))

    def _local_size(self, part: ArrayPart) -> int:
        """Elements on each device of its stage."""
        layout = replicated(len(part.shape)) if part.layout is None else part.layout
        return math.prod(local_shape(part.shape, layout, self._parts[part.device].axes))

    @property
    def choices(self) -> Mapping[str, str]:
        """Schedule, microbatches, and of each stage its layers and its part of the mesh."""
        assert self.saved is not None, "it is made of a pipeline"
        choices = {"schedule": self.saved.schedule, "microbatches": str(self.saved.microbatches)}
        for number, device in enumerate(self._devices()):
            layers = self.saved.layers[number] if self.saved.layers else ()
            part = self._parts[device]
            where = " ".join(f"{axis}={size}" for axis, size in part.axes.items())
            choices[f"stage {number}"] = f"{', '.join(layers)} on {where} from device {min(part.devices)}"
        return choices

    @cached_property
    def _parts(self) -> tuple[MeshPart, ...]:
        assert self.saved is not None, "it is made of a pipeline"
        return self.saved.parts

    def _sharding_of_parts(self, placed: PlacedArray, parts: ArrayParts) -> NamedSharding:
        if len(parts) > 1:
            return stacked(self.mesh, self._parts, parts).sharding
        return placed.sharding(self._parts[parts[0].device].on(self.mesh) if parts else self.mesh)

    def verify(self, target: str | None = None) -> StageVerification:  # type: ignore[override]
        """Compiles every program of every stage, and puts what XLA does beside what is predicted.

        Args:
            target: a machine by name that has as many devices as the mesh, or None, as for other plans. Each stage is
                compiled for its part of it.

        Raises:
            MeshError: the mesh has no devices to compile for, or the target or its compiler cannot be had.
        """
        mesh = self._mesh_to_compile_for(target)
        found = {}
        for program, plan in zip(self._held.programs.programs, self._held.plans, strict=True):
            assert plan.lowering is not None, "plans of stages are bound to their programs"
            device = self._held.schedule.placement[program.stage]
            part = self._held.part(mesh, device)
            there = compiled(replace(plan.lowering)(part), part)
            found[program.name] = verification(plan.predicted, there.named(plan.lowering.program))
        return StageVerification(found)

    def _sections(self) -> list[Section]:
        head, *rest = super()._sections()
        return [head, self._stages_section(), *rest]

    def _stages_section(self) -> Section:
        assert self.timeline is not None, "it has stages"
        return stages_section(self.stages, self.timeline, self.without, self.bound)

    def _html(self) -> Html:
        assert self.timeline is not None, "it has stages"
        colours = {axis: i for i, axis in enumerate(self.mesh.shape)}
        return joined(super()._html(), section_html(self._stages_section(), colours), timeline_html(self.timeline))

    def on(self, mesh: Mesh | AbstractMesh) -> Self:
        """This plan on another mesh of the same axes, unbound.

        Raises:
            PlanError: the mesh has other axes.
        """
        moved = super().on(mesh)
        stages = tuple(
            replace(stage, mesh=part.on(moved.mesh), devices=devices_at(moved.mesh, part.devices), plans={})
            for stage, part in zip(self.stages, map(self._parts.__getitem__, self._devices()), strict=True)
        )
        return replace(moved, pipeline=None, stages=stages)

    def _devices(self) -> tuple[int, ...]:
        """Of each stage its device of the schedule."""
        return self.timeline.schedule.placement[: len(self.stages)]

    def dumps(self) -> str:
        """The plan as JSON: what `save` writes."""
        return to_text(to_json(self, None) | {PIPELINE: pipeline_to_json(self)})

    @classmethod
    def reads(cls, content: Any) -> bool:
        """Whether a file is that of such a plan."""
        return isinstance(content, dict) and PIPELINE in content

    @classmethod
    def of_content(cls, content: Any, mesh: Mesh | AbstractMesh, where: str) -> Plan:
        """The plan in a file, not bound to a step."""
        rest = dict(content)
        node = Node(rest.pop(PIPELINE), PIPELINE)
        data = from_json(rest, mesh, where, axes_of_arrays(node, dict(mesh.shape))).plan
        values = {one.name: getattr(data, one.name) for one in fields(PlanData)}
        return cls(**values, **pipeline_from_json(node, data))

    def to_code(self, style: str = "specs") -> str:
        """
        Raises:
            PlanError: always. Code without autoshard has one function for `jax.jit`, and stages are several programs.
        """
        raise PlanError(
            f"the plan of {self.name} has {len(self.stages)} stages, and cannot be written as code for jax.jit, which "
            "takes one program.\nplan.stages[0].plans has a plan per program, each of which can; plan.save(...) keeps "
            "all of it."
        )


def _parts_of_argument(pipeline: PlannedPipeline, index: int) -> tuple[Key, ...]:
    key, programs = Key("argument", index), pipeline.programs
    pieces = tuple(Key("piece", n) for n, piece in enumerate(programs.pieces) if piece.argument == index)
    return pieces or ((key,) if key in programs.homes else ())


def _placed_by_key(pipeline: PlannedPipeline) -> dict[Key, PlacedArray]:
    """How everything with a name lies on the stage that reads or makes it first."""
    placed: dict[Key, PlacedArray] = {}
    for one, plan in zip(pipeline.programs.programs, pipeline.plans, strict=True):
        names, arrays = (*one.inputs, *one.outputs), (*plan.arguments, *plan.results)
        for key, array in zip(names, arrays, strict=True):
            placed.setdefault(key, array)
    return placed


def _of_busiest_device(pipeline: PlannedPipeline, stages: Sequence[PlannedStage]) -> list[tuple[int, Prediction]]:
    """The programs of all virtual stages of the device that works longest: how often each runs, and its figures."""
    placement, programs = pipeline.schedule.placement, pipeline.programs
    # Replicas share the microbatches, so a device may have several virtual stages that are one stage.
    seconds = [0.0] * pipeline.schedule.stages
    for virtual, device in enumerate(placement):
        seconds[device] += stages[virtual % programs.stages].seconds / pipeline.schedule.replicas
    busiest = max(range(len(seconds)), key=seconds.__getitem__)
    found = []
    for virtual, device in enumerate(placement):
        for program, plan in zip(programs.programs, pipeline.plans, strict=True):
            if device == busiest and program.stage == virtual % programs.stages:
                runs = programs.microbatches // pipeline.schedule.replicas if program.kind in LOOP else 1
                if program.kind in LOOP or virtual < programs.stages:
                    found.append((runs, plan.predicted))
    return found


def _copied_stacks(
    pipeline: PlannedPipeline, parts: Sequence[ArrayParts], mesh: Mesh | AbstractMesh, saved: SavedPipeline
) -> tuple[str, ...]:
    """A warning if stacks among the results are copied on every step."""
    program = pipeline.program
    found = [
        (name, math.prod(value.shape) * value.dtype.itemsize)
        for name, value, one in zip(program.result_names, program.results, parts, strict=True)
        if len(one) > 1 and not stacked(mesh, saved.parts, one).is_view
    ]
    if not found:
        return ()
    return (
        f"{len(found)} stacked results ({', '.join(name for name, _ in found[:3])}{', ...' * (len(found) > 3)}; "
        f"{bytes_text(sum(size for _, size in found))}) are copied between stages on every step, which is not in the "
        "prediction: stages have unequal numbers of layers or unlike devices, or a device has several. "
        "A number of stages that divides the layers, with chunks=1, leaves them where they are.",
    )


def pipeline_plan(
    pipeline: PlannedPipeline,
    options: Options,
    least_task_seconds: float,
    *,
    without: Prediction | str | None = None,
    bound: float = 0.0,
) -> PipelinePlan:
    """The plan of a step whose stages are planned.

    Args:
        least_task_seconds: that dispatching a task takes.
        without: the best plan without stages, or why there is none.
        bound: s per step that no plan takes less than; 0 if that is not known.
    """
    figures = figures_of(pipeline, options, least_task_seconds)
    stages = planned_stages(pipeline, figures)
    predicted = _predicted(pipeline, options, least_task_seconds)
    program = pipeline.program
    placed = _placed_by_key(pipeline)

    def laid(name: str, value: Any, keys: tuple[Key, ...]) -> PlacedArray:
        found = [placed[key] for key in keys if key in placed]
        shape = tuple(value.shape)
        if not found:
            return PlacedArray(name, shape, str(value.dtype), ((),) * len(shape), 0)
        return PlacedArray(
            name, shape, str(value.dtype), found[0].layout, max(one.local_bytes for one in found), found[0].on_host
        )

    def parts(keys: Any) -> ArrayParts:
        named = keys if isinstance(keys, tuple) else ()
        types, known = pipeline.programs.types, {key: one.layout for key, one in placed.items()}
        return tuple(ArrayPart(pipeline.device(key), tuple(types[key].shape), known.get(key)) for key in named)

    saved = SavedPipeline.of(pipeline)
    own_keys = [_parts_of_argument(pipeline, i) for i in range(len(program.own_arguments))]
    result_parts = tuple(map(parts, pipeline.programs.results))
    arguments = tuple(
        laid(value.name, value, keys) for value, keys in zip(program.own_arguments, own_keys, strict=True)
    )
    results = tuple(
        laid(name, value, keys if isinstance(keys, tuple) else ())
        for name, value, keys in zip(program.result_names, program.results, pipeline.programs.results, strict=True)
    )
    data = PlanData(
        name=program.name,
        mesh=options.mesh,
        fingerprint=program.fingerprint,
        arguments=arguments,
        results=results,
        carried=program.carried,
        predicted=predicted,
        status="feasible",
        bound=min(bound, figures.seconds),
        cost=figures.seconds,
        memory=options.memory,
        warnings=(
            *filter(None, [pipeline.programs.own_statistics]),
            *(one.remark for one in pipeline.rewritten),
            *tactics_remarks(pipeline),
            *recomputation_remarks(pipeline),
            *_copied_stacks(pipeline, result_parts, options.mesh, saved),
        ),
        rewrites=tuple((one.name, one.places) for one in pipeline.rewritten),
        annotations=Annotations({}, {}, {}),
        argument_tree=program.in_tree,
        result_tree=program.out_tree,
    )
    values = {one.name: getattr(data, one.name) for one in fields(PlanData)}
    return PipelinePlan(
        **values,
        stages=stages,
        timeline=figures.timeline,
        pipeline=pipeline,
        saved=saved,
        costs=figures.costs,
        argument_parts=tuple(map(parts, own_keys)),
        result_parts=result_parts,
        without=without,
        planner=_planner(pipeline, options, least_task_seconds),
    )


def _predicted(pipeline: PlannedPipeline, options: Options, least_task_seconds: float) -> Prediction:
    """What the step takes: its seconds by the simulated timeline, all else on the device that works longest."""
    figures = figures_of(pipeline, options, least_task_seconds)
    own = _of_busiest_device(pipeline, planned_stages(pipeline, figures))
    return Prediction(
        step_seconds=figures.seconds,
        compute_seconds=sum(count * one.compute_seconds for count, one in own),
        communication_seconds=sum(count * one.communication_seconds for count, one in own),
        exposed_seconds=sum(count * one.exposed_seconds for count, one in own),
        peak_bytes=max(figures.peak_bytes),
        collectives=tuple(
            replace(found, count=found.count * count, bytes=found.bytes * count)
            for count, one in own
            for found in one.collectives
        ),
    )


def _planner(pipeline: PlannedPipeline, options: Options, least_task_seconds: float) -> StagesPlanner:
    """By which the plan is explained, and its stages planned again."""
    lowering = pipeline.plans[0].lowering
    assert lowering is not None, "plans of stages are bound to their programs"

    def predicted(plans: Sequence[Plan]) -> Prediction:
        return _predicted(replace(pipeline, plans=tuple(plans)), options, least_task_seconds)

    def needed(plans: Sequence[Plan]) -> float:
        return max(_needed(replace(pipeline, plans=tuple(plans)), options, least_task_seconds))

    def under(other: Options) -> Plan:
        keeps = dict(other.mesh.shape) == dict(options.mesh.shape)
        made = pipeline.planned_again(other, lowering.jit_keywords, keeps_parts=keeps)
        check_fits(made, other, least_task_seconds)
        return pipeline_plan(made, other, least_task_seconds)

    placement = pipeline.schedule.placement[: pipeline.programs.stages]
    return StagesPlanner(
        pipeline.program,
        options,
        lowering.jit_keywords,
        pipeline.programs,
        pipeline.plans,
        tuple(pipeline.meshes[device] for device in placement),
        predicted,
        under,
        starts=tuple(pipeline.positions[device][0] for device in placement),
        needed=needed,
    )


def _needed(pipeline: PlannedPipeline, options: Options, least_task_seconds: float) -> list[float]:
    """Per device of the schedule, the bytes that the smallest device has to have for what this one holds to fit."""
    topology, whole, found = options.topology, dict(options.mesh.shape), []
    peaks = figures_of(pipeline, options, least_task_seconds).peak_bytes
    for mesh, places, peak in zip(pipeline.meshes, pipeline.positions, peaks, strict=True):
        part = topology.part(dict(mesh.shape), whole, places[0])
        found.append(peak * options.memory / topology.room_on(part, options.memory))
    return found


def devices_over(pipeline: PlannedPipeline, options: Options, least_task_seconds: float) -> list[int]:
    """The devices of the schedule that hold more than the memory limit."""
    needed = _needed(pipeline, options, least_task_seconds)
    return [device for device, one in enumerate(needed) if one > options.memory * options.backend.usable]


def check_fits(pipeline: PlannedPipeline, options: Options, least_task_seconds: float) -> None:
    """
    Raises:
        MemoryLimitError: a stage holds more than the memory limit.
    """
    needed = _needed(pipeline, options, least_task_seconds)
    device = max(range(len(needed)), key=needed.__getitem__)
    if needed[device] > options.memory * options.backend.usable:
        peak = figures_of(pipeline, options, least_task_seconds).peak_bytes[device]
        room = options.memory * peak / needed[device]
        usable = room * options.backend.usable
        again = "" if options.remat else "remat='auto', "
        raise MemoryLimitError(
            f"pipeline: stage {device} of {pipeline.program.name} is predicted to hold {bytes_text(peak)} "
            f"per device, and {bytes_text(usable)} of {bytes_text(room)} are usable.\n"
            f"Use {again}more stages, a schedule with fewer microbatches in flight, more memory, or pipeline='auto'.",
            budget=options.memory,
            needed=needed[device] / options.backend.usable,
        )


def figures_of(pipeline: PlannedPipeline, options: Options, least_task_seconds: float) -> PipelineFigures:
    """What a pipeline is predicted to take and to hold."""
    sizes = [mesh.size for mesh in pipeline.meshes]
    return pipeline_figures(
        pipeline.programs,
        pipeline.plans,
        pipeline.schedule,
        [places[0] for places in pipeline.positions],
        sizes,
        dict(options.mesh.shape),
        options.topology,
        least_task_seconds,
    )


def planned_stages(pipeline: PlannedPipeline, figures: PipelineFigures) -> tuple[PlannedStage, ...]:
    """Every virtual stage of a pipeline."""
    programs, found = pipeline.programs, []
    runs = float(programs.microbatches)
    for stage in range(programs.stages):
        device = pipeline.schedule.placement[stage]
        mesh, places = pipeline.meshes[device], pipeline.positions[device]
        own = [(one, plan) for one, plan in zip(programs.programs, pipeline.plans, strict=True) if one.stage == stage]
        sent = sum(programs.bytes_of(key) for (a, _), keys in programs.sends.items() if a == stage for key in keys)
        plans: dict[str, Plan] = {}
        for one, plan in sorted(own, key=lambda pair: "FBW".find(pair[0].kind) % 4):
            plans.setdefault(one.kind, plan)
        work = sum(plan.predicted.step_seconds * (runs if one.kind in "FBW" else 1.0) for one, plan in own)
        found.append(
            PlannedStage(
                pipeline.layers[stage] if pipeline.layers else (),
                mesh,
                tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else places,
                plans,
                work,
                figures.peak_bytes[device],
                figures.timeline.peak[device],
                runs * sent,
            )
        )
    return tuple(found)
