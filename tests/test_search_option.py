"""A plan by a published search: what `autoshard(search=)` and `plan(search=)` take, and what comes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import autoshard
from autoshard.errors import ArgumentError

MACHINE = {"mesh": AbstractMesh((4, 2), ("data", "model")), "topology": "v5e:4x2"}


def step(weights, batch):
    def loss_of(weights):
        return jnp.mean((jax.nn.relu(batch @ weights["up"]) @ weights["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGUMENTS = {"up": float32(64, 128), "down": float32(128, 64)}, float32(512, 64)


def test_an_exact_search_finds_the_plan_of_the_solver():
    own = autoshard.plan(step, *ARGUMENTS, **MACHINE)
    found = autoshard.plan(step, *ARGUMENTS, search="pase", **MACHINE)
    np.testing.assert_allclose(found.cost, own.cost, rtol=1e-6)
    assert found.status == own.status == "optimal"


def test_a_search_of_ones_own_decides_alone(tmp_path):
    called = []

    def nothing(problem, run):
        called.append(problem)

    found = autoshard.autoshard(step, search=nothing, time_limit=5, **MACHINE).plan(*ARGUMENTS)
    assert called and found.status == "feasible" and found.bound <= found.cost
    with pytest.raises(ArgumentError, match=r"(?s)plans of a function of yours are not kept.*Drop cache="):
        autoshard.autoshard(step, search=nothing, cache=tmp_path, **MACHINE)


def test_plans_of_searches_are_kept_apart(tmp_path):
    for search in ("pase", None):
        autoshard.plan(step, *ARGUMENTS, search=search, cache=tmp_path, **MACHINE)
    assert len(list(tmp_path.glob("*.plan"))) == 2


@pytest.mark.parametrize("search", ["alpha", 3, ["pase"]])
def test_an_unknown_search_is_an_error_that_names_those_there_are(search):
    with pytest.raises(ArgumentError, match=r"search=.*: there is no search .*; the searches are aceso, .*tofu\."):
        autoshard.autoshard(step, search=search, **MACHINE)
