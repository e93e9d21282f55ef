"""Convolutions of few channels, beside the cycles of libtpu: taps and channels fill squares of the matrix unit."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from programs import f32

from autoshard import evaluate, plan
from autoshard.compiled.collectives import peak_bytes
from autoshard.mesh.targets import target_mesh
from autoshard.model.pricing import sizes
from autoshard.model.xla import fusion
from autoshard.model.xla.backends import V5E
from autoshard.model.xla.convolutions import Convolutions, lies_as_images

MACHINE = "v5e:2x4"


def convolved(x, kernel, stride=1):
    groups = x.shape[-1] // kernel.shape[2]
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def averaged(stride=1):
    """A convolution between other operations: nothing is copied for it but an argument of few channels."""
    return lambda x, kernel: jnp.mean(jax.nn.relu(convolved(jax.nn.relu(x * 1.5), kernel, stride)))


def gradient(argument):
    return jax.grad(lambda x, kernel: jnp.mean(convolved(x, kernel) ** 2), argument)


SINGLE = {  # function of what shapes, and whether the matrix unit takes longest, half of it idle
    "3 to 64 channels, 7 x 7": (averaged(stride=2), [f32(128, 112, 112, 3), f32(7, 7, 3, 64)], False),
    "32 channels": (averaged(), [f32(256, 32, 32, 32), f32(3, 3, 32, 32)], False),
    "128 to 16 channels, 5 x 5": (averaged(), [f32(128, 28, 28, 128), f32(5, 5, 128, 16)], True),
    "128 channels": (averaged(), [f32(128, 28, 28, 128), f32(3, 3, 128, 128)], False),
    "a gradient by images of 32 channels": (gradient(0), [f32(256, 32, 32, 32), f32(3, 3, 32, 32)], False),
    "a gradient by a kernel of 64 channels": (gradient(1), [f32(128, 28, 28, 64), f32(3, 3, 64, 64)], False),
    "each channel by itself": (averaged(), [f32(128, 32, 32, 64), f32(3, 3, 1, 64)], False),
}


def predicted(fn, shapes):
    fixed = {"x": jax.P("x"), "kernel": jax.P()}
    return plan(fn, *shapes, mesh=AbstractMesh((8,), ("x",)), topology=MACHINE, fixed=fixed)


@pytest.mark.parametrize("name", SINGLE)
def test_single_convolutions(name, monkeypatch):
    """Seconds within a factor of two of libtpu's, and further off if every square were full."""
    pytest.importorskip("libtpu")
    fn, shapes, is_slow = SINGLE[name]
    found = predicted(fn, shapes).verify(MACHINE)
    ratio = found.predicted_seconds / found.schedule.step_seconds
    assert 0.5 < ratio < 2
    if is_slow:
        monkeypatch.setattr(Convolutions, "padding", lambda self, group, pieces: 1.0)
        full = predicted(fn, shapes).predicted.comparable_seconds / found.schedule.step_seconds
        assert full < ratio and abs(math.log(full)) > abs(math.log(ratio))


@pytest.mark.parametrize("channels", [64, 128])
def test_results_that_libtpu_copies(channels):
    """Results of 64 channels pad as little in another order as in that of convolutions; of 128 channels they do not."""
    pytest.importorskip("libtpu")
    side = 28 if channels == 128 else 56
    shape = 16, side, side, channels
    whole = jax.NamedSharding(target_mesh(MACHINE, {"x": 8}), jax.P())
    shapes = f32(*shape), f32(3, 3, channels, channels)
    text = jax.jit(convolved, in_shardings=whole, out_shardings=whole).lower(*shapes).compile().as_text()
    copies = re.findall(rf"= f32\[{','.join(map(str, shape))}\]\S* copy\(", text)
    assert lies_as_images(shape, (0, 3), V5E.tile) == (not copies)


IMAGES = {  # what is made of images before they are convolved, their shape, and what is left out to fail
    "as they come": (lambda x: x, (32, 512, 512, 3), (sizes, "are_read_as_they_lie")),
    "rounded": (lambda x: x.astype(jnp.bfloat16), (32, 512, 512, 3), (fusion, "copies_argument")),
    "transposed and rounded": (
        lambda x: x.transpose(0, 2, 3, 1).astype(jnp.bfloat16),
        (32, 3, 512, 512),
        (fusion, "copies_argument"),
    ),
    "many, rounded": (lambda x: x.astype(jnp.bfloat16), (512, 224, 224, 3), (sizes, "lie_by_batch")),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_that_are_copied(name, monkeypatch):
    """Few images of an argument lie as any array does, and are copied so that their batch are the columns."""
    pytest.importorskip("libtpu")
    made, shape, (module, fault) = IMAGES[name]

    def loss(kernel, x):
        images = made(x)
        numbers = ("NHWC", "HWIO", "NHWC")
        kernel = kernel.astype(images.dtype)
        patches = jax.lax.conv_general_dilated(images, kernel, (16, 16), "VALID", dimension_numbers=numbers)
        return jnp.mean(patches.astype(jnp.float32) ** 2)

    step, shapes = jax.grad(loss), (f32(16, 16, 3, 384), f32(*shape))
    whole = jax.NamedSharding(target_mesh(MACHINE, {"x": 8}), jax.P())
    program = jax.jit(step, in_shardings=whole, out_shardings=whole).lower(*shapes).compile()

    def ratio():
        replicated = {"in_shardings": (jax.P(), jax.P()), "out_shardings": jax.P()}
        placed = evaluate(step, *shapes, mesh=AbstractMesh((8,), ("x",)), topology=MACHINE, **replicated)
        return placed.predicted.peak_bytes / peak_bytes(program)

    assert ratio() == pytest.approx(1, abs=0.06)
    monkeypatch.setattr(module, fault, lambda *_: fault == "are_read_as_they_lie")
    assert abs(ratio() - 1) > 0.06
