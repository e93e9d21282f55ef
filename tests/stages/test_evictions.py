"""bpipe: what a stage would hold above its share lies with its neighbour, on whose devices it really is."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from jax.sharding import AxisType
from pipeline_steps import numbers

from autoshard import autoshard
from autoshard.pipeline import simulate
from autoshard.stages.running.run import ThreadedRun

STAGES, MICROBATCHES, WIDTH = 4, 6, 4
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # to compile


def train(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return [w - 0.5 * g for w, g in zip(weights, gradient, strict=True)], value


ARGS = [numbers(i, WIDTH, WIDTH) for i in range(STAGES)], numbers(9, MICROBATCHES, WIDTH)


@pytest.fixture(scope="module")
def sharded():
    mesh = jax.make_mesh((STAGES,), ("stage",), (AxisType.Auto,), devices=jax.devices()[:STAGES])
    pipeline = {"stages": STAGES, "microbatches": MICROBATCHES, "schedule": "bpipe"}
    return autoshard(train, mesh=mesh, pipeline=pipeline, compiler_options=QUICK)


def most_held(sharded, monkeypatch):
    """Per device of the mesh, the most microbatches of which residuals lie there after any task."""
    found: dict[int, set[int]] = {}
    after = ThreadedRun.task

    def task(self, task, device, state):
        after(self, task, device, state)
        with self.changed:
            held: dict[int, set[tuple[int, int]]] = {}
            for place, array in self.store.items():
                if len(place) == 3 and place[0] in self.programs.kept[place[2]]:
                    (where,) = array.devices()
                    held.setdefault(where.id, set()).add(place[1:])
            for where, several in held.items():
                found[where] = max(found.get(where, 0), len(several))

    monkeypatch.setattr(ThreadedRun, "task", task)
    results = sharded(*ARGS)
    return [found[device] for device in range(STAGES)], results


@pytest.mark.parametrize("late", [None, *range(STAGES)])
def test_no_device_holds_more_than_the_schedule_says(late, sharded, monkeypatch):
    """Also where one device is later with all its tasks than the others: a stage that it keeps for has gone on."""
    schedule = sharded.pipeline(*ARGS).schedule
    task = ThreadedRun.task
    monkeypatch.setattr(
        ThreadedRun, "task", lambda self, *args: (time.sleep(0.01 * (args[1] == late)), task(self, *args))
    )
    assert schedule.evictions
    held, results = most_held(sharded, monkeypatch)
    assert_equal(jax.tree.map(np.asarray, results), jax.tree.map(np.asarray, jax.jit(train)(*ARGS)))
    # What comes from the stage before may be there a task early.
    assert all(count <= peak + 1 for count, peak in zip(held, simulate(schedule).peak, strict=True)), held


def test_the_oracle_sees_what_is_not_evicted(sharded, monkeypatch):
    evicted = []
    monkeypatch.setattr(ThreadedRun, "evict", lambda self, forward, device, keeper: evicted.append((forward, keeper)))
    monkeypatch.setattr(ThreadedRun, "bring_back", lambda self, forward, device: None)
    held, _ = most_held(sharded, monkeypatch)
    assert len(evicted) == len(sharded.pipeline(*ARGS).schedule.evictions)
    assert held[0] == STAGES
