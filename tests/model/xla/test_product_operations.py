"""Products whose results take longer to pack and to write than to multiply, beside libtpu's cycles; with faults."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compiled.schedule import schedule_of
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.targets import target_mesh
from autoshard.model.pricing.product_operations import ProductOperations

pytest.importorskip("libtpu")
MACHINES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
AXES = {"x": 4}
WITHIN = 1.25  # of libtpu's cycles


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def scores(queries, keys):
    return jnp.einsum("bqd,bkd->bqk", queries, keys)


def wide_scores(queries, keys):
    return jnp.einsum("bqd,bkd->bqk", queries, keys, preferred_element_type=jnp.float32)


ATTENTION = [array(32, 1024, 128)] * 2
DENSE = [array(4096, 256), array(256, 4096)]
DEEP = [array(4096, 1024), array(1024, 4096)]
PRODUCTS = {  # a function, and its arguments
    "scores": (scores, ATTENTION),
    "scores of 32 bits": (wide_scores, ATTENTION),
    "scaled scores": (lambda q, k: scores(q, k) * 0.125, ATTENTION),
    "few terms": (jnp.matmul, DENSE),
    "many terms": (jnp.matmul, DEEP),
    "an activation": (lambda x, w: jax.nn.gelu(x @ w), DENSE),
    "an activation of many terms": (lambda x, w: jax.nn.gelu(x @ w), DEEP),
    "a residual": (lambda x, w, y: x @ w + y, [*DENSE, array(4096, 4096)]),
    "a residual of many terms": (lambda x, w, y: x @ w + y, [*DEEP, array(4096, 4096)]),
    "a sum": (lambda x, w: (x @ w).astype(jnp.float32).sum(1), DENSE),
    "the activation of an image": (
        lambda x, w: jnp.tanh(
            jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        ),
        [array(64, 28, 28, 128), array(1, 1, 128, 512)],
    ),
}


def foreseen(name, chip="v5e") -> float:
    fn, shapes = PRODUCTS[name]
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    lies = tuple(P() for _ in shapes)
    placed = autoshard.evaluate(fn, *shapes, in_shardings=lies, out_shardings=P(), mesh=mesh, topology=MACHINES[chip])
    return placed.predicted.comparable_seconds


def compiled(name, chip="v5e") -> float:
    """Seconds by libtpu's cycles, without what the first operation waits for its arguments."""
    fn, shapes = PRODUCTS[name]
    whole = NamedSharding(target_mesh(MACHINES[chip], AXES), P())
    program = jax.jit(fn, in_shardings=whole, out_shardings=whole).lower(*shapes).compile()
    topology = autoshard.topology(MACHINES[chip], AXES)
    return schedule_of(program.as_text(), AXES, topology, CHIPS[chip].clock).compute_seconds


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    assert 1 / WITHIN <= foreseen(name) / compiled(name) <= WITHIN


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
@pytest.mark.parametrize("name", ["scores", "few terms", "an activation of many terms"])
def test_products_on_other_chips(name, chip):
    assert 1 / WITHIN <= foreseen(name, chip) / compiled(name, chip) <= WITHIN


def nothing(*_):
    return 0.0


FAULTS = [  # what is left out, and a product that is off without it
    ("stream_seconds", "scores"),
    ("stream_seconds", "a sum"),
    ("seconds_ahead", "a residual of many terms"),
]


@pytest.mark.parametrize("method, name", FAULTS)
def test_faults_of_products(monkeypatch, method, name):
    cycles = compiled(name)
    monkeypatch.setattr(ProductOperations, method, nothing)
    assert not 1 / WITHIN <= foreseen(name) / cycles <= WITHIN
