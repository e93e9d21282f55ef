"""With statistics="microbatch" a step in microbatches is a loop over them that is written by hand, and else refused."""

import functools
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core
from sweeps import some

import autoshard
from autoshard import ArgumentError, MicrobatchError, StageError
from autoshard.jaxprs import evaluated
from autoshard.microbatches import proof, statistics
from autoshard.microbatches.batch import in_microbatches
from autoshard.microbatches.microbatch import Microbatch
from autoshard.program.tracing import traced_step
from autoshard.propagation.registry import has_rule

ROWS, FEATURES, EXPERTS, COUNT = 16, 12, 4, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


BATCH = {"x": numbers(0, ROWS, FEATURES) + 0.3, "y": numbers(1, ROWS, FEATURES)}
WEIGHTS = {
    "up": numbers(2, 2, FEATURES, FEATURES),
    "scale": numbers(3, 2, FEATURES) + 1,
    "router": numbers(4, 2, FEATURES, EXPERTS),
    "experts": numbers(5, 2, EXPERTS, FEATURES, FEATURES),
}
STATE = {"mean": numbers(6, 2, FEATURES), "var": np.abs(numbers(7, 2, FEATURES)), "load": numbers(8, 2, EXPERTS)}


def at(tree, k):
    return jax.tree.map(lambda x: x[k], tree)


def stacked(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def error(x, batch):
    return jnp.mean((x - batch["y"]) ** 2)


def normalised(weights, state, x):
    x = x @ weights["up"]
    mean = x.mean(0)
    var = (x * x).mean(0) - mean**2
    changed = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}
    return jax.nn.relu((x - mean) * jax.lax.rsqrt(var + 1e-5) * weights["scale"]), state | changed


def batch_norm(weights, states, batch):
    x, first = normalised(at(weights, 0), states[0], batch["x"])
    x, second = normalised(at(weights, 1), states[1], x)
    return error(x, batch), [first, second]


def batch_norm_computed_again(weights, state, batch):
    x, changed = jax.checkpoint(normalised)(at(weights, 0), at(state, 0), batch["x"])
    return error(x, batch), state | {"mean": state["mean"].at[0].set(changed["mean"])}


def batch_norm_in_a_loop(weights, state, batch):
    def layer(x, both):
        made, changed = jax.checkpoint(normalised)(*both, x)
        return x + made, changed

    x, changed = jax.lax.scan(layer, batch["x"], (weights, state))
    return error(x, batch), changed


@jax.custom_vjp
def scaled(x, scale):
    return _scaled(x, scale)[0]


def _scaled(x, scale):
    mean, deviation = x.mean(0), jnp.sqrt(x.var(0) + 1e-5)
    centred = (x - mean) / deviation
    return centred * scale, (centred, deviation, scale)


def _scaled_back(kept, cotangent):
    """As libraries write it: sums over the batch are gradients, and read by every row."""
    centred, deviation, scale = kept
    of_scale, of_shift = (cotangent * centred).sum(0), cotangent.sum(0)
    inner = cotangent - (centred * of_scale + of_shift) / len(centred)
    return inner * scale / deviation, of_scale


scaled.defvjp(_scaled, _scaled_back)


def batch_norm_with_its_own_derivative(weights, state, batch):
    return error(scaled(jnp.tanh(batch["x"] @ weights["up"][0]), weights["scale"][0]), batch), state


def batch_norm_of_linen(weights, state, batch):
    norm = nn.BatchNorm(use_running_average=False, momentum=0.9)
    x = jnp.tanh(batch["x"] @ weights["up"][0])
    kept = {"params": {"scale": weights["scale"][0], "bias": weights["scale"][1]}, "batch_stats": at(state, 0)}
    kept["batch_stats"].pop("load")
    x, changed = norm.apply(kept, x, mutable="batch_stats")
    return error(x, batch), {key: state[key].at[0].set(changed["batch_stats"].get(key, state[key][0])) for key in state}


def experts(weights, x):
    chances = jax.nn.softmax(x @ weights["router"])
    chosen = jax.nn.one_hot(chances.argmax(-1), EXPERTS)
    load = chosen.mean(0)
    x = x + jnp.tanh(jnp.einsum("bf,efd,be->bd", x, weights["experts"], chosen * chances))
    return x, EXPERTS * jnp.sum(load * chances.mean(0)), load


def balance_loss(weights, state, batch):
    x, one, first = experts(at(weights, 0), batch["x"])
    x, other, second = experts(at(weights, 1), x)
    return error(x, batch) + 0.1 * (one + other), state | {"load": 0.9 * state["load"] + jnp.stack([first, second])}


def balance_loss_in_a_loop(weights, state, batch):
    def layer(carry, weights):
        x, loss, load = experts(weights, carry[0])
        return (x, carry[1] + loss + jnp.sum(load**2)), load

    (x, loss), loads = jax.lax.scan(layer, (batch["x"], 0.0), weights)
    return error(x, batch) + 0.1 * loss, state | {"load": 0.9 * state["load"] + loads}


LOSSES = [
    balance_loss,
    balance_loss_in_a_loop,
    batch_norm,
    batch_norm_computed_again,
    batch_norm_in_a_loop,
    batch_norm_of_linen,
    batch_norm_with_its_own_derivative,
]


def arguments(loss):
    state = [at(STATE, 0), at(STATE, 1)] if loss is batch_norm else STATE
    return WEIGHTS, OPTIMIZER.init(WEIGHTS), state, BATCH


def updated(weights, optimizer, gradient):
    updates, optimizer = OPTIMIZER.update(gradient, optimizer, weights)
    return optax.apply_updates(weights, updates), optimizer, optax.global_norm(gradient)


