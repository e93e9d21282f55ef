"""What keeps the largest elements of rows on TPU: a kernel, or a sort of turned rows; with faults."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compiled.collectives import peak_bytes
from autoshard.mesh.targets import target_mesh
from autoshard.model.xla.units import sorting
from autoshard.program.tracing import trace

pytest.importorskip("libtpu")
MACHINE, AXES = "v5e:2x2", {"x": 4}
WITHIN = 0.1  # of the compiled peak


def largest(kept, dtype=jnp.float32, are_read=slice(None)):
    return lambda x: [one + 1 for one in jax.lax.top_k(x.astype(dtype) * 1.5, kept)[are_read]]


STEPS = {  # a function, the shape of what it reads, and whether a kernel keeps the elements
    "matrix": (largest(16), (16384, 2048), True),
    "too many of a matrix": (largest(64), (16384, 2048), False),
    "matrices": (largest(16), (64, 256, 2048), False),
    "matrices, best alone": (largest(16, are_read=slice(1)), (64, 256, 2048), False),
    "bfloat16": (largest(16, jnp.bfloat16), (16384, 2048), True),
    "bfloat16, matrices": (largest(16, jnp.bfloat16), (64, 256, 2048), False),
    "what fits into the chip": (largest(16), (8, 128, 2048), False),
}


def foreseen(name):
    fn, shape, _ = STEPS[name]
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    lies = {"in_shardings": (P(),), "out_shardings": P(), "mesh": mesh, "topology": MACHINE}
    return autoshard.evaluate(fn, jax.ShapeDtypeStruct(shape, jnp.float32), **lies).predicted.peak_bytes


@pytest.mark.parametrize("name", STEPS)
def test_peaks(name, monkeypatch):
    fn, shape, by_kernel = STEPS[name]
    whole = NamedSharding(target_mesh(MACHINE, AXES), P())
    lowered = jax.jit(fn, in_shardings=whole, out_shardings=whole).lower(jax.ShapeDtypeStruct(shape, jnp.float32))
    compiled = lowered.compile()
    assert (" sort(" not in compiled.as_text()) == by_kernel
    assert foreseen(name) == pytest.approx(peak_bytes(compiled), rel=WITHIN)
    monkeypatch.setattr(sorting, "keeps_by_kernel", lambda _: not by_kernel)
    is_same = name in ("matrices, best alone", "what fits into the chip")
    assert is_same or foreseen(name) != pytest.approx(peak_bytes(compiled), rel=WITHIN)


@pytest.mark.parametrize("shape, kept", [((64, 128), 2), ((64, 128), 3), ((64, 64), 1), ((64, 320), 5), ((4096,), 8)])
def test_which_are_kernels(shape, kept):
    def fn(x):
        return jax.lax.top_k(x * 1.5, kept)

    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    whole = NamedSharding(target_mesh(MACHINE, AXES), P())
    compiled = jax.jit(fn, in_shardings=whole, out_shardings=whole).lower(x).compile()
    (equation,) = (one for one in trace(fn, (x,), {}).equations if one.primitive == "top_k")
    assert sorting.keeps_by_kernel(equation) == (" sort(" not in compiled.as_text())
