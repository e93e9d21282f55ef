"""The figures of data parallelism, FSDP and tensor parallelism against what those are known to communicate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import SMALL, mesh_of, slow_chips, tally, v5e

import autoshard

WIDTH, HIDDEN, BATCH = 512, 2048, 65536
F32 = 4  # bytes
ALL = ("x", "y")
SHAPE = {"x": 4, "y": 2}
DEVICES = 8


def step(weights, x):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


WEIGHTS = {
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), np.float32),
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), np.float32),
}
X = jax.ShapeDtypeStruct((BATCH, WIDTH), np.float32)
EACH = WIDTH * HIDDEN * F32  # bytes of a weight


@functools.cache
def alternatives():
    plan = autoshard.plan(step, WEIGHTS, X, mesh=mesh_of(SHAPE), topology=v5e(SHAPE), donate_argnums=0)
    return plan, plan.alternatives


def test_data_parallel_only_reduces_gradients_and_the_loss():
    assert tally(alternatives()[1]["data parallel"].collectives) == {("all_reduce", ALL): 2 * EACH + F32}


def test_fsdp_gathers_weights_and_scatters_gradients():
    found = tally(alternatives()[1]["FSDP"].collectives)
    assert found.pop(("all_gather", ALL)) in (2 * EACH, 3 * EACH)  # the backward pass reads `down` too
    assert found == {("reduce_scatter", ALL): 2 * EACH // DEVICES, ("all_reduce", ALL): F32}


def test_tensor_parallel_is_megatron():
    """Column then row: one all_reduce of activations; the backward pass needs none, since x is data."""
    found = tally(alternatives()[1]["tensor parallel"].collectives)
    assert found == {("all_reduce", ALL): BATCH * WIDTH * F32 + found["all_reduce", ALL] % 64}  # and maybe the loss


def test_memory_orders_as_everybody_knows():
    _, found = alternatives()
    assert found["FSDP"].peak_bytes < found["data parallel"].peak_bytes
    assert found["data parallel"].peak_bytes >= 2 * EACH


@pytest.mark.parametrize("topology", [slow_chips, v5e])
@pytest.mark.parametrize("name", ["mlp", "moe", "tied", "lstm"])
def test_no_alternative_beats_an_optimal_plan(name, topology):
    model = SMALL[name]()
    plan = autoshard.plan(
        model.step, model.state, model.batches(0), mesh=mesh_of(SHAPE), topology=topology(SHAPE), donate_argnums=0
    )
    assert plan.status == "optimal"
    np.testing.assert_allclose(plan.predicted.step_seconds, plan.cost)
    assert plan.predicted.step_seconds == plan.predicted.compute_seconds + plan.predicted.communication_seconds
    for way, predicted in plan.alternatives.items():
        assert predicted is None or predicted.step_seconds >= plan.cost * (1 - 1e-6), way


def test_no_such_sharding():
    """Nothing to split: no batch, and a state of odd sizes."""
    plan = autoshard.plan(lambda s: {"w": s["w"] * 2}, {"w": np.ones((3, 5))}, mesh=mesh_of(SHAPE))
    assert plan.alternatives == {"data parallel": None, "FSDP": None, "tensor parallel": None}
    assert str(plan).count("no such sharding") == 3
