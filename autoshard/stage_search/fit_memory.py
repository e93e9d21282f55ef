"""Virtual stages that are too large for their devices to such as fit: on tables that hold less, or of fewer layers.

Each switch of a stage to another table saves bytes and costs seconds. On a device that holds too much, the switch that
costs least per byte comes first, as a greedy knapsack does, until the device has room. Where no switch is left, a layer
goes from one virtual stage to another, each time the one after which the devices lack the least.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.stage_search.choices import ChosenStage
from autoshard.stage_search.chunks import ChunkProblem
from autoshard.stage_search.tables import StageTable

Run = tuple[int, int]  # the first layer of a stage, and the layer after its last

_MOST_CUTS = 4  # that move together: a layer goes to a virtual stage so many further at most


def fitted_to_memory(
    problem: ChunkProblem, stages: Sequence[ChosenStage], in_flight: Sequence[NDArray[np.int64]]
) -> tuple[ChosenStage, ...]:
    """Stages on the same devices, on tables and with layers that fit as far as such are found.

    Args:
        in_flight: as `ScheduleFacts.in_flight`.
    """
    found = tuple(stages)
    for device in range(len(in_flight)):
        found = _stages_on_leaner_tables(problem, found, device, in_flight[device])
    lacking = [_lacking(problem, found, device, states) for device, states in enumerate(in_flight)]
    while any(lacking):
        for cuts in range(1, _MOST_CUTS + 1):
            moves = _moves(problem, found, in_flight, lacking, cuts)
            still_lacking, moved = min(moves, key=lambda one: sum(one[0]), default=(lacking, found))
            if sum(still_lacking) < sum(lacking) * (1 - 1e-9):
                lacking, found = still_lacking, moved
                break
        else:
            return found
    return found


def _moves(
    problem: ChunkProblem,
    stages: tuple[ChosenStage, ...],
    in_flight: Sequence[NDArray[np.int64]],
    lacking: Sequence[float],
    cuts: int,
) -> Iterator[tuple[list[float], tuple[ChosenStage, ...]]]:
    """What devices lack, and the stages, after so many cuts in a row have moved by a layer.

    So one virtual stage has a layer less and another one a layer more. A device that lacks bytes has a part in it.
    """
    for at, by in itertools.product(range(len(stages) - cuts), (-1, 1)):
        several = stages[at : at + cuts + 1]
        homes = set(problem.form.placement[at : at + cuts + 1])
        if len(several[0 if by < 0 else -1].layers) == 1 or not any(lacking[device] for device in homes):
            continue
        ends = [one.last + by for one in several[:-1]]
        moved = [
            replace(one, first=first, last=last)
            for one, first, last in zip(several, [several[0].first, *ends], [*ends, several[-1].last], strict=True)
        ]
        if not all(np.isfinite(_entry(one, "fixed_bytes")) for one in moved):  # a table may not have every stage
            continue
        found, changed = (*stages[:at], *moved, *stages[at + cuts + 1 :]), list(lacking)
        for device in homes:
            found = _stages_on_leaner_tables(problem, found, device, in_flight[device])
            changed[device] = _lacking(problem, found, device, in_flight[device])
        yield changed, found


def _stages_on_leaner_tables(
    problem: ChunkProblem, stages: tuple[ChosenStage, ...], device: int, states: NDArray[np.int64]
) -> tuple[ChosenStage, ...]:
    """The stages, those of one device switched until it has room or no switch saves anything."""
    found, own, most = list(stages), _own(problem, device), states.max(axis=0)
    while _held([found[v] for v in own], states) > found[own[0]].table.shape.memory_bytes:
        switches = []
        for flying, v in zip(most, own, strict=True):
            stage, run = found[v], (found[v].first, found[v].last)
            kept, taken = _kept(stage.table, run, flying), _seconds(problem, stage.table, run)
            for table in problem.table_of(stage.start):
                saved = kept - _kept(table, run, flying)
                if saved > 0 and np.isfinite(table.work[run]):
                    switches.append((_seconds(problem, table, run) - taken, saved, v, table))
        if not switches:
            break
        _, _, v, table = min(switches, key=lambda one: one[0] / one[1])
        found[v] = replace(found[v], table=table)
    return tuple(found)


def _own(problem: ChunkProblem, device: int) -> list[int]:
    return [v for v, home in enumerate(problem.form.placement) if home == device]


def _lacking(problem: ChunkProblem, stages: tuple[ChosenStage, ...], device: int, states: NDArray[np.int64]) -> float:
    """The share of its memory that a device would have to have more."""
    own = [stages[v] for v in _own(problem, device)]
    return max(0.0, _held(own, states) / own[0].table.shape.memory_bytes - 1.0)


def _held(stages: Sequence[ChosenStage], states: NDArray[np.int64]) -> float:
    """Bytes that a device with these virtual stages holds at most."""
    fixed, working, saved = (
        [_entry(one, name) for one in stages] for name in ("fixed_bytes", "working_bytes", "microbatch_bytes")
    )
    return sum(fixed) + max(working) + float((states @ np.array(saved)).max())


def _kept(table: StageTable, run: Run, flying: float) -> float:
    return float(table.fixed_bytes[run] + flying * table.microbatch_bytes[run])


def _seconds(problem: ChunkProblem, table: StageTable, run: Run) -> float:
    return float(problem.microbatches * table.work[run] + table.after[run])


def _entry(stage: ChosenStage, name: str) -> float:
    return float(getattr(stage.table, name)[stage.first, stage.last])
