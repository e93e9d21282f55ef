"""The programs of stages and tactics in, what the tactics leave of each program's choices out.

What an array or a dim is follows from the whole step: the backward program of a stage has neither the batch that its
rows come from nor the optimizer. So all programs are grouped for the mesh of a stage, and looked at together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autoshard.layout import Layout, MeshShape
from autoshard.model.formulation import Formulation
from autoshard.model.grouping import groups_of
from autoshard.model.xla.backends import CPU, Backend
from autoshard.program import Program
from autoshard.propagation import rules_for
from autoshard.stages.programs import Key, StageProgram, StagePrograms
from autoshard.stages.stage_layouts import program_of
from autoshard.tactics.parts import PartRoles, StepGroups, StepInterface, StepPart
from autoshard.tactics.requests import TacticLike, TacticRequests
from autoshard.tactics.restriction import restricted_by, tactic_requests
from autoshard.tactics.roles import Roles


@dataclass(frozen=True, eq=False)
class StageTactics:
    """Tactics that hold in every stage."""

    tactics: Sequence[TacticLike]
    programs: StagePrograms
    step: Program  # as it is written
    _roles: dict[Any, tuple[list[StepPart], Roles]] = field(default_factory=dict, repr=False)  # by mesh axes
    _asked: dict[Any, TacticRequests] = field(default_factory=dict, repr=False)  # by mesh

    def restricted(self, program: StageProgram, formulation: Formulation, mesh: MeshShape) -> Formulation:
        """The formulation of a program with the choices that the tactics leave.

        Args:
            formulation: of the program, which may have constraints on its results.
            mesh: of its stage: axis -> devices.

        Raises:
            ConflictError: tactics contradict each other or what is fixed, or find nothing in the step to apply to.
            MeshError: a tactic names an axis that the mesh does not have.
        """
        backend = formulation.prices.backend
        asked, (parts, whole) = self._asked_on(mesh, backend), self._roles_on(mesh, backend)
        roles = PartRoles.of(self._interface, parts, self._number(program), formulation, mesh, whole)
        layouts = {
            i: (_of_rows(layout) if key.kind == "piece" else layout, requested_by)
            for i, key in enumerate(program.inputs)
            if (known := roles.inputs[i]) is not None and known in asked.layouts
            for layout, requested_by in [asked.layouts[known]]
        }
        return restricted_by(formulation, roles, replace(asked, layouts=layouts), self.tactics)

    def look(self, program: StageProgram) -> Any:
        """Equal for programs that are alike, if the tactics leave them the same choices."""
        number, (parts, roles) = self._number(program), self._roles_on({}, CPU)
        groups = roles.step
        assert isinstance(groups, StepGroups), "the roles are of parts"
        known = [groups.arguments.get(_name(key, program.stage)) for key in program.inputs]
        states = tuple(None if i is None else roles.state.get(i) for i in known)
        first = groups.first_groups[number]
        return roles.work[first : first + len(parts[number].groups)], states

    def _number(self, program: StageProgram) -> int:
        return next(n for n, one in enumerate(self.programs.programs) if one is program)

    def _roles_on(self, mesh: MeshShape, backend: Backend) -> tuple[list[StepPart], Roles]:
        """All programs grouped, but for constraints, and what their groups are."""
        axes = {axis: devices for axis, devices in mesh.items() if devices > 1}
        key = tuple(axes.items())
        if key not in self._roles:
            parts = [
                StepPart(
                    traced := one.running_on(backend.lowers_as),
                    groups_of(traced, rules_for(traced), backend, axes),
                    [_name(key, program.stage) for key in program.inputs],
                    [_name(key, program.stage) for key in program.outputs],
                )
                for program, one in zip(self.programs.programs, self._traced, strict=True)
            ]
            self._roles[key] = parts, Roles(StepGroups.of(self._interface, parts, mesh))
        return self._roles[key]

    def _asked_on(self, mesh: MeshShape, backend: Backend) -> TacticRequests:
        key = tuple(mesh.items())
        if key not in self._asked:
            _, roles = self._roles_on(mesh, backend)
            self._asked[key] = tactic_requests(self.tactics, roles, mesh)
        return self._asked[key]

    @cached_property
    def _traced(self) -> list[Program]:
        how = self.programs.name, self.programs.carried
        return [program_of(one, *how) for one in self.programs.programs]

    @cached_property
    def _interface(self) -> StepInterface:
        programs = self.programs
        arguments: dict[Hashable, int] = {Key("argument", i): i for i in range(len(self.step.own_arguments))}
        arguments |= {Key("piece", n): piece.argument for n, piece in enumerate(programs.pieces)}
        constants = [Key("constant", i) for i in range(len(programs.constants))]
        return StepInterface(self.step, arguments, constants, [_first_part(parts) for parts in programs.results])


def _name(key: Key, stage: int) -> Any:
    """What a value is called among all programs: each stage makes its early values for itself."""
    return (key, stage) if key.kind == "early" else key


def _first_part(parts: Any) -> Key | None:
    return parts[0] if isinstance(parts, tuple) and parts and isinstance(parts[0], Key) else None


def _of_rows(layout: Layout) -> Layout:
    """How some trips of a stack lie: these are never split."""
    return ((), *layout[1:])
