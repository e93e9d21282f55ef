"""Gradients of what a step uses in several places: TPU adds up what a device has of them, and reduces the total."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.model import grouping

pytest.importorskip("libtpu")
MACHINE, MESH = "v5e:2x4", AbstractMesh((2, 4), ("x", "y"))
ROWS, WIDTH, WORDS = 512, 256, 512


def image_layer(kernel, x):
    images = x.reshape(-1, 8, 8, 4)
    made = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.tanh(made).reshape(x.shape)


LAYERS = {  # one parameter and rows to rows, and the parameter's shape
    "product": (lambda w, x: jnp.tanh(x @ w), (WIDTH, WIDTH)),
    "heads": (lambda w, x: jnp.tanh(jnp.einsum("nd,dhe->nhe", x, w)).reshape(x.shape), (WIDTH, 8, WIDTH // 8)),
    "bias": (lambda b, x: jnp.tanh(x + b), (WIDTH,)),
    "scale": (lambda g, x: jnp.tanh(x * g), (WIDTH,)),
    "kernel": (image_layer, (3, 3, 4, 4)),
    "table": (lambda e, x: jnp.tanh(e[(jnp.abs(x[:, 0]) * 100).astype(int) % WORDS]), (WORDS, WIDTH)),
}


def normalised(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def shared(layer, times: int = 3):
    """A loss in which so many layers have one parameter."""

    def loss(parameter, x):
        for _ in range(times):
            x += layer(parameter, normalised(x))
        return jnp.mean(x**2)

    return loss


def twins(layer):
    return shared(layer, 2)


def tied(layer):
    """A loss of a table's rows, and of products with all of it."""

    def loss(table, x):
        made = layer(table, x)
        return jax.nn.logsumexp(made @ table.T, axis=-1).mean()

    return loss


def physical(layer):
    """A loss of a derivative by the inputs, and of the values."""

    def loss(parameter, x):
        slope = jax.grad(lambda x: layer(parameter, x).sum())(x)
        return jnp.mean(slope**2) + layer(parameter, x).mean()

    return loss


CASES = [(shared, name, 1) for name in LAYERS if name != "table"]  # form, parameter, how often it is reduced
CASES += [(physical, "product", 1), (physical, "bias", 1)]
CASES += [(twins, "table", 1), (shared, "table", 2), (tied, "table", 2)]


def gradient(form, name: str):
    """A gradient of rows split over one axis, which all devices get, as it is predicted and compiled."""
    layer, shape = LAYERS[name]
    arrays = (jax.ShapeDtypeStruct(one, jnp.float32) for one in (shape, (ROWS, WIDTH)))
    placed = autoshard.evaluate(
        jax.grad(form(layer)), *arrays, in_shardings=(P(), P("x")), out_shardings=P(), mesh=MESH, topology=MACHINE
    )
    return placed.verify(target=MACHINE)


@pytest.mark.parametrize("form, name, times", CASES)
def test_how_often_gradients_of_what_is_used_several_times_are_reduced(form, name, times):
    found = gradient(form, name)
    assert found.predicted == found.actual, str(found)
    (size,) = found.actual.values()
    layer_bytes = 4 * jnp.zeros(LAYERS[name][1]).size
    assert size == times * layer_bytes


def test_what_is_reduced_each_time_is_caught(monkeypatch):
    monkeypatch.setattr(grouping, "added_sums", lambda *_: {})
    with pytest.raises(AssertionError, match="differs"):
        test_how_often_gradients_of_what_is_used_several_times_are_reduced(shared, "product", 1)


def test_slices_of_them_are_scattered_once():
    """A step whose parameter is split: a plan scatters the total of its gradients."""
    layer, shape = LAYERS["product"]
    arrays = (jax.ShapeDtypeStruct(one, jnp.float32) for one in (shape, (16 * ROWS, WIDTH)))

    def step(w, x):
        return w - jax.grad(shared(layer))(w, x)

    plan = autoshard.plan(
        step, *arrays, mesh=MESH, topology=MACHINE, donate_argnums=0, fixed={"w": P(("x", "y")), "x": P(("x", "y"))}
    )
    found = plan.verify(target=MACHINE)
    assert found.predicted == found.actual, str(found)
    assert found.actual["reduce_scatter", ("x", "y")] == 4 * WIDTH * WIDTH // 8
