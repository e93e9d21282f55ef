"""Virtual stages that are too large for their devices to such as fit: some on tables that hold less.

Each switch of a stage to another table saves bytes and costs seconds. On a device that holds too much, the switch that
costs least per byte comes first, as a greedy knapsack does, until the device has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.stage_search.choices import ChosenStage
from autoshard.stage_search.chunks import ChunkProblem


def within_memory(
    problem: ChunkProblem, stages: Sequence[ChosenStage], in_flight: Sequence[NDArray[np.int64]]
) -> tuple[ChosenStage, ...]:
    """The same layers on the same devices, on tables that fit as far as there are such.

    Args:
        in_flight: as `ScheduleFacts.in_flight`.
    """
    found = list(stages)
    for device, states in enumerate(in_flight):
        own = [v for v, home in enumerate(problem.form.placement) if home == device]
        most = states.max(axis=0)
        while _held([found[v] for v in own], states) > found[own[0]].table.shape.memory_bytes:
            switches = [
                (_seconds(problem, other) - _seconds(problem, found[v]), saved, v, other)
                for flying, v in zip(most, own, strict=True)
                for other in _others(problem, found[v])
                if (saved := _kept(found[v], flying) - _kept(other, flying)) > 0
            ]
            if not switches:
                break
            _, _, v, other = min(switches, key=lambda one: one[0] / one[1])
            found[v] = other
    return tuple(found)


def _others(problem: ChunkProblem, stage: ChosenStage) -> list[ChosenStage]:
    run = stage.first, stage.last
    return [
        replace(stage, table=table)
        for table in problem.table_of(stage.start)
        if table is not stage.table and np.isfinite(table.work[run])
    ]


def _held(stages: Sequence[ChosenStage], states: NDArray[np.int64]) -> float:
    """Bytes that a device with these virtual stages holds at most."""
    fixed, working, saved = (
        [_entry(one, name) for one in stages] for name in ("fixed_bytes", "working_bytes", "microbatch_bytes")
    )
    return sum(fixed) + max(working) + float((states @ np.array(saved)).max())


def _kept(stage: ChosenStage, flying: float) -> float:
    return _entry(stage, "fixed_bytes") + flying * _entry(stage, "microbatch_bytes")


def _seconds(problem: ChunkProblem, stage: ChosenStage) -> float:
    return problem.microbatches * float(stage.table.work[stage.first, stage.last]) + _entry(stage, "after")


def _entry(stage: ChosenStage, name: str) -> float:
    return float(getattr(stage.table, name)[stage.first, stage.last])
