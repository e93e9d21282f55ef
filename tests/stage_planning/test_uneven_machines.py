"""pipeline='auto' where devices are not alike: stages on slow devices get fewer layers."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from autoshard import plan, topology
from autoshard.errors import MemoryLimitError

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
    # Asked again, each stage is planned for its own devices: the fast one is not taken for a slow one.
    for other in (found.what_if(time_limit=5.0), found):
        explained = other.explain("params/0")
        assert explained.chosen.step_seconds == pytest.approx(found.predicted.step_seconds, rel=0.02)
        assert explained.reasons[0].startswith("Stage 0 keeps it")


def test_stages_that_are_asked_for_are_priced_on_their_own_devices():
    asked = {"stages": 2, "microbatches": 2}
    even = planned(asked)
    slow = planned(asked, speeds={"hosts": (1, 0.5)})
    assert slow.stages[0].seconds == pytest.approx(even.stages[0].seconds)
    assert slow.stages[1].seconds == pytest.approx(2 * even.stages[1].seconds, rel=0.05)
    assert slow.what_if(topology=even.planner.options.topology).predicted == even.predicted


def test_a_stage_has_the_memory_of_its_own_devices():
    """The second host has a thousandth of the memory, which its stage does not fit; the first one does."""
    share = 1e-3
    with pytest.raises(MemoryLimitError, match="of stage 1") as found:
        planned({"stages": 2, "microbatches": 2}, memories={"hosts": (1, share)})
    assert found.value.budget == pytest.approx(share * topology("h100:2x1", AXES).memory_bytes)
    swapped = {"stages": 2, "microbatches": 2}
    with pytest.raises(MemoryLimitError, match="of stage 0"):
        planned(swapped, memories={"hosts": (share, 1)})
