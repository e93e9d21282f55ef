"""A choice of the search in, out the same with every stage planned as a whole: its own plans, seconds and bytes.

The tables of the search add up units that were planned one by one. What layers share, and the layouts in which one
hands its result to the next, are in no table. So the best choices are planned again, each stage with as many
microbatches in flight as the schedule has there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.model.xla.backends import Backend
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
from autoshard.stage_search.simulating import schedule_facts

CutAt = Callable[[int, Sequence[int], bool], CutStep]
"""Number of microbatches, first units of all stages but the first, whether W has programs -> the step cut so."""


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
    memory: float,
) -> ExactPipeline | None:
    """The stages of a choice planned; None if one of them fits in no way.

    Args:
        cut_at: makes the programs of the stages.
        shapes: by the names of the tables' sub-meshes.
        memory: bytes per device.
    """
    facts = schedule_facts(choice.schedule, choice.devices, choice.chunks, choice.microbatches)
    if facts is None:
        return None
    made = facts.schedule
    cut = cut_at(choice.microbatches, [stage.first for stage in choice.stages[1:]], made.has_weight_tasks)
    known: dict[tuple[int, str, float], StageCost | None] = {}
    costs: list[StageCost] = []
    for number, stage in enumerate(choice.stages):
        device = made.placement[number]
        own = [other for other, home in enumerate(made.placement) if home == device]
        in_flight = float(facts.in_flight[device][:, own.index(number)].max())
        shape = shapes[stage.table.shape.name]
        key = cut.kinds[number], stage.table.shape.name, in_flight
        if key not in known:
            where = SubMeshModel(shape.mesh, shape.topology, backend, memory / len(own))
            known[key] = cut.cost(number, where, in_flight)
        cost = known[key]
        if cost is None:
            return None
        costs.append(cost)
    stages = tuple(
        replace(stage, table=_table_of(stage, cost, space.layers))
        for stage, cost in zip(choice.stages, costs, strict=True)
    )
    sent_forward, sent_backward = np.zeros(space.layers + 1), np.zeros(space.layers + 1)
    starts = [stage.first for stage in stages] + [space.layers]
    sent_forward[starts], sent_backward[starts] = cut.crossing()
    tables = tuple(stage.table for stage in stages)
    exact = replace(space, costs={choice.microbatches: MicrobatchCosts(tables, sent_forward, sent_backward)})
    found = simulated(exact, replace(choice, stages=stages))
    return None if found is None else ExactPipeline(found, cut, tuple(costs))


def _table_of(stage: ChosenStage, cost: StageCost, layers: int) -> StageTable:
    """A table of this one stage."""
    arrays = []
    for number in cost.row:
        one = np.full((layers + 1, layers + 1), np.inf)
        one[stage.first, stage.last] = number
        arrays.append(one)
    return StageTable(stage.table.shape, stage.table.variant, *arrays)
