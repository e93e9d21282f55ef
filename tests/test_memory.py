"""A plan that is dropped takes with it what it was found from: no cache keeps it, and nothing refers to itself."""

import gc
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from sweeps import some

from autoshard import autoshard
from autoshard.model.formulation import Formulation
from autoshard.program import Program
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.problem import Problem
from autoshard.user_plan import Plan

LARGE = (Formulation, Plan, Problem, Program)  # what takes megabytes


def plan_of(batch: int) -> Plan:
    """The plan of a step that no other call has planned."""

    def step(weights, x):
        def loss(weights):
            return jnp.mean(jnp.tanh(x @ weights["up"]) @ weights["down"])

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    mesh = AbstractMesh((4, 2), ("data", "model"))
    sharded = autoshard(step, mesh=mesh, topology="cpu:8", donate_argnums=0)
    return sharded.plan({"up": array(64, 256), "down": array(256, 64)}, array(batch, 64))


def alive() -> Counter:
    return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, LARGE))


@pytest.fixture
def uncollected(few_objects):
    """Nothing looks for cycles meanwhile: only what nobody refers to is freed."""
    str(plan_of(8).compare())  # what is made once
    jax.clear_caches()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("compared", some([False, True], True))
def test_plans_that_are_dropped_are_gone(uncollected, compared):
    before = alive()
    for batch in (16, 24, 32):
        plan = plan_of(batch)
        assert str(plan.compare() if compared else plan)
        assert alive()["Plan"] > before["Plan"]
    assert alive()["Formulation"] == before["Formulation"]  # a plan does without one
    del plan
    jax.clear_caches()
    assert alive() == before


def test_a_cycle_is_found(uncollected, monkeypatch):
    monkeypatch.setattr(Incumbent, "disconnect", lambda self: None)
    before = alive()
    str(plan_of(16))
    jax.clear_caches()
    assert alive()["Problem"] > before["Problem"] and alive()["Formulation"] > before["Formulation"]
