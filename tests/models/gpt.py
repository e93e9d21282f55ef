"""Decoder-only transformer in flax nnx, AdamW."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .model import Model, named


class Block(nnx.Module):
    """Pre-LN attention and MLP."""

    def __init__(self, d_model: int, heads: int, dtype: Any, rngs: nnx.Rngs):
        # No biases on query, key and value: softmax cancels a key bias, so its gradient is rounding noise, which Adam
        # would blow up to full-size updates that differ with every order of summation.
        head = (heads, d_model // heads)
        self.norm1 = nnx.LayerNorm(d_model, dtype=dtype, rngs=rngs)
        self.query = nnx.LinearGeneral(d_model, head, use_bias=False, dtype=dtype, rngs=rngs)
        self.key = nnx.LinearGeneral(d_model, head, use_bias=False, dtype=dtype, rngs=rngs)
        self.value = nnx.LinearGeneral(d_model, head, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = nnx.LinearGeneral(head, d_model, axis=(-2, -1), dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(d_model, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(d_model, 4 * d_model, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * d_model, d_model, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm1(x)
        q, k, v = (named(project(h), "batch", None, "heads", None) for project in (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(v.dtype)
        heads = named(jnp.einsum("bhqk,bkhd->bqhd", weights, v), "batch", None, "heads", None)
        x = named(x + self.out(heads), "batch", "length", None)
        hidden = named(nnx.gelu(self.up(self.norm2(x))), "batch", None, "hidden")
        return named(x + self.down(hidden), "batch", "length", None)


class GPT(nnx.Module):
    """Token and position embedding, blocks, and an untied output projection."""

    def __init__(
        self,
        layers: int,
        d_model: int,
        heads: int,
        vocab: int,
        seq: int,
        scan: bool,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.scan = scan
        self.token = nnx.Embed(vocab, d_model, dtype=dtype, rngs=rngs)
        self.position = nnx.Embed(seq, d_model, dtype=dtype, rngs=rngs)
        if scan:
            self.blocks = nnx.vmap(lambda rngs: Block(d_model, heads, dtype, rngs))(rngs.split(layers))
        else:
            self.blocks = nnx.List([Block(d_model, heads, dtype, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(d_model, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(d_model, vocab, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, *, remat: bool = False) -> jax.Array:
        def apply(block, x):
            return block(x)

        if remat:
            apply = jax.checkpoint(apply)
        x = named(self.token(tokens) + self.position(jnp.arange(tokens.shape[1])), "batch", "length", None)
        if self.scan:
            x, _ = jax.lax.scan(lambda x, block: (apply(block, x), None), x, self.blocks)
        else:
            for block in self.blocks:
                x = apply(block, x)
        return named(self.head(self.norm(x)), "batch", None, "vocab").astype(jnp.float32)


def make(
    layers: int = 2,
    d_model: int = 64,
    heads: int = 8,
    vocab: int = 128,
    seq: int = 32,
    batch: int = 16,
    *,
    scan: bool = False,
    remat: bool = False,
    dtype: Any = jnp.float32,
) -> Model:
    """A GPT; `scan` stacks the blocks and loops over them, `remat` recomputes each block in the backward pass.

    It computes in `dtype`, apart from attention's softmax and the loss.
    """
    model = GPT(layers, d_model, heads, vocab, seq, scan, dtype, nnx.Rngs(0))
    # A gradient below Adam's usual epsilon of 1e-8 is rounding noise here, and would become a full-size update.
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3, eps=1e-6), wrt=nnx.Param)

    def step(state, batch):
        model, optimizer = state

        def loss_of(model):
            logits = model(batch["inputs"], remat=remat)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return (model, optimizer), loss

    def batches(i):
        rng = np.random.default_rng(i)
        start, stride = rng.integers(vocab, size=(batch, 1)), rng.integers(1, 4, size=(batch, 1))
        tokens = ((start + stride * np.arange(seq + 1)) % vocab).astype(np.int32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    return Model("gpt", step, (model, optimizer), batches)
