"""Convolutional network with batch norm in flax linen, SGD with momentum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from .model import Model


class CNN(nn.Module):
    """Conv, batch norm and silu per entry of `channels`; average pool after the first two.

    Neither relu nor max pool: among so many activations there is one so near a kink, or a tie, that rounding decides
    which gradient it gets.
    """

    channels: tuple[int, ...]
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, features in enumerate(self.channels):
            # Batch norm cancels a bias of the convolution before it.
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.silu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
            if layer < 2:
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(self.classes)(x.reshape(len(x), -1))


class State(TrainState):
    """A TrainState that also carries batch norm's running statistics."""

    batch_stats: Any


def make(channels: tuple[int, ...] = (16, 32), size: int = 16, classes: int = 16, batch: int = 32) -> Model:
    """A classifier of `size` x `size` RGB images."""
    return classifier("cnn", CNN(channels, classes), size, classes, batch)


def classifier(name: str, model: nn.Module, size: int, classes: int, batch: int) -> Model:
    """The training of `model`, images to logits with batch norm, on images that are their class's under noise."""
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, size, size, 3)))
    state = State.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.01, momentum=0.9),
    ).replace(step=jnp.zeros((), jnp.int32))  # an array from the start; `create` puts a Python int

    def step(state, batch):
        def loss_of(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = state.apply_fn(variables, batch["images"], mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return losses.mean(), updates["batch_stats"]

        (loss, batch_stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, batch_stats=batch_stats), loss

    def batches(i):
        prototypes = np.random.default_rng(0).normal(size=(classes, size, size, 3))
        rng = np.random.default_rng(i)
        labels = rng.integers(classes, size=batch).astype(np.int32)
        images = prototypes[labels] + rng.normal(size=(batch, size, size, 3))
        return {"images": images.astype(np.float32), "labels": labels}

    return Model(name, step, state, batches)
