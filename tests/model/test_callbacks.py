"""What callbacks send: one device calls the host, and hands what it gets to all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from oracles import mesh_of

import autoshard
from autoshard.primitives import PRIMITIVES, facts_of

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
ROW = jax.ShapeDtypeStruct((64,), jnp.float32)
X = jnp.ones((64, 64))


def asked(x, ordered=True):
    return io_callback(lambda total: np.float32(total), NUMBER, x.sum(), ordered=ordered)


def unread(x):
    io_callback(lambda _: np.ones(64, np.float32), ROW, x.sum(), ordered=True)
    return x + 1


def mixed(x):
    kinds = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((4,), bool), jax.ShapeDtypeStruct((4,), "f2")
    numbers, flags, halves = io_callback(lambda _: [np.ones(x.shape, x.dtype) for x in kinds], kinds, x.sum())
    return x * numbers.sum(), flags, halves * 2


def empty(x):
    nothing = jax.ShapeDtypeStruct((0, 4), jnp.float32)
    return x + 1, io_callback(lambda _: np.zeros((0, 4), np.float32), nothing, x.sum())


CASES = {
    "an empty result": empty,
    "ordered": lambda x: x * 2 + asked(x),
    "unordered": lambda x: x * 2 + asked(x, ordered=False),
    "two": lambda x: x + asked(x) + asked(x * x),
    "a row": lambda x: x * jax.pure_callback(lambda _: np.ones(64, np.float32), ROW, x.sum()),
    "several results": mixed,
    "a result that nobody reads": unread,
    "in a loop": lambda x: lax.fori_loop(0, 4, lambda _, y: y + asked(y), x),
    "in a scan": lambda x: lax.scan(lambda total, row: (total + asked(row), None), 0.0, x)[0],
    "in a branch": lambda x: lax.cond(x.sum() > 0, lambda x: x + asked(x), lambda x: x, x),
}


def compared(case, mesh):
    return autoshard.plan(CASES[case], X, mesh=mesh_of(mesh)).verify()


@pytest.mark.parametrize("case", CASES)
def test_what_callbacks_send(case):
    found = compared(case, {"x": 8})
    assert found.predicted == found.actual, str(found)


def test_over_all_axes():
    found = compared("a row", {"x": 4, "y": 2})
    assert found.predicted == found.actual == {("all_reduce", ("x", "y")): 256}


def test_the_comparison_can_fail(monkeypatch):
    monkeypatch.setitem(PRIMITIVES, "pure_callback", facts_of("debug_nothing"))
    found = compared("a row", {"x": 8})
    assert found.predicted != found.actual


def test_what_is_inspected_stays_where_it_is():
    """The host is told how an array lies, and gets nothing of it."""

    def inspected(x):
        jax.debug.inspect_array_sharding(x, callback=lambda _: None)
        return x + 1

    made = autoshard.plan(inspected, X, mesh=mesh_of({"x": 8}), fixed={"*": jax.P("x")})
    found = made.verify()
    assert found.predicted == found.actual == {}, str(found)
