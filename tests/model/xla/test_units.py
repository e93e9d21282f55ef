"""Work that neither memory nor the FLOP rate of products explains, beside libtpu's own cycles."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compiled.schedule import schedule_of
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.targets import target_mesh
from autoshard.model.xla import backends
from autoshard.model.xla.units.matrix_unit import MatrixUnit
from autoshard.model.xla.units.vector_unit import VectorUnit

MACHINE, AXES = "v5e:2x2", {"x": 4}


def array(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


SLOW = {  # function of what shapes
    "trigonometry": (lambda x, y: jnp.cos(x) + jnp.tan(y), [array(512, 1024)] * 2),
    "gamma": (jax.scipy.special.digamma, [array(512, 1024)]),
    "complex numbers": (jnp.exp, [array(512, 1024, dtype=np.complex64)]),
    "small products of a batch": (jnp.matmul, [array(2048, 8, 16), array(2048, 16, 8)]),
}


def foreseen(fn, shapes):
    whole = (P(),) * len(shapes)
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    made = autoshard.evaluate(fn, *shapes, in_shardings=whole, out_shardings=P(), mesh=mesh, topology=MACHINE)
    return made.predicted.comparable_seconds


@pytest.mark.parametrize("name", SLOW)
def test_what_is_slow_in_a_unit(monkeypatch, name):
    """Within two fifths of libtpu's cycles; less than three fifths of these without what the units take."""
    pytest.importorskip("libtpu")
    fn, shapes = SLOW[name]
    shardings = NamedSharding(target_mesh(MACHINE, AXES), P())
    hlo = jax.jit(fn, in_shardings=shardings, out_shardings=shardings).lower(*shapes).compile().as_text()
    schedule = schedule_of(hlo, AXES, autoshard.topology(MACHINE, AXES), CHIPS["v5e"].clock)
    assert schedule.unestimated == ()
    assert foreseen(fn, shapes) == pytest.approx(schedule.compute_seconds, rel=0.4)
    without = replace(backends.V5E, vector_unit=VectorUnit(), matrix_unit=MatrixUnit())
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "v5e": without})
    assert foreseen(fn, shapes) < 0.6 * schedule.compute_seconds
