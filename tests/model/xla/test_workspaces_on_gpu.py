"""What single operations hold on GPU beside operands and results, and how many kernels they are, as XLA has it."""

import importlib.util
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lax.linalg import geqp3, geqrf
from jax.sharding import AbstractMesh, PartitionSpec
from oracles import adjusted

from autoshard import plan
from autoshard.compiled import roofline
from autoshard.model import workspaces
from autoshard.model.xla import backends, operations

MESH, TARGET = AbstractMesh((8,), ("data",)), "h100:8"
ROWS, WHOLE = PartitionSpec("data"), PartitionSpec()


def array(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def pooled(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID").sum()


def drawn(key):
    return jax.lax.rng_bit_generator(key, (1024, 256), algorithm=jax.lax.RandomAlgorithm.RNG_PHILOX)[1]


def convolved(*numbers, strides=1, spread=1, padding="SAME"):
    dims = len(numbers[0]) - 2
    how = {"window_strides": (strides,) * dims, "lhs_dilation": (spread,) * dims, "padding": padding}
    return lambda x, w: jax.lax.conv_general_dilated(x, w, **how, dimension_numbers=numbers)


def solved(matrix, sides):
    return jax.lax.linalg.triangular_solve(matrix, sides, left_side=True, lower=True)


def pivoted(matrix):
    return geqp3(matrix, jnp.zeros((*matrix.shape[:-2], matrix.shape[-1]), np.int32))


class Held(NamedTuple):
    """An operation, and what XLA makes of it."""

    function: object
    shapes: tuple
    specs: dict  # argument -> how it lies
    primitive: str
    peak: int  # bytes, of the compiled program
    kernels: int | None  # of it; None: they are not counted


MINOR, MAJOR = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
IMAGES, KERNEL = array(64, 32, 32, 16), array(3, 3, 16, 16)
IMAGE_SPECS = {"x": ROWS, "w": WHOLE}
MATRICES, SQUARES = array(64, 48, 32), array(64, 64, 64)
HELD = {
    "words": Held(drawn, (array(4, dtype=np.uint32),), {"*": WHOLE}, "rng_bit_generator", 2097424, 2),
    "pooling": Held(jax.grad(pooled), (array(256, 32, 32),), {"*": ROWS}, "select_and_scatter_add", 393248, 3),
    "major channels": Held(
        convolved(*MAJOR),
        (array(64, 16, 32, 32), array(16, 16, 3, 3)),
        IMAGE_SPECS,
        "conv_general_dilated",
        1591552,
        None,
    ),
    "volumes": Held(
        convolved("NDHWC", "DHWIO", "NDHWC"),
        (array(64, 8, 16, 16, 16), array(3, 3, 3, 16, 16)),
        IMAGE_SPECS,
        "conv_general_dilated",
        3201280,
        None,
    ),
    "one end padded": Held(
        convolved(*MINOR, strides=2), (IMAGES, KERNEL), IMAGE_SPECS, "conv_general_dilated", 1231616, 3
    ),
    "spread": Held(
        convolved(*MINOR, spread=2, padding=((1, 1), (1, 1))),
        (IMAGES, KERNEL),
        IMAGE_SPECS,
        "conv_general_dilated",
        4738304,
        None,
    ),
    "spectra": Held(jnp.fft.irfft2, (array(64, 64, 33, dtype=np.complex64),), {"*": ROWS}, "fft", 536576, None),
    "vectors": Held(lambda x: jnp.linalg.svd(x)[0], (SQUARES,), {"*": ROWS}, "svd", 526624, None),
    "vectors of tall matrices": Held(
        lambda x: jnp.linalg.svd(x, full_matrices=False), (MATRICES,), {"*": ROWS}, "svd", 206136, None
    ),
    "eigenvectors": Held(
        lambda x: jax.lax.linalg.eigh(x, symmetrize_input=False), (SQUARES,), {"*": ROWS}, "eigh", 395568, 4
    ),
    "reflectors": Held(geqrf, (MATRICES,), {"*": ROWS}, "geqrf", 148752, None),
    "pivoted reflectors": Held(pivoted, (MATRICES,), {"*": ROWS}, "geqp3", 149784, None),
    "orthogonal matrices": Held(
        jax.lax.linalg.householder_product,
        (MATRICES, array(64, 32)),
        {"*": ROWS},
        "householder_product",
        148480,
        None,
    ),
    "reflected": Held(jax.lax.linalg.ormqr, (MATRICES, array(64, 32), MATRICES), {"*": ROWS}, "ormqr", 197632, None),
    "three diagonals": Held(jax.lax.linalg.tridiagonal, (SQUARES,), {"*": ROWS}, "tridiagonal", 399872, None),
    "triangles": Held(solved, (SQUARES, SQUARES), {"*": ROWS}, "triangular_solve", 655744, 4),
    "bands": Held(
        lambda a, b: jax.lax.linalg.tridiagonal_solve(a, a, a, b),
        (array(64, 64), SQUARES),
        {"*": ROWS},
        "tridiagonal_solve",
        395264,
        3,
    ),
}


def planned(name):
    one = HELD[name]
    return plan(one.function, *one.shapes, mesh=MESH, topology=TARGET, fixed=one.specs)


@pytest.mark.parametrize("name", HELD)
def test_workspaces(monkeypatch, name):
    """Within 15% of the compiled peak, and out of that without the row of the operation; as many kernels as XLA starts.

    Kernels are counted by what each takes at least, so libraries take no more here.
    """
    without = {**backends.BACKENDS, "h100": replace(backends.H100, libraries={})}
    monkeypatch.setattr(backends, "BACKENDS", without)
    one, found = HELD[name], planned(name).predicted
    assert found.peak_bytes == pytest.approx(one.peak, rel=0.15)
    if one.kernels is not None:
        assert round(found.comparable_seconds / operations.KERNEL_SECONDS) == one.kernels
    rows = {primitive: row for primitive, row in workspaces.WORKSPACES["gpu"].items() if primitive != one.primitive}
    monkeypatch.setattr(workspaces, "WORKSPACES", {**workspaces.WORKSPACES, "gpu": rows})
    assert planned(name).predicted.peak_bytes < 0.85 * one.peak


@pytest.mark.parametrize("name", HELD)
def test_recorded_figures_are_those_of_the_compiler(monkeypatch, name):
    pytest.importorskip("jax_cuda13_plugin")
    monkeypatch.setattr(roofline, "CALLS", {})
    one, found = HELD[name], planned(name).verify(TARGET)
    assert found.actual_peak == one.peak
    assert one.kernels in (None, round(found.schedule.step_seconds / operations.KERNEL_SECONDS))


@pytest.mark.parametrize("summed, is_library", [(1, False), (3, True)])
def test_an_outer_product_is_no_call_of_a_library(summed, is_library):
    """XLA multiplies in a fusion, as in the gradient of a solve, and gives cuBLAS no room."""
    shapes = array(512, summed), array(summed, 512)
    made = plan(lambda x, y: jnp.tanh(x @ y), *shapes, mesh=MESH, topology=TARGET, fixed={"*": WHOLE})
    assert (made.predicted.peak_bytes > 2**25) == is_library
    if importlib.util.find_spec("jax_cuda13_plugin"):
        assert (made.verify(TARGET).actual_peak > 2**25) == is_library


def test_channels_that_lie_as_they_are_read_are_not_copied():
    """Those of images as the minor dim, those of volumes as a major one."""
    volumes = convolved("NCDHW", "OIDHW", "NCDHW")
    shapes = (array(64, 16, 8, 16, 16), array(16, 16, 3, 3, 3))
    for function, arguments in ((convolved(*MINOR), (IMAGES, KERNEL)), (volumes, shapes)):
        found = plan(function, *arguments, mesh=MESH, topology=TARGET, fixed=IMAGE_SPECS).predicted.peak_bytes
        images, kernel = (one.size * 4 for one in arguments)
        assert found == pytest.approx(2 * images / 8 + kernel, rel=0.01)


KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 65536))


def split_each(keys):
    return jax.random.key_data(jax.vmap(jax.random.split)(keys))


def drawn_by_each(keys):
    def sum_of_two(key):
        one, other = jax.random.split(key)
        return jax.random.uniform(one) + jax.random.uniform(other)

    return jax.vmap(sum_of_two)(keys)


def peak_of_keys(function):
    return plan(function, KEYS, mesh=MESH, topology=TARGET, fixed={"keys": ROWS}).predicted.peak_bytes


def test_keys_that_are_made_of_keys(monkeypatch):
    """As results they lie where the step's are; those that the step reads are stored."""
    assert peak_of_keys(split_each) <= 65536 * (8 + 16) / 8
    assert peak_of_keys(drawn_by_each) > 65536 * (8 + 16 + 4) / 8
    computed_again = adjusted(backends.H100, "fusion", stores_keys=False)
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "h100": computed_again})
    assert peak_of_keys(drawn_by_each) < 65536 * (8 + 5) / 8
