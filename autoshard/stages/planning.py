"""The programs of stages in, a plan for each out. Within a stage what has one name lies one way.

The backward program of a stage is planned first, since it reads the most. What it says of parameters, residuals and
sums holds for the programs after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jax.sharding import Mesh

from autoshard.errors import MemoryLimitError
from autoshard.layout import Layout
from autoshard.model.formulation import Formulation
from autoshard.options import Options
from autoshard.planning import identity_of, lowered, planned
from autoshard.program import Program
from autoshard.stage_planning.costs import SubMeshModel
from autoshard.stage_planning.cut_step import CutStep
from autoshard.stages.programs import Key, StageProgram, StagePrograms
from autoshard.stages.stage_layouts import StageLayouts, in_planning_order
from autoshard.stages.stage_tactics import StageTactics
from autoshard.tactics.requests import TacticLike
from autoshard.user_plan import Plan

_FREE = 2.0**60  # bytes: a limit that is none
_LEAST_SECONDS = 0.1  # that a program is planned for, however late it is


@dataclass
class StagePlanner:
    """Plans programs of stages, those that are alike once."""

    programs: StagePrograms
    step: Program  # as it is written
    options: Options  # for the whole mesh
    fixed: Mapping[int, Layout]  # argument -> how the user wants it to lie
    donated: frozenset[int]  # arguments
    jit_keywords: Mapping[str, Any] = field(default_factory=dict)  # that programs are compiled with
    known: dict[Any, Any] = field(default_factory=dict)  # plans of programs, and costs of stages, that are alike
    in_flight: Sequence[float] = ()  # per stage, microbatches that its devices hold at most; () for one each
    is_limited: bool = True  # whether programs that fit in no way are errors; else they are planned as if they did
    until: float = math.inf  # when planning ends, as `time.monotonic` has it; not later than the time limit says
    _done: int = field(default=0, init=False)  # programs that are planned

    def __post_init__(self) -> None:
        self.until = self.options.deadline(self.until)

    def plans(self, meshes: Sequence[Any], starts: Sequence[int] = ()) -> tuple[Plan, ...]:
        """A plan per program, in the order of `StagePrograms.programs`, each on the mesh of its stage.

        Args:
            meshes: per stage.
            starts: per stage, the place of its first device in the whole mesh; () where all devices are alike.

        Raises:
            MemoryLimitError: a program fits in no way, with its stage.
        """
        found: dict[int, Plan] = {}
        for stage in range(self.programs.stages):
            found |= self.of_stage(stage, meshes[stage], starts[stage] if starts else 0)
        return tuple(found[n] for n in range(len(found)))

    def of_stage(self, stage: int, mesh: Any, start: int = 0) -> dict[int, Plan]:
        """The plans of the programs of one stage, by the place of each program in `StagePrograms.programs`."""
        if self.options.tactics and (together := self._together(stage, mesh, start)) is not None:
            return together
        layouts = self.asked()
        return {n: self.plan(program, layouts, mesh, start) for n, program in in_planning_order(self.programs, stage)}

    def _together(self, stage: int, mesh: Any, start: int) -> dict[int, Plan] | None:
        """The plans of one stage if its programs are planned as one problem; None if nothing is found so.

        What one program leaves another may not have the collectives to read, so that they are not planned in turns.
        """
        options, flying = self.options_on(mesh, start), self.in_flight[stage] if self.in_flight else 1.0
        where = SubMeshModel(mesh, options.topology, options.backend, options.memory)
        key = "together", self._cut.kinds[stage], tuple(mesh.shape.items()), options.topology, flying
        if key not in self.known:
            self.known[key] = self._cut.cost(stage, where, flying)
        cost, found = self.known[key], dict[int, Plan]()
        if cost is None:
            return None
        made = zip(self._cut.of_stage(stage), self._cut.traced(stage), cost.plans(mesh), strict=True)
        for program, traced, data in made:
            plan = replace(Plan.of(data).bound_to(traced), name=traced.name)
            found[self.programs.programs.index(program)] = lowered(traced, plan, self.jit_keywords)
        return found

    @cached_property
    def _cut(self) -> CutStep:
        return CutStep(self.programs, self.donated, self.fixed, tactics=self._tactics, search=self.options.search)

    def asked(self) -> dict[Key, Layout]:
        """How the user wants arguments to lie, and so pieces of them. Trips of a stack are never split."""
        asked = {Key("argument", i): layout for i, layout in self.fixed.items()}
        pieces = enumerate(self.programs.pieces)
        parts = {Key("piece", n): self.fixed[piece.argument] for n, piece in pieces if piece.argument in self.fixed}
        return asked | {key: ((), *layout[1:]) for key, layout in parts.items()}

    def plan(self, program: StageProgram, layouts: dict[Key, Layout], mesh: Any, start: int = 0) -> Plan:
        """The plan of one program. What it says of named values joins `layouts`."""
        made = StageLayouts(self.programs, self.donated, layouts).program(program, mesh)
        pinned = {i: layouts[key] for i, key in enumerate(program.inputs) if key in layouts}
        options = replace(self.options_for(program, mesh, start), pinned=pinned)
        look = self._tactics.look(program) if options.tactics else None
        key = identity_of(made), tuple(sorted(pinned.items())), tuple(mesh.shape.items()), options.topology, look
        if key not in self.known:
            self.known[key] = self._planned(program, made, replace(options, time_limit=self._seconds()))
        self._done += 1
        plan = self.known[key].on(mesh).bound_to(made)
        StageLayouts(self.programs, self.donated, layouts).add(program, plan)
        return lowered(made, replace(plan, name=made.name), self.jit_keywords)

    def _seconds(self) -> float:
        """That the search for one program may take.

        Our own search mostly ends long before, so it may have half of what is left. Others take all that they get.
        """
        left = self.until - time.monotonic()
        fair = left / max(1, len(self.programs.programs) - self._done)
        return max(_LEAST_SECONDS, fair if self.options.search is not None else max(fair, left / 2))

    @cached_property
    def _tactics(self) -> StageTactics:
        return StageTactics(self.options.tactics, self.programs, self.step)

    def options_for(self, program: StageProgram, mesh: Any, start: int = 0) -> Options:
        """The same for this very program: what tactics leave of it follows from the whole step."""
        options = self.options_on(mesh, start)
        if not options.tactics:
            return options

        def restricts(formulation: Formulation, tactics: Sequence[TacticLike], shape: Mapping[str, int]) -> Formulation:
            return self._tactics.restricted(program, formulation, shape)

        return replace(options, restricts=restricts, cache=None)  # equal programs of other steps may be left others

    def options_on(self, mesh: Any, start: int = 0) -> Options:
        """The options for a program on the part of the mesh whose first device has this place in it."""
        whole = self.options
        part = whole.topology.part(dict(mesh.shape), dict(whole.mesh.shape), start)
        where = {"mesh": mesh, "given_mesh": mesh, "topology": part}
        room = whole.topology.room_on(part, whole.memory)
        return replace(whole, **where, memory=room, fixed={}, microbatches=1, like=None, refine=1)

    def _planned(self, program: StageProgram, made: Program, options: Options) -> Plan:
        try:
            return planned(made, options, self.jit_keywords, {})
        except MemoryLimitError as error:
            if not self.is_limited:
                return planned(made, replace(options, memory=_FREE), self.jit_keywords, {})
            raise MemoryLimitError(
                f"pipeline: {program.name}: {error}", budget=error.budget, needed=error.needed
            ) from None


def compiled(plan: Plan) -> Any:
    """The program of a plan, compiled for its mesh."""
    assert plan.lowering is not None and isinstance(plan.mesh, Mesh), "it is planned for devices"
    return plan.lowering().compile()
