"""Stage programs, their plans and a schedule in, the step run: the one runtime of our own.

In one process a thread per device of the pipeline, which is one sub-mesh, dispatches that stage's programs in the
schedule's order (`run.py`). What one stage makes for another is put onto the other's devices as soon as it is
dispatched. The arrays of a microbatch are let go when their last reader is dispatched; sums are donated. Several
processes dispatch everything in one order (`ordered_run.py`).

An error in a stage stops all threads at their next task. It is raised as one error that names stage and task.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.pipeline.orders import Schedule, Task
from autoshard.planning import lowered
from autoshard.processes import ProcessGroup
from autoshard.stages.planning import compiled
from autoshard.stages.programs import Key, StageProgram, StagePrograms
from autoshard.stages.running.ordered_run import OrderedRun
from autoshard.stages.running.run import ThreadedRun
from autoshard.stages.running.transfers import line_of, moved, placed
from autoshard.stages.running.transfers import part_of as part_between_processes
from autoshard.stages.running.views import part_of
from autoshard.user_plan import Plan


@dataclass(frozen=True, eq=False)
class RunnableProgram:
    """One program of one stage, compiled for a device of the pipeline."""

    program: StageProgram
    plan: Plan
    compiled: Any = field(repr=False)
    captured: tuple[jax.Array, ...] = field(repr=False)  # arrays that its jaxpr closes over, on its devices

    @cached_property
    def shardings(self) -> dict[Key, NamedSharding]:
        """Of its inputs."""
        return dict(zip(self.program.inputs, self.plan.flat_in_shardings, strict=True))

    def __call__(self, arrays: Sequence[Any]) -> list[jax.Array]:
        return list(self.compiled(*arrays, *self.captured))


def runnable(program: StageProgram, plan: Plan) -> RunnableProgram:
    """Compiles a program of a stage for the mesh of its plan, if this process has devices of it."""
    assert plan.lowering is not None, "plans of stages are bound to their programs"
    if not is_here(plan.mesh):
        return RunnableProgram(program, plan, None, ())
    arrays = plan.lowering.program.captured
    captured = tuple(map(placed, arrays, plan.captured_shardings)) if arrays else ()
    return RunnableProgram(program, plan, compiled(plan), captured)


def is_here(mesh: Any) -> bool:
    """Whether this process has devices of a mesh."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.flat)


