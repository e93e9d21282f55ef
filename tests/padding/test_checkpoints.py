"""A checkpoint of a padded step is a checkpoint: with the barrier of its backward pass, its policy, and its numbers."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal
from equality import assert_equal

from autoshard.jaxprs import REMAT, inner_jaxprs
from autoshard.padding.dims.classes import DimClasses
from autoshard.padding.dims.rewriting import UnevenStep
from autoshard.padding.rewriting import PaddedProgram

MESH = {"x": 4}
POLICIES = {"all": None, "products": jax.checkpoint_policies.dots_saveable}


def step(weights, batch, policy=None):
    """Two layers of which each is checkpointed; a row of numbers is a constant of the body."""
    shift = np.linspace(0.0, 1.0, weights.shape[1]).astype(np.float32)

    def layer(x, w):
        return jax.checkpoint(lambda x, w: jnp.tanh(x @ w + shift) @ w.T, policy=policy)(x, w), None

    def loss(weights):
        x, _ = jax.lax.scan(layer, batch, jnp.stack([weights, 0.5 * weights]))
        return jnp.mean((x - batch) ** 2)

    return jax.value_and_grad(loss)(weights)


def padded_batch(fn, weights, batch):
    rows = jnp.pad(batch, ((0, 2), (0, 0)))
    program = PaddedProgram("step", jax.make_jaxpr(fn)(weights, batch), jax.make_jaxpr(fn)(weights, rows))
    return program, (weights, rows)


def padded_dims(fn, weights, batch):
    closed = jax.make_jaxpr(fn)(weights, batch)
    classes = DimClasses(closed)
    return UnevenStep(closed, classes, classes.uneven(MESH), ()), (weights, batch)


def calls(jaxpr) -> Counter:
    """The checkpoints of a jaxpr, by what they are, and its barriers."""
    found: Counter = Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in REMAT:
            found["backward" if eqn.params["differentiated"] else eqn.params["policy"]] += 1
        found["barrier"] += eqn.primitive.name == "optimization_barrier"
        for inner in inner_jaxprs(eqn):
            found += calls(inner.jaxpr)
    return +found


@pytest.mark.parametrize("pad", [padded_batch, padded_dims])
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoints_stay_what_they_are(pad, policy):
    def fn(weights, batch):
        return step(weights, batch, POLICIES[policy])

    weights, batch = normal(5, 6), normal(30, 5, seed=1)
    padded, arrays = pad(fn, weights, batch)
    made = jax.make_jaxpr(padded)(*arrays)
    assert calls(made.jaxpr) == calls(jax.make_jaxpr(fn)(weights, batch).jaxpr)
    assert calls(made.jaxpr)["backward"]
    assert_equal(jax.jit(padded)(*arrays), jax.tree.leaves(jax.jit(fn)(weights, batch)))


def test_a_barrier_in_its_place_is_seen(monkeypatch):
    def opened(eqn, body, operands):
        return body(*jax.lax.optimization_barrier(list(operands)))

    monkeypatch.setattr("autoshard.padding.rewriting.checkpointed", opened)
    padded, arrays = padded_batch(step, normal(5, 6), normal(30, 5, seed=1))
    assert calls(jax.make_jaxpr(padded)(*arrays).jaxpr)["barrier"]
