"""Next-token model whose output projection is its token embedding; plain pytrees, AdamW."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .model import Model, optax_step


def make(vocab: int = 256, d_model: int = 32, seq: int = 16, batch: int = 16) -> Model:
    """Embedding, one hidden layer, cross-entropy over the vocabulary."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "embedding": jax.random.normal(keys[0], (vocab, d_model)) * d_model**-0.5,
        "hidden": jax.random.normal(keys[1], (d_model, d_model)) * d_model**-0.5,
    }
    optimizer = optax.adamw(3e-3)
    successor = np.random.default_rng(0).permutation(vocab)

    def loss_of(params, batch):
        x = params["embedding"][batch["inputs"]]
        logits = jnp.tanh(x @ params["hidden"]) @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def batches(i):
        inputs = np.random.default_rng(i).integers(vocab, size=(batch, seq))
        return {"inputs": inputs.astype(np.int32), "targets": successor[inputs].astype(np.int32)}

    return Model("tied", optax_step(loss_of, optimizer), (params, optimizer.init(params)), batches)
