"""What operations need while they run, and what is never stored, beside what XLA's programs for CPU allocate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from oracles import mesh_of
from programs import f32

from autoshard import plan
from autoshard.model import workspaces
from autoshard.model.xla import fusion

TOKENS, MATRICES, MADE = f32(512, 64), f32(16, 64, 64), f32(512, 64)
SIZES = jax.ShapeDtypeStruct((16,), np.int32)


def of_tokens(x, w, sizes, cotangent):
    return jax.vjp(lambda x: jax.lax.ragged_dot(x, w, sizes), x)[1](cotangent)[0]


def of_matrices(x, w, sizes, cotangent):
    return jax.vjp(lambda w: jax.lax.ragged_dot(x, w, sizes), w)[1](cotangent)[0]


RAGGED = {
    "product": (jax.lax.ragged_dot, (TOKENS, MATRICES, SIZES)),
    "gradient of tokens": (of_tokens, (TOKENS, MATRICES, SIZES, MADE)),
    "gradient of matrices": (of_matrices, (TOKENS, MATRICES, SIZES, MADE)),
}


def assert_peak_as_compiled(name):
    function, arguments = RAGGED[name]
    found = plan(function, *arguments, mesh=mesh_of({"x": 8})).verify()
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=0.1), name


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_products_hold_tokens_once_per_group(name):
    assert_peak_as_compiled(name)


def test_a_workspace_that_is_left_out_is_caught(monkeypatch):
    rows = dict(workspaces.WORKSPACES["cpu"]) | {"ragged_dot_general": lambda shards: shards.operands[0]}
    monkeypatch.setattr(workspaces, "WORKSPACES", {**workspaces.WORKSPACES, "cpu": rows})
    with pytest.raises(AssertionError):
        assert_peak_as_compiled("product")


MOVES = {
    "reversed": lambda x: jnp.cos(jax.lax.rev(jnp.sin(x), (1,))),
    "padded": lambda x: jnp.cos(jnp.pad(jnp.sin(x), ((0, 0), (1, 1), (0, 0)))),
    "joined": lambda x: jnp.cos(jax.lax.concatenate([jnp.sin(x), x], 1)),
    "taken apart": lambda x: sum(jnp.split(jnp.sin(x), 2, 1)),
    "picked": lambda x: jnp.sin(x)[:, np.array([3, 1, 2])],
}


def assert_nothing_is_stored_between(name):
    found = plan(MOVES[name], f32(512, 16, 64), mesh=mesh_of({"x": 8}), fixed={"*": P("x")}).verify()
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=0.01), name


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_is_one_loop_with_its_only_reader(name):
    assert_nothing_is_stored_between(name)


def test_a_value_that_is_stored_between_is_caught(monkeypatch):
    monkeypatch.setattr(fusion, "_is_repeated", lambda *_: False)
    with pytest.raises(AssertionError):
        assert_nothing_is_stored_between("padded")
