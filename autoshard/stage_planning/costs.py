"""One stage on one sub-mesh to what it costs: the planner's optimum for all of its programs at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh, Mesh

from autoshard.errors import SolverError
from autoshard.mesh.topology import Topology
from autoshard.model.formulating import formulate
from autoshard.model.formulation import Formulation
from autoshard.model.search_policy import solve_for_plan
from autoshard.model.xla.backends import Backend
from autoshard.planning import checked_rules
from autoshard.plans.chosen import prediction_of
from autoshard.plans.making import make_plan
from autoshard.plans.plan import PlanData
from autoshard.program import Program
from autoshard.solver.problem import InfeasibleError, Solution
from autoshard.stage_planning.joint_stage import JointStage
from autoshard.stages.programs import LOOP, Key, StageProgram

LEANEST = 1.02  # of the least limit that some choice meets: with less, hardly a choice is left


@dataclass(frozen=True)
class SubMeshModel:
    """A sub-mesh as the planner sees it."""

    mesh: Mesh | AbstractMesh
    topology: Topology
    backend: Backend
    memory: float  # bytes per device


@dataclass(frozen=True, eq=False)
class StageCost:
    """What one stage costs each device of a sub-mesh, and the choice that costs it."""

    stage: JointStage
    choices: Sequence[Sequence[int]]  # per program
    seconds: Mapping[str, float]  # kind of program -> seconds of one run; of `before` and `after`, of all together
    fixed_bytes: float
    microbatch_bytes: float  # what a forward task leaves
    working_bytes: float
    bound: float  # s per step: no choice for this stage costs less

    @property
    def row(self) -> tuple[float, ...]:
        """Seconds of F, B, W and of what runs once per step; bytes kept, left by F, and held beside by a program."""
        once = self.seconds["before"] + self.seconds["after"]
        taken = *(self.seconds[kind] for kind in LOOP), once
        return *taken, self.fixed_bytes, self.microbatch_bytes, self.working_bytes

    def plans(self, mesh: Mesh | AbstractMesh) -> list[PlanData]:
        """The plan of each program."""
        return [
            make_plan(formulation, Solution(tuple(choice), 0.0, 0.0, "feasible"), mesh)
            for formulation, choice in zip(self.stage.formulations, self.choices, strict=True)
        ]


def formulated_on(program: Program, where: SubMeshModel) -> Formulation:
    """The problem of one program of a stage on a sub-mesh."""
    mesh_shape = dict(where.mesh.shape)
    rules = checked_rules(program, mesh_shape)
    return formulate(program, rules, mesh_shape, where.topology, memory=where.memory, backend=where.backend)


def stage_cost(
    programs: Sequence[StageProgram],
    traced: Sequence[Program],
    where: SubMeshModel,
    *,
    microbatches: int,
    kept: frozenset[Key],
    between: frozenset[Key],
    in_flight: float,
    or_leanest: bool = False,
    seconds: float = 10.0,
) -> StageCost | None:
    """The cheapest way to shard a stage that fits with so many microbatches in flight; None if none was found.

    Args:
        programs: of one stage, in the order in which a step of one microbatch runs them.
        traced: the same for the planner.
        kept: what F leaves for B and W.
        between: what the stage keeps between steps.
        in_flight: microbatches.
        or_leanest: whether to take what holds about the least, where nothing fits.
        seconds: that the search may take.
    """
    stage = JointStage(programs, [formulated_on(one, where) for one in traced], microbatches, kept, between)
    limit = where.memory * where.backend.usable if math.isfinite(where.memory) else None
    joint = stage.problem(limit, in_flight)
    try:
        solution = solve_for_plan(joint.problem, time_limit=seconds)
    except InfeasibleError as error:
        if not or_leanest:
            return None
        leaner = replace(joint.problem, limit=LEANEST * error.needed, checked=True)
        try:
            solution = solve_for_plan(leaner, time_limit=seconds)
        except SolverError:
            return None
    except SolverError:
        return None
    return _cost(stage, joint.choices(solution.choice), solution)


def _cost(stage: JointStage, choices: Sequence[Sequence[int]], solution: Solution) -> StageCost:
    taken = {"F": 0.0, "B": 0.0, "W": 0.0, "before": 0.0, "after": 0.0}
    held = {key: float(place.usage[solution.choice[place.node]]) for key, place in stage.held.items()}
    working = 0.0
    for number, (program, formulation, choice) in enumerate(
        zip(stage.programs, stage.formulations, choices, strict=True)
    ):
        predicted = prediction_of(formulation, choice)
        taken[program.kind] += predicted.step_seconds
        own = sum(size for key, size in held.items() if any(one.program == number for one in stage.places[key]))
        working = max(working, predicted.peak_bytes - own)
    return StageCost(
        stage,
        choices,
        taken,
        sum(size for key, size in held.items() if key not in stage.kept),
        sum(size for key, size in held.items() if key in stage.kept),
        working,
        solution.bound,
    )
