"""`PlannedPipeline`: a step in stages with a plan for each program, which the runtime takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.options import Options
from autoshard.pipeline import Schedule
from autoshard.program import Program
from autoshard.specs import fixed_layouts
from autoshard.stages.planning import StagePlanner
from autoshard.stages.programs import Key, StagePrograms
from autoshard.stages.sub_meshes import stage_meshes, stage_positions
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
        plans = StagePlanner(self.programs, options, own, self.program.donated, jit_keywords).plans(homes, starts)
        return replace(self, plans=plans, meshes=meshes, positions=positions)
