"""Temporaries that fill a TPU's own memory: the rest lies in the memory that arrays come from, as libtpu says."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compiled.collectives import peak_bytes
from autoshard.mesh.targets import target_mesh

pytest.importorskip("libtpu")
AXES = {"x": 8}


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loop(weights, x):
    def loss(weights):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0] ** 2)

    return jax.grad(loss)(weights)


def recurrent(weights, x):
    def loss(weights):
        return jnp.mean(jax.lax.scan(lambda h, _: (jnp.tanh(h @ weights), None), x, None, length=1024)[0] ** 2)

    return jax.grad(loss)(weights)


CASES = {  # machine, a step, the shape of its weights, rows that it works on
    "all of it": ("v5e:2x4", loop, (16, 512, 512), 2048),
    "most of it": ("v5e:2x4", loop, (16, 512, 512), 4608),
    "a part": ("v5e:2x4", loop, (16, 512, 512), 8192),
    "all of it, for many turns": ("v5e:2x4", recurrent, (128, 128), 64),  # libtpu counts the seconds of one
    "hardly any": ("v5p:2x2x2", loop, (16, 512, 512), 512),
    "hardly any of more": ("v5p:2x2x2", loop, (16, 512, 512), 2048),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_chip_holds(name):
    machine, step, weights, rows = CASES[name]
    shapes = array(*weights), array(rows, weights[-1])
    whole = NamedSharding(target_mesh(machine, AXES), P())
    program = jax.jit(step, in_shardings=whole, out_shardings=whole).lower(*shapes).compile()
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    placed = autoshard.evaluate(step, *shapes, in_shardings=(P(), P()), out_shardings=P(), mesh=mesh, topology=machine)
    assert placed.predicted.peak_bytes == pytest.approx(peak_bytes(program), rel=0.2)


def waits(products, x, weights, z):
    waiting = jnp.stack([rows @ weights[0] for rows in x])
    z = z + waiting.sum()
    for number in range(products):
        z = jnp.tanh(z @ weights[number % 4])
    return ((waiting * z.sum()) @ weights[1]).sum(0)


@pytest.mark.parametrize("products, stays", [(4, True), (32, False)])
def test_what_waits_for_long_leaves_the_chip(products, stays):
    step, whole = functools.partial(waits, products), NamedSharding(target_mesh("v5e:2x4", AXES), P())
    shapes = array(8, 1024, 1024), array(4, 1024, 1024), array(8192, 1024)
    program = jax.jit(step, in_shardings=whole, out_shardings=whole).lower(*shapes).compile()
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    replicated = {"in_shardings": (P(), P(), P()), "out_shardings": P()}
    placed = autoshard.evaluate(step, *shapes, mesh=mesh, topology="v5e:2x4", **replicated)
    held = 4 * sum(math.prod(shape.shape) for shape in (*shapes, shapes[0]))
    compiled, predicted = peak_bytes(program), placed.predicted.peak_bytes
    assert (compiled < held) == stays
    assert predicted == pytest.approx(compiled, rel=0.1)


def product_of_sorted(x, y, **how):
    keys, others = jax.lax.sort((x, y), num_keys=1, **how)
    return keys * others


ROWS = array(2048, 8, 16)
SORTED = {  # steps whose sorts hold positions outside the chip, or nothing
    "one": (lambda x: jnp.sort(x) * 2, (ROWS,)),
    "positions": (lambda x: jnp.argsort(x) + 1, (ROWS,)),
    "two": (product_of_sorted, (ROWS, ROWS)),
    "two, in any order": (functools.partial(product_of_sorted, is_stable=False), (ROWS, ROWS)),
    "gradient": (jax.grad(lambda x: (jnp.sort(x) ** 3).sum()), (ROWS,)),
}


@pytest.mark.parametrize("name", SORTED)
def test_of_what_is_sorted_the_unread_lies_outside(name):
    function, shapes = SORTED[name]
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    made = autoshard.plan(function, *shapes, mesh=mesh, topology="v5e:2x4", fixed={"*": P("x")})
    found = made.verify("v5e:2x4")
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=0.1)
