"""What single operations hold on GPU beside operands and results, as XLA for H100 has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from autoshard import plan
from autoshard.model import workspaces

MESH, TARGET = AbstractMesh((8,), ("data",)), "h100:8"
IMAGES, WORDS = jax.ShapeDtypeStruct((256, 32, 32), jnp.float32), jax.ShapeDtypeStruct((4,), np.uint32)


def pooled(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID").sum()


def drawn(key):
    return jax.lax.rng_bit_generator(key, (1024, 256), algorithm=jax.lax.RandomAlgorithm.RNG_PHILOX)[1]


HELD = {  # primitive: function of what, how it lies, and the compiled peak in bytes
    "rng_bit_generator": (drawn, WORDS, PartitionSpec(), 2097424),
    "select_and_scatter_add": (jax.grad(pooled), IMAGES, PartitionSpec("data"), 393248),
}


def planned(primitive):
    function, shape, spec, _ = HELD[primitive]
    return plan(function, shape, mesh=MESH, topology=TARGET, fixed={"*": spec})


@pytest.mark.parametrize("primitive", HELD)
def test_workspaces(monkeypatch, primitive):
    assert planned(primitive).predicted.peak_bytes == pytest.approx(HELD[primitive][3], rel=0.15)
    rows = {name: row for name, row in workspaces.WORKSPACES["gpu"].items() if name != primitive}
    monkeypatch.setattr(workspaces, "WORKSPACES", {**workspaces.WORKSPACES, "gpu": rows})
    assert planned(primitive).predicted.peak_bytes < 0.8 * HELD[primitive][3]


@pytest.mark.parametrize("primitive", HELD)
def test_peaks_are_those_of_the_compiler(primitive):
    pytest.importorskip("jax_cuda13_plugin")
    assert planned(primitive).verify(TARGET).actual_peak == HELD[primitive][3]
