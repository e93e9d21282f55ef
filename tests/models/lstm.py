"""LSTM over time in flax linen (`nn.RNN`, a `lax.scan` inside), a classifier of its last state; Adam."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from .model import Model, optax_step


class Classifier(nn.Module):
    """The class of a sequence, read off the LSTM's last output."""

    hidden: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.classes)(nn.RNN(nn.OptimizedLSTMCell(self.hidden))(x)[:, -1])


def make(hidden: int = 32, features: int = 16, classes: int = 8, seq: int = 16, batch: int = 32) -> Model:
    """Which of `classes` fixed sequences is it, under noise?"""
    model = Classifier(hidden, classes)
    params = model.init(jax.random.key(0), jnp.zeros((1, seq, features)))
    optimizer = optax.adam(5e-3)

    def loss_of(params, batch):
        logits = model.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def batches(i):
        prototypes = np.random.default_rng(0).normal(size=(classes, seq, features))
        rng = np.random.default_rng(i)
        labels = rng.integers(classes, size=batch).astype(np.int32)
        x = prototypes[labels] + 0.5 * rng.normal(size=(batch, seq, features))
        return {"x": x.astype(np.float32), "labels": labels}

    return Model("lstm", optax_step(loss_of, optimizer), (params, optimizer.init(params)), batches)
