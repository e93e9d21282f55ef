"""What XLA for CPU runs first, as it waits for the least: each peak is low where groups run in program order."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from oracles import mesh_of
from programs import f32

import autoshard
from autoshard.model.xla import backends

LAYERS, WIDTH, BATCH = 4, 128, 256


def sliced(weights, x):
    for i in range(LAYERS):
        x = jnp.tanh(x @ weights[i])
    return x


def widened(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight.astype(jnp.float32))
    return x


def widened_in_loop(weights, x):
    return jax.lax.fori_loop(0, 3, lambda _, x: widened(weights, x), x)


def dropped_out(weights, x):
    for i in range(LAYERS):
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), i), 0.9, x.shape)
        x = jnp.where(kept, jnp.tanh(x @ weights), 0)
    return x


def pooled(weights, x):
    def loss(x):
        for _ in range(2):
            x = jax.lax.reduce_window(jnp.sin(x), -jnp.inf, jax.lax.max, (1, 1, 2), (1, 1, 1), "VALID")
        return x.sum() + weights.sum()

    return jax.grad(loss)(x)


def recomputed(weights, x, prevent_cse=True):
    def block(weights, x):
        for weight in weights:
            x = jnp.tanh(x) @ weight
        return x

    def loss(weights, x):
        for i in range(LAYERS):
            x = jax.checkpoint(block, prevent_cse=prevent_cse)(weights[2 * i : 2 * i + 2], x)
        return x.sum()

    return jax.grad(loss)(weights, x)


NARROW = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.int8)] * LAYERS
BLOCKS, ROWS = [f32(WIDTH, WIDTH)] * 2 * LAYERS, f32(8 * BATCH, WIDTH)
X, IMAGES = f32(BATCH, WIDTH), f32(64, 32, 32)
STEPS = {
    "slices of stacked weights": (sliced, f32(LAYERS, WIDTH, WIDTH), X),
    "wider weights": (widened, NARROW, X),
    "wider weights in a loop": (widened_in_loop, NARROW, X),
    "blocks of jax.checkpoint": (recomputed, BLOCKS, ROWS),
    "such blocks without barriers": (partial(recomputed, prevent_cse=False), BLOCKS, ROWS),
    "random bits": (dropped_out, f32(WIDTH, WIDTH), f32(8 * BATCH, WIDTH)),
    "positions of poolings": (pooled, f32(8, 8), IMAGES),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_waits_for_the_least_is_made_first(name, monkeypatch):
    function, weights, x = STEPS[name]

    def made():
        fixed = {"weights*": jax.P(), "x": jax.P("x")}
        return autoshard.plan(function, weights, x, mesh=mesh_of({"x": 8}), fixed=fixed)

    found = made().verify()
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=0.12)
    in_order = {**backends.BACKENDS, "cpu": replace(backends.CPU, runs_ready_first=False)}
    monkeypatch.setattr(backends, "BACKENDS", in_order)
    assert made().predicted.peak_bytes < 0.85 * found.actual_peak
