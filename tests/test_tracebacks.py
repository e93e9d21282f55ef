"""Errors and warnings show the lines of the user, not those of autoshard between them."""

import traceback
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import autoshard
from autoshard.errors import OWN_FOLDER

MESH = AbstractMesh((4, 2), ("data", "model"))
WEIGHTS, X = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((8, 32), jnp.float32)
AT_THE_DOOR = 2  # lines of autoshard that stay: the function that was called, and the raise


@pytest.fixture
def as_shipped():
    """JAX's own setting, which tests otherwise turn off."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


def step(weights, x):
    return weights - jax.grad(lambda w: jnp.sum((x @ w.T) ** 2))(weights)


def refused(weights, x):
    return step(weights, x.T)


def with_cause(weights, x):
    try:
        return refused(weights, x)
    except TypeError as error:
        raise ValueError("as the step has it") from error


def lines_of(error):
    return [line.filename for line in traceback.extract_tb(error.__traceback__)]


def own(error):
    return sum(file.startswith(OWN_FOLDER) for file in lines_of(error))


CALLS = {  # name -> (the error, what raises it)
    "memory": (autoshard.MemoryLimitError, lambda: autoshard.plan(step, WEIGHTS, X, mesh=MESH, memory=1500)),
    "frontier": (TypeError, lambda: autoshard.frontier(refused, WEIGHTS, X, mesh=MESH)),
    "option": (autoshard.ArgumentError, lambda: autoshard.autoshard(step, mesh=MESH, memory="much")),
    "tracing": (TypeError, lambda: autoshard.plan(refused, WEIGHTS, X, mesh=MESH)),
    "no devices": (
        autoshard.MeshError,
        lambda: autoshard.autoshard(step, mesh=MESH)(jnp.ones((64, 32)), jnp.ones((8, 32))),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_show_the_users_lines(name, as_shipped):
    kind, call = CALLS[name]
    with pytest.raises(kind) as caught:
        call()
    assert own(caught.value) <= AT_THE_DOOR
    assert lines_of(caught.value)[0] == __file__
    assert name != "tracing" or lines_of(caught.value).count(__file__) >= 3  # the step's own lines stay


def test_causes_show_them_too(as_shipped):
    with pytest.raises(ValueError, match="as the step has it") as caught:
        autoshard.plan(with_cause, WEIGHTS, X, mesh=MESH)
    assert own(caught.value) <= AT_THE_DOOR
    assert own(caught.value.__cause__) == 0


def test_all_lines_are_shown_where_jax_shows_its_own():
    with pytest.raises(autoshard.MemoryLimitError) as caught:
        CALLS["memory"][1]()
    assert own(caught.value) > AT_THE_DOOR


def test_warnings_name_the_users_line():
    def changes(state, x):
        state["a"] = state["a"] + x
        return x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autoshard.plan(changes, {"a": X}, X, mesh=MESH)
    assert [one.filename for one in caught if "changes 1 arrays" in str(one.message)] == [__file__]