def trained(loss):
    def step(weights, optimizer, state, batch):
        (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(weights, state, batch)
        return *updated(weights, optimizer, gradient), state, value

    return step


def by_hand(loss):
    """A loop over microbatches that takes the mean of gradients and losses, and hands the state on."""

    def step(weights, optimizer, state, batch):
        def microbatch(state, batch):
            (value, state), gradient = jax.value_and_grad(loss, has_aux=True)(weights, state, batch)
            return state, (value, gradient)

        parts = jax.tree.map(lambda x: x.reshape(-1, COUNT, FEATURES).swapaxes(0, 1), batch)
        state, found = jax.lax.scan(microbatch, state, parts)
        value, gradient = jax.tree.map(lambda x: x.mean(0), found)
        return *updated(weights, optimizer, gradient), state, value

    return step


def in_parts(loss):
    args = arguments(loss)
    traced = replace(traced_step(trained(loss), args, {}, has_rule=has_rule), has_own_statistics=True)
    split, _ = in_microbatches(traced, COUNT)
    return jax.jit(core.jaxpr_as_fun(split))(*jax.tree.leaves(args))


@functools.cache
def expected(loss):
    return jax.tree.leaves(jax.jit(by_hand(loss))(*arguments(loss)))


def check(loss, found):
    for one, other in zip(jax.tree.leaves(found), expected(loss), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "loss", some(LOSSES, *(one for one in LOSSES if one not in (batch_norm_computed_again, batch_norm_of_linen)))
)
def test_numbers_are_those_of_a_loop_by_hand(loss):
    check(loss, in_parts(loss))


def _at_once(equations, env, *_):
    """States changed once, by the mean of all microbatches."""
    made = [var for eqn in equations for var in eqn.outvars]
    return dict(zip(made, evaluated(equations, env, made), strict=True))


def _unscaled(self, eqn, small, operands, sound=Microbatch.statistics, **_):
    return sound(self, eqn, small, operands, is_sum=False)


FAULTS = [  # what is wrong, and a loss by which it is seen
    (Microbatch, "statistics", _unscaled, batch_norm),
    (proof, "is_backward", lambda eqn: False, batch_norm_with_its_own_derivative),
    (proof, "late_inputs", lambda *_: set(), balance_loss),
    (statistics, "_in_turn", _at_once, batch_norm),
]


@pytest.mark.parametrize("where, name, fault, loss", FAULTS, ids=[name for _, name, _, _ in FAULTS])
def test_a_planted_fault_is_caught(where, name, fault, loss, monkeypatch):
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(AssertionError):
        check(loss, in_parts(loss))


def test_layers_take_no_walk_each(monkeypatch):
    """Statistics of all layers are found in one walk over the step, and known in the next."""
    walks, walk = [], proof._ProofWalk.step

    def counted(self, whole, part):
        walks.append(len(self.sums))
        return walk(self, whole, part)

    monkeypatch.setattr(proof._ProofWalk, "step", counted)
    args = arguments(batch_norm)
    traced = replace(traced_step(trained(batch_norm), args, {}, has_rule=has_rule), has_own_statistics=True)
    in_microbatches(traced, COUNT)
    assert len(walks) == 2 and walks[0] == 0 < walks[1]


def mesh_of_two():
    return jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])


@pytest.mark.parametrize(
    "loss", some([balance_loss, balance_loss_in_a_loop, batch_norm], balance_loss_in_a_loop, batch_norm)
)
def test_stages_have_statistics_of_microbatches(loss):
    pipeline = {"stages": 2, "microbatches": COUNT}
    step = autoshard.autoshard(trained(loss), mesh=mesh_of_two(), statistics="microbatch", pipeline=pipeline)
    check(loss, step(*arguments(loss)))
    (remark,) = (one for one in step.plan(*arguments(loss)).warnings if one.startswith("statistics="))
    assert "test_statistics.py:" in remark and "in turn" in remark


def test_a_plan_says_which_lines_have_statistics_of_microbatches():
    how = {"mesh": mesh_of_two(), "microbatches": COUNT}
    args = arguments(batch_norm)
    plan = autoshard.plan(trained(batch_norm), *args, **how, statistics="microbatch")
    assert any(one.startswith("statistics='microbatch': each microbatch takes sums") for one in plan.warnings)
    with pytest.raises(MicrobatchError, match=r"at test_statistics.py:[0-9]+ needs .*\n.*statistics='microbatch'"):
        autoshard.plan(trained(batch_norm), *args, **how)
    with pytest.raises(ArgumentError, match="statistics='batch'"):
        autoshard.plan(trained(batch_norm), *args, **how, statistics="batch")


@pytest.mark.parametrize("others", [{}, {"remat": "auto"}, {"mesh": "auto"}, {"pad": "batch"}])
def test_statistics_of_microbatches_want_microbatches(others):
    """They were ignored where the step runs in one part."""
    with pytest.raises(ArgumentError, match=r"takes its batch at once.*\n.*microbatches= or pipeline="):
        autoshard.autoshard(trained(batch_norm), **{"mesh": mesh_of_two(), **others}, statistics="microbatch")
    autoshard.autoshard(trained(batch_norm), mesh=mesh_of_two(), statistics="microbatch", microbatches="auto")


def test_states_that_a_loop_changes_are_not_cut_into_stages():
    pipeline = {"stages": 2, "microbatches": COUNT}
    with pytest.raises(StageError, match="arrays of state are changed by every microbatch"):
        how = {"mesh": mesh_of_two(), "statistics": "microbatch", "pipeline": pipeline}
        autoshard.plan(trained(batch_norm_in_a_loop), *arguments(batch_norm_in_a_loop), **how)
