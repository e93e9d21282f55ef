"""What the runtime of pipelines costs: a dispatch per task, and how well stages overlap, beside the simulated timeline.

    python benchmarks/pipeline_runtime.py

Every stage has one CPU device. The step has next to no work, so it takes what its tasks cost to dispatch. CPU time per
task is split into transfers between devices, calls of compiled programs, and all else of a task. Then each program also
sleeps for as long as its task is said to take, which needs no core. The time of the step is held against
the simulated makespan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import autoshard
from autoshard.pipeline import simulate
from autoshard.stages.running.run import ThreadedRun

LAYERS, WIDTH, ROWS, STEPS = 8, 16, 32, 5
SECONDS = {"F": 0.02, "B": 0.04, "W": 0.02}  # that tasks sleep
SETTINGS = (
    ("gpipe", 4, 8, 1),
    ("1f1b", 4, 8, 1),
    ("interleaved_1f1b", 4, 8, 2),
    ("zb_h1", 4, 8, 1),
    ("1f1b", 8, 16, 1),
)


def step(weights: list[Any], x: Any, y: Any) -> tuple[list[Any], Any]:
    """A step of an MLP."""

    def loss(weights: list[Any]) -> Any:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradient, strict=True)], value


def arguments() -> tuple[Any, ...]:
    """Numbers for it."""
    made = np.random.default_rng(0)
    weights = [made.standard_normal((WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)]
    return weights, *(made.standard_normal((ROWS, WIDTH)).astype(np.float32) for _ in range(2))


def seconds_of(run: Callable[..., Any], args: Sequence[Any]) -> float:
    """The median over some runs."""
    found = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        jax.block_until_ready(run(*args))
        found.append(time.perf_counter() - begin)
    return float(np.median(found))


def sleeping(compiled: Any, seconds: float) -> Callable[..., Any]:
    """A program that takes so much longer."""

    def run(*arrays: Sequence[Any]) -> Any:
        time.sleep(seconds)
        return jax.block_until_ready(compiled(*arrays))

    return run


def cpu_seconds(fn: Any, args: Sequence[Any], runtime: Any, tasks: int) -> dict[str, float]:
    """CPU seconds per task of the threads of stages: of transfers, of compiled programs, of all else."""
    spent = {"transfers": 0.0, "programs": 0.0, "tasks": 0.0}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            begin = time.thread_time()
            made = function(*given)
            spent[name] += time.thread_time() - begin
            return made

        return run

    move, task, runnable = runtime.move, ThreadedRun.task, runtime.runnable
    runtime.move = timed("transfers", move)
    runtime.runnable = {key: replace(one, compiled=timed("programs", one.compiled)) for key, one in runnable.items()}
    ThreadedRun.task = timed("tasks", task)  # type: ignore[method-assign]
    try:
        seconds_of(fn, args)
    finally:
        runtime.move, runtime.runnable = move, runnable
        ThreadedRun.task = task  # type: ignore[method-assign]
    found = {name: one / STEPS / tasks for name, one in spent.items()}
    return {**found, "all else": found["tasks"] - found["transfers"] - found["programs"]}


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    args = arguments()
    for name, stages, microbatches, chunks in SETTINGS:
        mesh = jax.make_mesh((stages,), ("stage",), devices=jax.devices()[:stages])
        pipeline = {"stages": stages, "microbatches": microbatches, "schedule": name, "chunks": chunks}
        fn = autoshard(step, mesh=mesh, pipeline=pipeline)
        fn(*args)
        planned = fn.pipeline(*args)
        runtime = fn._runtime(planned)
        tasks = sum(map(len, planned.schedule.orders))
        plain = seconds_of(fn, args)
        parts = cpu_seconds(fn, args, runtime, tasks)
        before = runtime.runnable
        runtime.runnable = {
            key: replace(one, compiled=sleeping(one.compiled, SECONDS.get(one.program.kind, 0.0) / chunks))
            for key, one in before.items()
        }
        asleep = seconds_of(fn, args)
        has_weights = planned.schedule.has_weight_tasks
        ideal = simulate(planned.schedule, SECONDS["F"], SECONDS["B"], SECONDS["W"] if has_weights else 0.0).makespan
        print(
            f"{name:17} {stages} stages, {microbatches:2} microbatches: {tasks:3} tasks, "
            f"{plain / tasks * 1e6:6.0f} us per task ({parts['transfers'] * 1e6:.0f} us of CPU for transfers, "
            f"{parts['programs'] * 1e6:.0f} for programs, {parts['all else'] * 1e6:.0f} for all else); "
            f"with sleeps {asleep * 1e3:6.0f} ms, simulated {ideal * 1e3:6.0f} ms, ratio {asleep / ideal:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
