"""One run of a step in stages: threads that dispatch tasks, and what they hand to each other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from autoshard.arrays.arguments import is_deleted
from autoshard.errors import StageError
from autoshard.pipeline.orders import Task
from autoshard.stages.programs import Key, StageProgram
from autoshard.stages.running.views import joined

if TYPE_CHECKING:
    from autoshard.stages.running.runtime import PipelineRuntime

State = dict[tuple[Key, int], Any]
"""Sums and early values of one device: key and virtual stage -> array."""

_COMBINED: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "last": lambda one, other: other,
}


class PeerFailure(Exception):
    """Another thread failed."""


class ThreadedRun:
    """One run of a step, by threads of one process."""

    def __init__(self, runtime: PipelineRuntime, arguments: Sequence[Any], donated: frozenset[int]):
        self.runtime, self.programs, self.arguments, self.donated = runtime, runtime.programs, arguments, donated
        self.outside = runtime.placed(arguments)
        self.changed = threading.Condition()
        self.store: dict[Any, Any] = {}  # what threads hand to each other, and values of microbatches
        self.left: dict[tuple[Key, int, int], int] = {}  # value, microbatch, device -> how often it is still read
        self.away: dict[tuple[Key, int, int], Any] = {}  # value, microbatch, device -> how it lay before it was evicted
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
        return arrays[0] if len(arrays) == 1 else joined(arrays, self.runtime.move)

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
                raise PeerFailure
            return self.store[key]

    # One device.

    def guarded(self, device: int) -> None:
        at = [f"stage {device}"]
        try:
            self.device(device, at)
        except PeerFailure:
            return
        except BaseException as error:  # whatever a program or a transfer raises
            self.fail(at[0], error)

    def device(self, device: int, at: list[str]) -> None:
        """Runs the programs of one device.

        Args:
            at: where it is, for errors.
        """
        schedule, runtime = self.runtime.schedule, self.runtime
        state = State()
        for v in runtime.virtual_stages_of(device):
            at[0] = f"stage {runtime.stage_of(v)} before its first microbatch"
            self.before(v, device, state)
        for task in schedule.orders[device]:
            at[0] = f"stage {runtime.stage_of(task.virtual_stage)} in {words(task)}"
            if self.failure is not None:
                raise PeerFailure
            self.task(task, device, state)
        self.hand_sums(state)
        stages = sorted({runtime.stage_of(v) for v in runtime.virtual_stages_of(device)})
        at[0] = f"stage {', '.join(map(str, stages))} after its last microbatch"
        jax.block_until_ready(list(state.values()))
        for program in self.programs.after:
            if runtime.homes[program.stage] == device:
                jax.block_until_ready(self.after(program, device))

    def before(self, v: int, device: int, state: State) -> None:
        """What a virtual stage computes before its first microbatch."""
        program = self.programs.before.get(self.runtime.stage_of(v))
        if program is not None:
            arrays = [self.outside[key, device] for key in program.inputs]
            made = self.run(program, device, arrays)
            state.update({(key, v): array for key, array in zip(program.outputs, made, strict=True)})

    def hand_sums(self, state: State) -> None:
        """Puts the sums of a device where `after` programs find them."""
        for (key, v), array in state.items():
            if key.kind == "sum":
                self.put((key, v // self.programs.stages), array)

    def run(self, program: StageProgram, device: int, arrays: Sequence[Any]) -> list[jax.Array]:
        made = self.runtime.runnable[id(program), device]
        placed = [self.runtime.move(array, to) for array, to in zip(arrays, made.plan.flat_in_shardings, strict=True)]
        return made(placed)

    def task(self, task: Task, device: int, state: State) -> None:
        """Runs a task, if its stage has a program for it."""
        v, m = task.virtual_stage, task.microbatch
        for forward in self.runtime.returns.get(task, ()):
            self.bring_back(forward, device)
        program = self.programs.loop.get((task.kind, self.runtime.stage_of(v)))
        if program is None:
            return
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
        if (keeper := self.runtime.keepers.get(task)) is not None:
            self.evict(task, device, keeper)

    def kept(self, forward: Task, device: int) -> list[tuple[Key, int, int]]:
        """What a forward task has left on its device for its backward task."""
        keys = self.programs.kept[self.runtime.stage_of(forward.virtual_stage)]
        places = ((key, forward.microbatch, device) for key in keys)
        return [place for place in places if place in self.store]

    def evict(self, forward: Task, device: int, keeper: int) -> None:
        """Puts what a forward task has left onto the devices of the neighbour that keeps it."""
        mesh = self.runtime.meshes[keeper]
        for place in self.kept(forward, device):
            array = self.store[place]
            self.away[place] = array.sharding
            self.put(place, self.runtime.move(array, NamedSharding(mesh, array.sharding.spec)))

    def bring_back(self, forward: Task, device: int) -> None:
        for place in self.kept(forward, device):
            self.put(place, self.runtime.move(self.store[place], self.away.pop(place)))

    def hand(self, key: Key, m: int, array: Any, replica: int) -> None:
        """Puts a value of a microbatch onto the devices that read it."""
        runtime, targets = self.runtime, dict[int, NamedSharding]()
        for stage, program in runtime.readers.get(key, ()):
            device = runtime.devices_of(stage)[replica]
            targets.setdefault(device, runtime.runnable[id(program), device].shardings[key])
        for device, sharding in targets.items():
            self.put((key, m, device), self.runtime.move(array, sharding))

    def let_go(self, key: Key, m: int, device: int, replica: int) -> None:
        """Forgets a value that nobody on a device reads any more."""
        with self.changed:
            left = self.left.get((key, m, device), self.runtime.uses[key, replica, device]) - 1
            self.left[key, m, device] = left
            if not left:
                del self.store[key, m, device], self.left[key, m, device]

    def after(self, program: StageProgram, device: int) -> list[jax.Array]:
        runtime, rows = self.runtime, Counter[Key]()
        shardings = runtime.runnable[id(program), device].shardings
        arrays = []
        for key in program.inputs:
            if key.kind == "sum":
                several = [self.wait((key, replica)) for replica in range(runtime.schedule.replicas)]
                parts = [runtime.move(part, shardings[key]) for part in several]
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
        for key, array in zip(program.outputs, made, strict=True):
            self.put(key, array)
        return made


def words(task: Task) -> str:
    """What a task does, for errors."""
    kinds = {"F": "the forward pass", "B": "the backward pass", "W": "the weight gradients"}
    return f"{kinds[task.kind]} of microbatch {task.microbatch}"