class PipelineRuntime:
    """A step in stages, ready to run. A call runs it once."""

    def __init__(
        self,
        programs: StagePrograms,
        plans: Sequence[Plan],
        schedule: Schedule,
        meshes: Sequence[Mesh],
        group: ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            plans: of the programs, in the order of `StagePrograms.programs`, each on its stage's first device.
            schedule: as many virtual stages per replica as the programs have stages.
            meshes: one per device of the schedule.
            group: the processes that share the mesh; None if one has all of it.
        """
        self.programs, self.schedule, self.meshes, self.group = programs, schedule, tuple(meshes), group
        self.move = put_on if group is None else moved
        self.homes = schedule.placement[: programs.stages]  # stage -> the device that keeps its state
        self.plans = {id(program): plan for program, plan in zip(programs.programs, plans, strict=True)}
        wanted: dict[tuple[int, int], tuple[StageProgram, Plan]] = {}
        for program in programs.programs:
            plan = self.plans[id(program)]
            for device in {self.homes[program.stage]} if program.kind == "after" else self.devices_of(program.stage):
                here = plan if plan.mesh == self.meshes[device] else _on(plan, self.meshes[device])
                wanted[id(program), device] = program, here
        # Where processes compile together, they do it in one order.
        with ThreadPoolExecutor(min(4, len(wanted)) if group is None else 1) as pool:
            made = pool.map(lambda one: runnable(*one), wanted.values())
            self.runnable = dict(zip(wanted, made, strict=True))
        self.numbers = [
            [placed(np.int32(m), NamedSharding(mesh, PartitionSpec())) for m in range(programs.microbatches)]
            for mesh in self.meshes
        ]
        self._runs = itertools.count()
        self.constants: dict[tuple[Key, int], Any] = {}

    def devices_of(self, stage: int) -> list[int]:
        """The devices that run a stage, one per replica."""
        count = self.programs.stages
        return [self.schedule.placement[replica * count + stage] for replica in range(self.schedule.replicas)]

    @cached_property
    def line(self) -> Mesh:
        """All devices in a row."""
        devices = dict.fromkeys(device for mesh in self.meshes for device in mesh.devices.flat)
        return line_of(tuple(devices))

    def next_run(self) -> int:
        """The number of a run, alike on all processes."""
        return next(self._runs)

    def virtual_stages_of(self, device: int) -> list[int]:
        return [v for v, place in enumerate(self.schedule.placement) if place == device]

    def stage_of(self, virtual_stage: int) -> int:
        return virtual_stage % self.programs.stages

    @cached_property
    def readers(self) -> Mapping[Key, list[tuple[int, StageProgram]]]:
        """Value of a microbatch -> the stages and programs that read it."""
        found: dict[Key, list[tuple[int, StageProgram]]] = {}
        for program in self.programs.loop.values():
            for key in program.inputs:
                if key.kind == "value":
                    found.setdefault(key, []).append((program.stage, program))
        return found

    @cached_property
    def uses(self) -> Mapping[tuple[Key, int, int], int]:
        """How often a device reads a value of one microbatch, per value, replica and device."""
        count: Counter[tuple[Key, int, int]] = Counter()
        for key, several in self.readers.items():
            for stage, _ in several:
                for replica, device in enumerate(self.devices_of(stage)):
                    count[key, replica, device] += 1
        return count

    @cached_property
    def keepers(self) -> Mapping[Task, int]:
        """Forward task whose residuals are evicted -> the device of the schedule that keeps them."""
        return {one.forward: one.keeper for one in self.schedule.evictions}

    @cached_property
    def returns(self) -> Mapping[Task, tuple[Task, ...]]:
        """Task -> the forward tasks whose residuals are back before it starts."""
        found: dict[Task, list[Task]] = {}
        for one in self.schedule.evictions:
            found.setdefault(one.before, []).append(one.forward)
        return {task: tuple(several) for task, several in found.items()}

    @cached_property
    def outside(self) -> Mapping[tuple[Key, int], NamedSharding]:
        """Argument, piece or constant, and device -> how it lies there first."""
        found: dict[tuple[Key, int], NamedSharding] = {}
        for (_, device), one in self.runnable.items():
            for key, sharding in one.shardings.items():
                if key.kind in ("argument", "piece", "constant"):
                    found.setdefault((key, device), sharding)
        return found

    def __call__(self, arguments: Sequence[Any], donated: frozenset[int] = frozenset()) -> list[Any]:
        """The flat results of the step.

        Args:
            donated: arguments whose memory the step may take; for errors to tell whether they are still there.

        Raises:
            StageError: a stage failed.
        """
        kind = ThreadedRun if self.group is None else OrderedRun
        return kind(self, arguments, donated).results()

    def placed(self, arguments: Sequence[Any]) -> dict[tuple[Key, int], Any]:
        """Arguments, pieces and constants on the devices that read them."""
        found: dict[tuple[Key, int], Any] = {}
        for (key, device), sharding in self.outside.items():
            if key.kind == "constant":
                if (key, device) not in self.constants:
                    self.constants[key, device] = placed(self.programs.constants[key.number], sharding)
                found[key, device] = self.constants[key, device]
            elif key.kind == "piece":
                piece = self.programs.pieces[key.number]
                take = part_of if self.group is None else part_between_processes
                found[key, device] = take(arguments[piece.argument], piece.start, piece.stop, sharding)
            else:
                found[key, device] = self.move(arguments[key.number], sharding)
        return found


def put_on(array: Any, sharding: NamedSharding) -> Any:
    """The array as `sharding` has it, on devices of this process."""
    return array if getattr(array, "sharding", None) == sharding else jax.device_put(array, sharding)


def _on(plan: Plan, mesh: Mesh) -> Plan:
    """The plan of a program on the devices of another replica."""
    assert plan.lowering is not None
    return lowered(plan.lowering.program, plan.on(mesh), plan.lowering.jit_keywords)
