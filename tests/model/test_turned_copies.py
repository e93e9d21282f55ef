"""Copies that XLA for CPU makes around collectives along inner dims of matrices: each peak is low without them."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import mesh_of, slow_chips
from programs import f32

import autoshard
from autoshard.mesh.topology import Link
from autoshard.model.heap import overwriting
from autoshard.model.memory_terms import HeldOutput
from autoshard.model.resharding_memory import Resharding
from autoshard.model.xla import backends

AXES = {"x": 8}
COLUMNS = jax.P(None, "x")


def assert_low_without(monkeypatch, owner, name, nothing, made) -> None:
    """The peak is within a fifth of the compiled one, and too low where a habit is taken away."""
    found = made().verify()
    assert found.collectives_agree, str(found)
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=0.2)
    monkeypatch.setattr(owner, name, nothing)
    found = made().verify()
    assert found.predicted_peak < 0.8 * found.actual_peak


def test_gathered_columns_are_turned(monkeypatch):
    def gathered(x, w):
        return jnp.sin(x) @ w

    def made():
        layouts = {"in_shardings": (COLUMNS, COLUMNS), "out_shardings": COLUMNS}
        return autoshard.evaluate(gathered, f32(1024, 256), f32(256, 64), mesh=mesh_of(AXES), **layouts)

    assert_low_without(monkeypatch, Resharding, "_pieces_transposed", lambda *_: math.inf, made)


def test_arguments_are_gathered_at_the_start(monkeypatch):
    """XLA for CPU runs what is ready first, and so holds all gathered weights of a stack at once."""

    def stack(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    def made():
        layouts = {"in_shardings": (jax.P("x"), jax.P("x")), "out_shardings": jax.P("x")}
        return autoshard.evaluate(stack, [f32(128, 128)] * 6, f32(1024, 128), mesh=mesh_of(AXES), **layouts)

    in_order = replace(backends.CPU, runs_ready_first=False)
    table = {**backends.BACKENDS, "cpu": in_order}
    assert_low_without(monkeypatch, backends, "BACKENDS", table, made)


def test_products_of_a_batch_of_weights_are_turned(monkeypatch):
    """XLA makes one product of them all, whose columns elementwise work reads in another order than it writes."""

    def products(x, weights):
        return jnp.sum(jnp.tanh(jnp.tanh(jax.vmap(lambda w: x @ w)(weights))) @ jnp.ones((100, 1)))

    def made():
        layouts = {"in_shardings": (jax.P(), jax.P()), "out_shardings": jax.P()}
        return autoshard.evaluate(products, f32(100, 8), f32(50, 8, 100), mesh=mesh_of(AXES), **layouts)

    assert_low_without(monkeypatch, overwriting, "_turned", lambda group: set(), made)


def scattered_layers(layer, weights):
    """A plan of layers in a loop, each of which ends in sums that are scattered along their last dim."""
    free = replace(slow_chips(AXES), links={"x": Link(latency=0.0, bandwidth=1e15)})
    fixed = {"x": COLUMNS, "weights": jax.P(None, "x")}

    def layers(x, weights):
        return jax.lax.scan(lambda h, w: (layer(h, w), None), x, weights)[0]

    return autoshard.plan(layers, f32(1024, 128), weights, mesh=mesh_of(AXES), topology=free, fixed=fixed)


def test_sums_scattered_along_inner_dims_are_turned(monkeypatch):
    def made():
        return scattered_layers(lambda h, w: jnp.tanh(jnp.einsum("rk,kmn->rmn", h, w)).sum(1), f32(3, 128, 2, 128))

    nothing = property(lambda output: np.zeros(len(output.strategies), bool))
    assert_low_without(monkeypatch, HeldOutput, "scatters_inside", nothing, made)


def test_sums_of_products_are_made_with_the_scattered_dim_first():
    found = scattered_layers(lambda h, w: jnp.tanh(h @ w), f32(3, 128, 128)).verify()
    assert found.collectives_agree, str(found)
    assert any(kind == "reduce_scatter" for kind, _ in found.actual)
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=0.2)
