"""Work that neither memory nor the FLOP rate of products explains, beside libtpu's own cycles."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compiled.collectives import peak_bytes
from autoshard.compiled.schedule import schedule_of
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.targets import target_mesh
from autoshard.model import formulating, memory_terms
from autoshard.model.heap import number_terms
from autoshard.model.pricing import price_lists
from autoshard.model.xla import backends
from autoshard.model.xla.products import ProductSizes
from autoshard.model.xla.units import scalar_unit
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
    "small complex products": (
        jnp.matmul,
        [array(2048, 4, 3, dtype=np.complex64), array(2048, 3, 6, dtype=np.complex64)],
    ),
}


def predicted(fn, shapes, lies=None):
    spec, mesh = lies or P(), AbstractMesh(tuple(AXES.values()), tuple(AXES))
    layouts = {"in_shardings": (spec,) * len(shapes), "out_shardings": spec}
    return autoshard.evaluate(fn, *shapes, mesh=mesh, topology=MACHINE, **layouts).predicted


def foreseen(fn, shapes):
    return predicted(fn, shapes).comparable_seconds


@pytest.mark.parametrize("name", SLOW)
def test_what_is_slow_in_a_unit(monkeypatch, name):
    """Within two fifths of libtpu's cycles; less than three fifths of these without what the units take.

    Small products of a batch write padding, too, which is left out with what the units take.
    """
    pytest.importorskip("libtpu")
    fn, shapes = SLOW[name]
    shardings = NamedSharding(target_mesh(MACHINE, AXES), P())
    hlo = jax.jit(fn, in_shardings=shardings, out_shardings=shardings).lower(*shapes).compile().as_text()
    schedule = schedule_of(hlo, AXES, autoshard.topology(MACHINE, AXES), CHIPS["v5e"].clock)
    assert schedule.unestimated == ()
    assert foreseen(fn, shapes) == pytest.approx(schedule.compute_seconds, rel=0.4)
    without = replace(backends.V5E, vector_unit=VectorUnit(), matrix_unit=MatrixUnit())
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "v5e": without})
    monkeypatch.setattr(price_lists, "matrix_dims", lambda program: {})
    assert foreseen(fn, shapes) < 0.6 * schedule.compute_seconds


GENERATED = {  # algorithm and shape -> peak of the program that libtpu compiles, and seconds by its cycles
    ("RNG_PHILOX", (512, 512)): (1213952, 55.4e-6),
    ("RNG_PHILOX", (1000, 1000)): (132154880, 394e-6),  # each of its blocks takes a row of memory
    ("RNG_THREE_FRY", (900, 1000)): (3835392, 197e-6),
    ("RNG_THREE_FRY", (600000,)): (156050944, 406e-6),  # of a flat array as well
}


def bits(algorithm, shape):
    return lambda state: jax.lax.rng_bit_generator(state, shape, np.uint32, jax.lax.RandomAlgorithm[algorithm])


@pytest.mark.parametrize("algorithm, shape", GENERATED)
def test_generators_that_are_not_the_chips_own(algorithm, shape):
    """Peaks are within a tenth of libtpu's; seconds within a factor of two, and five for flat arrays."""
    peak, seconds = GENERATED[algorithm, shape]
    said = predicted(bits(algorithm, shape), [array(4, dtype=np.uint32)])
    assert said.peak_bytes == pytest.approx(peak, rel=0.1)
    factor = 2 if len(shape) > 1 else 5
    assert seconds / factor <= said.comparable_seconds <= seconds * factor


@pytest.mark.slow
@pytest.mark.parametrize("algorithm, shape", GENERATED)
def test_what_libtpu_makes_of_generators(algorithm, shape):
    """The figures above."""
    pytest.importorskip("libtpu")
    shardings = NamedSharding(target_mesh(MACHINE, AXES), P())
    jitted = jax.jit(bits(algorithm, shape), in_shardings=shardings, out_shardings=shardings)
    compiled = jitted.lower(array(4, dtype=np.uint32)).compile()
    peak, seconds = GENERATED[algorithm, shape]
    schedule = schedule_of(compiled.as_text(), AXES, autoshard.topology(MACHINE, AXES), CHIPS["v5e"].clock)
    assert peak_bytes(compiled) == pytest.approx(peak, rel=0.01)
    assert schedule.compute_seconds == pytest.approx(seconds, rel=0.01)


