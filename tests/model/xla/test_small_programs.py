"""Programs in which starting operations decides, beside libtpu's own cycles; each fails without the habit it shows."""

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
from autoshard.model import grouping
from autoshard.model.pricing import price_lists
from autoshard.model.xla import backends, loop_memory, operations
from autoshard.model.xla.combining import Combining
from autoshard.model.xla.convolutions import Convolutions
from autoshard.model.xla.products import FourierProducts
from autoshard.model.xla.units import work_numbers
from autoshard.model.xla.units.streams import Streams
from autoshard.program import reader

KEY = jax.eval_shape(lambda: jax.random.key(0))
MACHINE, AXES = "v5e:2x2", {"x": 4}
WHOLE, ROWS = P(), P("x")


def array(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def layers(weights, x):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0]


def recurrence(w, xs):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h * 2

    return jax.lax.scan(step, xs[0], xs)


def power_iteration(matrix, x):
    return jax.lax.fori_loop(0, 16, lambda _, x: jnp.sin(matrix @ x), x)


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def grouped(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8)


def normal(seed):
    return jax.random.normal(jax.random.wrap_key_data(seed), (4, 16, 256))


def normalised(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (scale + 1)


def gated(x, y):
    return jnp.where(x > 0, x, y), jnp.where(x > 0, y, x), jnp.where(x > 0, 0.0, x)


def without(**fields):
    """A fault: the constants of v5e without some of them."""
    return lambda patch: patch.setattr(
        backends, "BACKENDS", {**backends.BACKENDS, "v5e": replace(backends.V5E, **fields)}
    )


def rounds_no_stacks(patch):
    patch.setattr(price_lists, "rounded_for_loops", lambda program, itemsizes: set())


def nothing_runs_ahead(patch):
    patch.setattr(operations, "_operations_before_loop", lambda group: 0)
    patch.setattr(grouping, "runs_before_readers", lambda groups, users, repeated: [False] * len(groups))


def nothing_runs_beside(patch):
    patch.setattr(grouping, "joined_operands", lambda groups, *_, **how: [None] * len(groups))


def every_product_fills_the_unit(patch):
    patch.setattr(operations, "multiplies_vector", lambda group: False)
    patch.setattr(operations.OperationCosts, "vector_seconds", lambda self, group, pieces: 0.0)


SMALL = {  # function of what shapes, how they are split, and a fault
    "a stack of weights": (layers, [array(4, 512, 512), array(64, 512)], [WHOLE, WHOLE], rounds_no_stacks),
    "a stack of results": (
        recurrence,
        [array(256, 256), array(8, 32, 256)],
        [WHOLE, WHOLE],
        without(operations=replace(backends.V5E.operations, product_seconds=0.0)),
    ),
    "a matrix and a vector": (
        power_iteration,
        [array(64, 64), array(64)],
        [WHOLE, WHOLE],
        every_product_fills_the_unit,
    ),
    "one number over all devices": (
        loss,
        [array(64, 64), array(1024, 64), array(1024, 64)],
        [WHOLE, ROWS, ROWS],
        lambda patch: patch.setattr(Combining, "counted", lambda combining, _: combining),  # its launch costs nothing
    ),
    "sums of what a loop hands on": (
        lambda w, x: jax.lax.scan(lambda x, _: (lambda y: (y, y.mean()))(jnp.tanh(x @ w)), x, None, length=16),
        [array(256, 256), array(2048, 256)],
        [WHOLE, WHOLE],
        lambda patch: patch.setattr(loop_memory, "_made_in_small_loops", lambda program, room: {}),
    ),
    "what a larger loop repeats": (normalised, [array(64, 256), array(256)], [WHOLE, WHOLE], nothing_runs_ahead),
    "several results of one array": (gated, [array(64, 256), array(64, 256)], [WHOLE, WHOLE], nothing_runs_beside),
    "a sum and what else is made": (
        lambda x: (x.sum(1), x.max(0), x * 2),
        [array(64, 256)],
        [WHOLE],
        nothing_runs_beside,
    ),
    "an argument that a loop goes on from": (
        lambda x: jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x * 0.5, x),
        [array(256, 1024)],
        [WHOLE],
        lambda patch: patch.setattr(grouping, "_entering_loops", lambda program, groups, staying: set()),
    ),
    "parts of one array": (lambda x: jnp.split(x, 4, 1), [array(64, 256)], [WHOLE], nothing_runs_beside),
    "complex numbers that are moved": (
        lambda x: jnp.concatenate([x, x]),
        [array(64, 256, dtype=np.complex64)],
        [WHOLE],
        lambda patch: patch.setattr(operations, "_moves_complex_numbers", lambda group: False),
    ),
    "complex numbers that two operations read": (
        lambda x, y: ((x * y).sum(0), x * y, (x - y).sum(1)),
        [array(64, 256, dtype=np.complex64)] * 2,
        [WHOLE] * 2,
        lambda patch: patch.setattr(operations, "_loop_extent", lambda group: (1, (64, 256), 8)),
    ),
    "all distances": (
        lambda x, y: ((x[:, None] - y[None]) ** 2).sum(-1),
        [array(512, 16), array(512, 16)],
        [WHOLE, WHOLE],
        without(streams=Streams()),
    ),
    "random bits of three dims": (
        normal,
        [array(2, dtype=np.uint32)],
        [WHOLE],
        lambda patch: patch.setattr(operations, "_OPERATIONS_PER_DIM", 0),
    ),
    "groups of channels": (
        grouped,
        [array(8, 32, 32, 128), array(3, 3, 16, 128)],
        [WHOLE, WHOLE],
        without(convolutions=Convolutions()),
    ),
    "a row whose place the step says": (
        lambda x, row: x.at[jnp.array([3])].set(row),
        [array(64, 128), array(128)],
        [WHOLE, WHOLE],
        lambda patch: patch.setattr(reader, "_is_known", lambda eqn, inputs: False),
    ),
    "a transform of few points": (
        lambda x: jnp.abs(jnp.fft.rfft(x)),
        [array(512, 16, 17)],
        [WHOLE],
        without(fourier_products=FourierProducts(passes=6)),
    ),
}


