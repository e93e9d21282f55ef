"""Products in a ring of pieces: the numbers of `jnp.matmul`, forward and backward, and the permutes predicted."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal
from equality import are_equal, assert_equal
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips, tally

from autoshard import ArgumentError, Link, autoshard
from autoshard.operations.call import Call
from autoshard.ops import attention, matmul
from autoshard.ops.matmul import RING
from autoshard.propagation.registry import rule_of

X, W, WEIGHTS = normal(2, 16, 24), normal(24, 32, seed=1), normal(2, 16, 32, seed=2)


def with_gradients(function, weights=WEIGHTS):
    def computed(x, w):
        made, pull = jax.vjp(function, x, w)
        return made, *pull(weights)

    return computed


def computed(shape, x=X, w=W, weights=WEIGHTS):
    """Implementation -> value and gradients, on a ring of all devices."""
    mesh = mesh_of(shape)
    program = autoshard(with_gradients(matmul, weights), mesh=mesh).trace(x, w)
    forward, backward = (Call.of(one, rule_of(one)) for one in program.equations if one.primitive == "operation")
    whole = tuple(shape)
    runs = {run.name: run for run in forward.runs(shape) if run.name and set(dict(run.roles).values()) == {whole}}

    @jax.jit
    def found(x, w):
        made = {name: forward.on_mesh(run, mesh)(x, w)[0] for name, run in runs.items()}
        return {name: (one, *backward.on_mesh(runs[name], mesh)(x, w, one, weights)) for name, one in made.items()}

    return found(x, w)


@pytest.mark.parametrize("shape", [{"x": 8}, {"x": 2, "y": 2}])
def test_implementations_compute_the_same_numbers(shape):
    found = computed(shape)
    assert set(found) == {"gathering", "scattering", "rows"}
    for one in found.values():
        assert_equal(one, with_gradients(jnp.matmul)(X, W))


def errors_in_bfloat16():
    """Implementation -> the largest error of value and gradients in bfloat16, over that of plain JAX."""
    arrays = [x.astype(jnp.bfloat16) for x in (normal(1, 64, 16), normal(16, 32, seed=1), normal(1, 64, 32, seed=2))]
    wide = [x.astype(jnp.float32) for x in arrays]
    truth = with_gradients(jnp.matmul, wide[2])(*wide[:2])

    def errors(made):
        return np.array([float(jnp.abs(one - other).max()) for one, other in zip(made, truth, strict=True)])

    plain = errors(jax.jit(with_gradients(jnp.matmul, arrays[2]))(*arrays[:2]))
    return {name: errors(one) / plain for name, one in computed({"x": 8}, *arrays).items()}


def test_in_bfloat16_rings_are_nearly_as_exact_as_plain_products():
    """Gradients of the matrix are summed on the device; what travels is rounded at each of the eight."""
    for name, (value, of_rows, of_matrix) in errors_in_bfloat16().items():
        assert of_matrix <= 1.01 or name == "rows", name
        assert max(value, of_rows) <= 3, name


def test_sums_in_few_bits_are_found(monkeypatch):
    module = importlib.import_module("autoshard.ops.matmul")
    monkeypatch.setattr(module, "_of_sums", lambda x: x.dtype)
    found = errors_in_bfloat16()
    assert max(found[name][2] for name in ("gathering", "scattering")) > 1.01


def test_a_ring_that_turns_the_wrong_way_is_found(monkeypatch):
    def wrong(split, distance):
        return [(i, (i - distance) % split.count(RING)) for i in range(split.count(RING))]

    monkeypatch.setattr(importlib.import_module("autoshard.ops.matmul"), "_pairs", wrong)
    found = computed({"x": 4})
    assert not are_equal(found["gathering"], with_gradients(jnp.matmul)(X, W))
    assert not are_equal(found["scattering"], with_gradients(jnp.matmul)(X, W))


def test_a_ring_is_predicted():
    """Tokens and columns are split: pieces travel, and nothing is gathered."""
    shape = {"x": 8}
    chips = dataclasses.replace(slow_chips(shape), links={"x": Link(1e-9, 1e8)})
    fixed = {"x": P(None, "x"), "w": P(None, "x")}
    step = autoshard(with_gradients(matmul), mesh=mesh_of(shape), topology=chips, fixed=fixed)
    plan = step.plan(X, W)
    assert tally(plan.predicted.collectives) == tally(plan.verify().collectives)
    assert_equal(step(X, W), with_gradients(jnp.matmul)(X, W))


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_products_of_nothing_have_the_shape_of_jnp(shape):
    x, w = jnp.ones(shape), jnp.ones((shape[-1], 4))
    assert_equal(matmul(x, w), jnp.matmul(x, w))


def test_what_does_not_fit_is_said():
    with pytest.raises(ArgumentError, match="matmul takes"):
        matmul(X, W.T)


@pytest.mark.parametrize("mesh", [None, {"x": 8}])
def test_products_have_the_precision_of_their_call(mesh):
    """The function of an operation is traced when the step is lowered, as are derivatives and what devices run."""

    def step(x, w, precision):
        with jax.default_matmul_precision(precision):
            loss = jax.grad(lambda x, w: (matmul(x, w) * WEIGHTS).sum(), argnums=(0, 1))
            rows = x[:, :, None, :8]
            mapped = jax.vmap(attention, in_axes=(None, None, 0))(rows, rows, jnp.stack([rows, rows]))
            return matmul(x, w), loss(x, w), mapped

    for precision in ("highest", None):
        how = jax.jit if mesh is None else functools.partial(autoshard, mesh=mesh_of(mesh))
        text = how(functools.partial(step, precision=precision)).lower(X, W).as_text()
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert products and all(("HIGHEST" in line) == (precision == "highest") for line in products)
