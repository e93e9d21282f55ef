"""Factorizations and solves on GPU: their seconds as measured, and as verification has them of compiled programs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from autoshard import plan
from autoshard.model.xla import backends

START = 140e-6  # seconds of a call, that measurements have and predictions do not
LINALG = jax.lax.linalg


def solved(columns, triangle, sides):
    return LINALG.triangular_solve(triangle, sides[..., :columns], left_side=True, lower=True)


MEASURED = {  # function of matrices, their number, rows and columns, microseconds (`benchmarks/kernels.py`)
    "cholesky": (lambda x: LINALG.cholesky(x, symmetrize_input=False), (64, 1024, 1024), 3667),
    "lu of one": (LINALG.lu, (1, 1024, 1024), 2460),
    "lu of many": (LINALG.lu, (64, 1024, 1024), 82214),
    "qr of one": (lambda x: LINALG.qr(x, full_matrices=False), (1, 4096, 4096), 29192),
    "qr of many": (lambda x: LINALG.qr(x, full_matrices=False), (64, 256, 256), 49155),
    "qr of tall": (lambda x: LINALG.qr(x, full_matrices=False), (8, 4096, 1024), 61270),
    "eigh of one": (LINALG.eigh, (1, 1024, 1024), 12108),
    "eigh of many": (LINALG.eigh, (512, 256, 256), 18377),
    "svd": (lambda x: LINALG.svd(x, full_matrices=False), (64, 64, 64), 66701),
    "svd of small": (lambda x: LINALG.svd(x, full_matrices=False), (512, 32, 32), 769),
    "triangular": (lambda x: solved(1024, x, x), (64, 1024, 1024), 4882),
    "tridiagonal": (
        lambda x: LINALG.tridiagonal_solve(x[..., 0], x[..., 1], x[..., 2], x),
        (8, 1024, 1024),
        65978,
    ),
}


def planned(name, devices=1):
    function, (count, *order), _ = MEASURED[name]
    mesh, topology = AbstractMesh((devices,), ("data",)), f"h100:{devices}"
    matrices = jax.ShapeDtypeStruct((count * mesh.size, *order), jnp.float32)
    return plan(function, matrices, mesh=mesh, topology=topology, fixed={"*": PartitionSpec("data")})


@pytest.mark.parametrize("name", MEASURED)
def test_seconds_are_as_measured(monkeypatch, name):
    """Within a factor of 2, and out of that if a library took what it moves."""
    measured = MEASURED[name][-1] * 1e-6
    assert 0.5 <= (planned(name).predicted.step_seconds + START) / measured <= 2
    without = {**backends.BACKENDS, "h100": replace(backends.H100, libraries={})}
    monkeypatch.setattr(backends, "BACKENDS", without)
    assert (planned(name).predicted.step_seconds + START) / measured < 0.5


@pytest.mark.parametrize("name", MEASURED)
def test_compiled_programs_call_these_libraries(name):
    """What they are verified with takes as long as their plans do."""
    pytest.importorskip("jax_cuda13_plugin")
    made = planned(name, devices=8)
    assert made.verify("h100:8").schedule.step_seconds == pytest.approx(made.predicted.step_seconds, rel=0.05)


def test_batches_of_small_matrices_are_split():
    """Each device does its own: one after another they take far longer than they take to be sent."""
    matrices, mesh = jax.ShapeDtypeStruct((64, 64, 64), jnp.float32), AbstractMesh((8,), ("data",))
    function = MEASURED["svd"][0]
    found = plan(lambda x: function(x)[1].sum(), matrices, mesh=mesh, topology="h100:8", fixed={"x": PartitionSpec()})
    assert found.predicted.step_seconds < 0.2 * MEASURED["svd"][-1] * 1e-6
