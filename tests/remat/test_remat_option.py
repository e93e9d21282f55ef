"""`remat="auto"` and `microbatches="auto"` from the outside: decorated steps compute what they did, in fewer bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import assert_equal
from flax import nnx
from oracles import mesh_of

import autoshard
from autoshard import ArgumentError
from autoshard.options import options_of
from autoshard.report.memory_error import memory_error
from autoshard.solver.problem import InfeasibleError, LeastNeed

WIDTH, ROWS = 16, 64


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        return x + self.dropout(self.down(nnx.gelu(self.up(x))))


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def trained(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def started():
    model = Model()
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def test_a_model_with_nnx_remat_and_dropout_trains_as_before():
    x = numbers(0, ROWS, WIDTH)
    step = autoshard.autoshard(trained, mesh=mesh_of({"data": 8}), topology="v5e:4x2", remat="auto")
    (ours, ours_optimizer), (theirs, theirs_optimizer) = started(), started()
    plain = nnx.jit(trained)
    for _ in range(2):
        made, expected = step(ours, ours_optimizer, x), plain(theirs, theirs_optimizer, x)
        assert_equal([made], [expected])
    assert_equal(jax.tree.leaves(nnx.state(ours, nnx.Param)), jax.tree.leaves(nnx.state(theirs, nnx.Param)))


def scanned(weights, x):
    def loss(weights):
        y, _ = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w["up"]) @ w["down"], None), x, weights)
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


WEIGHTS = {"up": numbers(1, 4, WIDTH, 4 * WIDTH), "down": numbers(2, 4, 4 * WIDTH, WIDTH)}


def test_less_memory_is_met_by_recomputation_and_microbatches():
    x = numbers(3, 64 * ROWS, WIDTH)
    options = {"mesh": mesh_of({"data": 8}), "topology": "v5e:4x2"}
    free = autoshard.plan(scanned, WEIGHTS, x, **options)
    step = autoshard.autoshard(
        scanned, **options, memory=0.4 * free.predicted.peak_bytes, remat="auto", microbatches="auto"
    )
    plan = step.plan(WEIGHTS, x)
    assert plan.predicted.peak_bytes <= 0.4 * free.predicted.peak_bytes
    assert any(warning.startswith("remat='auto'") for warning in plan.warnings)
    assert plan.bound <= plan.cost
    assert_equal(jax.tree.leaves(step(WEIGHTS, x)), jax.tree.leaves(jax.jit(scanned)(WEIGHTS, x)))
    # A plan that is given finds the variant that it is for.
    again = autoshard.autoshard(scanned, **options, remat="auto", microbatches="auto", plan=plan)
    assert again.trace(WEIGHTS, x).name == "scanned"
    assert_equal(jax.tree.leaves(again(WEIGHTS, x)), jax.tree.leaves(jax.jit(scanned)(WEIGHTS, x)))


def test_a_frozen_array_that_the_step_closes_over_stays_one_argument():
    frozen = numbers(4, 4, 128, 128)

    def loss(scale, x):
        y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w * scale), None), x, jnp.asarray(frozen))
        return jnp.mean(y**2)

    step = jax.value_and_grad(loss)
    args = numbers(5, 128), numbers(6, ROWS, 128)
    tuned = autoshard.autoshard(step, mesh=mesh_of({"data": 8}), topology="v5e:4x2", remat="auto")
    assert len(tuned.plan(*args).captured) == 1
    assert_equal(jax.tree.leaves(tuned(*args)), jax.tree.leaves(jax.jit(step)(*args)))


def test_a_plan_says_where_nothing_can_be_chosen():
    """As of a step without a backward pass, and of one whose weights lie in the host's memory."""
    mesh = mesh_of({"data": 8})
    host = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    there = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32, sharding=host)
    for weights, reason in ((numbers(7, WIDTH, WIDTH), "no backward pass"), (there, "an argument of the step is")):
        plan = autoshard.plan(
            lambda w, x: x @ jax.device_put(w, jax.memory.Space.Device), weights, x, mesh=mesh, remat="auto"
        )
        assert any(one.startswith("remat='auto' changes nothing") and reason in one for one in plan.warnings)


@pytest.mark.parametrize(
    ("options", "step", "named"),
    [
        ({}, scanned, ["remat='auto'", "microbatches='auto'"]),
        ({"remat": "auto"}, scanned, ["microbatches='auto'"]),
        ({"microbatches": 2}, scanned, ["remat='auto'"]),
        ({}, lambda weights, x: x @ weights["up"][0], []),  # no backward pass, so nothing is kept for one
    ],
)
def test_what_fits_in_no_way_is_told_what_was_not_tried(options, step, named):
    mesh = mesh_of({"data": 8})
    program = autoshard.autoshard(step, mesh=mesh, **options).trace(WEIGHTS, numbers(3, ROWS, WIDTH))
    untried = options_of(mesh, **options).untried
    advice = str(memory_error(program, InfeasibleError(1024, LeastNeed("", 2048)), 0.85, False, untried)).splitlines()[
        -1
    ]
    assert [way for way in ("remat='auto'", "microbatches='auto'") if way in advice] == named


def test_a_wrong_option_is_an_error():
    with pytest.raises(ArgumentError, match="remat='full'"):
        autoshard.plan(scanned, WEIGHTS, numbers(3, ROWS, WIDTH), mesh=mesh_of({"data": 8}), remat="full")
