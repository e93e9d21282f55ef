"""Stage programs, their plans and a schedule in, the step run: the one runtime of our own.

One controller runs every stage: a thread per device of the pipeline, which is one sub-mesh, dispatches that stage's
programs in the schedule's order. What one stage makes for another is put onto the other's devices as soon as it is
dispatched. The arrays of a microbatch are let go when their last reader is dispatched; sums are donated.

An error in a stage stops all threads at their next task. It is raised as one error that names stage and task.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.arrays.arguments import is_deleted
from autoshard.errors import StageError
from autoshard.pipeline.orders import Schedule, Task
from autoshard.planning import lowered
from autoshard.stages.planning import compiled
from autoshard.stages.programs import Key, StageProgram, StagePrograms
from autoshard.stages.running.views import joined, part_of
from autoshard.user_plan import Plan

_COMBINED: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "last": lambda one, other: other,
}


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
    """Compiles a program of a stage for the mesh of its plan."""
    assert plan.lowering is not None, "plans of stages are bound to their programs"
    arrays = plan.lowering.program.captured
    captured = tuple(jax.device_put(list(arrays), list(plan.captured_shardings))) if arrays else ()
    return RunnableProgram(program, plan, compiled(plan), captured)


class PipelineRuntime:
    """A step in stages, ready to run. A call runs it once."""

    def __init__(
        self, programs: StagePrograms, plans: Sequence[Plan], schedule: Schedule, meshes: Sequence[Mesh]
    ) -> None:
        """
        Args:
            plans: of the programs, in the order of `StagePrograms.programs`, each on its stage's first device.
            schedule: as many virtual stages per replica as the programs have stages.
            meshes: one per device of the schedule.
        """
        self.programs, self.schedule, self.meshes = programs, schedule, tuple(meshes)
        self.homes = schedule.placement[: programs.stages]  # stage -> the device that keeps its state
        self.plans = {id(program): plan for program, plan in zip(programs.programs, plans, strict=True)}
        wanted: dict[tuple[int, int], tuple[StageProgram, Plan]] = {}
        for program in programs.programs:
            plan = self.plans[id(program)]
            for device in {self.homes[program.stage]} if program.kind == "after" else self.devices_of(program.stage):
                moved = plan if plan.mesh == self.meshes[device] else _on(plan, self.meshes[device])
                wanted[id(program), device] = program, moved
        with ThreadPoolExecutor(min(4, len(wanted))) as pool:
            made = pool.map(lambda one: runnable(*one), wanted.values())
            self.runnable = dict(zip(wanted, made, strict=True))
        self.numbers = [
            [jax.device_put(np.int32(m), NamedSharding(mesh, PartitionSpec())) for m in range(programs.microbatches)]
            for mesh in self.meshes
        ]
        self.constants: dict[tuple[Key, int], Any] = {}

    def devices_of(self, stage: int) -> list[int]:
        """The devices that run a stage, one per replica."""
        count = self.programs.stages
        return [self.schedule.placement[replica * count + stage] for replica in range(self.schedule.replicas)]

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
        return _Run(self, arguments, donated).results()

    def placed(self, arguments: Sequence[Any]) -> dict[tuple[Key, int], Any]:
        """Arguments, pieces and constants on the devices that read them."""
        found: dict[tuple[Key, int], Any] = {}
        for (key, device), sharding in self.outside.items():
            if key.kind == "constant":
                if (key, device) not in self.constants:
                    self.constants[key, device] = jax.device_put(self.programs.constants[key.number], sharding)
                found[key, device] = self.constants[key, device]
            elif key.kind == "piece":
                piece = self.programs.pieces[key.number]
                found[key, device] = part_of(arguments[piece.argument], piece.start, piece.stop, sharding)
            else:
                found[key, device] = _as(arguments[key.number], sharding)
        return found


class _Stopped(Exception):
    """Another thread failed."""


class _Run:
    """One run of a step."""

    def __init__(self, runtime: PipelineRuntime, arguments: Sequence[Any], donated: frozenset[int]):
        self.runtime, self.programs, self.arguments, self.donated = runtime, runtime.programs, arguments, donated
        self.outside = runtime.placed(arguments)
        self.changed = threading.Condition()
        self.store: dict[Any, Any] = {}  # what threads hand to each other, and values of microbatches
        self.left: dict[tuple[Key, int, int], int] = {}  # value, microbatch, device -> how often it is still read
        self.failure: tuple[str, BaseException] | None = None

    def results(self) -> list[Any]:
        devices = range(len(self.runtime.schedule.orders))
        threads = [threading.Thread(target=self.guarded, args=(device,), daemon=True) for device in devices]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: threads stop at their next task
            self.fail("the caller", error)
            raise
        if self.failure is not None:
            raise self.error() from self.failure[1]
        return [self.result(one) for one in self.programs.results]

    def result(self, keys: Any) -> Any:
        if not isinstance(keys, tuple):
            return keys
        arrays = [self.made(key) for key in keys]
        return arrays[0] if len(arrays) == 1 else joined(arrays)

    def made(self, key: Key) -> Any:
        if key.kind == "late":
            return self.store[key]
        if key.kind == "argument":
            return self.outside.get((key, self.home(key)), self.arguments[key.number])
        return self.outside[key, self.home(key)]

    def home(self, key: Key) -> int:
        return self.runtime.homes[self.programs.homes[key]]

    # Between threads.

    def fail(self, where: str, error: BaseException) -> None:
        with self.changed:
            if self.failure is None:
                self.failure = where, error
            self.changed.notify_all()

    def error(self) -> StageError:
        assert self.failure is not None
        where, error = self.failure
        gone = [i for i in self.donated if is_deleted(self.arguments[i])]
        state = (
            f"{len(gone)} of its donated arguments are gone; go on from a checkpoint."
            if gone
            else "Its arguments are as they were before the step."
        )
        return StageError(f"{self.programs.name}: {where} failed: {type(error).__name__}: {error}\n{state}")

    def put(self, key: Any, array: Any) -> None:
        with self.changed:
            self.store[key] = array
            self.changed.notify_all()

    def wait(self, key: Any) -> Any:
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None or key in self.store)
            if self.failure is not None:
                raise _Stopped
            return self.store[key]

    # One device.

    def guarded(self, device: int) -> None:
        at = [f"stage {device}"]
        try:
            self.device(device, at)
        except _Stopped:
            return
        except BaseException as error:  # whatever a program or a transfer raises
            self.fail(at[0], error)

    def device(self, device: int, at: list[str]) -> None:
        """Runs the programs of one device.

        Args:
            at: where it is, for errors.
        """
        schedule, runtime = self.runtime.schedule, self.runtime
        state: dict[tuple[Key, int], Any] = {}  # key and virtual stage -> sums and early values
        own = [v for v, place in enumerate(schedule.placement) if place == device]
        for v in own:
            stage = runtime.stage_of(v)
            if stage in self.programs.before:
                at[0] = f"stage {stage} before its first microbatch"
                program = self.programs.before[stage]
                arrays = [self.outside[key, device] for key in program.inputs]
                made = self.run(program, device, arrays)
                state |= {(key, v): array for key, array in zip(program.outputs, made, strict=True)}
        for task in schedule.orders[device]:
            stage = runtime.stage_of(task.virtual_stage)
            at[0] = f"stage {stage} in {_words(task)}"
            if self.failure is not None:
                raise _Stopped
            if (task.kind, stage) in self.programs.loop:
                self.task(self.programs.loop[task.kind, stage], task, device, state)
        for (key, v), array in state.items():
            if key.kind == "sum":
                self.put((key, v // self.programs.stages), array)
        at[0] = f"stage {', '.join(str(runtime.stage_of(v)) for v in own)} after its last microbatch"
        jax.block_until_ready(list(state.values()))
        for program in self.programs.after:
            if runtime.homes[program.stage] == device:
                self.after(program, device)

    def run(self, program: StageProgram, device: int, arrays: Sequence[Any]) -> list[jax.Array]:
        made = self.runtime.runnable[id(program), device]
        placed = [_as(array, to) for array, to in zip(arrays, made.plan.flat_in_shardings, strict=True)]
        return made(placed)

    def task(self, program: StageProgram, task: Task, device: int, state: dict[tuple[Key, int], Any]) -> None:
        v, m = task.virtual_stage, task.microbatch
        arrays = []
        for key in program.inputs:
            if key.kind == "microbatch":
                arrays.append(self.runtime.numbers[device][m])
            elif key.kind == "value":
                arrays.append(self.wait((key, m, device)))
            elif key.kind in ("sum", "early"):
                arrays.append(state[key, v])
            else:
                arrays.append(self.outside[key, device])
        made = self.run(program, device, arrays)
        for key, array in zip(program.outputs, made, strict=True):
            if key.kind == "value":
                self.hand(key, m, array, v // self.programs.stages)
            elif key.kind == "rows":
                self.put((key, m), array)
            else:
                state[key, v] = array
        for key in program.inputs:
            if key.kind == "value":
                self.let_go(key, m, device, v // self.programs.stages)

    def hand(self, key: Key, m: int, array: Any, replica: int) -> None:
        """Puts a value of a microbatch onto the devices that read it."""
        runtime, targets = self.runtime, dict[int, NamedSharding]()
        for stage, program in runtime.readers.get(key, ()):
            device = runtime.devices_of(stage)[replica]
            targets.setdefault(device, runtime.runnable[id(program), device].shardings[key])
        for device, sharding in targets.items():
            self.put((key, m, device), _as(array, sharding))

    def let_go(self, key: Key, m: int, device: int, replica: int) -> None:
        """Forgets a value that nobody on a device reads any more."""
        with self.changed:
            left = self.left.get((key, m, device), self.runtime.uses[key, replica, device]) - 1
            self.left[key, m, device] = left
            if not left:
                del self.store[key, m, device], self.left[key, m, device]

    def after(self, program: StageProgram, device: int) -> None:
        runtime, rows = self.runtime, Counter[Key]()
        shardings = runtime.runnable[id(program), device].shardings
        arrays = []
        for key in program.inputs:
            if key.kind == "sum":
                parts = [_as(self.wait((key, r)), shardings[key]) for r in range(runtime.schedule.replicas)]
                total = parts[0]
                for part in parts[1:]:
                    total = _COMBINED[self.programs.operations[key]](total, part)
                arrays.append(total)
            elif key.kind == "rows":
                arrays.append(self.wait((key, rows[key])))
                rows[key] += 1
            elif key.kind == "late":
                arrays.append(self.wait(key))
            else:
                arrays.append(self.outside[key, device])
        made = self.run(program, device, arrays)
        jax.block_until_ready(made)
        for key, array in zip(program.outputs, made, strict=True):
            self.put(key, array)


def _as(array: Any, sharding: NamedSharding) -> Any:
    return array if getattr(array, "sharding", None) == sharding else jax.device_put(array, sharding)


def _on(plan: Plan, mesh: Mesh) -> Plan:
    """The plan of a program on the devices of another replica."""
    assert plan.lowering is not None
    return lowered(plan.lowering.program, plan.on(mesh), plan.lowering.jit_keywords)


def _words(task: Task) -> str:
    kinds = {"F": "the forward pass", "B": "the backward pass", "W": "the weight gradients"}
    return f"{kinds[task.kind]} of microbatch {task.microbatch}"
