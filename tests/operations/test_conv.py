"""Convolutions of any size: the numbers of `jax.lax.conv_general_dilated`, by every implementation, and their halos."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from cases import normal
from equality import are_equal, assert_equal
from jax import lax
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips, tally

from autoshard import Link, autoshard
from autoshard.operations.call import Call
from autoshard.ops import conv
from autoshard.ops.convolving import windows
from autoshard.propagation.registry import rule_of

ROW = {"x": 8}

# images, kernel, how, mesh, and the implementations that share out space over the whole mesh
CONVOLUTIONS = [
    ((2, 4, 64, 20), (6, 4, 3, 3), {"padding": "VALID"}, ROW, {"gathered0", "shared1"}),
    ((1, 3, 37, 30), (8, 3, 7, 7), {"window_strides": (2, 2)}, ROW, {"shared0", "shared1"}),
    ((2, 4, 17, 9), (4, 4, 4, 4), {"lhs_dilation": (2, 2), "padding": [(2, 2), (1, 2)]}, ROW, {"shared0", "shared1"}),
    ((2, 8, 29, 16), (8, 4, 3, 5), {"feature_group_count": 2}, ROW, {"shared0", "halo1"}),
    ((2, 3, 100), (5, 3, 31), {"rhs_dilation": (2,), "padding": [(-3, 5)]}, {"x": 2, "y": 2}, {"gathered0"}),
    ((2, 4, 64, 24), (4, 4, 3, 3), {"padding": [(5, 5), (-1, 0)]}, ROW, {"halo0", "gathered1"}),
]


def with_gradients(function, cotangent):
    def computed(*operands):
        made, pull = jax.vjp(function, *operands)
        return made, *pull(cotangent)

    return computed


def plain(how):
    def computed(x, w):
        said = {"window_strides": (1,) * (x.ndim - 2), "padding": "SAME", **how}
        pads = said["padding"]
        if not isinstance(pads, str):  # XLA's CPU compiler computes some negative padding wrongly, also of gradients
            x = (
                lax.pad(x, 0.0, [(0, 0, 0)] * 2 + [(low, high, 0) for low, high in pads])
                if "lhs_dilation" not in how
                else x
            )
            said["padding"] = pads if "lhs_dilation" in how else [(0, 0)] * len(pads)
        return lax.conv_general_dilated(x, w, **said)

    return computed


def calls(images, kernel, how, mesh):
    """The operands, a cotangent, and the calls of both passes."""
    x, w = normal(*images), normal(*kernel, seed=1)
    cotangent = normal(*jax.eval_shape(plain(how), x, w).shape, seed=2)
    step = with_gradients(lambda x, w: conv(x, w, **how), cotangent)
    program = autoshard(step, mesh=mesh).trace(x, w)
    found = [Call.of(one, rule_of(one)) for one in program.equations if one.primitive == "operation"]
    return x, w, cotangent, *found


def computed_by(forward, backward, runs, mesh):
    def computed(x, w, cotangent):
        found = {}
        for name, run in runs.items():
            (made,) = forward.on_mesh(run, mesh)(x, w)
            found[name] = made, *backward.on_mesh(run, mesh)(x, w, made, cotangent)
        return found

    return jax.jit(computed)


@pytest.mark.parametrize("images, kernel, how, shape, expected", CONVOLUTIONS)
def test_implementations_compute_the_same_numbers(images, kernel, how, shape, expected):
    mesh = mesh_of(shape)
    x, w, cotangent, forward, backward = calls(images, kernel, how, mesh)
    runs = {run.name: run for run in forward.runs(shape) if dict(run.roles).get("space") == tuple(shape)}
    assert set(runs) == expected
    wanted = with_gradients(plain(how), cotangent)(x, w)
    for found in computed_by(forward, backward, runs, mesh)(x, w, cotangent).values():
        assert_equal(found, wanted)


def test_a_row_too_far_is_found(monkeypatch):
    right = windows.of_positions
    mesh, (images, kernel, how, shape, _) = mesh_of(ROW), CONVOLUTIONS[0]
    x, w, cotangent, forward, backward = calls(images, kernel, how, mesh)
    wrong = lambda *args: dataclasses.replace(right(*args), first=1)  # noqa: E731
    monkeypatch.setattr("autoshard.ops.convolving.conv.of_positions", wrong)
    runs = {run.name: run for run in forward.runs(shape) if run.name == "gathered0"}
    found = computed_by(forward, backward, runs, mesh)(x, w, cotangent)["gathered0"]
    assert not are_equal(found, with_gradients(plain(how), cotangent)(x, w))


def test_a_shrinking_convolution_is_planned_and_predicted():
    """Images of 64 rows stay split, with no padding at all; what is gathered are the 62 rows of the result."""
    links = {"x": Link(1e-9, 1e9)}
    x, w = normal(1, 3, 64, 6), normal(5, 3, 3, 3, seed=1)

    def loss(x, w):
        return jnp.sum(conv(x, w, padding="VALID") ** 2)

    fixed = {"x": P(None, None, "x"), "w": P()}
    chips = dataclasses.replace(slow_chips(ROW), links=links)
    step = autoshard(jax.value_and_grad(loss, argnums=(0, 1)), mesh=mesh_of(ROW), topology=chips, fixed=fixed)
    plan = step.plan(x, w)
    assert {run.name for run in plan.annotations.runs.values()} == {"gathered0"}
    assert tally(plan.predicted.collectives) == tally(plan.verify().collectives)
    assert_equal(step(x, w), jax.value_and_grad(loss, argnums=(0, 1))(x, w))


def test_what_begins_alike_on_every_device_is_a_plain_convolution():
    program = autoshard(lambda x, w: conv(x, w), mesh=mesh_of(ROW)).trace(normal(2, 4, 64, 16), normal(4, 4, 3, 3))
    assert "conv_general_dilated" in {equation.primitive for equation in program.equations}


def test_without_autoshard_it_is_plain():
    x, w = normal(2, 4, 9, 7), normal(4, 4, 3, 3)
    assert_equal(jax.jit(conv)(x, w), lax.conv_general_dilated(x, w, (1, 1), "SAME"))
