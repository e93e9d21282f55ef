"""Gathers and scatters of rows that fill no tile, beside the programs that libtpu compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compiled.collectives import peak_bytes
from autoshard.mesh.targets import target_mesh
from autoshard.model.xla.units import rows

MACHINE, AXES = "v5e:2x4", {"x": 8}
COUNT = 2**18  # of rows that are picked or added


def array(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def places(*shape):
    return array(*shape, dtype=np.int32)


def picked(x, at):
    return jnp.sin(x.at[at].get(mode="clip"))


def picked_and_summed(x, at, weights):
    return (x.at[at].get(mode="clip") * weights[:, None]).sum(axis=0)


def added(x, at, u):
    return x.at[at].add(jnp.sin(u))


def windows(x, at):
    return jnp.sin(jax.vmap(lambda start: lax.dynamic_slice(x, (start,), (8,)))(at))


PADDED = {  # function of what shapes
    "rows of 2": (picked, [array(2**14, 2), places(COUNT)]),
    "rows of 16": (picked, [array(2**14, 16), places(COUNT)]),
    "rows of 16 halves": (picked, [array(2**14, 16, dtype=jnp.bfloat16), places(2 * COUNT)]),
    "rows of 3 x 4": (picked, [array(2**12, 3, 4), places(COUNT)]),
    "rows along a second dim": (lambda x, at: jnp.sin(x.at[:, at].get(mode="clip")), [array(8, 2**14), places(COUNT)]),
    "rows by two coordinates": (
        lambda x, at: jnp.sin(x.at[at[:, 0], at[:, 1]].get(mode="clip")),
        [array(128, 128, 16), places(COUNT, 2)],
    ),
    "rows of a batch": (jax.vmap(lambda x, at: jnp.sin(x[at])), [array(512, 64, 4), places(512, COUNT // 512)]),
    "rows that are summed": (picked_and_summed, [array(2**14, 16), places(COUNT), array(COUNT)]),
    "rows that are returned": (lambda x, at: x.at[at].get(mode="clip"), [array(2**14, 16), places(COUNT)]),
    "rows that are added": (added, [array(2**14, 16), places(COUNT), array(COUNT, 16)]),
    "sums of segments": (
        lambda u, at: jax.ops.segment_sum(jnp.sin(u), at, num_segments=2**14),
        [array(COUNT, 16), places(COUNT)],
    ),
    "windows of a line": (windows, [array(2**14), places(COUNT)]),
}
DENSE = {
    "rows of many": (picked, [array(2**20, 16), places(COUNT)]),
    "added to many": (added, [array(2**20, 16), places(COUNT), array(COUNT, 16)]),
    "whole tiles": (picked, [array(2**10, 256), places(COUNT)]),
    "single elements": (
        lambda x, at: jnp.sin(jnp.take_along_axis(x, at, axis=1)),
        [array(2**12, 64), places(2**12, 64)],
    ),
}


def peaks(fn, shapes):
    """Predicted and compiled, where every device does all."""
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    layouts = {"in_shardings": (P(),) * len(shapes), "out_shardings": P()}
    found = autoshard.evaluate(fn, *shapes, mesh=mesh, topology=MACHINE, **layouts)
    whole = jax.NamedSharding(target_mesh(MACHINE, AXES), P())
    compiled = jax.jit(fn, in_shardings=whole, out_shardings=whole).lower(*shapes).compile()
    return found.predicted.peak_bytes, peak_bytes(compiled)


@pytest.mark.parametrize("name", [*PADDED, *DENSE])
def test_rows(name):
    pytest.importorskip("libtpu")
    predicted, compiled = peaks(*(PADDED | DENSE)[name])
    assert predicted == pytest.approx(compiled, rel=0.2)


@pytest.mark.parametrize("name", PADDED)
def test_rows_that_are_taken_for_dense_are_caught(name, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setattr(rows, "_padding", lambda window: 1.0)
    predicted, compiled = peaks(*PADDED[name])
    assert predicted < 0.5 * compiled
