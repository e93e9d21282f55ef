"""Fourier transforms along split dims: the numbers of `jax.numpy.fft`, every implementation, and their collectives."""

import dataclasses

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
from autoshard.ops import fft
from autoshard.ops.fourier import implementations
from autoshard.ops.fourier.fft import fft_operation
from autoshard.ops.fourier.transform import Transform
from autoshard.propagation.registry import rule_of

MESHES = {"row": {"x": 8}, "grid": {"x": 4, "y": 2}}


def numbers(*shape, kind="FFT"):
    real = normal(*shape)
    return real if kind == "RFFT" else jax.lax.complex(real, normal(*shape, seed=1))


# kind, shape, lengths, mesh, the implementations that can run
TRANSFORMS = [
    ("FFT", (16, 24), (16, 24), "row", {"kept0", "kept1", "traded01", "traded10"}),
    ("RFFT", (3, 16, 14), (16, 14), "row", {"kept0", "traded01"}),
    ("IRFFT", (16, 13), (16, 24), "row", {"kept0"}),
    ("IFFT", (8, 4, 6), (8, 4, 6), "grid", {"kept0", "kept01", "kept02", "kept1", "kept2", "kept12"}),
    ("RFFT", (8, 4, 10), (8, 4, 10), "grid", {"kept0", "kept01", "kept1", "traded02", "traded12"}),
    ("FFT", (2, 128), (128,), "row", {"sixstep"}),
    ("IFFT", (256,), (256,), "grid", {"sixstep"}),
]


def call_of(transform, x, mesh):
    program = autoshard(lambda x: fft_operation(transform)(x), mesh=mesh).trace(x)
    (equation,) = (one for one in program.equations if one.primitive == "operation")
    return Call.of(equation, rule_of(equation))


@pytest.mark.parametrize("kind, shape, lengths, mesh, expected", TRANSFORMS)
def test_implementations_compute_the_same_numbers(kind, shape, lengths, mesh, expected):
    sizes, transform, x = MESHES[mesh], Transform(kind, lengths), numbers(*shape, kind=kind)
    devices = mesh_of(sizes)
    call = call_of(transform, x, devices)
    runs = {run.name: run for run in sorted(call.runs(sizes), key=lambda run: len(run.roles)) if run.name}
    assert expected <= set(runs)
    made = jax.jit(lambda x: {name: call.on_mesh(run, devices)(x)[0] for name, run in runs.items()})(x)
    for one in made.values():
        assert_equal(one, jax.lax.fft(x, kind, lengths))


def smoothed(u):
    waves = jnp.arange(u.shape[0])[:, None] + jnp.arange(u.shape[1] // 2 + 1)[None]
    return jnp.fft.irfft2(jnp.fft.rfft2(u) / (1 + waves))


def test_plain_transforms_of_a_split_grid_are_planned_and_predicted():
    """The grid stays split, forward and backward: no all_gather, and the all_to_alls that were predicted."""
    shape = {"x": 8}
    chips = dataclasses.replace(slow_chips(shape), links={"x": Link(1e-9, 1e7)})
    gradient, u = jax.value_and_grad(lambda u: jnp.sum(smoothed(u) ** 2)), normal(64, 48)
    step = autoshard(gradient, mesh=mesh_of(shape), topology=chips, fixed={"u": P("x")})
    plan = step.plan(u)
    assert {run.name for run in plan.annotations.runs.values()} == {"kept0"}
    assert {kind for kind, _ in tally(plan.predicted.collectives)} == {"all_to_all", "all_reduce"}
    assert tally(plan.predicted.collectives) == tally(plan.verify().collectives)
    assert_equal(step(u), gradient(u))


def test_batches_that_take_all_devices_need_no_exchange():
    program = autoshard(lambda x: jnp.fft.fft2(x), mesh=mesh_of({"x": 8})).trace(numbers(8, 4, 4))
    assert "operation" not in {equation.primitive for equation in program.equations}


# axes, keywords, the function of `jax.numpy.fft`
SAME = [
    ((-1,), {}, jnp.fft.fft),
    ((0, 2), {"inverse": True}, lambda x: jnp.fft.ifftn(x, axes=(0, 2))),
    ((2, 0), {"real": True}, lambda x: jnp.fft.rfftn(x, axes=(2, 0))),
    ((0, 1, 2), {"real": True, "inverse": True}, lambda x: jnp.fft.irfftn(x)),
    (1, {"real": True, "inverse": True, "length": 9}, lambda x: jnp.fft.irfft(x, 9, axis=1)),
]


@pytest.mark.parametrize("axes, how, plain", SAME)
def test_numbers_are_those_of_numpy(axes, how, plain):
    x = normal(4, 6, 5)
    assert_equal(fft(x, axes, **how), plain(x))


def test_an_axis_may_be_an_integer_of_numpy():
    x = numbers(4)
    assert_equal(fft(x, np.int64(-1)), jnp.fft.fft(x))


def test_a_wrong_twiddle_is_found(monkeypatch):
    monkeypatch.setattr(implementations, "twiddles", lambda *args, dtype, **how: jnp.ones((), dtype))
    mesh, x = mesh_of({"x": 8}), numbers(64)
    call = call_of(Transform("FFT", (64,)), x, mesh)
    (run,) = (run for run in call.runs({"x": 8}) if run.name)
    assert not are_equal(call.on_mesh(run, mesh)(x)[0], jnp.fft.fft(x))


@pytest.mark.parametrize(
    "axes, how, said",
    [
        ((0, 0), {}, "different axes"),
        (3, {}, "no such axis"),
        (0, {"length": 4}, "length="),
        (0, {"real": True}, "real=True"),
        (0, {"length": 0, "inverse": True, "real": True}, "1 or more is needed"),
    ],
)
def test_what_cannot_be_transformed_is_said(axes, how, said):
    with pytest.raises(ArgumentError, match=said):
        fft(numbers(4), axes, **how)
