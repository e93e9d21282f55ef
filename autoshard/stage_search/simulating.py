"""A choice of stages to its seconds and bytes: every task of the schedule, every transfer, what each device holds."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import ArgumentError, ScheduleError
from autoshard.pipeline import Schedule, Timeline, schedule
from autoshard.pipeline.operations import OperationGraph, start_times
from autoshard.pipeline.validation import checked_graph
from autoshard.stage_search.choices import ChosenStage, PipelineChoice, SimulatedChoice
from autoshard.stage_search.machine import DeviceRow
from autoshard.stage_search.tables import MicrobatchCosts, StageSpace

Hop = tuple[str, int, int]  # kind of task, virtual stage that sends, virtual stage that receives


@dataclass(frozen=True)
class ScheduleFacts:
    """What of a schedule does not depend on seconds."""

    schedule: Schedule
    graph: OperationGraph
    in_flight: tuple[NDArray[np.int64], ...]
    """Per device, rows of microbatches in flight in each of its virtual stages: every state that none other exceeds."""

    @functools.cached_property
    def hops(self) -> tuple[list[Hop], list[tuple[tuple[int, int], ...]]]:
        """What results travel, and per operation those that it waits for, each with the number of what it travels.

        Tuples of numbers are none of the garbage collector's business: there are hundreds of thousands.
        """
        tasks, numbers = [operation[0] for operation in self.graph.operations], dict[Hop, int]()
        waits = [
            tuple(
                (other, numbers.setdefault((task.kind, tasks[other].virtual_stage, task.virtual_stage), len(numbers)))
                for other in inputs
            )
            for task, inputs in zip(tasks, self.graph.inputs, strict=True)
        ]
        return list(numbers), waits

    @property
    def most_in_flight(self) -> tuple[float, ...]:
        """Per device, the most microbatches in flight, in whole stages."""
        return tuple(float(states.sum(axis=1).max()) / states.shape[1] for states in self.in_flight)


@functools.lru_cache(maxsize=512)
def schedule_facts(name: str, stages: int, chunks: int, microbatches: int) -> ScheduleFacts | None:
    """A published schedule, checked; None where it is not defined for these numbers."""
    made, states = _schedule(name, stages, chunks, microbatches), in_flight_of(name, stages, chunks, microbatches)
    if made is None or states is None:
        return None
    try:
        return ScheduleFacts(made, checked_graph(made, fuse=False), states)
    except ScheduleError:
        return None


@functools.lru_cache(maxsize=512)
def in_flight_of(name: str, stages: int, chunks: int, microbatches: int) -> tuple[NDArray[np.int64], ...] | None:
    """What `ScheduleFacts.in_flight` is of a published schedule; None where it is not defined for these numbers."""
    made = _schedule(name, stages, chunks, microbatches)
    return None if made is None else tuple(_states(made, device) for device in range(stages))


@functools.lru_cache(maxsize=512)
def _schedule(name: str, stages: int, chunks: int, microbatches: int) -> Schedule | None:
    try:
        made = schedule(name, stages, microbatches, chunks)
    except (ArgumentError, ScheduleError):
        return None
    return made if len(made.placement) == stages * chunks else None  # else its number of virtual stages is another


@dataclass(frozen=True)
class ScheduleForm:
    """What of a schedule does not depend on the number of microbatches."""

    placement: tuple[int, ...]  # virtual stage -> device
    has_weight_tasks: bool


@functools.lru_cache(maxsize=512)
def schedule_form(name: str, stages: int, chunks: int) -> ScheduleForm | None:
    """The form of a published schedule, by its smallest instance; None where it is not defined for these numbers."""
    for microbatches in (stages, 2 * stages):
        try:
            made = schedule(name, stages, microbatches, chunks)
        except ArgumentError:
            continue
        if len(made.placement) == stages * chunks:
            return ScheduleForm(made.placement, made.has_weight_tasks)
    return None


def _states(made: Schedule, device: int) -> NDArray[np.int64]:
    """What is in flight on one device after each of its forward tasks; it is let go of with the last task of it."""
    own = [stage for stage, home in enumerate(made.placement) if home == device]
    kinds, _, stages = zip(*made.orders[device], strict=True)
    counts = {"F": 1, "B": 0, "W": -1} if made.has_weight_tasks else {"F": 1, "B": -1}
    changes = np.zeros((len(kinds), len(own)), np.int64)
    changes[np.arange(len(kinds)), np.searchsorted(own, stages)] = [counts[kind] for kind in kinds]
    # After a forward task that another one follows, less is in flight than after that one.
    forward = changes.sum(axis=1) > 0
    states = np.ascontiguousarray(np.cumsum(changes, axis=0)[forward & ~np.append(forward[1:], False)])
    distinct = {state.tobytes() for state in states}
    states = np.unique(np.frombuffer(b"".join(distinct), np.int64).reshape(-1, len(own)), axis=0)
    if len(own) == 1:
        return states[-1:]
    if len(states) > 512:
        return states
    # All are different, so each is no more than itself, and than those that exceed it.
    above = np.ones((len(states), len(states)), bool)
    for column in states.T:
        above &= column[None, :] >= column[:, None]
    return states[above.sum(axis=1) == 1]


def task_seconds(space: StageSpace, stage: ChosenStage, *, has_weight_tasks: bool) -> dict[str, float]:
    """Seconds of each kind of task of a stage; without W, B is the whole backward pass."""
    at = stage.first, stage.last
    forward, backward, weight = (
        float(rows[at]) for rows in (stage.table.forward, stage.table.backward, stage.table.weight)
    )
    seconds = {"F": forward, "B": backward, "W": weight} if has_weight_tasks else {"F": forward, "B": backward + weight}
    return {kind: max(one, space.least_task_seconds) for kind, one in seconds.items()}


def transfer_seconds(row: DeviceRow, size: float, source: ChosenStage, target: ChosenStage) -> float:
    """Seconds in which so many bytes go from one stage to another."""
    return row.seconds(size, source.start, source.table.shape.devices, target.start, target.table.shape.devices)


def estimated_seconds(space: StageSpace, choice: PipelineChoice) -> float:
    """About what a choice takes, without a schedule of it: what the busiest device does, and the way there and back.

    Exact for 1F1B of equal stages without transfers. Choices are simulated in the order of their estimates.
    """
    form = schedule_form(choice.schedule, choice.devices, choice.chunks)
    if form is None:
        return float("inf")
    costs, stages = space.costs[choice.microbatches], choice.stages
    seconds = [task_seconds(space, stage, has_weight_tasks=form.has_weight_tasks) for stage in stages]
    work, after = np.zeros(choice.devices), np.zeros(choice.devices)
    for device, stage, taken in zip(form.placement, stages, seconds, strict=True):
        work[device] += sum(taken.values())
        after[device] += stage.table.after[stage.first, stage.last]
    lags = _lags(space.row, costs, stages)
    passing, busiest = 0.0, 0.0
    for device in range(choice.devices):  # whose first virtual stage has the same number
        busiest = max(busiest, choice.microbatches * work[device] + after[device] + passing)
        taken = seconds[device]
        passing += max(0.0, taken["F"] + taken["B"] - taken.get("W", 0.0))
        passing += lags.get(("F", device, device + 1), 0.0) + lags.get(("B", device + 1, device), 0.0)
    return float(busiest)


def simulated(space: StageSpace, choice: PipelineChoice) -> SimulatedChoice | None:
    """What a choice takes; None if its schedule is not defined for its numbers."""
    facts = schedule_facts(choice.schedule, choice.devices, choice.chunks, choice.microbatches)
    if facts is None:
        return None
    stages, costs, made, graph = choice.stages, space.costs[choice.microbatches], facts.schedule, facts.graph
    seconds_of = [task_seconds(space, stage, has_weight_tasks=made.has_weight_tasks) for stage in stages]
    lag = _lags(space.row, costs, stages)
    tasks = [operation[0] for operation in graph.operations]
    seconds = [seconds_of[task.virtual_stage][task.kind] for task in tasks]
    hops, waits = facts.hops
    travel = [lag.get(hop, 0.0) for hop in hops]
    lags = [tuple([(other, travel[hop]) for other, hop in inputs]) for inputs in waits]
    starts, _ = start_times(graph.rows, lags, seconds)
    ends = [start + taken for start, taken in zip(starts, seconds, strict=True)]
    work = tuple(sum(seconds[operation] for operation in row) for row in graph.rows)
    after = np.zeros(choice.devices)
    fixed, working, saved = np.zeros(choice.devices), np.zeros(choice.devices), np.zeros(choice.devices)
    for device in range(choice.devices):
        own = [stage for stage, home in zip(stages, made.placement, strict=True) if home == device]
        after[device] = sum(stage.table.after[stage.first, stage.last] for stage in own)
        fixed[device] = sum(stage.table.fixed_bytes[stage.first, stage.last] for stage in own)
        working[device] = max(stage.table.working_bytes[stage.first, stage.last] for stage in own)
        sizes = np.array([stage.table.microbatch_bytes[stage.first, stage.last] for stage in own])
        saved[device] = float((facts.in_flight[device] @ sizes).max())
    timeline = Timeline(
        made,
        dict(zip(tasks, starts, strict=True)),
        dict(zip(tasks, ends, strict=True)),
        work,
        facts.most_in_flight,
        tuple(map(float, saved)),
    )
    sent = [
        choice.microbatches * float(costs.sent_forward[stage.last] + costs.sent_backward[stage.last])
        for stage in stages[:-1]
    ]
    return SimulatedChoice(
        choice,
        timeline,
        float(after.max()),
        tuple(map(float, fixed + working + saved)),
        facts.most_in_flight,
        tuple(sent),
    )


def _lags(row: DeviceRow, costs: MicrobatchCosts, stages: tuple[ChosenStage, ...]) -> dict[Hop, float]:
    """Seconds that results travel."""
    found: dict[Hop, float] = {}
    for i, (before, after) in enumerate(itertools.pairwise(stages)):
        cut = before.last
        found["F", i, i + 1] = transfer_seconds(row, float(costs.sent_forward[cut]), before, after)
        found["B", i + 1, i] = transfer_seconds(row, float(costs.sent_backward[cut]), after, before)
    return found
