"""Bounds of one kind of pipeline: linear programs in which layers may be shared by virtual stages.

The seconds of each kind of task in each virtual stage are variables. A stage takes at least what its shares of layers
take. A device works for as long as all its tasks take, after the first microbatch has come and before the last
cotangent has gone back. The program sees memory: that a device has no room for some layers, with the microbatches that
are in flight there. What it does not see is that layers are whole, but for a limit of layers per device that it may be
told.

What the order of a schedule costs is added path by path: an order made for equal stages waits if they are not. Tasks on
a path through the order, with the transfers between them, take no longer than the step. There are too many paths for a
program. So the schedule is run with the seconds that the program finds, and the paths that end last join it, until it
finds about as many seconds as the schedule takes (cutting planes). Each program on the way is a bound by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.pipeline import Schedule
from autoshard.pipeline.operations import OperationGraph, start_times
from autoshard.stage_search.chunks import ChunkProblem
from autoshard.stage_search.simulating import ScheduleFacts
from autoshard.stage_search.tables import StageTable
from autoshard.stage_search.whole_layers import Ending, LayerLimit, least_per_layer

MOST_PROGRAMS = 40  # one after the other, each with more paths
MAKESPAN_TOLERANCE = 1e-3  # by which share of it the makespan may be missed
_PROGRAM_ERROR = 1e-6  # by which share the solver may be wrong


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
class _Inequalities:
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

    def matrix(self, columns: int) -> Any:
        """The coefficients, [inequality, variable]."""
        from scipy.sparse import coo_array

        return coo_array((self.value, (self.row, self.column)), shape=(len(self.bound), columns)).tocsr()


def fractional_bound(
    problem: ChunkProblem,
    facts: ScheduleFacts,
    ending: Ending = (0,),
    limit: LayerLimit | None = None,
    *,
    has_tasks: bool = True,
) -> float:
    """Seconds that no choice of virtual stages is below whose last layers are cut so; inf if none fits.

    Args:
        has_tasks: whether the order of tasks counts, as far as `MOST_PROGRAMS` see it.
        limit: holds for every choice that takes less than its seconds. The bound is then no more than these seconds.
    """
    program = _LayerProgram(problem, facts, ending, limit)
    if not program.add_devices() or not program.add_totals():
        return float("inf")
    below = np.inf if limit is None else limit.seconds
    orders, bound = _TaskOrders(facts.graph, program.lag), 0.0
    for _ in range(MOST_PROGRAMS if has_tasks else 1):
        found = program.solved()
        if found.status == 2:  # infeasible
            return float(below)
        if found.status != 0:
            break
        bound = max(bound, float(found.fun) * (1.0 - _PROGRAM_ERROR))
        if bound >= below or not has_tasks:
            break
        seconds, paths = orders.last_paths({key: float(found.x[column]) for key, column in program.duration.items()})
        if seconds <= float(found.x[program.makespan]) * (1.0 + MAKESPAN_TOLERANCE):
            break
        for path, travel in paths:
            program.add_path(path, travel)
    return min(bound, float(below))


class _LayerProgram:
    """The linear program: columns for seconds of tasks by stage and kind, layers by share, the makespan, the step."""

    def __init__(self, problem: ChunkProblem, facts: ScheduleFacts, ending: Ending, limit: LayerLimit | None) -> None:
        self.problem, self.facts, self.limit = problem, facts, limit
        schedule = facts.schedule
        self.segments = _segments(problem, len(ending))
        self.shares = _shares(problem, self.segments, ending)
        self.kinds = "FBW" if schedule.has_weight_tasks else "FB"
        stages = len(schedule.placement)
        self.duration = {(kind, v): i * stages + v for i, kind in enumerate(self.kinds) for v in range(stages)}
        self.first_share = len(self.duration)
        self.makespan = self.first_share + len(self.shares)
        self.step = self.makespan + 1
        self.rows, self.totals = _Inequalities(), _Inequalities()
        self.lag = least_lags(problem, schedule)
        self.by_stage: list[list[int]] = [[] for _ in range(stages)]
        for i, share in enumerate(self.shares):
            self.by_stage[share.stage].append(i)
        _add_up_tasks(self.rows, problem, schedule, self.lag, self.duration, self.makespan)
        self._add_stages()

    def _add_stages(self) -> None:
        """A stage takes what its shares of layers take, and has a layer or more."""
        for v, own in enumerate(self.by_stage):
            for kind in self.kinds:
                taken = [(self.first_share + i, self.shares[i].seconds[kind]) for i in own]
                self.rows.add([*taken, (self.duration[kind, v], -1.0)], 0.0)
            self.rows.add([(self.first_share + i, -1.0) for i in own], -1.0)

    def add_devices(self) -> bool:
        """Adds what devices hold, and what they do once per step; whether each has a table."""
        placement = self.facts.schedule.placement
        for device in range(self.facts.schedule.stages):
            here = [v for v, home in enumerate(placement) if home == device]
            tables = self.problem.table_of(self.problem.starts[here[0]])
            if not tables:
                return False
            self._add_device(device, here, tables)
        return True

    def _add_device(self, device: int, here: Sequence[int], tables: Sequence[StageTable]) -> None:
        rows, shares, first = self.rows, self.shares, self.first_share
        memory = max(table.shape.memory_bytes for table in tables)
        working = min(float(np.nanmin(table.working_bytes)) for table in tables)
        once = [(first + i, shares[i].after) for v in here for i in self.by_stage[v]]
        rows.add([*once, (self.makespan, 1.0), (self.step, -1.0)], 0.0)
        for state in fullest_states(self.facts.in_flight[device]):
            held = [
                (first + i, (shares[i].fixed_bytes + flying * shares[i].microbatch_bytes) / memory)
                for v, flying in zip(here, state, strict=True)
                for i in self.by_stage[v]
            ]
            rows.add(held, 1.0 - working / memory)
        if self.limit is not None:
            limited = {number for number, segment in enumerate(self.segments) if segment[0] in self.limit.layers}
            dealt = [(first + i, 1.0) for v in here for i in self.by_stage[v] if shares[i].segment in limited]
            rows.add(dealt, float(self.limit.most[device]))

    def add_totals(self) -> bool:
        """Adds that every layer is on some device; whether each can be."""
        for number, segment in enumerate(self.segments):
            parts = [(self.first_share + i, 1.0) for i, share in enumerate(self.shares) if share.segment == number]
            if not parts:
                return False
            self.totals.add(parts, float(len(segment)))
        return True

    def add_path(self, path: Mapping[Any, int], travel: float) -> None:
        """Adds that the tasks on a path, with these seconds of transfers, take no longer than the makespan."""
        terms = [(self.duration[key], float(count)) for key, count in path.items()]
        self.rows.add([*terms, (self.makespan, -1.0)], -travel)

    def solved(self) -> Any:
        """What `linprog` returns."""
        from scipy.optimize import linprog

        least = np.zeros(self.step + 1)
        least[: self.first_share] = self.problem.space.least_task_seconds
        cost = np.zeros(self.step + 1)
        cost[self.step] = 1.0
        return linprog(
            cost,
            A_ub=self.rows.matrix(self.step + 1),
            b_ub=self.rows.bound,
            A_eq=self.totals.matrix(self.step + 1),
            b_eq=self.totals.bound,
            bounds=np.stack([least, np.full(self.step + 1, np.inf)], axis=1),
            method="highs",
        )


class _TaskOrders:
    """The tasks of a schedule in their orders."""

    def __init__(self, graph: OperationGraph, lag: Mapping[tuple[str, int, int], float]) -> None:
        self.rows = graph.rows
        self.firsts = {row[0] for row in graph.rows}
        tasks = [operation[0] for operation in graph.operations]
        self.keys = [(task.kind, task.virtual_stage) for task in tasks]
        self.lags = [
            [(other, lag.get((task.kind, tasks[other].virtual_stage, task.virtual_stage), 0.0)) for other in inputs]
            for task, inputs in zip(tasks, graph.inputs, strict=True)
        ]

    def last_paths(self, seconds: Mapping[tuple[str, int], float]) -> tuple[float, list[tuple[Counter[Any], float]]]:
        """The makespan, and per device the tasks on the longest path to its last one, with the seconds of transfers.

        Args:
            seconds: of a task by its kind and virtual stage.
        """
        taken = [seconds[key] for key in self.keys]
        starts, _ = start_times(self.rows, self.lags, taken)
        found: list[tuple[Counter[Any], float]] = []
        seen: set[Any] = set()
        for row in self.rows:
            path, travel = Counter[Any](), 0.0
            at: int | None = row[-1]
            while at is not None:
                path[self.keys[at]] += 1
                at, spent = self._before(at, starts, taken)
                travel += spent
            known = tuple(sorted(path.items())), travel
            if known not in seen:
                seen.add(known)
                found.append((path, travel))
        return max(starts[row[-1]] + taken[row[-1]] for row in self.rows), found

    def _before(self, task: int, starts: Sequence[float], taken: Sequence[float]) -> tuple[int | None, float]:
        """What a task waited for last, and the seconds that its result travelled; None if it did not wait."""
        ways = [(starts[other] + taken[other] + spent, other, spent) for other, spent in self.lags[task]]
        if task not in self.firsts:
            ways.append((starts[task - 1] + taken[task - 1], task - 1, 0.0))
        if not ways:
            return None, 0.0
        _, other, spent = max(ways)
        return other, spent


def _add_up_tasks(
    rows: _Inequalities,
    problem: ChunkProblem,
    made: Schedule,
    lag: Mapping[tuple[str, int, int], float],
    duration: Mapping[tuple[str, int], int],
    makespan: int,
) -> None:
    """The makespan is no less than what a device works, and what its first virtual stage waits for there and back.

    Nobody waits for W tasks. So these count where the way back does not, or do not count (`chains.py`).
    """
    count = float(problem.microbatches)
    ways = [("FBW", "F"), ("FB", "FB")] if made.has_weight_tasks else [("FB", "FB")]
    for device, first in enumerate(problem.first_stages):
        here = [v for v, home in enumerate(made.placement) if home == device]
        for own, passed in ways:
            terms = [(duration[kind, v], count) for v in here for kind in own]
            terms += [(duration[kind, v], 1.0) for v in range(first) for kind in passed]
            travel = sum(lag["F", v, v + 1] + ("B" in passed) * lag["B", v + 1, v] for v in range(first))
            rows.add([*terms, (makespan, -1.0)], -travel)


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


def fullest_states(states: np.ndarray) -> np.ndarray:
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
        least = least_of_layers(table, split=problem.form.has_weight_tasks)
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


def least_of_layers(table: StageTable, *, split: bool) -> dict[str, np.ndarray]:
    """What every layer adds at least, of each figure of a table."""
    tasks = (
        {"F": table.forward, "B": table.backward, "W": table.weight}
        if split
        else {"F": table.forward, "B": table.backward + table.weight}
    )
    figures = {**tasks, "after": table.after, "fixed": table.fixed_bytes, "microbatch": table.microbatch_bytes}
    allowed = table.fits
    return {name: least_per_layer(np.where(allowed, rows, np.inf)) for name, rows in figures.items()}
