"""One stage on one sub-mesh to what it costs: the planner's optimum for all of its programs at once."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from autoshard.errors import SolverError
from autoshard.layout import Layout
from autoshard.mesh.topology import Topology
from autoshard.model.formulating import formulate
from autoshard.model.formulation import Formulation
from autoshard.model.search_policy import solve_for_plan
from autoshard.model.xla.backends import Backend
from autoshard.planning import checked_rules, with_sequences
from autoshard.plans.chosen_options import prediction_of
from autoshard.plans.make_plan import make_plan
from autoshard.plans.plan import PlanData
from autoshard.program import Program
from autoshard.solver.problem import InfeasibleError, Problem, Solution
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.searches.search_run import Search
from autoshard.stage_planning.joint_stage import JointStage
from autoshard.stages.programs import LOOP, Key, StageProgram
from autoshard.stages.stage_tactics import StageTactics
from autoshard.together.joint_problem import JointProblem

LEANEST_LIMIT_FACTOR = 1.02  # of the least limit that some choice meets: with less, hardly a choice is left
STAGE_LIMIT_SHARES = (
    1.0,
    0.9,
    0.8,
    0.7,
)  # shares of the limit for the problem, which does not count what reshardings hold
# Seconds of a quiet core that the search for one stage may take. Work counts, not the clock: a busy machine finds the
# same tables. The clock ends a search only after so many times its work.
STAGE_WORK_SECONDS = 4.0
_CLOCK_FACTOR = 50.0
# A choice so far above its bound, relative to this, is one that the search has begun with and not yet improved: where a
# limit leaves little, the leanest choice of a Llama layer took 50 times the best. It is sought so many times longer.
_FAR_FROM_BOUND, _EXTRA_WORK_FACTOR = 0.5, 4.0


@dataclass(frozen=True)
class SubMeshModel:
    """A sub-mesh as the planner sees it."""

    mesh: Mesh | AbstractMesh
    topology: Topology
    backend: Backend
    memory: float  # bytes per device
    until: float = math.inf  # when planning on it ends, as `time.monotonic` has it


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

    def held(self, in_flight: float, copies: float = 1.0) -> float:
        """Bytes on each device with so many microbatches in flight, and so many such stages, one of which works."""
        return copies * (self.fixed_bytes + in_flight * self.microbatch_bytes) + self.working_bytes

    def plans(self, mesh: Mesh | AbstractMesh) -> list[PlanData]:
        """The plan of each program."""
        return [
            make_plan(formulation, Solution(tuple(choice), 0.0, 0.0, "feasible"), mesh, formulation.restrictions)
            for formulation, choice in zip(self.stage.formulations, self.choices, strict=True)
        ]


def formulated_on(program: Program, where: SubMeshModel, fixed: Mapping[int, Layout]) -> Formulation:
    """The problem of one program of a stage on a sub-mesh; its arguments of these indices lie so.

    Raises:
        FormulationTimeout: planning on the sub-mesh has to end.
    """
    mesh_shape = dict(where.mesh.shape)
    rules = checked_rules(program, mesh_shape)
    how: dict[str, Any] = {"memory": where.memory, "fixed": fixed, "backend": where.backend, "until": where.until}
    return formulate(program, rules, mesh_shape, where.topology, **how)


def formulated_stage(
    programs: Sequence[StageProgram],
    traced: Sequence[Program],
    where: SubMeshModel,
    microbatches: int,
    kept: frozenset[Key],
    between: frozenset[Key],
    fixed: Mapping[Key, Layout],
    tactics: StageTactics | None = None,
) -> JointStage:
    """The programs of one stage on one sub-mesh as one problem.

    Args:
        programs: in the order in which a step of one microbatch runs them.
        traced: the same for the planner.
        kept: what F leaves for B and W.
        between: what the stage keeps between steps.
        fixed: how arguments and pieces have to lie.
        tactics: that hold in every stage.
    """
    asked = [{i: fixed[key] for i, key in enumerate(one.inputs) if key in fixed} for one in programs]
    if tactics is not None:
        where = replace(where, backend=with_sequences(where.backend))
    formulations = [formulated_on(one, where, layouts) for one, layouts in zip(traced, asked, strict=True)]
    if tactics is not None:
        mesh_shape, both = dict(where.mesh.shape), zip(programs, formulations, strict=True)
        formulations = [tactics.restricted(one, formulation, mesh_shape) for one, formulation in both]
    return JointStage(programs, formulations, microbatches, kept, between)


def stage_cost(
    stage: JointStage,
    limit: float | None,
    in_flight: float,
    *,
    gap: float = 0.0,
    work: float = STAGE_WORK_SECONDS,
    shares: Sequence[float] = STAGE_LIMIT_SHARES,
    or_leanest: bool = False,
    copies: float = 1.0,
    until: float = math.inf,
    search: str | Search | None = None,
) -> StageCost | None:
    """The cheapest way to shard a stage that fits with so many microbatches in flight; None if none was found.

    Args:
        limit: bytes per device; None: as many as it takes.
        in_flight: microbatches.
        gap: that is good enough; 0: that of plans.
        work: s of a quiet core that the search may take.
        shares: of the limit, for the problem, until what is found fits with what reshardings hold.
        or_leanest: whether to take what holds about the least, where nothing fits.
        copies: how many such stages a device has, which all have to fit.
        until: when the clock ends searches, as `time.monotonic` has it.
        search: instead of the solver's own, as for `solve`.
    """
    effort = _Effort(gap, work, until, search)
    least: StageCost | None = None
    for share in (1.0,) if limit is None else shares:
        joint = stage.problem(None if limit is None else limit * share, in_flight, copies)
        try:
            solution = _solved(joint.problem, effort)
        except InfeasibleError as error:
            if or_leanest and least is None and math.isfinite(error.needed):
                least = _leanest(stage, joint, error.needed, effort)
            break
        except SolverError:
            break
        found = _cost(stage, joint.choices(solution.choice), solution)
        if limit is None or found.held(in_flight, copies) <= limit:
            return found
        if least is None or found.held(in_flight, copies) < least.held(in_flight, copies):
            least = found
    return least if or_leanest else None


@dataclass(frozen=True)
class _Effort:
    """How well a stage is to be planned, and by which search."""

    gap: float
    work: float  # s of a quiet core
    until: float  # when the clock ends it, as `time.monotonic` has it
    search: str | Search | None

    def solution(self, problem: Problem, times: float = 1.0) -> Solution:
        """What a search finds in so many times the work."""
        work = times * self.work
        budget = Budget(work, min(self.until, time.monotonic() + _CLOCK_FACTOR * work))
        return solve_for_plan(problem, gap=self.gap, budget=budget, search=self.search)


def _leanest(stage: JointStage, joint: JointProblem, needed: float, effort: _Effort) -> StageCost | None:
    try:
        leaner = replace(joint.problem, limit=LEANEST_LIMIT_FACTOR * needed, checked=True)
        solution = _solved(leaner, effort)
    except SolverError:
        return None
    return _cost(stage, joint.choices(solution.choice), solution)


def _solved(problem: Problem, effort: _Effort) -> Solution:
    found = effort.solution(problem)
    if found.cost <= (1 + _FAR_FROM_BOUND) * found.bound or time.monotonic() >= effort.until:
        return found
    again = effort.solution(problem, _EXTRA_WORK_FACTOR)
    return again if again.cost < found.cost else found


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
