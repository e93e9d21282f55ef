"""A choice of stages to a better one near it: a cut moved by a layer, a stage on another variant of its sub-mesh."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from autoshard.stage_search.choices import ChosenStage, PipelineChoice, SimulatedChoice
from autoshard.stage_search.tables import StageSpace


def neighbours(space: StageSpace, choice: PipelineChoice) -> Iterator[PipelineChoice]:
    """Every choice that differs in one cut by one layer, or in the table of one stage on the same devices."""
    stages = choice.stages
    for i, (before, after) in enumerate(itertools.pairwise(stages)):
        for cut in (before.last - 1, before.last + 1):
            if before.first < cut < after.last:
                moved = replace_stage(before, last=cut), replace_stage(after, first=cut)
                yield replace(choice, stages=(*stages[:i], *moved, *stages[i + 2 :]))
    for i, stage in enumerate(stages):
        for table in space.costs[choice.microbatches].tables:
            same_place = table.shape.devices == stage.table.shape.devices and stage.start in table.shape.starts
            if same_place and table is not stage.table:
                yield replace(choice, stages=(*stages[:i], replace_stage(stage, table=table), *stages[i + 1 :]))


def replace_stage(stage: ChosenStage, **changes: object) -> ChosenStage:
    """The stage with other layers or another table."""
    return replace(stage, **changes)  # type: ignore[arg-type]


def largest_work(choice: PipelineChoice) -> float:
    """Seconds per microbatch of the virtual stage that takes longest."""
    return max(float(stage.table.work[stage.first, stage.last]) for stage in choice.stages)


def polished(
    space: StageSpace,
    start: SimulatedChoice,
    simulate: Callable[[PipelineChoice], SimulatedChoice | None],
    may_go_on: Callable[[], bool],
) -> SimulatedChoice:
    """The best choice that single moves lead to, each taken as soon as it is faster and fits.

    Moves that make the slowest virtual stage slower are not simulated.
    """
    best, improved = start, True
    while improved:
        improved = False
        for other in neighbours(space, best.choice):
            if not may_go_on():
                return best
            if largest_work(other) > largest_work(best.choice) * (1 + 1e-9):
                continue
            found = simulate(other)
            if found is not None and found.fits and found.seconds < best.seconds * (1 - 1e-9):
                best, improved = found, True
                break
    return best
