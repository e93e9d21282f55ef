"""The programs of a pipeline with their plans, in; what each stage takes and holds, and when its tasks run, out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from autoshard.layout import MeshShape
from autoshard.mesh.topology import Topology
from autoshard.pipeline import Schedule, Timeline, simulate
from autoshard.stage_search import Channel
from autoshard.stages.programs import LOOP, Key, StageProgram, StagePrograms
from autoshard.user_plan import Plan


@dataclass(frozen=True, eq=False)
class PlannedStage:
    """Consecutive layers on one part of the mesh: a virtual stage of the pipeline."""

    layers: tuple[str, ...]  # the user's lines where units of the forward pass begin
    mesh: Mesh | AbstractMesh  # its part of the whole
    devices: tuple[Any, ...]  # of that part; numbers in the order of the whole mesh where that has no devices
    plans: Mapping[str, Plan] = field(repr=False)  # kind of program ("F", "B", "W", "before", "after") -> its plan
    seconds: float  # s per step in which its devices work
    peak_bytes: int  # on each of its devices, of all virtual stages there
    in_flight: float  # microbatches that its devices hold at most, in whole stages
    sent_bytes: float  # per step, to all other stages

    @property
    def plan(self) -> Plan:
        """The plan of its forward program, or of the first that it has."""
        return next(iter(self.plans.values()))


@dataclass(frozen=True, eq=False)
class StageMemory:
    """Bytes on each device of one virtual stage."""

    fixed: float  # whatever runs
    microbatch: float  # left by a forward task for its backward task
    working: float  # beside, while a program runs


def stage_memory(programs: StagePrograms, plans: Sequence[Plan], stage: int) -> StageMemory:
    """What one virtual stage holds by the plans of its programs.

    Args:
        plans: in the order of `StagePrograms.programs`.
    """
    own = [(one, plan) for one, plan in zip(programs.programs, plans, strict=True) if one.stage == stage]
    kept = set(programs.kept[stage])
    sizes: dict[Key, float] = {}
    for program, plan in own:
        for key, placed in _placed(program, plan):
            if key in kept or programs.homes.get(key) == stage or key.kind in ("sum", "early"):
                sizes.setdefault(key, float(placed.local_bytes))
    working = 0.0
    for program, plan in own:
        held = {key for key, _ in _placed(program, plan)} & sizes.keys()
        working = max(working, plan.predicted.peak_bytes - sum(map(sizes.__getitem__, held)))
    return StageMemory(
        sum(size for key, size in sizes.items() if key not in kept),
        sum(size for key, size in sizes.items() if key in kept),
        working,
    )


def _placed(program: StageProgram, plan: Plan) -> list[tuple[Key, Any]]:
    return [
        *zip(program.inputs, plan.arguments, strict=True),
        *zip(program.outputs, plan.results, strict=True),
    ]


@dataclass(frozen=True)
class TaskCosts:
    """What the tasks of a schedule take and hold: all that `simulate` needs beside the schedule."""

    forward: tuple[float, ...]  # s, per virtual stage
    backward: tuple[float, ...]
    weight: tuple[float, ...]  # empty without weight tasks
    transfer: tuple[tuple[float, ...], ...]  # s, from device to device of the schedule
    memory: tuple[float, ...]  # bytes per virtual stage that a microbatch holds

    def timeline(self, schedule: Schedule) -> Timeline:
        """When the tasks run."""
        forward, backward, weight, memory = map(list, (self.forward, self.backward, self.weight, self.memory))
        return simulate(schedule, forward, backward, weight or 0.0, list(map(list, self.transfer)), memory=memory)


@dataclass(frozen=True, eq=False)
class PipelineFigures:
    """What a pipeline is predicted to take and to hold."""

    costs: TaskCosts  # of the loop over microbatches
    timeline: Timeline  # of the loop over microbatches
    once: tuple[float, ...]  # s per virtual stage, of what runs once per step
    memory: tuple[StageMemory, ...]  # per virtual stage
    peak_bytes: tuple[int, ...]  # per device of the schedule

    @property
    def seconds(self) -> float:
        """Seconds of the step: the loop, and what the slowest device of the schedule does before and after it."""
        of_device: dict[int, float] = {}
        for stage, seconds in enumerate(self.once):
            device = self.timeline.schedule.placement[stage]
            of_device[device] = of_device.get(device, 0.0) + seconds
        return self.timeline.makespan + max(of_device.values(), default=0.0)


def pipeline_figures(
    programs: StagePrograms,
    plans: Sequence[Plan],
    schedule: Schedule,
    starts: Sequence[int],
    sizes: Sequence[int],
    mesh_shape: MeshShape,
    topology: Topology,
    least_task_seconds: float,
) -> PipelineFigures:
    """The figures of a pipeline from the plans of its programs.

    Args:
        starts: per device of the schedule, its first device in the order of the whole mesh.
        sizes: per device of the schedule, how many devices it has.
        mesh_shape: of the whole mesh.
        topology: of the whole mesh.
        least_task_seconds: that a task takes at least, to be dispatched.
    """
    count = programs.stages
    seconds = {(kind, stage): 0.0 for kind in (*LOOP, "before", "after") for stage in range(count)}
    for program, plan in zip(programs.programs, plans, strict=True):
        seconds[program.kind, program.stage] += plan.predicted.step_seconds
    virtual = [v % count for v in range(len(schedule.placement))]

    def amounts(kind: str) -> tuple[float, ...]:
        # `simulate` has seconds of a virtual stage, which the slices of a microbatch share.
        return tuple(max(seconds[kind, stage], least_task_seconds) for stage in virtual)

    travel = np.zeros((schedule.stages, schedule.stages))
    for (source, target), keys in _hops(programs, schedule).items():
        size = float(sum(map(programs.bytes_of, keys)))
        for replica in range(schedule.replicas):
            a, b = (schedule.placement[replica * count + stage] for stage in (source, target))
            if a != b:
                channel = channel_between(mesh_shape, topology, starts[a], starts[b])
                taken = channel.latency + size / (channel.bandwidth * min(sizes[a], sizes[b]))
                travel[a, b] = max(travel[a, b], taken)
    memory = tuple(stage_memory(programs, plans, stage) for stage in range(count))
    costs = TaskCosts(
        amounts("F"),
        amounts("B"),
        amounts("W") if schedule.has_weight_tasks else (),
        tuple(map(tuple, travel.tolist())),
        tuple(memory[stage].microbatch for stage in virtual),
    )
    timeline = costs.timeline(schedule)
    peaks = []
    for device in range(schedule.stages):
        here = [memory[virtual[v]] for v, home in enumerate(schedule.placement) if home == device]
        held = sum(one.fixed for one in here) + max((one.working for one in here), default=0.0)
        peaks.append(math.ceil(held + timeline.peak_bytes[device]))
    once = tuple(seconds["before", stage] + seconds["after", stage] for stage in range(count))
    return PipelineFigures(costs, timeline, once, memory, tuple(peaks))


def _hops(programs: StagePrograms, schedule: Schedule) -> dict[tuple[int, int], set[Key]]:
    """What travels between stages that wait for each other. Whatever is sent past a stage is charged on every hop."""
    found: dict[tuple[int, int], set[Key]] = {}
    for (source, target), keys in programs.sends.items():
        low, high = sorted((source, target))
        is_direct = low in schedule.predecessors[high]
        for a, b in [(low, high)] if is_direct else itertools.pairwise(range(low, high + 1)):
            found.setdefault((a, b) if source < target else (b, a), set()).update(keys)
    return found


def channel_between(mesh_shape: MeshShape, topology: Topology, first: int, second: int) -> Channel:
    """What two devices talk over, by their numbers in the order of the mesh: the slowest link on the way."""
    levels = [one for axis, size in mesh_shape.items() if size > 1 for one in topology.links[axis].over(size)]
    shape = [devices for devices, _ in levels]
    places = [np.unravel_index(number, shape) for number in (first, second)]
    crossed = [link for (_, link), a, b in zip(levels, *places, strict=True) if a != b]
    latency = max((link.latency for link in crossed), default=0.0)
    return Channel(latency, min((link.one_way() for link in crossed), default=math.inf))
