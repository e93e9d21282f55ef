"""Pipelines whose devices have several virtual stages each: balanced cuts, and bounds.

All sub-meshes are equal. One bound is that of `whole_layers`. The other is the mean over devices of what `chains` takes
the maximum of: seconds of all virtual stages, which the devices share, and what the first microbatch passes before each
device's first virtual stage. The least mean over all cuts is a shortest path, so it is found exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.stage_search.choices import ChosenStage
from autoshard.stage_search.simulating import ScheduleForm
from autoshard.stage_search.tables import Numbers, StageSpace, StageTable


@dataclass(frozen=True)
class ChunkProblem:
    """Virtual stages of one schedule on equal sub-meshes that together take the whole row of devices."""

    space: StageSpace
    form: ScheduleForm
    microbatches: int
    tables: tuple[StageTable, ...]  # of one number of devices

    def table_of(self, start: int) -> list[StageTable]:
        """The tables of sub-meshes that may begin at a position."""
        return self._tables_by_start[start]

    @cached_property
    def _tables_by_start(self) -> dict[int, list[StageTable]]:
        starts = set(self.starts)
        return {start: [table for table in self.tables if start in table.shape.starts] for start in starts}

    @property
    def devices(self) -> int:
        """Devices of the schedule."""
        return max(self.form.placement) + 1

    @property
    def first_stages(self) -> list[int]:
        """Per device of the schedule, its first virtual stage."""
        return [self.form.placement.index(device) for device in range(self.devices)]

    @property
    def starts(self) -> list[int]:
        """Per virtual stage, the position of its first device."""
        return [device * self.tables[0].shape.devices for device in self.form.placement]


def mean_bound(problem: ChunkProblem) -> float:
    """Seconds that no cut into virtual stages is below, by the mean over devices; inf if there is none."""
    made, devices, first = problem.form, problem.devices, problem.first_stages
    after = [sum(1 for stage in first if stage > i) for i in range(devices)]
    bounds, all_seconds = [], {id(table): _seconds(problem, table) for table in problem.tables}
    for without in (False, True) if made.has_weight_tasks else (False,):  # as in `ChainProblem.leaves_out_weights`
        back = without or not made.has_weight_tasks
        rest = np.full(problem.space.layers + 1, np.inf)
        rest[-1] = 0.0
        known: dict[tuple[int, float], list[Numbers]] = {}  # by the first device, and the share of stages that wait
        for i in range(len(made.placement) - 1, -1, -1):
            start, passing = problem.starts[i], after[i] / devices if i < devices else 0.0
            if (start, passing) not in known:
                costs = []
                for table in problem.table_of(start):
                    seconds = all_seconds[id(table)]
                    counted = seconds[:2] if without else seconds
                    cost = (problem.microbatches * sum(counted) + table.after) / devices
                    if passing:
                        cost = cost + passing * (seconds[0] + seconds[1] if back else seconds[0])
                    costs.append(np.where(table.fits, cost, np.inf))
                known[start, passing] = [np.min(costs, axis=0)] if costs else []
            rest = min_plus(known[start, passing], rest)
        bounds.append(float(rest[0]))
    return max(bounds)


def _seconds(problem: ChunkProblem, table: StageTable) -> list[Numbers]:
    least = problem.space.least_task_seconds
    back = [table.backward, table.weight] if problem.form.has_weight_tasks else [table.backward + table.weight]
    return [np.maximum(one, least) for one in (table.forward, *back)]


def min_plus(costs: list[Numbers], rest: Numbers) -> Numbers:
    """At layer i, the least over k and over costs of cost[i, k] and what follows from layer k on."""
    if not costs:
        return np.full(len(rest), np.inf)
    return np.min([(cost + rest[None, :]).min(axis=1) for cost in costs], axis=0)


def balanced(problem: ChunkProblem) -> tuple[ChosenStage, ...] | None:
    """The cut whose slowest virtual stage is fastest, and of such cuts the one of the least work; None: none fits."""
    layers, starts = problem.space.layers, problem.starts
    worst = np.full(layers + 1, np.inf)
    worst[-1] = 0.0
    total = np.where(np.isfinite(worst), 0.0, np.inf)
    steps: list[tuple[Numbers, Numbers, list[StageTable]]] = []
    works = {id(table): np.where(table.fits, sum(_seconds(problem, table)), np.inf) for table in problem.tables}
    known: dict[int, Numbers] = {}  # by the first device
    for start in reversed(starts):
        tables = problem.table_of(start)
        if not tables:
            return None
        if start not in known:
            known[start] = np.stack([works[id(table)] for table in tables])
        work = known[start]
        largest = np.maximum(work, worst[None, None, :])
        sums = work + total[None, None, :]
        # The sum decides where the largest is the same but for rounding.
        best = largest.min(axis=(0, 2))
        near = largest <= best[None, :, None] * (1 + 1e-9)
        sums = np.where(near & np.isfinite(largest), sums, np.inf)
        flat = np.moveaxis(sums, 1, 0).reshape(layers + 1, -1)
        choice = flat.argmin(axis=1)
        steps.append((choice // (layers + 1), choice % (layers + 1), tables))
        worst, total = best, flat.min(axis=1)
    if not math.isfinite(worst[0]):
        return None
    stages, at = [], 0
    for (which, end, tables), start in zip(reversed(steps), starts, strict=True):
        stages.append(ChosenStage(at, int(end[at]), tables[int(which[at])], start))
        at = int(end[at])
    return tuple(stages)