PRODUCTS = {  # einsum, its shapes, how they are split, and whether it is elementwise work
    "vectors": ("bd,bd->b", [array(4096, 12)] * 2, P("x"), True),
    "vectors, in several dims": ("bhd,bhd->bh", [array(512, 64, 16)] * 2, P("x"), True),
    "matrices and rows": ("brk,bkn->brn", [array(256, 1, 1024), array(256, 1024, 64)], P("x"), True),
    "matrices and columns": ("bmk,bkr->bmr", [array(256, 128, 128), array(256, 128, 1)], P("x"), True),
    "one of a batch on each device": ("bk,bkn->bn", [array(4, 1024), array(4, 1024, 1024)], P("x"), True),
    "matrices and vectors": ("bk,bkn->bn", [array(256, 1024), array(256, 1024, 64)], P("x"), False),
    "matrices of few rows and vectors": ("bk,bkn->bn", [array(4096, 8), array(4096, 8, 64)], P("x"), True),
    "vectors and matrices of few columns": ("bmk,bk->bm", [array(1024, 32, 256), array(1024, 256)], P("x"), True),
    "several dims of a batch": ("bhd,bhtd->bht", [array(64, 8, 128), array(64, 8, 128, 128)], P("x"), False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_which_products_of_a_batch_are_elementwise(monkeypatch, name):
    """Within three tenths of libtpu's cycles; not if all such products go to the matrix unit, or none does."""
    pytest.importorskip("libtpu")
    text, shapes, lies, is_elementwise = PRODUCTS[name]
    fn = partial(jnp.einsum, text)
    shardings = NamedSharding(target_mesh(MACHINE, AXES), lies)
    hlo = jax.jit(fn, in_shardings=shardings, out_shardings=shardings).lower(*shapes).compile().as_text()
    truth = schedule_of(hlo, AXES, autoshard.topology(MACHINE, AXES), CHIPS["v5e"].clock).compute_seconds
    assert predicted(fn, shapes, lies).comparable_seconds == pytest.approx(truth, rel=0.3)
    fault = property(lambda sizes: (sizes.rows < 0) != (not is_elementwise))
    monkeypatch.setattr(ProductSizes, "is_with_vector", fault)
    assert predicted(fn, shapes, lies).comparable_seconds != pytest.approx(truth, rel=0.3)


def turning(limit):
    """A loop that counts up to a number, and returns an array that it doubles."""

    def loop(x, *numbers):
        until = limit(x, *numbers)
        return jax.lax.while_loop(lambda c: c[0] < until, lambda c: (c[0] + 1, c[1] * 2), (0.0, x))[1]

    return loop


def settling(x):
    """A loop in a batch: which rows go on is carried, and lies outside the chip."""

    def turn(carried):
        x, goes_on = carried
        return jnp.where(goes_on[:, None], x * 0.5, x), x.max(1) > 1

    return jax.lax.while_loop(lambda c: c[1].any(), turn, (x, x.max(1) > 1))[0]


IN_MEMORY = {  # function of what shapes, and whether the fault is that all numbers are in registers, or that none is
    "a loop of numbers alone": (turning(lambda x, n: n), [array(64, 256), array()], False),
    "a loop up to a sum": (turning(lambda x: x.sum()), [array(64, 256)], True),
    "a number that scales": (lambda x: x / jnp.sqrt((x * x).sum()), [array(32, 128)], True),
}


@pytest.mark.parametrize("name", IN_MEMORY)
def test_which_numbers_lie_in_memory(monkeypatch, name):
    """Peaks within a sixth of libtpu's, and out of that if all numbers lie in memory, or none."""
    pytest.importorskip("libtpu")
    fn, shapes, all_in_registers = IN_MEMORY[name]
    whole = NamedSharding(target_mesh(MACHINE, AXES), P())
    peak = peak_bytes(jax.jit(fn, in_shardings=whole, out_shardings=whole).lower(*shapes).compile())
    assert predicted(fn, shapes).peak_bytes == pytest.approx(peak, rel=1 / 6)
    monkeypatch.setattr(
        scalar_unit,
        "numbers_in_registers",
        lambda program: frozenset({value.id for value in program.values} if all_in_registers else ()),
    )
    assert predicted(fn, shapes).peak_bytes != pytest.approx(peak, rel=1 / 6)


CARRIED = {  # function of what shapes
    "arrays": (lambda x: jnp.sin(jax.lax.fori_loop(0, 9, lambda _, x: jnp.cos(x) / 2, x)), [array(512, 128)]),
    "which rows go on": (settling, [array(64, 256)]),
}


@pytest.mark.parametrize("name", CARRIED)
def test_where_what_loops_carry_lies(name):
    """Peaks within a sixth of libtpu's: in the chip's own memory, but for what the loop waits for."""
    pytest.importorskip("libtpu")
    fn, shapes = CARRIED[name]
    whole = NamedSharding(target_mesh(MACHINE, AXES), P())
    peak = peak_bytes(jax.jit(fn, in_shardings=whole, out_shardings=whole).lower(*shapes).compile())
    assert predicted(fn, shapes).peak_bytes == pytest.approx(peak, rel=1 / 6)


ONE_EACH = {  # function of rows, of which every device has one
    "a sum of each row": lambda x: x + x.sum(1, keepdims=True),
    "two of each row": lambda x: x.sum(1) * x.max(1),
    "an element of each row": lambda x: x[:, 3] * 2,
}


@pytest.mark.parametrize("name", ONE_EACH)
def test_an_element_on_each_device_is_a_number(monkeypatch, name):
    """Peaks within a tenth of libtpu's, and out of that if only what is a number in the program takes its place."""
    pytest.importorskip("libtpu")
    rows = NamedSharding(target_mesh(MACHINE, AXES), P("x"))
    peak = peak_bytes(jax.jit(ONE_EACH[name], in_shardings=rows, out_shardings=rows).lower(array(4, 16)).compile())
    assert predicted(ONE_EACH[name], [array(4, 16)], P("x")).peak_bytes == pytest.approx(peak, rel=0.1)
    terms = [term for term in memory_terms.OUTPUT_TERMS if term is not number_terms.split_numbers]
    monkeypatch.setattr(formulating, "OUTPUT_TERMS", terms)
    assert predicted(ONE_EACH[name], [array(4, 16)], P("x")).peak_bytes < peak / 4
