"""Convolutions whose kernels lie in pieces: XLA for TPU makes them in turns, and they take as long as predicted."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compiled.schedule import schedule_of
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.targets import target_mesh
from autoshard.model.partitioner import reshards
from autoshard.model.xla.convolutions import Turns

AXES, ALL = {"d": 4, "m": 4}, ("d", "m")
CHANNELS, TAPS = 64, 3
WITHIN = 1.35  # of the seconds that XLA estimates
TOPOLOGY = autoshard.topology("v5e:4x4", AXES)
ABSTRACT = jax.sharding.AbstractMesh((4, 4), ALL)


def convolved(images, kernel, stride=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (stride, stride), "SAME", dimension_numbers=numbers)


def step(first, second, images):
    def loss(kernels):
        return jnp.sum(convolved(jax.nn.relu(convolved(images, kernels[0], 2)), kernels[1]) ** 2)

    gradients = jax.grad(loss)((first, second))
    return first - gradients[0], second - gradients[1]


def evaluated(size: int, mesh, topology=TOPOLOGY):
    kernel, images = (TAPS, TAPS, CHANNELS, CHANNELS), (32 * mesh.size, size, size, CHANNELS)
    shapes = kernel, kernel, images
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    specs = P(None, None, None, ALL), P(None, None, ALL), P(ALL)
    return autoshard.evaluate(step, *arrays, mesh=mesh, topology=topology, in_shardings=specs, donate_argnums=(0, 1))


@pytest.fixture
def found(monkeypatch):
    """The turns that are found while something is evaluated."""
    turns: list[Turns] = []
    decide = reshards.turns_of

    def noted(*arguments):
        one = decide(*arguments)
        turns.extend([one] if one else [])
        return one

    monkeypatch.setattr(reshards, "turns_of", noted)
    return turns


def test_in_turns_or_at_once(found):
    """Large images are convolved in turns, of every tensor that lies in pieces; of small ones kernels are gathered."""
    evaluated(56, ABSTRACT)
    assert {(one.tensor, one.dim) for one in found} == {(1, 3), (1, 2), (2, 3), (2, 2)}
    assert {(one.count, one.by_batch) for one in found} == {(8, True)}  # pieces of 4 channels, and 32 images
    found.clear()
    small = evaluated(2, ABSTRACT).predicted
    assert not found and small.collectives


@pytest.mark.parametrize(
    "machine, sides, turns",
    [("v5e:2x2", (2, 2), True), ("v5e:8x8", (8, 8), False), ("v5p:2x2x1", (2, 2), False), ("v5p:2x2x4", (4, 4), True)],
)
def test_devices_that_make_turns(found, machine, sides, turns):
    """As compiled programs have it: pieces that go round, or one gather; among 64, an all_reduce."""
    evaluated(56, jax.sharding.AbstractMesh(sides, ALL), machine)
    assert bool(found) == turns


@pytest.mark.slow
def test_seconds_of_turns():
    """Beside XLA's own: made at once, these convolutions would take an eighth of the time."""
    pytest.importorskip("libtpu")
    mesh = target_mesh("v5e:4x4", AXES)
    plan = evaluated(56, mesh)
    compiled = plan.lowering(mesh).compile().as_text()
    ids = [device.id for device in mesh.devices.flat]
    there = schedule_of(compiled, AXES, TOPOLOGY, CHIPS["v5e"].clock, ids)
    assert 1 / WITHIN < plan.predicted.program_seconds / there.step_seconds < WITHIN
