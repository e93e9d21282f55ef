"""`reductions="auto"`: sums over slow and fast links are finished in sequence, by price, and stay the same sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from jax.sharding import PartitionSpec
from oracles import mesh_of

import autoshard
from autoshard import ArgumentError, Link, Topology

AXES = {"hosts": 2, "chips": 4}
SLOW_BETWEEN = Topology({"hosts": Link(1e-6, 1e9), "chips": Link(1e-6, 1e11)}, 1e12, 1e10, {"float32": 5e13})
OVER_CHIPS = {"state/*": PartitionSpec("chips")}  # each host has the whole state


def step(state, x):
    """Descent with momentum. Each device updates a part of the state, if its gradient is scattered."""

    def loss(weights):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

    weights, momenta = state
    value, gradients = jax.value_and_grad(loss)(weights)
    momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
    return ([w - 0.1 * m for w, m in zip(weights, momenta, strict=True)], momenta), value


@pytest.fixture(scope="module")
def arguments():
    random = np.random.default_rng(0)
    weights = [jnp.asarray(random.standard_normal((512, 512)), jnp.float32) / 32 for _ in range(2)]
    return (weights, [jnp.zeros_like(w) for w in weights]), jnp.ones((8192, 512), jnp.float32)


def decorated(**options):
    return autoshard.autoshard(step, mesh=mesh_of(AXES), topology=SLOW_BETWEEN, fixed=OVER_CHIPS, **options)


def test_a_sum_is_scattered_inside_before_it_is_reduced_between(arguments):
    staged, at_once = decorated(reductions="auto"), decorated()
    plan, before = staged.plan(*arguments), at_once.plan(*arguments)
    kinds = {(one.kind, one.axes) for one in plan.predicted.collectives}
    assert {("reduce_scatter", ("chips",)), ("all_reduce", ("hosts",))} <= kinds and plan.cost < 0.99 * before.cost
    assert_equal(staged(*arguments), jax.jit(step)(*arguments))


def test_where_it_does_not_pay_the_plan_stays(arguments):
    fast = Topology(dict.fromkeys(AXES, Link(1e-3, 1e12)), 1e9, 8e11, {"float32": 5e13})
    plans = [
        autoshard.plan(step, *arguments, mesh=mesh_of(AXES), topology=fast, reductions=one) for one in (None, "auto")
    ]
    assert plans[0].dumps() == plans[1].dumps()


def test_what_is_no_choice_is_an_error():
    with pytest.raises(ArgumentError, match="reductions="):
        decorated(reductions="staged")
