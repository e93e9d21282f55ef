"""Ragged products: the numbers of `jax.lax.ragged_dot`, whole and by every implementation, and their collectives."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from cases import normal
from equality import assert_equal
from jax import lax
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips, tally

from autoshard import ArgumentError, Link, autoshard
from autoshard.operations.call import Call
from autoshard.ops import ragged_dot
from autoshard.propagation.registry import rule_of

M, G = 64, 8
LHS, RHS, WEIGHTS = normal(M, 64), normal(G, 64, 64, seed=1), normal(M, 64, seed=2)
SIZES = {"even": [8] * 8, "skewed": [30, 0, 1, 17, 0, 0, 9, 2], "one group": [0, 0, 64, 0, 0, 0, 0, 0]}
SHAPES = ({"x": 8}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2})


def with_gradients(function, lhs, rhs, sizes):
    made, pull = jax.vjp(lambda lhs, rhs: function(lhs, rhs, sizes), lhs, rhs)
    return made, pull(WEIGHTS)


def chosen_runs(call, shape):
    """Implementation -> its way to run the call that uses the most axes."""
    found = {}
    for run in call.runs(shape):
        if run.name and {role for role, _ in run.roles} <= {"experts", "n", "m"}:
            found[run.name] = run
    return found


@pytest.mark.parametrize("shape", [SHAPES[0], pytest.param(SHAPES[1], marks=pytest.mark.slow), SHAPES[2]])
def test_implementations_compute_the_same_numbers(shape):
    mesh = mesh_of(shape)
    program = autoshard(lambda *x: with_gradients(ragged_dot, *x), mesh=mesh).trace(LHS, RHS, jnp.array(SIZES["even"]))
    forward, backward = (Call.of(e, rule_of(e)) for e in program.equations if e.primitive == "operation")
    runs = chosen_runs(forward, shape)
    assert set(runs) == {"groups", "groups_and_rows"}

    @jax.jit
    def computed(lhs, rhs, sizes):
        found = {}
        for name, run in runs.items():
            inputs = lhs, rhs, sizes, jnp.arange(M, dtype=sizes.dtype)
            (made,) = forward.on_mesh(run, mesh)(*inputs)
            found[name] = made, tuple(backward.on_mesh(run, mesh)(*inputs, made, WEIGHTS))
        return found

    for sizes in SIZES.values():
        expected = with_gradients(lax.ragged_dot, LHS, RHS, jnp.array(sizes))
        for found in computed(LHS, RHS, jnp.array(sizes)).values():
            assert_equal(found, expected)


def test_experts_over_devices_are_planned_and_predicted():
    """Matrices that are split by groups stay so, and rows come to them."""
    shape, sizes = {"x": 8}, jnp.array(SIZES["skewed"])
    fixed = {"lhs": P("x"), "rhs": P("x")}
    step = autoshard(
        lambda lhs, rhs, sizes: with_gradients(ragged_dot, lhs, rhs, sizes),
        mesh=mesh_of(shape),
        topology=dataclasses.replace(slow_chips(shape), links={"x": Link(1e-9, 1e7)}),
        fixed=fixed,
    )
    plan = step.plan(LHS, RHS, sizes)
    assert {run.name for run in plan.annotations.runs.values()} == {"groups_and_rows"}
    assert tally(plan.predicted.collectives) == tally(plan.verify().collectives)
    assert_equal(step(LHS, RHS, sizes), with_gradients(lax.ragged_dot, LHS, RHS, sizes))


def test_what_does_not_fit_is_said():
    with pytest.raises(ArgumentError, match="not rows"):
        ragged_dot(LHS[0], RHS, jnp.array(SIZES["even"]))
    with pytest.raises(ArgumentError, match="do not fit"):
        ragged_dot(LHS, RHS, jnp.array([1, 2]))
