"""Mixture-of-experts layer of GShard (Lepikhin et al. 2020, algorithm 1), written in plain einsum; Adam."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .model import Model, named


def gates_of(logits: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Top-2 gating: how to combine the experts' results, `[groups, tokens, experts, capacity]`, and the balance loss.

    Each token goes to its two best experts, first choices first; what exceeds an expert's capacity is dropped.
    """
    experts = logits.shape[-1]
    probabilities = jax.nn.softmax(logits)
    first = jax.nn.one_hot(jnp.argmax(probabilities, -1), experts)
    second = jax.nn.one_hot(jnp.argmax(jnp.where(first > 0, -1.0, probabilities), -1), experts)
    balance = experts * jnp.mean(first.mean(1) * probabilities.mean(1)) * experts

    position_first = (jnp.cumsum(first, 1) - first) * first
    position_second = (jnp.cumsum(second, 1) - second + first.sum(1, keepdims=True)) * second
    weight_first, weight_second = (probabilities * first).sum(-1), (probabilities * second).sum(-1)
    total = weight_first + weight_second

    def combine(chosen, position, weight):
        slot = jax.nn.one_hot(position.sum(-1).astype(jnp.int32), capacity)  # all zeros beyond the capacity
        return jnp.einsum("GS,GSE,GSC->GSEC", weight / total, chosen, slot)

    return combine(first, position_first, weight_first) + combine(second, position_second, weight_second), balance


Params = dict[str, jax.Array]


def perceptrons(params: Params, inputs: jax.Array) -> jax.Array:
    """Each expert's hidden layer: `[experts, groups, capacity, model]` in and out."""
    hidden = jax.nn.relu(jnp.einsum("EGCM,EMH->EGCH", inputs, params["up"]))
    return jnp.einsum("EGCH,EHM->EGCM", hidden, params["down"])


def layer(
    params: Params, x: jax.Array, capacity: int, through: Callable[[Params, jax.Array], jax.Array] = perceptrons
) -> tuple[jax.Array, jax.Array]:
    """Tokens to their experts, `through` them, and back: `[groups, tokens, model]` in and out, and the balance loss."""
    combine, balance = gates_of(jnp.einsum("GSM,ME->GSE", x.astype(jnp.float32), params["gate"]), capacity)
    combine = combine.astype(x.dtype)
    dispatch = (combine > 0).astype(x.dtype)
    inputs = named(jnp.einsum("GSEC,GSM->EGCM", dispatch, x), None, "batch", None, None)  # as its tokens lie
    inputs = named(inputs, "experts", "expert_batch", None, None)
    outputs = named(through(params, inputs), "experts", "expert_batch", None, None)
    outputs = named(outputs, None, "batch", None, None)
    return named(jnp.einsum("GSEC,EGCM->GSM", combine, outputs), "batch", "length", None), balance


def make(
    groups: int = 8, tokens: int = 16, d_model: int = 32, d_hidden: int = 64, experts: int = 8, capacity: int = 8
) -> Model:
    """One MoE layer with a residual connection, learning a fixed random map of its input."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "gate": jax.random.normal(keys[0], (d_model, experts)) * d_model**-0.5,
        "up": jax.random.normal(keys[1], (experts, d_model, d_hidden)) * d_model**-0.5,
        "down": jax.random.normal(keys[2], (experts, d_hidden, d_model)) * d_hidden**-0.5,
    }
    optimizer = optax.adam(1e-3)
    teacher = np.random.default_rng(0).normal(size=(d_model, d_model)) * d_model**-0.5

    def step(state, batch):
        params, opt_state = state

        def loss_of(params):
            y, balance = layer(params, batch["x"], capacity)
            return jnp.mean((batch["x"] + y - batch["y"]) ** 2) + 0.01 * balance

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def batches(i):
        x = np.random.default_rng(i).normal(size=(groups, tokens, d_model)).astype(np.float32)
        return {"x": x, "y": np.tanh(x @ teacher).astype(np.float32)}

    return Model("moe", step, (params, optimizer.init(params)), batches)
