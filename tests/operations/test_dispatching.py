"""Rows exchanged between devices by their groups: the numbers of plain JAX, whatever the load, and the collectives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from cases import normal
from equality import assert_equal
from jax import lax
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips, tally

from autoshard import Link, autoshard
from autoshard.operations import CallRun
from autoshard.operations.call import Call
from autoshard.ops.dispatching.exchange import capacity_of
from autoshard.propagation.registry import rule_of

TOKENS, SLOTS, GROUPS, WIDTH, HIDDEN = 48, 3, 8, 5, 7
LOADS = {  # the groups of all slots
    "even": jnp.arange(TOKENS * SLOTS).reshape(TOKENS, SLOTS) % GROUPS,
    "random": jax.random.randint(jax.random.key(0), (TOKENS, SLOTS), 0, GROUPS),
    "skewed": jnp.minimum(jax.random.geometric(jax.random.key(1), 0.5, (TOKENS, SLOTS)) - 1, GROUPS - 1),
    "one group": jnp.full((TOKENS, SLOTS), 5),
    "rows of no group": jax.random.randint(jax.random.key(2), (TOKENS, SLOTS), -1, GROUPS + 3),
}


def arrays_of(dtype=jnp.float32, hidden=HIDDEN):
    params = {
        "up": normal(GROUPS, WIDTH, hidden, seed=1).astype(dtype),
        "down": normal(GROUPS, hidden, WIDTH, seed=2).astype(dtype),
    }
    return params, normal(TOKENS, WIDTH).astype(dtype), normal(TOKENS, SLOTS, seed=3).astype(dtype)


def experts(params, x, weights, groups):
    order = jnp.argsort(groups.reshape(-1))
    sizes = jnp.bincount(groups.reshape(-1), length=GROUPS)
    rows = jnp.tanh(lax.ragged_dot(x[order // SLOTS], params["up"], sizes))
    made = lax.ragged_dot(rows, params["down"], sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // SLOTS].add(made)


def step(params, x, weights, groups):
    def loss(params, x, weights):
        made = experts(params, x, weights, groups)
        return (made.astype(jnp.float32) ** 2).sum(), made

    (_, made), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(params, x, weights)
    return made, gradients


def slow_links(shape):
    return dataclasses.replace(slow_chips(shape), links=dict.fromkeys(shape, Link(1e-9, 1e7)))


def calls_of(*arrays):
    """The forward and the backward call, and operands of them; the first operand is the groups."""
    program = autoshard(step, mesh=mesh_of({"x": 8})).trace(*arrays)
    equations = [equation for equation in program.equations if equation.primitive == "operation"]
    assert len(equations) == 2
    assert all("ragged" not in equation.primitive for equation in program.equations)
    return [
        (Call.of(one, rule_of(one)), [normal(*x.shape, seed=i).astype(x.dtype) for i, x in enumerate(one.inputs[1:])])
        for one in equations
    ]


CALLS = functools.cache(lambda dtype: calls_of(*arrays_of(dtype), LOADS["even"]))


@pytest.mark.parametrize(
    ("shape", "roles", "dtype"),
    [
        pytest.param({"x": 8}, {"experts": ("x",)}, jnp.float32, marks=pytest.mark.slow),
        ({"x": 2, "y": 2, "z": 2}, {"experts": ("x", "z"), "data": ("y",)}, jnp.float32),
        ({"x": 4, "y": 2}, {"experts": ("x", "y")}, jnp.bfloat16),
        pytest.param({"x": 2, "y": 2, "z": 2}, {"experts": ("z",)}, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param({"x": 4, "y": 2}, {"experts": ("x",), "data": ("y",)}, jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_an_exchange_computes_the_same_numbers_whatever_the_load(shape, roles, dtype):
    """The backward pass computes the forward pass again; a planned step below runs that by itself."""
    mesh, run = mesh_of(shape), CallRun("exchange", tuple(roles.items()))
    _, (call, inputs) = CALLS(dtype)
    assert call.can_run(run, shape)
    function, expected = jax.jit(call.on_mesh(run, mesh)), jax.jit(call.operation.function)
    for groups in LOADS.values():
        assert_equal(function(groups, *inputs), list(expected(groups, *inputs)))


def test_experts_that_lie_on_devices_are_planned_with_an_exchange_as_predicted():
    shape, arrays = {"x": 8}, (*arrays_of(hidden=1000), LOADS["skewed"])
    fixed = {"params/*": P("x"), "x": P("x")}
    planned = autoshard(step, mesh=mesh_of(shape), topology=slow_links(shape), fixed=fixed)
    plan = planned.plan(*arrays)
    assert {run.name for run in plan.annotations.runs.values()} == {"exchange"}
    # XLA counts the rounds once for both passes: one all_reduce of a number less
    predicted, found = (tally(one.collectives) for one in (plan.predicted, plan.verify()))
    assert predicted.pop(("all_reduce", ("x",))) == 2 * found.pop(("all_reduce", ("x",))) == 2 * 4
    assert predicted == found
    assert_equal(planned(*arrays), step(*arrays))


@pytest.mark.parametrize(("name", "roles"), [("exchange_scattered", {"experts": ("y",)}), ("scattered", {})])
def test_sums_over_the_rows_of_groups_may_be_scattered(name, roles):
    """Each device gets a part of the gradients, as the planned step below wants them."""
    shape, run = {"x": 2, "y": 4}, CallRun(name, tuple({**roles, "data": ("x",)}.items()))
    wide, narrow = (normal(8, 6, 10, seed=1), normal(8, 10, 6, seed=2)), (normal(48, 6), normal(48, 3, seed=3))
    arrays = {"up": wide[0], "down": wide[1]}, *narrow, LOADS["skewed"]
    _, (call, inputs) = calls_of(*arrays)
    assert call.can_run(run, shape)
    function = call.on_mesh(run, mesh_of(shape))
    assert "reduce_scatter" in str(jax.make_jaxpr(function)(LOADS["skewed"], *inputs))
    assert_equal(jax.jit(function)(LOADS["skewed"], *inputs), list(call.operation.function(LOADS["skewed"], *inputs)))


def test_a_round_has_room_for_an_even_load_and_a_quarter_more():
    assert capacity_of(4096, 8) == 640
    assert capacity_of(6, 8) == 6
