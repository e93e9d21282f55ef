"""Products whose results take longer to pack and to write than to multiply, beside libtpu's cycles; with faults."""

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
from autoshard.model import grouping
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


ATTENTION = [array(128, 1024, 128)] * 2
DENSE = [array(16384, 256), array(256, 4096)]
DEEP = [array(16384, 1024), array(1024, 4096)]
WEIGHTS = {(256, 4096), (1024, 4096), (1, 1, 128, 512)}


def sums(x, w):
    made = (x @ w).astype(jnp.float32)
    return made.sum(1), jnp.square(made).sum(1), jnp.maximum(made, 0).sum(1)


PRODUCTS = {  # a function, and its arguments
    "scores": (scores, ATTENTION),
    "scores of 32 bits": (wide_scores, ATTENTION),
    "scaled scores": (lambda q, k: scores(q, k) * 0.125, ATTENTION),
    "few terms": (jnp.matmul, DENSE),
    "many terms": (jnp.matmul, DEEP),
    "an activation": (lambda x, w: jax.nn.gelu(x @ w), DENSE),
    "an activation of many terms": (lambda x, w: jax.nn.gelu(x @ w), DEEP),
    "a residual": (lambda x, w, y: x @ w + y, [*DENSE, array(16384, 4096)]),
    "a residual of many terms": (lambda x, w, y: x @ w + y, [*DEEP, array(16384, 4096)]),
    "a sum": (lambda x, w: (x @ w).astype(jnp.float32).sum(1), DENSE),
    "sums": (sums, DENSE),
    "the activation of an image": (
        lambda x, w: jnp.tanh(
            jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        ),
        [array(256, 28, 28, 128), array(1, 1, 128, 512)],
    ),
}


def foreseen(name, chip="v5e") -> float:
    (fn, shapes), lies = PRODUCTS[name], specs(name)
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    how = {"in_shardings": lies, "out_shardings": P("x"), "mesh": mesh, "topology": MACHINES[chip]}
    return autoshard.evaluate(fn, *shapes, **how).predicted.comparable_seconds


def specs(name) -> tuple[P, ...]:
    """Rows, batches and images are split."""
    return tuple(P() if shape.shape in WEIGHTS else P("x") for shape in PRODUCTS[name][1])


def compiled(name, chip="v5e") -> float:
    """Seconds by libtpu's cycles, without what the first operation waits for its arguments."""
    fn, shapes = PRODUCTS[name]
    mesh = target_mesh(MACHINES[chip], AXES)
    lies = tuple(NamedSharding(mesh, spec) for spec in specs(name))
    program = jax.jit(fn, in_shardings=lies, out_shardings=NamedSharding(mesh, P("x"))).lower(*shapes).compile()
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
    ("product_lead_seconds", "a residual of many terms"),
]


@pytest.mark.parametrize("method, name", FAULTS)
def test_faults_of_products(monkeypatch, method, name):
    cycles = compiled(name)
    monkeypatch.setattr(ProductOperations, method, nothing)
    assert not 1 / WITHIN <= foreseen(name) / cycles <= WITHIN


def test_sums_of_one_product_are_one_operation(monkeypatch):
    cycles = compiled("sums")
    monkeypatch.setattr(grouping, "joined_operands", lambda groups, *_, **how: [None] * len(groups))
    assert foreseen("sums") / cycles > WITHIN


def normalised(images):
    images = images.astype(jnp.float32)
    mean, square = images.mean((0, 1, 2)), jnp.square(images).mean((0, 1, 2))
    return ((images - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)).astype(jnp.bfloat16)


def test_gradients_of_normalised_images(monkeypatch):
    """Gradients of scales are sums that run in the operation of the convolution whose result they are made of."""
    kernels = [array(1, 1, 128, 128)] * 3
    images, scales = array(128, 32, 32, 128), [array(128, dtype=jnp.float32)] * 2

    def loss(kernels, scales, images):
        for kernel, scale in zip(kernels[:2], scales, strict=True):
            made = jax.lax.conv_general_dilated(
                images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            images = jax.nn.relu(normalised(made) * scale).astype(jnp.bfloat16)
        return jnp.square((images @ kernels[2][0, 0]).astype(jnp.float32)).mean()

    lies = (P(), P(), P("x"))
    mesh = AbstractMesh((4,), ("x",))

    def evaluated():
        how = {"in_shardings": lies, "out_shardings": P(), "mesh": mesh, "topology": MACHINES["v5e"]}
        return autoshard.evaluate(jax.grad(loss, (0, 1)), kernels, scales, images, **how)

    found = evaluated().verify(MACHINES["v5e"])
    assert 1 / WITHIN <= found.predicted_seconds / found.schedule.step_seconds <= WITHIN
    marked = grouping._leading_to_results
    monkeypatch.setattr(grouping, "_leading_to_results", lambda *args: (*marked(*args)[:2], [False] * len(args[1])))
    assert evaluated().predicted.step_seconds > 1.1 * found.predicted_seconds


def updated(weight, x, gradient):
    return weight - 0.1 * jax.lax.with_sharding_constraint(x.T @ gradient, P())


def test_updates_wait_for_their_gradients(monkeypatch):
    """A sum over devices comes between: the update is an operation of its own, which reads the weight and writes it."""
    shapes = array(4096, 4096, dtype=jnp.float32), array(2048, 4096), array(2048, 4096)
    lies, axes = (P(), P("x"), P("x")), dict(AXES)
    mesh = target_mesh(MACHINES["v5e"], axes)
    shardings = tuple(NamedSharding(mesh, spec) for spec in lies)
    with jax.set_mesh(mesh):
        lowered = jax.jit(updated, in_shardings=shardings, out_shardings=shardings[0], donate_argnums=0).lower(*shapes)
    text = lowered.compile().as_text()
    taken = schedule_of(text, axes, autoshard.topology(MACHINES["v5e"], axes), CHIPS["v5e"].clock).compute_seconds
    how = {"in_shardings": lies, "out_shardings": P(), "mesh": AbstractMesh((4,), ("x",)), "topology": MACHINES["v5e"]}

    def ratio():
        placed = autoshard.evaluate(lambda w, x, g: w - 0.1 * (x.T @ g), *shapes, donate_argnums=0, **how)
        return placed.predicted.compute_seconds / taken

    assert 1 / WITHIN <= ratio() <= WITHIN
    monkeypatch.setattr(ProductOperations, "_runs_in_product", lambda *_: np.ones(1, bool))
    assert ratio() < 1 / WITHIN
