"""Pipelines whose devices have several virtual stages each: balanced cuts, and a bound.

All sub-meshes are equal. The bound is the mean over devices of what `chains` takes the maximum of: seconds of all
virtual stages, which the devices share, and what the first microbatch passes before each device's first virtual stage.
The least mean over all cuts is a shortest path, so it is found exactly. Whole layers cannot be shared equally, which
gives another bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        return [table for table in self.tables if start in table.shape.starts]

    @property
    def starts(self) -> list[int]:
        """Per virtual stage, the position of its first device."""
        return [device * self.tables[0].shape.devices for device in self.form.placement]


def chunk_bound(problem: ChunkProblem) -> float:
    """Seconds that no cut into virtual stages is below; inf if there is none."""
    made = problem.form
    devices = max(made.placement) + 1
    first = [made.placement.index(device) for device in range(devices)]
    after = [sum(1 for stage in first if stage > i) for i in range(devices)]
    bounds = [problem.microbatches * busiest_device(problem.tables, devices)]
    for without in (False, True) if made.has_weight_tasks else (False,):  # as in `ChainProblem.leaves_out_weights`
        back = without or not made.has_weight_tasks
        rest = np.full(problem.space.layers + 1, np.inf)
        rest[-1] = 0.0
        for i in range(len(made.placement) - 1, -1, -1):
            passing = after[i] / devices if i < devices else 0.0
            costs = []
            for table in problem.table_of(problem.starts[i]):
                seconds = _seconds(problem, table)
                counted = seconds[:2] if without else seconds
                cost = (problem.microbatches * sum(counted) + table.after) / devices
                if passing:
                    cost = cost + passing * (seconds[0] + seconds[1] if back else seconds[0])
                costs.append(cost)
            rest = min_plus(costs, rest)
        bounds.append(float(rest[0]))
    return max(bounds)


def busiest_device(tables: Sequence[StageTable], devices: int) -> float:
    """Seconds of work per microbatch that some device has at least, however layers are dealt to devices.

    Of the k * devices + 1 layers that take longest, some device has k + 1, so at least the shortest k + 1 of these
    (Graham's bound for identical machines). A run of layers may take less than they take one by one: every layer counts
    as little as makes the bound hold for the run that saves the most.

    >>> from autoshard.stage_search import LayerCosts, SubMesh
    >>> costs = LayerCosts(*[np.ones(5)] * 7).table(SubMesh.anywhere("1", 1, 2, 1e9))
    >>> busiest_device([costs], 2)  # 5 layers of 3 s on 2 devices: one of them has 3 layers
    9.0
    """
    work = np.min([table.work for table in tables], axis=0)
    layers = len(work) - 1
    alone = work[np.arange(layers), np.arange(1, layers + 1)]
    if not np.isfinite(alone).all():
        return 0.0
    total = np.concatenate(([0.0], np.cumsum(alone)))
    sums = total[None, :] - total[:, None]
    runs = np.isfinite(work) & (sums > 0)
    kept = min(1.0, float((work[runs] / sums[runs]).min())) if runs.any() else 1.0
    longest = np.sort(alone)[::-1]
    counts = [k for k in range(layers) if k * devices < layers]
    return kept * max(float(longest[k * devices - k : k * devices + 1].sum()) for k in counts)


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
    for i in range(len(starts) - 1, -1, -1):
        tables = problem.table_of(starts[i])
        if not tables:
            return None
        work = np.stack([np.where(_fits(table), sum(_seconds(problem, table)), np.inf) for table in tables])
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


def _fits(table: StageTable) -> np.ndarray:
    return table.fixed_bytes + table.working_bytes + table.microbatch_bytes <= table.shape.memory_bytes
