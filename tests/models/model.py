"""What every file of this folder returns: one train step, its first state, and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax


@dataclass(frozen=True)
class Model:
    """A train step with everything needed to run it, in float32 and without randomness."""

    name: str
    step: Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (state, loss): plain, ready for jax.jit
    state: Any  # the first state, a pytree of arrays
    batches: Callable[[int], dict[str, np.ndarray]]  # the i-th batch, the same in every process


Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]  # an array and the names of its dims -> the array

_constrain: ContextVar[Constrain | None] = ContextVar("constrain", default=None)


@contextmanager
def constrained(constrain: Constrain) -> Iterator[None]:
    """Steps that are traced meanwhile have their named values laid out by `constrain`.

    JAX keeps what it has traced of a function: under another `constrain` a model has to be made anew.
    """
    token = _constrain.set(constrain)
    try:
        yield
    finally:
        _constrain.reset(token)


def named(x: jax.Array, *dims: str | None) -> jax.Array:
    """`x`, whose dims an expert may want to lie somewhere; None for those that nobody asks for.

    Names: batch, length (of a sequence, between layers), heads, shared_heads, hidden, vocab, experts, expert_batch (of
    what experts compute), height, channels (of images), nodes, edges.
    """
    constrain = _constrain.get()
    return x if constrain is None else constrain(x, dims)


def optax_step(loss_of: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation) -> Callable:
    """The plain train step of a loss of (params, batch); its state is (params, optimizer state)."""

    def step(state, batch):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step
