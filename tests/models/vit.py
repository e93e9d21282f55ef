"""Vision Transformer in flax nnx, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .model import Model, named


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
        x = named(x + self.attention(self.norm1(x)), "batch", None, None)
        hidden = named(nnx.gelu(self.up(self.norm2(x))), "batch", None, "hidden")
        return named(x + self.down(hidden), "batch", None, None)


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
        scan: bool,
        dtype: Any,
        rngs: nnx.Rngs,
        remat: bool | Callable = False,
    ):
        self.scan, self.remat = scan, remat
        self.patches = nnx.Conv(3, width, (patch, patch), strides=patch, padding="VALID", dtype=dtype, rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, patches + 1, width)))
        if scan:
            self.blocks = nnx.vmap(lambda rngs: Block(width, heads, dtype, rngs))(rngs.split(layers))
        else:
            self.blocks = nnx.List([Block(width, heads, dtype, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(len(x), -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...].astype(x.dtype), (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([token, x], axis=1) + self.positions[...].astype(x.dtype)
        x = named(x, "batch", None, None)
        apply = Block.__call__
        if self.remat:
            apply = nnx.remat(apply, policy=None if self.remat is True else self.remat)
        if self.scan:
            x, _ = jax.lax.scan(lambda x, block: (apply(block, x), None), x, self.blocks)
        else:
            for block in self.blocks:
                x = apply(block, x)
        return self.head(self.norm(x)[:, 0]).astype(jnp.float32)


def make(
    layers: int = 2,
    width: int = 32,
    heads: int = 8,
    size: int = 16,
    patch: int = 4,
    classes: int = 16,
    batch: int = 16,
    *,
    scan: bool = False,
    remat: bool | Callable = False,
    dtype: Any = jnp.float32,
) -> Model:
    """A classifier of `size` x `size` RGB images, cut into squares of `patch` x `patch`; it computes in `dtype`.

    `scan` stacks the blocks and loops over them; `remat` recomputes each, all of it or what a policy does not save.
    """
    model = ViT(layers, width, heads, patch, (size // patch) ** 2, classes, scan, dtype, nnx.Rngs(0), remat)
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
