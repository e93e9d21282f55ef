"""Steps whose plans become code: their classes are what code has to write. Knows nothing of autoshard."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


class Pair(NamedTuple):
    up: Any
    down: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Average:
    """Weights, and how they are averaged, which is no literal."""

    shadow: Any
    decay: Any = field(metadata={"static": True}, default=abs)
    rate: float = field(metadata={"static": True}, default=0.9)


@jax.tree_util.register_pytree_node_class
class Counter:
    """A class of the user's own, registered by hand."""

    def __init__(self, count, names):
        self.count, self.names = count, names

    def tree_flatten(self):
        return (self.count,), ("names", self.names)

    @classmethod
    def tree_unflatten(cls, static, children):
        assert static[0] == "names"
        return cls(*children, static[1])


def apply(weights, x):
    return jax.nn.relu(x @ weights.up) @ weights.down


def train_step(state, average, batch):
    def loss_of(weights):
        return jnp.mean((state.apply_fn(weights, batch["x"]) - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state.params)
    state = state.apply_gradients(grads=gradient)
    shadow = jax.tree.map(lambda s, w: average.rate * s + w, average.shadow, state.params)
    return state, Average(shadow, average.decay, average.rate), Counter([loss], {"loss": 1})


def arguments(width=16, hidden=64, rows=32):
    def make():
        weights = Pair(jnp.ones((width, hidden)), jnp.ones((hidden, width)))
        state = TrainState.create(apply_fn=apply, params=weights, tx=optax.adam(1e-3))
        return state, Average(weights, lambda x: x)

    state, average = jax.eval_shape(make)
    of = jax.ShapeDtypeStruct
    return state, average, {"x": of((rows, width), jnp.float32), "y": of((rows, width), jnp.float32)}


def looping_step(weights, x, turns):
    """A loop of known length, one of unknown length, a recomputation, a branch and a custom derivative."""

    def layer(x, weight):
        return jax.nn.relu(jnp.tanh(x @ weight) @ weight.T) + x, jnp.sum(x)

    def loss_of(weights):
        y, sums = jax.lax.scan(jax.checkpoint(layer), x, weights)
        y = jax.lax.cond(sums[0] > 0, lambda y: y @ weights[0] @ weights[0].T, lambda y: 2.0 * y, y)
        return jnp.mean(jax.lax.top_k(y, 4)[0] ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)

    def turn(carry):
        i, y = carry
        return i + 1, jnp.tanh(y @ weights[0]) @ weights[0].T

    _, y = jax.lax.while_loop(lambda carry: carry[0] < turns, turn, (0, x))
    y = jax.lax.dynamic_update_slice(y, loss[None, None], (turns, 0))
    return weights - 0.1 * gradient, y
