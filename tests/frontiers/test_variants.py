"""Frontiers under `remat="auto"`: one search over all levels of recomputation."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import autoshard
from autoshard.decorated import ShardedFunction
from autoshard.frontiers.traced_step import FrontierStep
from autoshard.tactics import FSDP

MESH = AbstractMesh((2,), ("data",))
WEIGHTS = {
    "up": jax.ShapeDtypeStruct((8, 512, 2048), jnp.bfloat16),
    "down": jax.ShapeDtypeStruct((8, 2048, 512), jnp.bfloat16),
}
X = jax.ShapeDtypeStruct((32768, 512), jnp.bfloat16)
GIVEN = {"mesh": MESH, "topology": "v5e:1x2", "donate_argnums": 0}
CHIP = autoshard.topology("v5e:1x2", dict(MESH.shape))
SLOW = GIVEN | {"topology": replace(CHIP, flops={"bfloat16": CHIP.flops["bfloat16"] / 20})}  # values are worth keeping


def step(weights, x):
    def loss(weights):
        y, _ = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w["up"]) @ w["down"], None), x, weights)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), weights, gradients), value


pytestmark = pytest.mark.usefixtures("little_work")


@pytest.fixture(scope="module")
def found(little_work):
    return autoshard.frontier(step, WEIGHTS, X, points=4, remat="auto", **SLOW)


def test_levels_are_points_of_one_frontier(found):
    plans = found.plans
    assert len({next(one for one in plan.warnings if one.startswith("remat='auto'")) for plan in plans}) >= 2
    for faster, smaller in itertools.pairwise(plans):
        assert faster.predicted.step_seconds < smaller.predicted.step_seconds
        assert faster.predicted.peak_bytes > smaller.predicted.peak_bytes
        assert faster.bound <= smaller.bound <= smaller.cost


def test_its_ends_are_the_free_plan_and_the_smallest(found):
    free = autoshard.plan(step, WEIGHTS, X, remat="auto", memory="1TiB", **SLOW)
    assert found.plans[0].cost == pytest.approx(free.cost)
    least = found.limit_of(found.plans[-1])
    assert autoshard.plan(step, WEIGHTS, X, remat="auto", memory=least, **SLOW).cost <= found.plans[-1].cost * 1.03
    with pytest.raises(autoshard.MemoryLimitError):
        autoshard.plan(step, WEIGHTS, X, remat="auto", memory=0.8 * least, **SLOW)


def test_less_memory_takes_a_larger_batch_and_fewer_devices():
    options = {"memory": "700MiB", "multiple": 4096, "most": 16384, "time_limit": 5}
    kept = autoshard.largest_batch(step, WEIGHTS, X, **options, **GIVEN)
    again = autoshard.largest_batch(step, WEIGHTS, X, remat="auto", **options, **GIVEN)
    assert again.rows > kept.rows
    few = {"chip": "v5e", "axes": ("data",), "memory": "1100MiB", "most": 8, "time_limit": 5, "donate_argnums": 0}
    kept = autoshard.fewest_devices(step, WEIGHTS, X, **few)
    again = autoshard.fewest_devices(step, WEIGHTS, X, remat="auto", **few)
    assert again.mesh.size < kept.mesh.size


def test_each_variant_is_formulated_once(monkeypatch):
    made, honest = [], FrontierStep.formulation.func
    counted = type(FrontierStep.__dict__["formulation"])(lambda self: made.append(self.program) or honest(self))
    counted.__set_name__(FrontierStep, "formulation")
    monkeypatch.setattr(FrontierStep, "formulation", counted)
    autoshard.frontier(step, WEIGHTS, X, points=3, remat="auto", time_limit=10, **SLOW)
    assert len(made) == len({id(program) for program in made}) >= 2


@pytest.mark.parametrize("tactics", [(), (FSDP("data"),)], ids=["free", "FSDP"])
def test_matrices_are_stacked_within_tactics_too(tactics, monkeypatch):
    """The step is planned in no other way first, and once as it is written."""

    def update(weights, gradients):
        return [w - 1.5 * g + 0.5 * g @ (g.T @ g) for w, g in zip(weights, gradients, strict=True)]

    weights = [jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)] * 4
    monkeypatch.setattr(ShardedFunction, "plan", None)
    monkeypatch.setattr(ShardedFunction, "_planned", None)
    options = {"mesh": MESH, "topology": "v5e:1x2", "tactics": tactics, "time_limit": 60}
    found = autoshard.frontier(update, weights, weights, points=2, **options)
    assert any("stack" in one for plan in found.plans for one in plan.warnings)
