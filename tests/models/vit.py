"""Vision Transformer in flax nnx, AdamW."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .model import Model


class Block(nnx.Module):
    """Pre-LN attention and MLP."""

    def __init__(self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs):
        # No biases in attention, as in gpt.py: softmax cancels the key's.
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, use_bias=False, decode=False, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
    """Patches by a strided convolution, a class token before them, positions, blocks; the class token is read."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        patch: int,
        patches: int,
        classes: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.patches = nnx.Conv(3, width, (patch, patch), strides=patch, padding="VALID", dtype=dtype, rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, patches + 1, width)))
        self.blocks = nnx.List([Block(width, heads, dtype, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(len(x), -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...].astype(x.dtype), (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([token, x], axis=1) + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0]).astype(jnp.float32)


def make(
    layers: int = 2,
    width: int = 32,
    heads: int = 8,
    size: int = 16,
    patch: int = 4,
    classes: int = 16,
    batch: int = 16,
    dtype: Any = jnp.float32,
) -> Model:
    """A classifier of `size` x `size` RGB images, cut into squares of `patch` x `patch`; it computes in `dtype`."""
    model = ViT(layers, width, heads, patch, (size // patch) ** 2, classes, dtype, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3, eps=1e-6), wrt=nnx.Param)

    def step(state, batch):
        model, optimizer = state

        def loss_of(model):
            logits = model(batch["images"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return (model, optimizer), loss

    def batches(i):
        prototypes = np.random.default_rng(0).normal(size=(classes, size, size, 3))
        rng = np.random.default_rng(i)
        labels = rng.integers(classes, size=batch).astype(np.int32)
        images = prototypes[labels] + 0.5 * rng.normal(size=(batch, size, size, 3))
        return {"images": images.astype(np.float32), "labels": labels}

    return Model("vit", step, (model, optimizer), batches)
