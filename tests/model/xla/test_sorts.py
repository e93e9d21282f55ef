"""Sorts on GPU: positions are held beside a stable one, nothing of what is computed ahead of it; and their seconds."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from oracles import assert_peak_on_h100

from autoshard import plan
from autoshard.model import workspaces
from autoshard.model.xla import backends
from autoshard.model.xla.gpu.sorts import Sorts

MESH, TARGET = AbstractMesh((8,), ("data",)), "h100:8"


def of(dtype):
    return jax.ShapeDtypeStruct((2048, 1024), dtype)


SORTS = {  # function of what shapes, bytes of positions on each device
    "float32": (jnp.sort, [of(jnp.float32)], 2**20),
    "bfloat16": (jnp.sort, [of(jnp.bfloat16)], 2**20),
    "uint8": (jnp.sort, [of(jnp.uint8)], 2**20),
    "unstable": (lambda x: jax.lax.sort(x, is_stable=False), [of(jnp.float32)], 0),
    "positions": (lambda x: jnp.argsort(x, axis=-1), [of(jnp.bfloat16)], 0),
    "with another": (lambda x: jax.lax.sort((x, x + 1), num_keys=1), [of(jnp.float32)], 2**20),
    "gradient": (jax.grad(lambda x: (jnp.sort(x) * jnp.arange(1024)).sum()), [of(jnp.float32)], 0),
}


def planned(name):
    function, shapes, _ = SORTS[name]
    return plan(function, *shapes, mesh=MESH, topology=TARGET, fixed={"*": PartitionSpec("data")})


@pytest.mark.parametrize("name", SORTS)
def test_positions_by_hand(monkeypatch, name):
    held, formula = set(), workspaces.WORKSPACES["gpu"]["sort"]
    noting = {**workspaces.WORKSPACES["gpu"], "sort": lambda shards: held.add(formula(shards)) or formula(shards)}
    monkeypatch.setattr(workspaces, "WORKSPACES", {**workspaces.WORKSPACES, "gpu": noting})
    planned(name)
    assert SORTS[name][2] in held


COMPILED = [name for name in SORTS if name != "gradient"]  # of which nothing lies in the result's place while it sorts


@pytest.mark.parametrize("name", COMPILED)
def test_peaks_are_those_of_the_compiler(name):
    assert_peak_on_h100(planned(name))


@pytest.mark.parametrize("name", ["bfloat16", "unstable"])
def test_a_copy_instead_of_positions_is_caught(monkeypatch, name):
    planted = {**workspaces.WORKSPACES["gpu"], "sort": workspaces.copied}
    monkeypatch.setattr(workspaces, "WORKSPACES", {**workspaces.WORKSPACES, "gpu": planted})
    with pytest.raises(AssertionError):
        assert_peak_on_h100(planned(name))


MEASURED = {  # function of rows of how many of 2**24 elements of which type, ps per element (`benchmarks/kernels.py`)
    "float32": (jnp.sort, 1024, jnp.float32, 62.3),
    "unstable": (lambda x: jax.lax.sort(x, is_stable=False), 8192, jnp.float32, 59.5),
    "bfloat16": (jnp.sort, 128, jnp.bfloat16, 34.3),
    "positions": (jnp.argsort, 2**20, jnp.float32, 339.7),
    "with another": (lambda x: jax.lax.sort((x, x + 1), num_keys=1), 65536, jnp.float32, 241.1),
    "the largest": (lambda x: jax.lax.top_k(x, 64), 1024, jnp.float32, 64.8),
}


@pytest.mark.parametrize("name", MEASURED)
def test_seconds_are_as_measured(monkeypatch, name):
    """Within a factor of 2, and out of that if a sort took what it moves."""
    function, length, dtype, measured = MEASURED[name]
    rows, one = jax.ShapeDtypeStruct((2**24 // length, length), dtype), AbstractMesh((1,), ("data",))

    def ratio():
        seconds = plan(function, rows, mesh=one, topology="h100:1").predicted.step_seconds
        return seconds / (measured * 1e-12 * 2**24)

    assert 0.5 <= ratio() <= 2
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "h100": replace(backends.H100, sorts=Sorts())})
    assert ratio() < 0.5
