"""Parts put side by side on GPU: who reads them computes them as it reads, in associative scans through all levels."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from oracles import adjusted, assert_peak_on_h100

from autoshard import plan
from autoshard.model.xla import backends, fusion
from autoshard.model.xla.operations import KERNEL_SECONDS

MESH, TARGET = AbstractMesh((8,), ("data",)), "h100:8"
ROWS = 8192


def rows(columns, count=ROWS):
    return jax.ShapeDtypeStruct((count, columns), jnp.float32)


def rotated(x, angle):
    first, second = jnp.split(x, 2, axis=1)
    made = x * jnp.cos(angle) + jnp.concatenate([-second, first], axis=1) * jnp.sin(angle)
    return made.astype(jnp.bfloat16)


def recurrence(decay, x):
    """Of two arrays: what is left of the past, and what comes in."""
    combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
    return jax.lax.associative_scan(combine, (decay, x), axis=1)[1]


def read_twice(x, y):
    both = jnp.concatenate([x * 2, y * 3], axis=1)
    return both + 1, jnp.cos(both)


def gradient(scan):
    return jax.grad(lambda x, weights: (scan(x, axis=1) * weights).sum())


PROGRAMS = {  # function of what; XLA for H100 stores nothing but its results
    "rotated": (rotated, [rows(256), rows(256)]),
    "read twice": (read_twice, [rows(128), rows(128)]),
    "padded": (lambda x: jnp.pad(jnp.concatenate([x, x * 2], axis=1), ((0, 0), (1, 1))) * 2, [rows(128)]),
    "a scan": (lambda x: jax.lax.associative_scan(jnp.multiply, x, axis=1), [rows(16)]),
    "a scan of pairs": (recurrence, [rows(16), rows(16)]),
    "a longer scan": (lambda x: jax.lax.associative_scan(jnp.multiply, x, axis=1), [rows(32)]),
    "a gradient of scans": (gradient(jax.lax.cummax), [rows(8), rows(8)]),
}
KERNELS = {  # scan, and elements -> kernels that XLA for H100 makes of its gradient
    (jax.lax.cummax, 8): 1,
    (jax.lax.cummax, 16): 2,
    (jax.lax.cummax, 40): 4,
    (jax.lax.cumlogsumexp, 8): 3,
    (jax.lax.cumlogsumexp, 16): 5,
    (jax.lax.cumprod, 16): 1,
    (jax.lax.cumprod, 40): 2,
}


def planned(function, shapes):
    return plan(function, *shapes, mesh=MESH, topology=TARGET, fixed={"*": PartitionSpec("data")})


def stored(function, shapes):
    """Bytes that the plan holds beside arguments and results."""
    arrays = jax.tree.leaves([shapes, jax.eval_shape(function, *shapes)])
    return (
        planned(function, shapes).predicted.peak_bytes - sum(array.size * array.dtype.itemsize for array in arrays) / 8
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_stored(name):
    assert abs(stored(*PROGRAMS[name])) < 2048


@pytest.mark.parametrize("name", PROGRAMS)
def test_peaks_are_those_of_the_compiler(name):
    assert_peak_on_h100(planned(*PROGRAMS[name]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_that_are_stored_are_caught(monkeypatch, name):
    taken = backends.H100.fusion.taken_in - {"concatenate"}
    without = adjusted(backends.H100, "fusion", taken_in=taken)
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "h100": without})
    with pytest.raises(AssertionError):
        test_nothing_is_stored(name)


def pooled(x):
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def images(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


POOLED = {  # function of what: sums over windows of what they compute themselves
    "of what is computed": (lambda x: pooled(jnp.exp(x)), [images((64, 28, 28, 16))]),
    "of what is padded": (
        lambda x: pooled(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))),
        [images((64, 28, 28, 16))],
    ),
    "gradients": (
        jax.grad(lambda x, weights: (pooled(x) * weights).sum()),
        [images((64, 28, 28, 16)), images((64, 14, 14, 16))],
    ),
}


@pytest.mark.parametrize("name", POOLED)
def test_windows_are_computed_as_they_are_summed(monkeypatch, name):
    """Gradients of what is pooled, that nothing else reads, need the weights alone."""
    fn, shapes = POOLED[name]
    alone = planned(fn, shapes)
    assert alone.predicted.comparable_seconds < 1.6 * KERNEL_SECONDS
    assert_peak_on_h100(alone)
    takes_in = backends.H100.fusion.takes_in - {"reduce_window_sum"}
    without = adjusted(backends.H100, "fusion", takes_in=takes_in)
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "h100": without})
    assert planned(fn, shapes).predicted.peak_bytes > 1.3 * alone.predicted.peak_bytes


@pytest.mark.parametrize("scan, count", KERNELS)
def test_gradients_of_scans_are_few_kernels(scan, count):
    """Within a factor of two."""
    seconds = planned(gradient(scan), [rows(count, count=64)] * 2).predicted.comparable_seconds
    assert 0.5 <= seconds / KERNELS[scan, count] / KERNEL_SECONDS <= 2.1


def test_a_long_scan_stores_some_of_its_levels(monkeypatch):
    """Half an array in all, of 100 elements: each level from some on."""
    scan = [lambda x: jax.lax.associative_scan(jnp.multiply, x, axis=1), [rows(100, count=2**19)]]
    array = 2**19 * 100 * 4 / 8
    assert 0.4 * array < stored(*scan) < 0.7 * array
    assert_peak_on_h100(planned(*scan))
    monkeypatch.setattr(fusion, "_MOST_SCAN_STEPS", 100)
    assert stored(*scan) < 0.1 * array
