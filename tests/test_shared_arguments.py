"""`like=`: what two steps share lies the same in both."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.arrays.shared_arguments import shared_arguments, shared_layouts
from autoshard.program import trace

WIDTH, HIDDEN, ROWS = 16, 64, 32


class State(NamedTuple):
    params: dict
    momentum: dict


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


WEIGHTS = {"up": float32(WIDTH, HIDDEN), "down": float32(HIDDEN, WIDTH)}
STATE = State(WEIGHTS, WEIGHTS)
BATCH = {"x": float32(ROWS, WIDTH), "y": float32(ROWS, WIDTH)}
FEWER = {"x": float32(8, WIDTH), "y": float32(8, WIDTH)}
# Weights and momentum lie in two ways, so that a mix-up shows.
FIXED = {
    "params/up": P(None, "data"),
    "params/down": P("data"),
    "momentum/up": P("data"),
    "momentum/down": P(None, "data"),
}


def loss_of(params, batch):
    return jnp.mean((jax.nn.relu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def train_step(state, batch):
    loss, gradient = jax.value_and_grad(loss_of)(state.params, batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, gradient)
    return State(jax.tree.map(lambda w, m: w - m, state.params, momentum), momentum), loss


def eval_step(params, batch):
    return loss_of(params, batch)


@pytest.fixture(scope="module")
def train_plan():
    mesh = jax.make_mesh((8,), ("data",))
    return autoshard.plan(train_step, STATE, BATCH, mesh=mesh, donate_argnums=0, fixed=FIXED)


def specs(tree):
    return [sharding.spec for sharding in jax.tree.leaves(tree)]


def of_state(state, batch):
    return loss_of(state.params, batch)


def of_momentum(momentum, batch):
    return loss_of(momentum, batch)


def of_parts(parts, batch):
    return loss_of(parts["params"], batch)


def sums(params):
    return jax.tree.map(jnp.sum, params)


CASES = [  # a step, its first argument, the part of the train step's arguments that it is
    (eval_step, WEIGHTS, lambda plan: plan.in_shardings[0].params),
    (of_state, STATE, lambda plan: plan.in_shardings[0]),
    (of_momentum, WEIGHTS, lambda plan: plan.in_shardings[0].momentum),
]


@pytest.mark.parametrize("step, argument, part", CASES, ids=[step.__name__ for step, _, _ in CASES])
@pytest.mark.parametrize("batch", [BATCH, FEWER], ids=["same rows", "fewer rows"])
def test_shared_arguments_lie_as_in_the_other_plan(train_plan, step, argument, part, batch):
    plan = autoshard.autoshard(step, like=train_plan).plan(argument, batch)
    assert plan.mesh == train_plan.mesh
    assert specs(plan.in_shardings[0]) == specs(part(train_plan))
    if batch is BATCH:
        assert specs(plan.in_shardings[1]) == specs(train_plan.in_shardings[1])


def test_a_step_runs_on_the_train_steps_state_as_it_lies(train_plan, tmp_path):
    step = autoshard.autoshard(eval_step, like=train_plan)
    params = train_plan.init(lambda: jax.tree.map(lambda x: jnp.ones(x.shape), STATE)).params
    batch = {name: np.ones((8, WIDTH), np.float32) for name in "xy"}
    np.testing.assert_allclose(step(params, batch), eval_step(jax.tree.map(np.asarray, params), batch), rtol=1e-5)
    assert [leaf.sharding for leaf in jax.tree.leaves(params)] == jax.tree.leaves(
        step.plan(params, batch).in_shardings[0]
    )
    train_plan.save(tmp_path / "train.json")
    again = autoshard.plan(eval_step, WEIGHTS, FEWER, mesh=train_plan.mesh, like=tmp_path / "train.json")
    assert specs(again.in_shardings[0]) == specs(train_plan.in_shardings[0].params)


def test_what_may_be_two_things_is_refused(train_plan):
    def nameless(weights, batch):
        return loss_of(weights, batch)

    with pytest.raises(autoshard.ConflictError, match=r"weights of nameless may be state/params or state/momentum"):
        autoshard.autoshard(nameless, like=train_plan).plan(WEIGHTS, BATCH)


NARROW = {**WEIGHTS, "up": float32(WIDTH, 8)}
REFUSED = [
    (sums, (NARROW,), {}, r"params/up float32\[16, 8\] of sums is state/params/up float32\[16, 64\] of train_step"),
    (lambda a: jnp.sum(a), (float32(3),), {}, r"like=: <lambda> shares no argument with train_step, .* state, batch"),
    (eval_step, (WEIGHTS, BATCH), {"fixed": {"params/up": P()}}, r"fixed= wants params/up .* to be P\(\), the plan"),
]


@pytest.mark.parametrize("step, arguments, options, message", REFUSED, ids=["other shape", "nothing shared", "fixed"])
def test_contradictions_are_named(train_plan, step, arguments, options, message):
    with pytest.raises(autoshard.AutoshardError, match=message):
        autoshard.autoshard(step, like=train_plan, **options).plan(*arguments)


def test_the_mesh_is_that_of_the_plan(train_plan):
    with pytest.raises(autoshard.PlanError, match="was made for the mesh"):
        autoshard.autoshard(eval_step, like=train_plan, mesh=AbstractMesh((4, 2), ("data", "model")))
    with pytest.raises(autoshard.ArgumentError, match="mesh must be"):
        autoshard.autoshard(eval_step)


def test_single_arrays_are_shared_by_name_alone(train_plan):
    def arrays(up, down, other):
        return jnp.sum(up @ down) + jnp.sum(other)

    program = trace(arrays, (WEIGHTS["up"], WEIGHTS["down"], WEIGHTS["up"]), {})
    with pytest.raises(autoshard.ConflictError, match="up of arrays may be state/params/up or state/momentum/up"):
        shared_layouts(program, train_plan)
    flat = trace(lambda up, other: (up, other), (WEIGHTS["up"], WEIGHTS["up"]), {})
    assert shared_arguments(flat, program) == {0: 0, 1: 2}


def test_an_argument_that_is_no_part_shares_its_parts(train_plan):
    plan = autoshard.plan(of_parts, {"params": WEIGHTS, "extra": float32(3)}, FEWER, like=train_plan)
    assert specs(plan.in_shardings[0]["params"]) == specs(train_plan.in_shardings[0].params)
