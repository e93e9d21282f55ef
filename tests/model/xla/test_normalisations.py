"""What GPUs store of softmaxes and norms of rows: kernels by hand, and peaks as XLA for GPU has them."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from oracles import assert_peak_on_h100

from autoshard import plan
from autoshard.model.grouping import groups_of
from autoshard.model.xla import fusion
from autoshard.model.xla.backends import H100
from autoshard.model.xla.gpu.normalisations import Normalisations, _chain
from autoshard.program import trace
from autoshard.propagation import rules_for

ROWS = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
LABELS = jax.ShapeDtypeStruct((1024,), jnp.int32)
SMALL = jax.ShapeDtypeStruct((16, 16), jnp.float32)
SCALES = jax.ShapeDtypeStruct((4096,), jnp.float32)
MESH, TARGET = AbstractMesh((8,), ("data",)), "h100:8"


def picked(x, labels):
    return jnp.take_along_axis(x, labels[:, None], axis=-1).sum()


def log_likelihood(x, labels):
    return picked(jax.nn.log_softmax(x), labels)


def centred(x, labels):
    """Two read what is left of the rows without their maxima."""
    x = x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))
    return (jnp.log(jnp.exp(x).sum(axis=-1)) - jnp.take_along_axis(x, labels[:, None], axis=-1)[:, 0]).mean()


def entropy(x):
    """Two softmaxes and their product: one kernel."""
    return -(jax.nn.softmax(x) * jax.nn.log_softmax(x)).sum(axis=-1).mean()


def most_likely(x):
    """The kernel reduces the rows, too."""
    return jax.nn.softmax(x * 2).max(axis=-1).mean()


def scaled(x, scales):
    return (x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * scales).sum()


def by_columns(x):
    return (jax.nn.softmax(x, axis=0) ** 2).sum()


PROGRAMS = {  # function of what shapes, how many kernels store what they make
    "log_likelihood": (log_likelihood, (ROWS, LABELS), 1),
    "centred": (centred, (ROWS, LABELS), 0),
    "entropy": (entropy, (ROWS,), 1),
    "most_likely": (most_likely, (ROWS,), 0),
    "scaled": (scaled, (ROWS, SCALES), 1),
    "scaled, and its gradient": (jax.value_and_grad(scaled), (ROWS, SCALES), 0),
    "longer rows": (log_likelihood, (jax.ShapeDtypeStruct((1024, 20000), jnp.float32), LABELS), 0),
    "work that nothing reads": (lambda x: jax.random.poisson(jax.random.key(0), jax.nn.softmax(x)), (SMALL,), 0),
    "by_columns": (by_columns, (ROWS,), 0),
}


COMPILED = [name for name in PROGRAMS if name not in ("by_columns", "centred", "work that nothing reads")]


def planned(name):
    function, shapes, _ = PROGRAMS[name]
    fixed = {"x": PartitionSpec("data")}
    return plan(function, *shapes, mesh=MESH, topology=TARGET, fixed=fixed)


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_by_hand(monkeypatch, name):
    found, of = [], fusion.normalisations
    monkeypatch.setattr(fusion, "normalisations", lambda *args: found.append(of(*args)) or found[-1])
    planned(name)
    assert {len(one.ends) for one in found} == {PROGRAMS[name][2]}


@pytest.mark.parametrize("name", COMPILED)
def test_peaks_are_those_of_the_compiler(name):
    assert_peak_on_h100(planned(name))


@pytest.mark.parametrize("name", ["log_likelihood", "scaled"])
def test_kernels_that_store_nothing_are_caught(monkeypatch, name):
    monkeypatch.setattr(fusion, "normalisations", lambda *_: Normalisations())
    with pytest.raises(AssertionError):
        assert_peak_on_h100(planned(name))


def test_a_chain_that_closes_ends():
    """A group may alone read what it makes, where that is a result, too, as the rates of layers in LARS."""
    program = trace(jnp.sin, (SMALL,), {})
    (group,) = groups_of(program, rules_for(program), H100)
    assert list(itertools.islice(_chain(group, [[group]]), 2)) == [group.index]