def foreseen(fn, shapes, specs):
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    made = autoshard.evaluate(fn, *shapes, in_shardings=tuple(specs), out_shardings=P(), mesh=mesh, topology=MACHINE)
    return made.predicted.comparable_seconds


@pytest.mark.parametrize("name", SMALL)
def test_small_programs(monkeypatch, name):
    """Within a factor of 1.6 of libtpu's cycles and our collectives, and out of that with the fault."""
    pytest.importorskip("libtpu")
    fn, shapes, specs, fault = SMALL[name]
    mesh = target_mesh(MACHINE, AXES)
    lies = tuple(NamedSharding(mesh, spec) for spec in specs)
    compiled = jax.jit(fn, in_shardings=lies, out_shardings=NamedSharding(mesh, P())).lower(*shapes).compile()
    schedule = schedule_of(compiled.as_text(), AXES, autoshard.topology(MACHINE, AXES), CHIPS["v5e"].clock)
    assert 1 / 1.6 <= foreseen(fn, shapes, specs) / schedule.step_seconds <= 1.6
    fault(monkeypatch)
    assert not 1 / 1.6 <= foreseen(fn, shapes, specs) / schedule.step_seconds <= 1.6


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_triangles_of_wide_numbers(dtype):
    """Within a factor of 1.6 of libtpu's cycles: TPU solves them row by row, in many operations each."""
    pytest.importorskip("libtpu")
    with jax.enable_x64(True):
        shapes, whole = [array(8, 8, dtype=dtype)] * 2, NamedSharding(target_mesh(MACHINE, AXES), P())
        solve = partial(jax.lax.linalg.triangular_solve, left_side=True, lower=True)
        compiled = jax.jit(solve, in_shardings=whole, out_shardings=whole).lower(*shapes).compile()
        predicted = foreseen(solve, shapes, [WHOLE, WHOLE])
    schedule = schedule_of(compiled.as_text(), AXES, autoshard.topology(MACHINE, AXES), CHIPS["v5e"].clock)
    assert 1 / 1.6 <= predicted / schedule.step_seconds <= 1.6


HELD = {  # function of what shapes, and rows of facts without which its peak is off
    "sorted elements that nothing reads": (lambda x: jnp.argsort(x, 1), [array(64, 256)], "sort"),
    "an element beside its position": (lambda x: jnp.argmax(x, 1), [array(64, 256)], "argmax"),
    "what the host gives back": (lambda x: jax.pure_callback(np.tanh, x, x), [array(8, 16)], "pure_callback"),
    "words of a key": (lambda key: jax.random.bits(key, (1000,)), [KEY], "random_bits"),
}


@pytest.mark.parametrize("name", HELD)
def test_what_small_programs_hold(monkeypatch, name):
    """Peaks within a tenth of libtpu's, and out of that without the primitive's numbers."""
    pytest.importorskip("libtpu")
    fn, shapes, primitive = HELD[name]
    whole = NamedSharding(target_mesh(MACHINE, AXES), P())
    program = jax.jit(fn, in_shardings=whole, out_shardings=whole).lower(*shapes).compile()
    peak = peak_bytes(program)
    assert peak_of(fn, shapes) == pytest.approx(peak, rel=0.1)
    monkeypatch.setattr(work_numbers, "_NUMBERS", dict(work_numbers._NUMBERS) | {primitive: 0})
    assert peak_of(fn, shapes) != pytest.approx(peak, rel=0.1)


def peak_of(fn, shapes):
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES))
    return autoshard.evaluate(
        fn, *shapes, in_shardings=(P(),), out_shardings=P(), mesh=mesh, topology=MACHINE
    ).predicted.peak_bytes


NOTHING_HELD = {  # function of what shapes
    "an argument that is returned": (lambda x: x, [array(8, 128)]),
    "random words of the chip": (lambda key: jax.lax.rng_bit_generator(key, (5, 7)), [array(4, dtype=np.uint32)]),
    "factors of a batch": (jax.lax.linalg.cholesky, [array(4, 8, 8)]),
    "eigenvalues of a batch": (jnp.linalg.eigh, [array(4, 8, 8)]),
    "the factor of a number": (jax.lax.linalg.cholesky, [array(1, 1)]),
    "the position of the only one": (lambda x: jnp.argmax(x, 0), [array(1, 128)]),
}


@pytest.mark.parametrize("name", NOTHING_HELD)
def test_small_programs_without_temporaries(name):
    """Peaks within a tenth of libtpu's, where these are arguments and results alone."""
    pytest.importorskip("libtpu")
    fn, shapes = NOTHING_HELD[name]
    whole = NamedSharding(target_mesh(MACHINE, AXES), P())
    program = jax.jit(fn, in_shardings=whole, out_shardings=whole).lower(*shapes).compile()
    assert program.memory_analysis().temp_size_in_bytes == 0
    assert peak_of(fn, shapes) == pytest.approx(peak_bytes(program), rel=0.1)
