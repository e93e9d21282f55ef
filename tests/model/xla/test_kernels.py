"""How many kernels XLA for H100 makes of loops, of what follows a product, of sums, and of softmaxes and norms."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from programs import f32

from autoshard import plan
from autoshard.model import grouping
from autoshard.model.xla import backends
from autoshard.model.xla.gpu import library_kernels
from autoshard.model.xla.operations import KERNEL_SECONDS
from autoshard.model.xla.units import product_ends

TARGET = "h100:8"
STATE, WEIGHTS = f32(64, 512), f32(512, 512)


def recurrence(turn):
    return lambda state, *others: jax.lax.scan(lambda state, _: turn(state, *others), state, None, length=16)


def layer_norm(x):
    return (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-6)


def counts_no_turns(patch):
    patch.setattr(grouping, "_counting_turns", lambda program, home: set())


def ends_as_on_tpu(patch):
    patch.setattr(product_ends, "ends_as_libraries_do", lambda equations: True)


def ends_in_nothing(patch):
    patch.setattr(product_ends, "ends_as_libraries_do", lambda equations: False)


def sums_at_once(patch):
    patch.setattr(library_kernels, "_MOST_SUMMED_AT_ONCE", 2**30)


def sums_apart(patch):
    patch.setattr(library_kernels, "_MOST_SUMMED_AT_ONCE", 1)


def adds_nothing(patch):
    patch.setattr(library_kernels, "_AROUND", {})


def without(**fields):
    fusion = replace(backends.H100.fusion, **fields)
    return lambda patch: patch.setattr(
        backends, "BACKENDS", {**backends.BACKENDS, "h100": replace(backends.H100, fusion=fusion)}
    )


KERNELS = {  # function of what shapes, kernels of the compiled program, and a fault
    "a loop of elementwise work": (recurrence(lambda h: (jnp.tanh(h) + 1, None)), [STATE], 34, counts_no_turns),
    "a loop of products": (recurrence(lambda h, w: (jnp.tanh(h @ w), None)), [STATE, WEIGHTS], 49, counts_no_turns),
    "a function of a product": (lambda x, w: jnp.tanh(x @ w), [STATE, WEIGHTS], 2, ends_as_on_tpu),
    "a GELU of a product": (lambda x, w: jax.nn.gelu(x @ w), [STATE, WEIGHTS], 1, ends_in_nothing),
    "a product and a bias": (lambda x, w, b: jax.nn.relu(x @ w + b), [STATE, WEIGHTS, f32(512)], 1, ends_in_nothing),
    "a sum of many": (lambda x: x.sum(), [f32(256, 256)], 2, sums_at_once),
    "a sum of few": (lambda x: x.sum(), [f32(64, 64)], 1, sums_apart),
    "a norm of few columns": (
        lambda x: x / jnp.sqrt((x * x).sum(0) + 1),
        [f32(4, 512)],
        1,
        without(reduces_apart_from=0),
    ),
    "a gradient of the largest of few": (
        jax.grad(lambda x, weights: (x.max(0) * weights).sum()),
        [f32(3, 512), f32(512)],
        1,
        without(reduces_apart_from=0),
    ),
    "a series": (jax.lax.igamma, [f32(16, 16)] * 2, 17, adds_nothing),
    "a norm of rows": (layer_norm, [f32(64, 1024)], 1, without(normalises=False)),
}


def planned(name):
    fn, shapes, *_ = KERNELS[name]
    return plan(fn, *shapes, mesh=AbstractMesh((8,), ("x",)), topology=TARGET, fixed={"*": jax.P()})


@pytest.mark.parametrize("name", KERNELS)
def test_how_many_kernels(monkeypatch, name):
    """Within a quarter: what they move is little. Not so with the fault."""
    _, _, kernels, fault = KERNELS[name]
    assert planned(name).predicted.comparable_seconds / KERNEL_SECONDS == pytest.approx(kernels, rel=0.25)
    fault(monkeypatch)
    assert planned(name).predicted.comparable_seconds / KERNEL_SECONDS != pytest.approx(kernels, rel=0.25)


@pytest.mark.parametrize("name", KERNELS)
def test_so_many_are_in_the_compiled_program(name):
    pytest.importorskip("jax_cuda13_plugin")
    found = planned(name).verify(TARGET).schedule
    assert found.step_seconds / KERNEL_SECONDS == pytest.approx(KERNELS[name][2], rel=0.25)
