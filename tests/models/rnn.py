"""Recurrent language model, a GRU under `lax.scan`, in equinox; Adam on clipped gradients."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .model import Model, optax_step


class Language(eqx.Module):
    """The logits of the next token at every time."""

    embedding: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, vocab: int, width: int, hidden: int, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(vocab, width, key=keys[0])
        self.cell = eqx.nn.GRUCell(width, hidden, key=keys[1])
        self.head = eqx.nn.Linear(hidden, vocab, key=keys[2])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def advance(h, x):
            h = self.cell(x, h)
            return h, h

        _, outputs = jax.lax.scan(advance, jnp.zeros(self.cell.hidden_size), jax.vmap(self.embedding)(tokens))
        return jax.vmap(self.head)(outputs)


def make(vocab: int = 64, width: int = 32, hidden: int = 64, seq: int = 16, batch: int = 16) -> Model:
    """Which token follows each of a sequence's, by a fixed rule?"""
    params, rest = eqx.partition(Language(vocab, width, hidden, jax.random.key(0)), eqx.is_array)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3, eps=1e-6))
    successor = np.random.default_rng(0).permutation(vocab)

    def loss_of(params, batch):
        logits = jax.vmap(eqx.combine(params, rest))(batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def batches(i):
        inputs = np.random.default_rng(i).integers(vocab, size=(batch, seq))
        return {"inputs": inputs.astype(np.int32), "targets": successor[inputs].astype(np.int32)}

    return Model("rnn", optax_step(loss_of, optimizer), (params, optimizer.init(params)), batches)
