"""State that only the update of a step reads, on hosts: which it is, and that the numbers stay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import assert_equal
from jax.extend import core

from autoshard.jaxprs import IN_HOST_MEMORY, on_host
from autoshard.remat.host_state import HostState, UpdateLoop


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


WEIGHTS = {"down": numbers(0, 3, 16, 8) / 4, "up": numbers(1, 3, 8, 16) / 4}
X = numbers(2, 6, 8)


def loss(weights, x):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, weights)
    return jnp.mean(x**2)


def trained(optimizer):
    """A step, and the state that it begins with."""

    def step(state, x):
        weights, kept = state
        value, gradients = jax.value_and_grad(loss)(weights, x)
        updates, kept = optimizer.update(gradients, kept, weights)
        return (optax.apply_updates(weights, updates), kept), value

    return step, (WEIGHTS, optimizer.init(WEIGHTS))


def averaged(state, x):
    """An average of the weights beside them, and what is read as it is and left."""
    weights, average, left = state
    value, gradients = jax.value_and_grad(loss)(weights, x)
    weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
    return (weights, jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, weights), left), value


def printed(state, x):
    """What the update prints cannot wait on a host."""
    (weights, average, left), value = averaged(state, x)
    jax.debug.print("{}", average["up"].sum())
    return (weights, average, left), value


def masters(state, x):
    """Weights that are rounded for the passes are read by them."""
    weights, momentum = state
    rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    value, gradients = jax.value_and_grad(loss)(rounded, x.astype(jnp.bfloat16))
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g.astype(jnp.float32), momentum, gradients)
    return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum), value


def lookahead(state, x):
    """Slow weights are the next fast ones, too."""
    weights, slow = state
    value, gradients = jax.value_and_grad(loss)(weights, x)
    slow = jax.tree.map(lambda s, w, g: s + 0.5 * (w - 0.1 * g - s), slow, weights, gradients)
    return (slow, slow), value


def with_metrics(state, x):
    """Of the moments, one is returned anew beside the state, another as it was."""
    (weights, momentum), value = masters(state, x)
    return (weights, momentum), (value, momentum["up"], state[1]["down"])


def counted(state, x):
    """What is updated from itself and numbers alone can be traced on a host."""
    weights, counts, sums = state
    value, gradients = jax.value_and_grad(loss)(weights, x)
    weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
    return (weights, counts + 1, jnp.where(sums > 0, sums * value, sums + counts)), value


def counted_with_momentum(state, x):
    """JAX refuses the momentum on a host, and then all is traced on devices."""
    weights, momentum, counts = state
    (weights, momentum), value = masters((weights, momentum), x)
    return (weights, momentum, counts + 1), value


def with_own_table(state, x):
    """A table of the user's, on hosts."""
    weights, momentum, table = state
    (weights, momentum), value = masters((weights, momentum), x + jax.device_put(table, jax.memory.Space.Device))
    return (weights, momentum, table), value


def with_token(state, x):
    weights, momentum, token = state
    (weights, momentum), value = masters((weights, momentum), x)
    return (weights, momentum, token), value


TABLE = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=IN_HOST_MEMORY)
COUNTS = numbers(3, 3, 4)
ZEROS = jax.tree.map(np.zeros_like, WEIGHTS)
STEPS = {  # step and state -> the paths of what can lie on hosts
    "adamw with clipping": (
        *trained(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))),
        [f"[1][1][0].{name}['{key}']" for name in ("mu", "nu") for key in ("down", "up")],
    ),
    "average": (averaged, (WEIGHTS, ZEROS, X), ["[1]['down']", "[1]['up']"]),
    "counted": (counted, (WEIGHTS, COUNTS, COUNTS), []),
    "counted with momentum": (counted_with_momentum, (WEIGHTS, ZEROS, COUNTS), ["[1]['down']", "[1]['up']", "[2]"]),
    "lookahead": (lookahead, (WEIGHTS, WEIGHTS), []),
    "masters": (masters, (WEIGHTS, ZEROS), ["[1]['down']", "[1]['up']"]),
    "no backward pass": (lambda state, x: ((state[0] * x.sum(),), x.sum()), (X,), []),
    "printed": (printed, (WEIGHTS, ZEROS, X), ["[1]['down']"]),
    "own table": (
        with_own_table,
        (WEIGHTS, ZEROS, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=IN_HOST_MEMORY)),
        [],
    ),
    "returned apart": (with_metrics, (WEIGHTS, ZEROS), []),
    "sgd in jit": (jax.jit(trained(optax.sgd(0.1))[0]), trained(optax.sgd(0.1))[1], []),
    "token": (with_token, (WEIGHTS, ZEROS, jax.lax.create_token()), []),
}


def state_of(name):
    step, state, _ = STEPS[name]
    flat, tree = jax.tree.flatten((state, X))
    closed = jax.make_jaxpr(lambda *leaves: jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves))))(*flat)
    return HostState.of(closed, {i: i for i in range(len(flat) - 1)}), flat


def check_numbers(name):
    found, flat = state_of(name)
    made, expected = found.rewritten(), jax.jit(core.jaxpr_as_fun(found.closed))(*flat)
    moved = [i for i, aval in enumerate(made.in_avals) if on_host(aval)]
    assert moved == [i for i, aval in enumerate(made.out_avals) if on_host(aval)] == list(found.movable)
    assert_equal(list(jax.jit(core.jaxpr_as_fun(made))(*flat)), list(expected))


@pytest.mark.parametrize("name", STEPS)
def test_what_the_passes_do_not_read_can_lie_on_hosts(name):
    found, _ = state_of(name)
    paths, _ = jax.tree_util.tree_flatten_with_path(STEPS[name][1])
    assert [jax.tree_util.keystr(paths[i][0]) for i in found.movable] == STEPS[name][2]


@pytest.mark.parametrize("name", ["adamw with clipping", "counted with momentum", "masters", "printed"])
def test_numbers_are_those_of_the_step(name):
    check_numbers(name)


def test_a_wrong_part_is_caught(monkeypatch):
    right = UpdateLoop.run

    def of_another_layer(self, env):
        found = right(self, env)
        return {**found, self.results[0]: jnp.flip(found[self.results[0]], axis=0)}

    monkeypatch.setattr(UpdateLoop, "run", of_another_layer)
    with pytest.raises((AssertionError, ValueError)):
        check_numbers("masters")


def test_the_update_runs_layer_by_layer():
    """All transfers are of one layer, and weights are written over."""
    found, _ = state_of("adamw with clipping")
    jaxpr = found.rewritten().jaxpr
    assert not any(eqn.primitive.name == "device_put" for eqn in jaxpr.eqns)
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"][-2:]
    for loop, shape in zip(loops, [(16, 8), (8, 16)], strict=True):
        body = loop.params["jaxpr"].jaxpr.eqns
        assert [eqn.outvars[0].aval.shape for eqn in body if eqn.primitive.name == "device_put"] == [shape] * 4
        assert str(loop.params["jaxpr"]).count("= dynamic_update_slice ") == 1
