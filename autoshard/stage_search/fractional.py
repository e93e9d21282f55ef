"""A bound of one kind of pipeline: its schedule as a linear program, in which layers may be shared by virtual stages.

The start of every task is a variable, and so are the seconds of each kind of task in each virtual stage. A task starts
after the one before it on its device, and after those whose results it reads have come. A stage takes at least what
its shares of layers take. The program sees what the order of a schedule costs: an order made for equal stages waits if
they are not. What it does not see is that layers are whole, but for a limit of layers per device that it may be told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.pipeline import Schedule
from autoshard.pipeline.operations import OperationGraph
from autoshard.stage_search.chunks import ChunkProblem
from autoshard.stage_search.simulating import ScheduleFacts
from autoshard.stage_search.tables import StageTable, is_within_memory
from autoshard.stage_search.whole_layers import Ending, LayerLimit, least_per_layer

_ROUNDING = 1e-6  # by which share the solver may be wrong


@dataclass(frozen=True)
class LayerShare:
    """What a virtual stage takes and holds at least, per layer of some that are alike, on one sub-mesh."""

    stage: int
    segment: int  # which layers
    seconds: Mapping[str, float]  # kind of task -> s
    after: float  # s per step
    fixed_bytes: float
    microbatch_bytes: float


@dataclass
class _Rows:
    """Inequalities `sum of coefficients * variables <= bound`, sparse."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], bound: float) -> None:
        for column, value in terms:
            self.row.append(len(self.bound))
            self.column.append(column)
            self.value.append(value)
        self.bound.append(bound)


