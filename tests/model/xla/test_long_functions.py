"""What XLA writes out as a long polynomial: TPUs store it for the backward pass, and do not work it out again."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from programs import f32

import autoshard
from autoshard.compiled.collectives import peak_bytes
from autoshard.mesh.targets import target_mesh
from autoshard.model.xla import fusion

pytest.importorskip("libtpu")
MACHINE, AXES = "v5e:2x2", {"x": 4}
FUNCTIONS = {  # activation, rows, layers, and whether its function is stored
    "an exact GELU": (lambda x: jax.nn.gelu(x, approximate=False), 16384, 1, True),
    "an approximate GELU": (lambda x: jax.nn.gelu(x, approximate=True), 16384, 1, False),
    "a Bessel function": (lambda x: x * jax.lax.bessel_i0e(x), 8192, 2, True),
}


def gradients(activation):
    def loss(weights, x):
        for up, down in zip(*weights, strict=True):
            x = x + activation(x.astype(jnp.bfloat16) @ up.astype(jnp.bfloat16)) @ down.astype(jnp.bfloat16)
        return jnp.mean(x**2)

    return lambda x, up, down: jax.grad(loss)((up, down), x)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("Bessel" in name)) for name in FUNCTIONS]
)
def test_peaks(name, monkeypatch):
    activation, rows, layers, is_stored = FUNCTIONS[name]
    shapes = f32(rows, 256), f32(layers, 256, 4096), f32(layers, 4096, 256)
    step, whole = gradients(activation), jax.NamedSharding(target_mesh(MACHINE, AXES), jax.P())
    program = jax.jit(step, in_shardings=whole, out_shardings=whole).lower(*shapes).compile()

    def ratio():
        mesh = jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES))
        replicated = {"in_shardings": (jax.P(),) * 3, "out_shardings": jax.P()}
        placed = autoshard.evaluate(step, *shapes, mesh=mesh, topology=MACHINE, **replicated)
        return placed.predicted.peak_bytes / peak_bytes(program)

    assert ratio() == pytest.approx(1, abs=0.12)
    facts_of = fusion.facts_of
    monkeypatch.setattr(fusion, "facts_of", lambda name: replace(facts_of(name), is_long=False))
    assert (ratio() < 0.88) == is_stored
