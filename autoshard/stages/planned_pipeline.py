"""`PlannedPipeline`: a step in stages with a plan for each program, which the runtime takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from autoshard.pipeline import Schedule
from autoshard.program import Program
from autoshard.stages.programs import Key, StagePrograms
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

    def part(self, mesh: Mesh, device: int) -> Mesh:
        """The part of another mesh of the same axes that a device of the schedule would have."""
        own = self.meshes[device]
        devices = mesh.devices.reshape(-1)[list(self.positions[device])]
        return Mesh(devices.reshape(tuple(own.shape.values())), own.axis_names)
