"""backend="one_jit" for loops of every kind: what they start from, end in, and read beside stacked weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from autoshard import StageError, autoshard, plan
from autoshard.one_jit import loop_ends

LAYERS, WIDTH, ROWS = 4, 8, 8
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # to compile


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 3


STACK, X, Y = numbers(0, LAYERS, WIDTH, WIDTH), numbers(1, ROWS, WIDTH), numbers(2, ROWS, WIDTH)


def squares(h, y):
    return jnp.mean((h - y) ** 2)


def from_the_batch(weights, x, y):
    return squares(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0], y)


def from_zeros(weights, x, y):
    return squares(lax.scan(lambda h, w: (jnp.tanh((h + x) @ w), None), jnp.zeros_like(x), weights)[0], y)


def with_an_unread_carry(weights, x, y):
    def layer(carry, w):
        h, before = carry
        return (jnp.tanh(h @ w + before), h), None

    return squares(lax.scan(layer, (x, x), weights)[0][0], y)


def with_an_auxiliary_loss(weights, x, y):
    def layer(carry, w):
        h = jnp.tanh(carry[0] @ w)
        return (h, carry[1] + jnp.mean(h**2)), None

    h, more = lax.scan(layer, (x, 0.0), weights)[0]
    return squares(h, y) + 0.1 * more


def with_shared_weights(weights, x, y):
    return squares(lax.scan(lambda h, w: (jnp.tanh(h @ w + h @ weights["all"]), None), x, weights["each"])[0], y)


def with_dropout(weights, x, y):
    def layer(h, each):
        w, key = each
        return jnp.where(jax.random.bernoulli(key, 0.8, h.shape), jnp.tanh(h @ w), 0), None

    return squares(lax.scan(layer, x, (weights, jax.random.split(jax.random.key(0), LAYERS)))[0], y)


def with_numbered_layers(weights, x, y):
    def layer(carry, each):
        (h, n), (w, i) = carry, each
        return (jnp.tanh(h @ w) * (1 + 0.1 * i + 0.01 * n), n + 1), None

    return squares(lax.scan(layer, (x, 0), (weights, jnp.arange(LAYERS)))[0][0], y)


def all_at_once(weights, x, y):
    def layer(carry, each):
        (h, more, n), (w, key, i) = carry, each
        h = jnp.tanh(h @ w + h @ weights["all"]) * (1 + 0.1 * i + 0.01 * n)
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h, 0)
        return (h, more + jnp.mean(h**2), n + 1), None

    keys = jax.random.split(jax.random.key(0), LAYERS)
    h, more, _ = lax.scan(layer, (x, 0.0, 0), (weights["each"], keys, jnp.arange(LAYERS)))[0]
    return squares(h, y) + 0.1 * more


SHARED = {"each": STACK, "all": numbers(3, WIDTH, WIDTH)}
LOSSES = {
    "auxiliary loss": (with_an_auxiliary_loss, STACK),
    "batch": (from_the_batch, STACK),
    "dropout": (with_dropout, STACK),
    "numbered": (with_numbered_layers, STACK),
    "shared": (with_shared_weights, SHARED),
    "unread": (with_an_unread_carry, STACK),
    "zeros": (from_zeros, STACK),
}


def step_of(loss):
    def step(weights, x, y):
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def check(loss, weights):
    step, mesh = step_of(loss), jax.make_mesh((2,), ("stage",), (AxisType.Auto,), devices=jax.devices()[:2])
    pipeline = {"stages": 2, "microbatches": 4, "backend": "one_jit"}
    sharded = autoshard(step, mesh=mesh, pipeline=pipeline, compiler_options=QUICK)
    found, expected = (weights, X, Y), (weights, X, Y)
    for _ in range(2):
        results, known = sharded(*found), jax.jit(step)(*expected)
        assert_equal(jax.tree.map(np.asarray, results), jax.tree.map(np.asarray, known))
        found, expected = (results[0], X, Y), (known[0], X, Y)


def test_a_loop_of_all_kinds_trains_as_one_device_does():
    check(all_at_once, SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loop_of_each_kind_trains_as_one_device_does(name):
    check(*LOSSES[name])


@pytest.mark.parametrize("name", ["batch", "auxiliary loss"])
def test_without_ends_such_loops_are_refused(name, monkeypatch):
    """That they run is what ends are for."""
    loss, weights = LOSSES[name]
    none = {"_needs_entrance": lambda roles, loop: False, "_handed_carries": lambda roles, loop: ()}
    for function, replacement in none.items():
        monkeypatch.setattr(loop_ends, function, replacement)
    with pytest.raises(StageError, match="cannot run with backend='one_jit'"):
        pipeline = {"stages": 2, "microbatches": 4, "backend": "one_jit"}
        plan(step_of(loss), weights, X, Y, mesh=AbstractMesh((2,), ("stage",)), topology="cpu:2", pipeline=pipeline)
