"""A choice of the search in, out the same with every stage planned as a whole: its own plans, seconds and bytes.

The tables of the search add up units that were planned one by one. What layers share, and the layouts in which one
hands its result to the next, are in no table. So the best choices are planned again, each stage with as many
microbatches in flight as the schedule has there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.model.xla.backends import Backend
from autoshard.solver.verify import fits
from autoshard.stage_planning.costs import StageCost, SubMeshModel
from autoshard.stage_planning.cut_step import CutStep
from autoshard.stage_planning.sub_meshes import SubMeshShape
from autoshard.stage_search import (
    ChosenStage,
    MicrobatchCosts,
    PipelineChoice,
    SimulatedChoice,
    StageSpace,
    StageTable,
    simulated,
)
from autoshard.stage_search.chunks import ChunkProblem
from autoshard.stage_search.fit_memory import fitted_to_memory
from autoshard.stage_search.simulating import ScheduleFacts, ScheduleForm, schedule_facts

MOST_LEANER_PLANS = 3  # leaner plans for a kind of stage
SAME_ROOM_SHARE = (
    0.02  # stages whose room differs by no larger share get one plan, unless these would be more than that many
)
LEANER_EFFORT: Mapping[str, Any] = {
    "gap": 0.02,
    "work": 2.0,
    "or_leanest": True,
}  # how well they are planned, and stay so

CutAt = Callable[[int, Sequence[int], bool, Sequence[str]], CutStep]
"""Number of microbatches, first units of all stages but the first, whether W has programs, and the variant of each
stage's table -> the step cut so.
"""


@dataclass(frozen=True, eq=False)
class ExactPipeline:
    """A pipeline whose stages are planned."""

    simulated: SimulatedChoice  # by the planned seconds and bytes
    cut: CutStep  # into the virtual stages
    costs: tuple[StageCost, ...]  # per virtual stage


def exact_pipeline(
    space: StageSpace,
    choice: PipelineChoice,
    cut_at: CutAt,
    shapes: Mapping[str, SubMeshShape],
    backend: Backend,
    until: float = math.inf,
) -> ExactPipeline | None:
    """The stages of a choice planned; None if one of them fits in no way.

    Args:
        cut_at: makes the programs of the stages.
        shapes: by the names of the tables' sub-meshes.
        until: when planning ends, as `time.monotonic` has it.

    Raises:
        FormulationTimeout: it is that late.
    """
    facts = schedule_facts(choice.schedule, choice.devices, choice.chunks, choice.microbatches)
    if facts is None:
        return None
    made = facts.schedule
    variants = [stage.table.variant for stage in choice.stages]
    cut = cut_at(choice.microbatches, [stage.first for stage in choice.stages[1:]], made.has_weight_tasks, variants)
    planner = _StagePlanner(cut, backend, until)
    numbers = range(len(choice.stages))
    at = [shapes[stage.table.shape.name] for stage in choice.stages]
    fastest = [planner.fastest(number, at[number]) for number in numbers]
    found = _exact(space, choice, cut, fastest)
    if found is not None and found.simulated.fits:
        return found
    # Each virtual stage of a device gets a part of its memory. One may hold more than that where others hold less.
    limits = stage_limits(choice, facts)
    in_flight = [stage_in_flight(facts, number) for number in numbers]
    best: ExactPipeline | None = None
    for most in (1, MOST_LEANER_PLANS):  # the first are for the least room: if nothing fits with these, it is given up
        plans = planner.plans_within(at, in_flight, limits, most)
        found = _exact(space, choice, cut, _fast_where_there_is_room(space, choice, facts, plans))
        best = min((one for one in (best, found) if one is not None), key=_misfit_and_seconds, default=None)
        if best is None or not best.simulated.fits:
            break
    return best


def _misfit_and_seconds(pipeline: ExactPipeline) -> tuple[bool, float]:
    return not pipeline.simulated.fits, pipeline.simulated.seconds


def _fast_where_there_is_room(
    space: StageSpace,
    choice: PipelineChoice,
    facts: ScheduleFacts,
    plans: Sequence[Sequence[StageCost]],
) -> list[StageCost | None]:
    """Of each stage one of its plans, fastest first: leaner ones as far as its device needs them."""
    stages: list[ChosenStage] = []
    tables: list[StageTable] = []
    cost_of: dict[int, StageCost | None] = {}  # by the ids of tables
    for stage, own in zip(choice.stages, plans, strict=True):
        made = [_table_of(stage, one, space.layers) for one in own]
        if not made:
            return [None]
        cost_of.update(zip(map(id, made), own, strict=True))
        stages.append(replace(stage, table=made[0]))
        tables += made
    form = ScheduleForm(facts.schedule.placement, facts.schedule.has_weight_tasks)
    problem = ChunkProblem(space, form, choice.microbatches, tuple(tables))
    return [cost_of[id(one.table)] for one in fitted_to_memory(problem, stages, facts.in_flight)]


def _exact(
    space: StageSpace, choice: PipelineChoice, cut: CutStep, costs: Sequence[StageCost | None]
) -> ExactPipeline | None:
    """A choice whose stages cost so; None if one of them has no plan."""
    planned = [cost for cost in costs if cost is not None]
    if len(planned) < len(costs):
        return None
    stages = tuple(
        replace(stage, table=_table_of(stage, cost, space.layers))
        for stage, cost in zip(choice.stages, planned, strict=True)
    )
    sent_forward, sent_backward = np.zeros(space.layers + 1), np.zeros(space.layers + 1)
    starts = [stage.first for stage in stages] + [space.layers]
    sent_forward[starts], sent_backward[starts] = cut.crossing()
    tables = tuple(stage.table for stage in stages)
    exact = replace(space, costs={choice.microbatches: MicrobatchCosts(tables, sent_forward, sent_backward)})
    found = simulated(exact, replace(choice, stages=stages))
    return None if found is None else ExactPipeline(found, cut, tuple(planned))


class _StagePlanner:
    """Plans stages: each kind of them once for speed, and a few times for less memory."""

    def __init__(self, cut: CutStep, backend: Backend, until: float = math.inf) -> None:
        self._cut, self._backend, self._until = cut, backend, until
        self._fastest: dict[tuple[int, str], StageCost | None] = {}
        self._leaner: dict[int, StageCost | None] = {}  # by the stage that a plan was made for

    def fastest(self, number: int, shape: SubMeshShape) -> StageCost | None:
        """The fastest plan of a stage, whatever it holds."""
        key = self._cut.kinds[number], shape.in_row.name
        if key not in self._fastest:
            self._fastest[key] = self._planned(number, shape, 1.0, math.inf)
        return self._fastest[key]

    def plans_within(
        self, shapes: Sequence[SubMeshShape], in_flight: Sequence[float], limits: Sequence[float], most: int
    ) -> list[list[StageCost]]:
        """Per stage its plans, the fastest first; leaner ones where the fastest holds more than its limit.

        Stages of one kind share their leaner plans. Each plan is for the stage that has the least room of some whose
        room is alike. It holds no more than that room, or about the least that is possible. What is lean with many
        microbatches in flight need not be with few: so stages that are too large by all of these get plans of their
        own, unless the least room of their kind is too little for any plan.

        Args:
            most: leaner plans for a kind, but for those of stages that are too large by them.
        """
        found: list[list[StageCost]] = [[] for _ in shapes]
        lacking: dict[tuple[int, str], list[tuple[float, int]]] = {}  # kind -> share of what the fastest holds, stage
        for number, (shape, flying, limit) in enumerate(zip(shapes, in_flight, limits, strict=True)):
            fastest = self.fastest(number, shape)
            share = 0.0 if fastest is None else limit / fastest.held(flying)
            found[number] += [fastest] if fastest is not None else []
            if share < 1.0:
                lacking.setdefault((self._cut.kinds[number], shape.in_row.name), []).append((share, number))
        rooms = list(zip(shapes, in_flight, limits, strict=True))
        for several in lacking.values():
            leaner = self._leaner_plans(sorted(several), rooms, most)
            for _, number in several:
                found[number] += leaner
        return found

    def _leaner_plans(
        self, ascending: Sequence[tuple[float, int]], rooms: Sequence[tuple[SubMeshShape, float, float]], most: int
    ) -> list[StageCost]:
        """Leaner plans for the stages of one kind, in the order of their room: shape, microbatches in flight, limit."""
        plans: dict[int, StageCost | None] = {}  # by the stage that a plan was made for

        def has_plan(number: int) -> bool:
            _, flying, limit = rooms[number]
            return any(fits(one.held(flying), limit) for one in plans.values() if one is not None)

        def make_plan(number: int) -> None:
            if number not in self._leaner:
                shape, flying, limit = rooms[number]
                self._leaner[number] = self._planned(number, shape, flying, limit, **LEANER_EFFORT)
            plans[number] = self._leaner[number]

        for _, number in _least_of_groups(ascending)[:most]:
            make_plan(number)
        for _, number in ascending if has_plan(ascending[0][1]) else ():
            if len(plans) < MOST_LEANER_PLANS and number not in plans and not has_plan(number):
                make_plan(number)
        return [one for one in plans.values() if one is not None]

    def _planned(
        self, number: int, shape: SubMeshShape, in_flight: float, limit: float, **effort: Any
    ) -> StageCost | None:
        where = SubMeshModel(shape.mesh, shape.topology, self._backend, limit / self._backend.usable, self._until)
        return self._cut.cost(self._cut.kinds[number], where, in_flight, **effort)


def _least_of_groups(ascending: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Of stages in the order of their room, those that have the least of some whose room is alike.

    >>> _least_of_groups([(0.5, 3), (0.505, 1), (0.9, 2)])
    [(0.5, 3), (0.9, 2)]
    """
    alike = SAME_ROOM_SHARE
    while True:
        firsts: list[tuple[float, int]] = []
        for one in ascending:
            if not firsts or one[0] > firsts[-1][0] * (1 + alike):
                firsts.append(one)
        if len(firsts) <= MOST_LEANER_PLANS:
            return firsts
        alike *= 2


