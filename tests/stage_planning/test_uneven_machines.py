"""pipeline='auto' where devices are not alike: stages on slow devices get fewer layers."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from autoshard import plan, topology
from autoshard.errors import ArgumentError, PlanError

WIDTH, LAYERS, ROWS = 8192, 6, 4096
AXES = {"hosts": 2}


def step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params), strict=True)]


def planned(pipeline, **unevenness):
    struct = jax.ShapeDtypeStruct
    arguments = [struct((WIDTH, WIDTH), jnp.bfloat16)] * LAYERS, struct((ROWS, WIDTH), jnp.bfloat16)
    costs = topology("h100:2x1", AXES, **unevenness)
    return plan(step, *arguments, mesh=AbstractMesh((2,), ("hosts",)), topology=costs, pipeline=pipeline)


def test_a_slow_device_gets_fewer_layers_and_the_step_is_faster_than_without_stages():
    found = planned("auto", speeds={"hosts": (1, 0.5)})
    assert [len(stage.layers) for stage in found.stages] == [4, 2]
    assert max(stage.seconds for stage in found.stages) < 1.2 * min(stage.seconds for stage in found.stages)
    assert found.predicted.step_seconds < 0.85 * found.without.step_seconds
    # What it rests on is planned for its own microbatches: costs taken from fewer rows were half of it.
    assert 0 < found.gap < 0.1
    for ask in (lambda: found.explain("params/0"), lambda: found.what_if(time_limit=1.0)):
        with pytest.raises(PlanError, match="devices differ along 'hosts'"):
            ask()


def test_stages_that_are_asked_for_do_not_heed_how_devices_differ():
    with pytest.raises(ArgumentError, match="uneven devices"):
        planned({"stages": 2, "microbatches": 2}, speeds={"hosts": (1, 0.5)})
