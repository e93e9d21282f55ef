"""`PlannedPipeline`: a step in stages with a plan for each program, which the runtime takes; and what makes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.options import Options
from autoshard.pipeline import Schedule, schedule, simulate
from autoshard.program import Program
from autoshard.program.program import RewrittenPlaces
from autoshard.program.tracing import TracedStep
from autoshard.specs import fixed_layouts
from autoshard.stages.cutting import CuttableStep, cut
from autoshard.stages.placement.recomputing import CutChoice
from autoshard.stages.planning import StagePlanner
from autoshard.stages.programs import Key, StagePrograms
from autoshard.stages.requests import PipelineRequest
from autoshard.stages.sub_meshes import stage_meshes, stage_positions
from autoshard.stages.units import Units
from autoshard.user_plan import Plan


@dataclass(frozen=True, eq=False)
class PlannedPipeline:
    """A step in stages: its programs, a plan for each, and the order in which they run."""

    programs: StagePrograms
    plans: tuple[Plan, ...]  # of the programs, in the order of `StagePrograms.programs`
    schedule: Schedule
    meshes: tuple[Any, ...]  # per device of the schedule
    program: Program = field(repr=False)  # the step as it is written
    layers: tuple[tuple[str, ...], ...] = ()  # per stage, the user's lines at which its units begin
    positions: tuple[tuple[int, ...], ...] = ()  # per device of the schedule, its devices by their place in the mesh
    rewritten: tuple[RewrittenPlaces, ...] = ()  # by laws of algebra, before the step was cut

    def home(self, key: Key) -> Any:
        """The mesh that keeps an argument, piece or constant, or makes a value for the next step."""
        return self.meshes[self.device(key)]

    def device(self, key: Key) -> int:
        """The device of the schedule that does so."""
        stage = self.programs.homes[key] if key in self.programs.homes else self.programs.makers[key].stage
        return self.schedule.placement[stage]

    def part(self, mesh: Any, device: int) -> Any:
        """The part of another mesh of the same axes that a device of the schedule would have."""
        own = dict(self.meshes[device].shape)
        types: Any = (AxisType.Auto,) * len(own)
        if not isinstance(mesh, Mesh):
            return AbstractMesh(tuple(own.values()), tuple(own), axis_types=types)
        devices = mesh.devices.reshape(-1)[list(self.positions[device])]
        return Mesh(devices.reshape(tuple(own.values())), tuple(own), axis_types=types)

    def planned_again(self, options: Options, jit_keywords: Mapping[str, Any], *, keeps_parts: bool) -> PlannedPipeline:
        """The same programs in the same order, planned under other options.

        Args:
            keeps_parts: whether stages keep their parts of the mesh; if not, they get equal parts of `options.mesh`.

        Raises:
            MeshError: the stages do not divide the other mesh.
            MemoryLimitError: a program fits in no way, with its stage.
        """
        positions, count = self.positions, self.schedule.stages
        if keeps_parts:
            meshes = tuple(self.part(options.mesh, device) for device in range(count))
        else:
            meshes, positions = stage_meshes(options.mesh, count), stage_positions(options.mesh, count)
        placement = self.schedule.placement[: self.programs.stages]
        homes, starts = [meshes[device] for device in placement], [positions[device][0] for device in placement]
        fixed = fixed_layouts(self.program, options.fixed, dict(homes[0].shape))
        own = {i: layout for i, layout in fixed.items() if i < len(self.program.own_arguments)}
        how = self.programs, self.program, options, own, self.program.donated, jit_keywords
        plans = StagePlanner(*how, in_flight=_in_flight(self.schedule)).plans(homes, starts)
        return replace(self, plans=plans, meshes=meshes, positions=positions)


@dataclass(frozen=True, eq=False)
class AskedStages:
    """A step and the stages that the user asks for: planned for what these keep for their backward passes."""

    step: CuttableStep
    program: Program  # the step as it is written
    request: PipelineRequest
    options: Options
    jit_keywords: Mapping[str, Any]
    context: AbstractMesh  # that the step was traced under
    until: float  # when planning ends, as `time.monotonic` has it
    known: dict[Any, Plan] = field(default_factory=dict, repr=False)  # plans of programs that are alike

    @classmethod
    def of(
        cls,
        traced: TracedStep,
        context: AbstractMesh,
        program: Program,
        request: PipelineRequest,
        options: Options,
        jit_keywords: Mapping[str, Any],
        until: float = math.inf,
    ) -> AskedStages:
        """
        Args:
            until: when planning ends, if not earlier by the time limit.

        Raises:
            MicrobatchError: the step cannot run in microbatches, with the line.
        """
        with jax.sharding.use_abstract_mesh(context):
            step = CuttableStep.of(traced, request.microbatches, program.carried, program.name)
        return cls(step, program, request, options, jit_keywords, context, options.deadline(until))

    @cached_property
    def order(self) -> Schedule:
        """The schedule, but for predecessors: those are as the step is cut."""
        return self.request.orders()

    @property
    def stages(self) -> int:
        """How many virtual stages there are."""
        return len(self.order.placement) // self.order.replicas

    @cached_property
    def units(self) -> Units:
        """What is dealt to stages."""
        with jax.sharding.use_abstract_mesh(self.context):
            return self.step.units(self.stages)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first units of all stages but the first."""
        return self.units.balanced(self.stages, self.request.stages)

    def planned(self, keeps: CutChoice | None = None, *, is_limited: bool = True) -> PlannedPipeline:
        """The stages, planned.

        Args:
            keeps: says what stages keep for their backward passes; by default as the step is written.
            is_limited: whether programs that fit in no way are errors; if not, they are planned as if memory were free.

        Raises:
            MemoryLimitError: a program fits in no way, with its stage.
            MicrobatchError: a microbatch would keep something else than the whole batch.
            StageError: the step cannot be cut so.
        """
        request, options, order = self.request, self.options, self.order
        with jax.sharding.use_abstract_mesh(self.context):
            boundaries = self.units.boundaries(self.firsts)
            programs = cut(self.step, boundaries, weight_programs=order.has_weight_tasks, keeps=keeps)
        if order.name == "graph":
            order = schedule("graph", request.stages, request.microbatches, predecessors=predecessors_of(programs))
        meshes, positions = stage_meshes(options.mesh, request.stages), stage_positions(options.mesh, request.stages)
        homes: Sequence[Any] = [meshes[order.placement[stage]] for stage in range(self.stages)]
        starts = [positions[order.placement[stage]][0] for stage in range(self.stages)]
        fixed = fixed_layouts(self.program, options.fixed, dict(meshes[0].shape))
        own = {i: layout for i, layout in fixed.items() if i < len(self.program.own_arguments)}
        how = programs, self.program, options, own, self.program.donated, self.jit_keywords, self.known
        more: dict[str, Any] = {"in_flight": _in_flight(order), "is_limited": is_limited, "until": self.until}
        plans = StagePlanner(*how, **more).plans(homes, starts)
        runs = itertools.pairwise([0, *self.firsts, len(self.units.units)])
        layers = tuple(tuple(unit.name for unit in self.units.units[a:b]) for a, b in runs)
        return PlannedPipeline(programs, plans, order, meshes, self.program, layers, positions)


def _in_flight(order: Schedule) -> list[float]:
    """Per virtual stage, how many microbatches its device holds at most, in whole stages."""
    held = simulate(order).peak
    return [float(held[device]) for device in order.placement]


def predecessors_of(programs: StagePrograms) -> list[list[int]]:
    """Per stage, the stages before it that it has to do with: they send it something, or wait for it going back."""
    found: list[set[int]] = [set() for _ in range(programs.stages)]
    for one, other in programs.sends:
        found[max(one, other)].add(min(one, other))
    return list(map(sorted, found))
