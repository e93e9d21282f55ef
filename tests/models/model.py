"""What every file of this folder returns: one train step, its first state, and its data."""

from __future__ import annotations

from collections.abc import Callable
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


def optax_step(loss_of: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation) -> Callable:
    """The plain train step of a loss of (params, batch); its state is (params, optimizer state)."""

    def step(state, batch):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step
