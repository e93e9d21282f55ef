"""A planned pipeline to data that can be written, and back, given the step: what files and other processes get.

Where a step is cut, the parts of the mesh, the schedule's name and the plan of every program say it all. The programs
are made anew of the step, and each plan is held against its program.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.errors import PlanError
from autoshard.lower.on_shards import check_plan
from autoshard.mesh.topology import Topology
from autoshard.pipeline import Schedule, schedule
from autoshard.planning import lowered
from autoshard.plans.files import from_json, to_json
from autoshard.plans.nodes import Node
from autoshard.program import Program
from autoshard.program.tracing import TracedStep
from autoshard.stages.cutting import CuttableStep, cut
from autoshard.stages.placement.recomputing import KnownCuts
from autoshard.stages.planned_pipeline import PlannedPipeline
from autoshard.stages.programs import BlockCut, RecomputedBlocks, StagePrograms
from autoshard.stages.stacks import EquationOrigin
from autoshard.stages.stage_layouts import StageLayouts, in_planning_order
from autoshard.user_plan import Plan


@dataclass(frozen=True)
class MeshPart:
    """The part of the mesh that one device of a schedule has."""

    axes: Mapping[str, int]  # axis -> devices
    devices: tuple[int, ...]  # by their place in the whole mesh

    def on(self, mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
        """The mesh of this part."""
        types: Any = (AxisType.Auto,) * len(self.axes)
        if isinstance(mesh, AbstractMesh):
            return AbstractMesh(tuple(self.axes.values()), tuple(self.axes), axis_types=types)
        devices = mesh.devices.reshape(-1)[list(self.devices)].reshape(tuple(self.axes.values()))
        return Mesh(devices, tuple(self.axes), axis_types=types)


def mesh_part(node: Node) -> MeshPart:
    """The part of a mesh that `SavedPipeline.to_json` wrote.

    Raises:
        ValueError: it is none; the message says where.
    """
    axes, devices = node.parts(2)
    made = MeshPart({axis: size.count() for axis, size in axes.entries()}, devices.items(Node.count))
    if int(np.prod(list(made.axes.values()))) != len(made.devices):
        raise node.wrong("a part of a mesh and as many devices")
    return made


@dataclass(frozen=True)
class SavedPipeline:
    """What a planned pipeline says beside the step that it is for."""

    stages: int  # devices of the schedule
    microbatches: int
    schedule: str
    chunks: int
    predecessors: tuple[tuple[int, ...], ...] | None  # of a schedule "graph" alone
    boundaries: tuple[EquationOrigin, ...]
    layers: tuple[tuple[str, ...], ...]
    parts: tuple[MeshPart, ...]  # per device of the schedule
    plans: tuple[Any, ...] = field(repr=False)  # of the programs, as JSON has them
    recomputed: RecomputedBlocks | None = field(repr=False, default=None)  # None: as the step is written

    @classmethod
    def of(cls, planned: PlannedPipeline) -> SavedPipeline:
        """
        Raises:
            PlanError: its tasks run in an order that has no name.
        """
        order = planned.schedule
        saved = cls(
            order.stages,
            order.microbatches,
            order.name,
            len(order.placement) // order.replicas // order.stages,
            order.predecessors if order.name == "graph" else None,
            planned.programs.boundaries,
            planned.layers,
            tuple(
                MeshPart(dict(mesh.shape), places)
                for mesh, places in zip(planned.meshes, planned.positions, strict=True)
            ),
            tuple(map(content_of, planned.plans)),
            planned.programs.recomputed,
        )
        if saved.order() != order:
            raise PlanError(
                f"the stages of {planned.programs.name} run in an order that schedule={order.name!r} has not, "
                "so it cannot be saved.\nUse one of autoshard.pipeline.SCHEDULES."
            )
        return saved

    def order(self) -> Schedule:
        """The schedule."""
        chosen: dict[str, Any] = {} if self.predecessors is None else {"predecessors": self.predecessors}
        return schedule(self.schedule, self.stages, self.microbatches, self.chunks, **chosen)

    def to_json(self) -> dict[str, Any]:
        """As numbers, words, lists and dicts."""
        return {
            "stages": self.stages,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "chunks": self.chunks,
            "predecessors": self.predecessors and list(map(list, self.predecessors)),
            "boundaries": [[one.equation, one.trip] for one in self.boundaries],
            "layers": list(map(list, self.layers)),
            "parts": [[dict(part.axes), list(part.devices)] for part in self.parts],
            "programs": list(self.plans),
            **({} if self.recomputed is None else {"recomputed": _recomputed_to_json(self.recomputed)}),
        }

    @classmethod
    def from_json(cls, node: Node) -> SavedPipeline:
        """What `to_json` made.

        Raises:
            ValueError: it is not what that wrote; the message says where.
        """
        node.only(
            (
                *("stages", "microbatches", "schedule", "chunks", "predecessors"),
                *("boundaries", "layers", "parts", "programs", "recomputed"),
            )
        )

        def boundary(one: Node) -> EquationOrigin:
            equation, trip = one.parts(2)
            return EquationOrigin(equation.count(), trip.count())

        return cls(
            node["stages"].count(),
            node["microbatches"].count(),
            node["schedule"].name(),
            node["chunks"].count(),
            node["predecessors"].optional(lambda one: one.items(lambda before: before.items(Node.count))),
            node["boundaries"].items(boundary),
            node["layers"].items(lambda one: one.items(Node.name)),
            node["parts"].items(mesh_part),
            tuple(one.value for one in node["programs"].parts()),
            None if (found := node.get("recomputed")) is None else found.optional(_recomputed_from_json),
        )

    def restored(
        self,
        traced: TracedStep,
        context: AbstractMesh,
        program: Program,
        mesh: Mesh | AbstractMesh,
        jit_keywords: Mapping[str, Any],
        topology: Topology,
        where: str = "the plan",
    ) -> PlannedPipeline:
        """The pipeline, for the step that it was planned for.

        Args:
            traced: the step.
            context: the mesh that it was traced under.
            program: the same for the planner.
            mesh: the whole mesh.
            jit_keywords: that programs are compiled with.
            topology: what the mesh costs.
            where: what messages call the data.

        Raises:
            PlanError: it was planned for another step, or contradicts itself.
        """
        order = self.order()
        with jax.sharding.use_abstract_mesh(context):
            step = CuttableStep.of(traced, self.microbatches, program.carried, program.name)
            keeps = None if self.recomputed is None else KnownCuts(self.recomputed.cuts, topology)
            programs = cut(step, self.boundaries, weight_programs=order.has_weight_tasks, keeps=keeps)
        known = [device for part in self.parts for device in part.devices]
        fits = len(self.parts) == order.stages and max(known, default=0) < mesh.size
        if (
            not fits
            or len(self.plans) != len(programs.programs)
            or programs.stages * order.replicas != len(order.placement)
        ):
            raise PlanError(
                f"{where} was made for another program than {program.name}: it has {len(self.plans)} programs of "
                f"{len(order.placement)} stages, the step {len(programs.programs)} of {programs.stages}.\n"
                "Plan the step anew."
            )
        meshes = tuple(part.on(mesh) for part in self.parts)
        of_stages = [meshes[order.placement[stage]] for stage in range(programs.stages)]
        plans = restored_plans(programs, program.donated, self.plans, of_stages, jit_keywords, where)
        positions = tuple(part.devices for part in self.parts)
        return PlannedPipeline(programs, plans, order, meshes, program, self.layers, positions)


def _recomputed_to_json(found: RecomputedBlocks) -> dict[str, Any]:
    return {"cuts": [[list(one.kept), list(one.again)] for one in found.cuts], "seconds": list(found.seconds)}


def _recomputed_from_json(node: Node) -> RecomputedBlocks:
    node.only(("cuts", "seconds"))

    def cut_of(one: Node) -> BlockCut:
        kept, again = one.parts(2)
        return BlockCut(kept.items(Node.count), again.items(Node.count))

    return RecomputedBlocks(node["cuts"].items(cut_of), node["seconds"].items(Node.number))


def content_of(plan: Plan) -> Any:
    """The plan of one program as JSON has it."""
    return json.loads(json.dumps(to_json(plan, None)))


def restored_plans(
    programs: StagePrograms,
    donated: Collection[int],
    contents: Sequence[Any],
    meshes: Sequence[Mesh | AbstractMesh],
    jit_keywords: Mapping[str, Any],
    where: str,
) -> tuple[Plan, ...]:
    """What `content_of` made of the programs of all stages, bound to these.

    Args:
        donated: arguments of the step.
        meshes: per stage.
        where: what messages call the data.

    Raises:
        PlanError: one was made for another program, or contradicts it.
    """
    found: dict[int, Plan] = {}
    for stage, mesh in enumerate(meshes):
        layouts = StageLayouts(programs, donated)
        for n, one in in_planning_order(programs, stage):
            plan = Plan.of(from_json(contents[n], mesh, where).plan)
            program = layouts.program(one, mesh, plan.fingerprint)
            plan = plan.bound_to(program)
            check_plan(program, plan.annotations, dict(mesh.shape))
            layouts.add(one, plan)
            found[n] = lowered(program, replace(plan, name=program.name), jit_keywords)
    return tuple(found[n] for n in range(len(found)))
