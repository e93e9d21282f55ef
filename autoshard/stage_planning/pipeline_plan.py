"""`PipelinePlan`: the plan of a step that runs in stages, each on its part of the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.compiled.verification import Verification, compiled, verification
from autoshard.errors import MeshError, PlanError
from autoshard.mesh.targets import target_mesh
from autoshard.options import Options
from autoshard.plans.annotations import Annotations
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.plans.prediction import Prediction
from autoshard.report.html.elements import Html, joined
from autoshard.report.html.tables import section_html
from autoshard.report.section import Section
from autoshard.report.units import bytes_text
from autoshard.stage_planning.planned_stage import PipelineFigures, PlannedStage, pipeline_figures
from autoshard.stage_planning.report import stages_section, timeline_html
from autoshard.stages.pipelined_function import PlannedPipeline
from autoshard.stages.programs import LOOP, Key
from autoshard.stages.views import StackSharding, stack_sharding
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

    pipeline: PlannedPipeline | None = field(repr=False, default=None)
    without: Prediction | str | None = None  # the best plan without stages, or why there is none; None: nobody looked

    @cached_property
    def flat_in_shardings(self) -> tuple[NamedSharding, ...]:
        """One sharding per flat argument: on the mesh of the stage that keeps it; over all stages, of a stack."""
        return self._shardings(self.arguments, [_parts_of_argument(self._held, i) for i in range(len(self.arguments))])

    @cached_property
    def flat_out_shardings(self) -> tuple[NamedSharding, ...]:
        """One sharding per flat result, likewise."""
        made = self._held.programs.results
        return self._shardings(self.results, [one if isinstance(one, tuple) else () for one in made])

    @property
    def _held(self) -> PlannedPipeline:
        assert self.pipeline is not None, "it is made of a pipeline"
        return self.pipeline

    def _shardings(self, placed: Sequence[PlacedArray], parts: Sequence[tuple[Key, ...]]) -> tuple[NamedSharding, ...]:
        held, laid = self._held, _placed_by_key(self._held)
        found = []
        for one, keys in zip(placed, parts, strict=True):
            if len(keys) > 1:
                found.append(_stacked(held, keys, laid).sharding)
            else:
                here = one.sharding(held.home(keys[0])) if keys else NamedSharding(self.mesh, PartitionSpec())
                found.append(here)
        return tuple(found)

    def verify(self, target: str | None = None) -> StageVerification:  # type: ignore[override]
        """Compiles every program of every stage, and puts what XLA does beside what is predicted.

        Args:
            target: a machine by name that has as many devices as the mesh, as for other plans. Each stage is compiled
                for its part of it.

        Raises:
            MeshError: the mesh has no devices to compile for, or the target or its compiler cannot be had.
        """
        mesh = self.mesh if target is None else target_mesh(target, dict(self.mesh.shape))
        if not isinstance(mesh, Mesh):
            raise MeshError(
                f"{self.mesh} has no devices to compile for.\n"
                "Name a machine, as in verify(target='v5e:4x4'), or plan on a mesh of devices."
            )
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

    def on(self, mesh: Mesh | AbstractMesh) -> PipelinePlan:
        """
        Raises:
            PlanError: always. The function planned on that mesh has a plan of its own.
        """
        self._refuse("moved to another mesh")

    def dumps(self) -> str:
        """
        Raises:
            PlanError: always: files of plans have no stages yet.
        """
        self._refuse("saved")

    def save(self, path: str | Path) -> None:
        """
        Raises:
            PlanError: always: files of plans have no stages yet.
        """
        self._refuse("saved")

    def explain(self, path: str) -> Any:
        """
        Raises:
            PlanError: always. `stages[i].plan` is a plan of one program, which can be asked.
        """
        self._refuse("explained as a whole")

    def what_if(self, **wish: Any) -> Plan:
        """
        Raises:
            PlanError: always.
        """
        self._refuse("planned again under a wish")

    def to_code(self, style: str = "specs") -> str:
        """
        Raises:
            PlanError: always.
        """
        self._refuse("written as code")

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """
        Raises:
            PlanError: always.
        """
        self._refuse("used to make a state: its arrays lie on several meshes")

    def _refuse(self, what: str) -> NoReturn:
        raise PlanError(
            f"the plan of {self.name} has {len(self.stages)} stages, and cannot be {what}.\n"
            "Each stage has plans that can: plan.stages[0].plan, and plan.stages[0].plans by kind of program."
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


def _stacked(pipeline: PlannedPipeline, keys: Sequence[Key], placed: Mapping[Key, PlacedArray]) -> StackSharding:
    """How the parts of a stack lie as one array, of which each stage keeps some rows."""
    devices = [pipeline.device(key) for key in keys]
    layouts = [placed.get(key) for key in keys]
    shapes = [tuple(pipeline.programs.types[key].shape) for key in keys]
    shardings = [
        NamedSharding(pipeline.meshes[device], PartitionSpec())
        if one is None
        else one.sharding(pipeline.meshes[device])
        for one, device in zip(layouts, devices, strict=True)
    ]
    return stack_sharding(shapes, shardings, [pipeline.positions[device] for device in devices])


def _copied_stacks(pipeline: PlannedPipeline, placed: Mapping[Key, PlacedArray]) -> tuple[str, ...]:
    """A warning if stacks among the results are copied on every step."""
    program = pipeline.program
    found = [
        (name, math.prod(value.shape) * value.dtype.itemsize)
        for name, value, keys in zip(program.result_names, program.results, pipeline.programs.results, strict=True)
        if isinstance(keys, tuple) and len(keys) > 1 and not _stacked(pipeline, keys, placed).is_view
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
    own = _of_busiest_device(pipeline, stages)
    predicted = Prediction(
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

    arguments = tuple(
        laid(value.name, value, _parts_of_argument(pipeline, i)) for i, value in enumerate(program.own_arguments)
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
        warnings=_copied_stacks(pipeline, placed),
        annotations=Annotations({}, {}, {}),
        argument_tree=program.in_tree,
        result_tree=program.out_tree,
    )
    said = {one.name: getattr(data, one.name) for one in fields(PlanData)}
    return PipelinePlan(**said, stages=stages, timeline=figures.timeline, pipeline=pipeline, without=without)


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
        here = tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else places
        plans: dict[str, Plan] = {}
        for one, plan in sorted(own, key=lambda pair: "FBW".find(pair[0].kind) % 4):
            plans.setdefault(one.kind, plan)
        work = sum(plan.predicted.step_seconds * (runs if one.kind in "FBW" else 1.0) for one, plan in own)
        found.append(
            PlannedStage(
                pipeline.layers[stage] if pipeline.layers else (),
                mesh,
                here,
                plans,
                work,
                figures.peak_bytes[device],
                figures.timeline.peak[device],
                runs * sent,
            )
        )
    return tuple(found)
