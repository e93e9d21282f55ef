"""One run of a step in stages by several processes, each of which has some of the devices.

Programs over devices of several processes, and transfers between them, must be dispatched in one order everywhere. So
each process goes through all tasks in the order in which they would run if F took 1 s, B 2 s and W 1 s. It runs its own
part of them: a program of which it has no device gives it arrays without shards.

A process whose program fails goes on with zeros, so that no other waits for it forever. Before the step returns, all
processes learn which of them failed, and raise the same error. A process that has ended is known by its heartbeat.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.arrays.arguments import is_deleted
from autoshard.errors import ProcessError, StageError
from autoshard.pipeline import Schedule, simulate
from autoshard.pipeline.orders import Task
from autoshard.processes.group import PATIENCE
from autoshard.stages.programs import StageProgram
from autoshard.stages.running.run import State, ThreadedRun, words
from autoshard.stages.running.transfers import moved, spans_processes, zeros

if TYPE_CHECKING:
    from autoshard.stages.running.runtime import PipelineRuntime

_WELL, _FAILED, _DONATED = range(3)  # what a process says at the end of a step
_WATCH_SECONDS = 1.0  # between two looks at whether the other processes live


@functools.lru_cache(maxsize=16)
def order_of(schedule: Schedule) -> tuple[Task, ...]:
    """All tasks in one order, in which none stands before what it waits for."""
    start = simulate(schedule, 1.0, 2.0, 1.0 if schedule.has_weight_tasks else 0.0).start
    return tuple(sorted(start, key=lambda task: (start[task], schedule.placement[task.virtual_stage], task)))


class OrderedRun(ThreadedRun):
    """One run of a step in one order of all tasks."""

    def __init__(self, runtime: PipelineRuntime, arguments: Sequence[Any], donated: frozenset[int]):
        super().__init__(runtime, arguments, donated)
        assert runtime.group is not None, "several processes run it"
        self.group = runtime.group
        self.found: list[Any] = []
        self.at = ""  # where it is, for errors

    def results(self) -> list[Any]:
        with self.group.joined(runs=True):  # if this process cannot go on, the others get to know
            worker = threading.Thread(target=self.guarded_run, daemon=True)
            worker.start()
            while worker.is_alive():
                worker.join(_WATCH_SECONDS)
                if worker.is_alive():
                    self.watch(worker)
            failed = self.failure
            if failed is not None and isinstance(failed[1], StageError | ProcessError):
                raise failed[1]
            if failed is not None:
                raise self.error() from failed[1]
        return self.found

    def watch(self, worker: threading.Thread) -> None:
        """
        Raises:
            ProcessError: another process has failed or ended, and this one will not learn why from its own work.
        """
        try:
            self.group.watch()
        except ProcessError:
            worker.join(PATIENCE.beat)  # the other may have told of the same failure while this one was about to
            if worker.is_alive():
                raise

    def guarded_run(self) -> None:
        try:
            self.in_order()
            self.agree()
        except BaseException as error:  # a transfer, or the last exchange: nothing can go on
            self.failure = self.at, error

    def in_order(self) -> None:
        """Everything that the step dispatches."""
        runtime, schedule = self.runtime, self.runtime.schedule
        states = [State() for _ in schedule.orders]
        for v, device in enumerate(schedule.placement):
            self.at = f"stage {runtime.stage_of(v)} before its first microbatch"
            self.before(v, device, states[device])
        for task in order_of(schedule):
            self.at = f"stage {runtime.stage_of(task.virtual_stage)} in {words(task)}"
            device = schedule.placement[task.virtual_stage]
            self.task(task, device, states[device])
        for state in states:
            self.hand_sums(state)
        for program in self.programs.after:
            self.at = f"stage {program.stage} after its last microbatch"
            self.after(program, runtime.homes[program.stage])
        self.at = "the end of the step"
        self.found = [self.result(one) for one in self.programs.results]
        try:
            jax.block_until_ready([*self.found, *(array for state in states for array in state.values())])
        except Exception as error:  # a device failed after its program was dispatched
            self.fail(self.at, error)

    def result(self, keys: Any) -> Any:
        """A result of the step. Numbers that no next step takes lie on all devices, so that each process can read
        them."""
        array = super().result(keys)
        if not isinstance(keys, tuple) or array.shape or keys[0] in set(self.programs.carried.values()):
            return array
        return moved(array, NamedSharding(self.runtime.line, PartitionSpec()))

    def wait(self, key: Any) -> Any:
        return self.store[key]

    def run(self, program: StageProgram, device: int, arrays: Sequence[Any]) -> list[jax.Array]:
        made = self.runtime.runnable[id(program), device]
        ready = list(map(self.runtime.move, arrays, made.plan.flat_in_shardings))
        types, shardings = program.jaxpr.out_avals, made.plan.flat_out_shardings
        if made.compiled is None:
            return [
                jax.make_array_from_single_device_arrays(one.shape, to, [], dtype=one.dtype)
                for one, to in zip(types, shardings, strict=True)
            ]
        # Others wait for a program that they share with this process, so it runs whatever became of its operands, and
        # once more if it fails.
        is_shared = any(map(spans_processes, shardings))
        for _ in range(1 + is_shared) if self.failure is None or is_shared else ():
            try:
                return made(ready)
            except Exception as error:  # whatever it raises, the others must not wait
                self.fail(self.at, error)
        return [zeros(one.shape, one.dtype, to) for one, to in zip(types, shardings, strict=True)]

    def agree(self) -> None:
        """
        Raises:
            StageError: a stage failed on some process.
        """
        self.at = "the end of the step"
        key = f"stages/{self.group.round}/{self.runtime.next_run()}"
        outcome = _WELL
        if self.failure is not None:
            self.group.post(f"{key}/{jax.process_index()}", str(self.error()))
            outcome = _FAILED
        elif any(is_deleted(self.arguments[i]) for i in self.donated):
            outcome = _DONATED
        flags = _gathered(self.runtime.line, outcome)
        flagged = zip(self.runtime.line.devices, flags, strict=True)
        failed = sorted({device.process_index for device, flag in flagged if flag == _FAILED})
        if not failed:
            return
        text = self.group.peek(f"{key}/{failed[0]}") or "a stage failed"
        head = text.rpartition("\n")[0] or text
        gone = any(flag == _DONATED for flag in flags) or "are gone" in text
        state = (
            "Some of its donated arguments are gone; go on from a checkpoint."
            if gone
            else "Its arguments are as they were before the step."
        )
        error = StageError(f"{head} (on process {failed[0]})\n{state}")
        raise error from (None if self.failure is None else self.failure[1])


def _gathered(line: Mesh, number: int) -> list[int]:
    """What each process says, per device."""
    whole = NamedSharding(line, PartitionSpec("devices"))
    numbers = np.full(line.size, number, np.int32)
    own = jax.make_array_from_callback(numbers.shape, whole, lambda index: numbers[index], dtype=np.int32)
    found = _everywhere(line)(own)
    return list(map(int, np.asarray(found.addressable_data(0))))


@functools.lru_cache(maxsize=16)
def _everywhere(line: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(line, PartitionSpec()))