def stage_in_flight(facts: ScheduleFacts, number: int) -> float:
    """The most microbatches in flight in a virtual stage."""
    made = facts.schedule
    device = made.placement[number]
    own = [other for other, home in enumerate(made.placement) if home == device]
    return float(facts.in_flight[device][:, own.index(number)].max())


def stage_limits(choice: PipelineChoice, facts: ScheduleFacts) -> list[float]:
    """Bytes per device that each virtual stage may hold, by what the tables say that it does.

    Programs of a device run one at a time, so its virtual stages share what a program holds beside. The rest is theirs
    in proportion to what they hold.
    """
    placement, found = facts.schedule.placement, []
    for number, stage in enumerate(choice.stages):
        own = [other for other, home in enumerate(placement) if home == placement[number]]
        room = stage.table.shape.memory_bytes
        working = max(_entry(choice.stages[other], "working_bytes") for other in own)
        if len(own) == 1 or working >= room:
            found.append(room / len(own))
            continue
        held = {
            other: _entry(choice.stages[other], "fixed_bytes")
            + stage_in_flight(facts, other) * _entry(choice.stages[other], "microbatch_bytes")
            for other in own
        }
        share = held[number] / sum(held.values()) if any(held.values()) else 1.0 / len(own)
        found.append(working + (room - working) * share)
    return found


def _entry(stage: ChosenStage, name: str) -> float:
    return float(getattr(stage.table, name)[stage.first, stage.last])


def _table_of(stage: ChosenStage, cost: StageCost, layers: int) -> StageTable:
    """A table of this one stage."""
    arrays = []
    for number in cost.row:
        one = np.full((layers + 1, layers + 1), np.inf)
        one[stage.first, stage.last] = number
        arrays.append(one)
    return StageTable(stage.table.shape, stage.table.variant, *arrays)