def fractional_bound(
    problem: ChunkProblem, facts: ScheduleFacts, ending: Ending = (0,), limit: LayerLimit | None = None
) -> float:
    """Seconds that no choice of virtual stages is below whose last layers are cut so; inf if none fits.

    Args:
        limit: holds for every choice that takes less than its seconds. The bound is then no more than these seconds.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    made, segments = facts.schedule, _segments(problem, len(ending))
    shares = _shares(problem, segments, ending)
    kinds = "FBW" if made.has_weight_tasks else "FB"
    stages, tasks = len(made.placement), len(facts.graph.operations)
    # Variables: starts of tasks, seconds of tasks by stage and kind, layers by share, the makespan, the step.
    duration = {(kind, v): tasks + i * stages + v for i, kind in enumerate(kinds) for v in range(stages)}
    first_share = tasks + len(duration)
    makespan = first_share + len(shares)
    step = makespan + 1
    rows = _Rows()
    _order_tasks(rows, problem, facts.graph, duration, makespan)
    by_stage: list[list[int]] = [[] for _ in range(stages)]
    for i, share in enumerate(shares):
        by_stage[share.stage].append(i)
    for v, own in enumerate(by_stage):
        for kind in kinds:
            taken = [(first_share + i, shares[i].seconds[kind]) for i in own]
            rows.add([*taken, (duration[kind, v], -1.0)], 0.0)
        rows.add([(first_share + i, -1.0) for i in own], -1.0)  # a stage has a layer or more
    memory = problem.tables[0].shape.memory_bytes
    working = min(float(np.nanmin(table.working_bytes)) for table in problem.tables)
    for device in range(made.stages):
        here = [v for v, home in enumerate(made.placement) if home == device]
        once = [(first_share + i, shares[i].after) for v in here for i in by_stage[v]]
        rows.add([*once, (makespan, 1.0), (step, -1.0)], 0.0)
        for state in _fullest(facts.in_flight[device]):
            held = [
                (first_share + i, (shares[i].fixed_bytes + flying * shares[i].microbatch_bytes) / memory)
                for v, flying in zip(here, state, strict=True)
                for i in by_stage[v]
            ]
            rows.add(held, 1.0 - working / memory)
        if limit is not None:
            limited = {number for number, segment in enumerate(segments) if segment[0] in limit.layers}
            dealt = [(first_share + i, 1.0) for v in here for i in by_stage[v] if shares[i].segment in limited]
            rows.add(dealt, float(limit.most[device]))
    totals = _Rows()
    for number, segment in enumerate(segments):
        parts = [(first_share + i, 1.0) for i, share in enumerate(shares) if share.segment == number]
        if not parts:
            return float("inf")
        totals.add(parts, float(len(segment)))
    least = np.zeros(step + 1)
    least[tasks:first_share] = problem.space.least_task_seconds
    cost = np.zeros(step + 1)
    cost[step] = 1.0

    def matrix(some: _Rows) -> coo_array:
        return coo_array((some.value, (some.row, some.column)), shape=(len(some.bound), step + 1)).tocsr()

    found = linprog(
        cost,
        A_ub=matrix(rows),
        b_ub=rows.bound,
        A_eq=matrix(totals),
        b_eq=totals.bound,
        bounds=np.stack([least, np.full(step + 1, np.inf)], axis=1),
        method="highs",
    )
    below = np.inf if limit is None else limit.seconds
    if found.status == 2:  # infeasible
        return float(below)
    return min(float(found.fun) * (1.0 - _ROUNDING), float(below)) if found.status == 0 else 0.0


def _order_tasks(
    rows: _Rows,
    problem: ChunkProblem,
    graph: OperationGraph,
    duration: Mapping[tuple[str, int], int],
    makespan: int,
) -> None:
    """Every task after those that it waits for, and the makespan after all."""
    lag = least_lags(problem, graph.schedule)
    tasks = [operation[0] for operation in graph.operations]

    def after(task: int, later: int, seconds: float) -> None:
        kind, _, stage = tasks[task]
        rows.add([(task, 1.0), (duration[kind, stage], 1.0), (later, -1.0)], -seconds)

    for row in graph.rows:
        for task in row[:-1]:
            after(task, task + 1, 0.0)
        after(row[-1], makespan, 0.0)
    for task, inputs in enumerate(graph.inputs):
        kind, _, stage = tasks[task]
        for other in inputs:
            after(other, task, lag.get((kind, tasks[other].virtual_stage, stage), 0.0))


def least_lags(problem: ChunkProblem, made: Schedule) -> dict[tuple[str, int, int], float]:
    """(kind of task, virtual stage that sends, virtual stage that receives) -> s, over the cut that sends least."""
    space, starts, devices = problem.space, problem.starts, problem.tables[0].shape.devices
    costs, stages = space.costs[problem.microbatches], len(made.placement)
    found = {}
    for v in range(stages - 1):
        cuts = slice(v + 1, space.layers - (stages - 1 - v) + 1)
        for kind, sent, (a, b) in (("F", costs.sent_forward, (v, v + 1)), ("B", costs.sent_backward, (v + 1, v))):
            found[kind, a, b] = space.row.seconds(float(sent[cuts].min()), starts[a], devices, starts[b], devices)
    return found


def _fullest(states: np.ndarray) -> np.ndarray:
    """Of microbatches in flight per virtual stage, those with the most of one stage, and the most in all."""
    return np.unique(states[[int(states.sum(axis=1).argmax()), *states.argmax(axis=0).tolist()]], axis=0)


def _segments(problem: ChunkProblem, known: int) -> list[range]:
    """Consecutive layers that cost the same on every sub-mesh; the first layer and the last `known` by themselves."""
    layers = problem.space.layers
    looks = [
        tuple(
            f"{float(rows[layer, layer + 1]):.12g}"
            for table in problem.tables
            for rows in (table.forward, table.backward, table.weight, table.after, table.fixed_bytes)
        )
        for layer in range(layers)
    ]
    alone = {0, 1, *range(layers - known, layers)}
    firsts = [layer for layer in range(layers) if layer in alone or looks[layer] != looks[layer - 1]]
    return [range(first, end) for first, end in zip(firsts, [*firsts[1:], layers], strict=True)]


def _shares(problem: ChunkProblem, segments: Sequence[range], ending: Ending) -> list[LayerShare]:
    """Every share that a virtual stage may have: stages are in a row, and each has a layer or more."""
    stages, layers = len(problem.form.placement), problem.space.layers
    found = []
    for table in problem.tables:
        least = _least(table, split=problem.form.has_weight_tasks)
        for number, segment in enumerate(segments):
            at = {name: float(per_layer[segment].min()) for name, per_layer in least.items()}
            if not all(map(np.isfinite, at.values())):
                continue
            seconds = {kind: at[kind] for kind in "FBW" if kind in at}
            from_end = layers - 1 - segment[0]
            if from_end < len(ending):
                homes = range(stages - 1 - ending[from_end], stages - ending[from_end])
            else:
                homes = range(max(0, stages - layers + segment[0]), min(stages, segment[-1] + 1))
            for v in homes:
                if problem.starts[v] in table.shape.starts:
                    found.append(LayerShare(v, number, seconds, at["after"], at["fixed"], at["microbatch"]))
    return found


def _least(table: StageTable, *, split: bool) -> dict[str, np.ndarray]:
    """What every layer adds at least, of each figure of a table."""
    tasks = (
        {"F": table.forward, "B": table.backward, "W": table.weight}
        if split
        else {"F": table.forward, "B": table.backward + table.weight}
    )
    figures = {**tasks, "after": table.after, "fixed": table.fixed_bytes, "microbatch": table.microbatch_bytes}
    allowed = is_within_memory(table, 1.0)
    return {name: least_per_layer(np.where(allowed, rows, np.inf)) for name, rows in figures.items()}
