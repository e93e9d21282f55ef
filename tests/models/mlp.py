"""Multi-layer perceptron in plain pytrees, SGD."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .model import Model


def make(layers: int = 4, width: int = 64, batch: int = 32, *, bias: bool = True) -> Model:
    """`layers` square matrices with relu between them, learning a fixed random map."""
    keys = jax.random.split(jax.random.key(0), layers)
    params = [{"w": jax.random.normal(key, (width, width)) * (2 / width) ** 0.5} for key in keys]
    if bias:
        params = [layer | {"b": jnp.zeros(width)} for layer in params]
    teacher = np.random.default_rng(0).normal(size=(width, width)) * width**-0.5

    def loss_of(params, batch):
        x = batch["x"]
        for index, layer in enumerate(params):
            x = x @ layer["w"]
            if bias:
                x = x + layer["b"]
            if index < layers - 1:
                x = jax.nn.relu(x)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(params, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.2 * g, params, gradients), loss

    def batches(i):
        x = np.random.default_rng(i).normal(size=(batch, width)).astype(np.float32)
        return {"x": x, "y": np.tanh(x @ teacher).astype(np.float32)}

    return Model("mlp", step, params, batches)
