"""Llama 3 (Dubey et al. 2024) in plain JAX: RMSNorm, rotary positions, grouped queries, SwiGLU; AdamW.

With experts it is Mixtral (Jiang et al. 2024), whose feed-forward layers are mixtures of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import moe
from .model import Model, named, optax_step

Params = dict[str, Any]


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (Su et al. 2021) of `[batch, position, head, feature]`."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # of queries, keys, values [batch, position, head, ...]


def attention(p: Params, x: jax.Array, theta: float, attend: Attend | None = None) -> jax.Array:
    """Causal; several query heads share one head of keys and values."""
    query, key, value = (jnp.einsum("bsd,dhk->bshk", x, p[name].astype(x.dtype)) for name in ("query", "key", "value"))
    query = named(rotated(query, theta), "batch", None, "heads", None)
    key, value = (named(x, "batch", None, "shared_heads", None) for x in (rotated(key, theta), value))
    if attend is not None:
        return jnp.einsum("bshk,hkd->bsd", attend(query, key, value), p["out"].astype(x.dtype))
    shared = key.shape[2]
    query = query.reshape(*query.shape[:2], shared, -1, query.shape[-1])
    scores = jnp.einsum("bqhgk,bshk->bhgqs", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    position = jnp.arange(x.shape[1])
    scores = jnp.where(position[:, None] >= position, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    heads = jnp.einsum("bhgqs,bshk->bqhgk", weights, value)
    heads = named(heads.reshape(*heads.shape[:2], -1, heads.shape[-1]), "batch", None, "heads", None)
    return jnp.einsum("bshk,hkd->bsd", heads, p["out"].astype(x.dtype))


def feed_forward(p: Params, x: jax.Array) -> jax.Array:
    gate, up, down = (p[name].astype(x.dtype) for name in ("gate", "up", "down"))
    return named(jax.nn.silu(x @ gate) * (x @ up), "batch", None, "hidden") @ down


def experts_of(p: Params, inputs: jax.Array) -> jax.Array:
    """Each a SwiGLU of its own: `[experts, groups, capacity, model]` in and out."""
    swish, up, down = (p[name].astype(inputs.dtype) for name in ("swish", "up", "down"))
    first, second = (jnp.einsum("EGCM,EMH->EGCH", inputs, kernel) for kernel in (swish, up))
    return jnp.einsum("EGCH,EHM->EGCM", jax.nn.silu(first) * second, down)


def block(
    p: Params, x: jax.Array, theta: float, capacity: int, attend: Attend | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """The residual stream after it, and how badly its experts are balanced, if it has any."""
    x = named(x + attention(p, normed(x, p["norm1"]), theta, attend), "batch", "length", None)
    h = normed(x, p["norm2"])
    if "experts" in p:
        y, balance = moe.layer(p["experts"], h, capacity, experts_of)
    else:
        y, balance = feed_forward(p, h), None
    return named(x + y, "batch", "length", None), balance


def make(
    layers: int = 2,
    d_model: int = 64,
    heads: int = 8,
    shared_heads: int = 4,
    d_hidden: int = 128,
    vocab: int = 128,
    seq: int = 32,
    batch: int = 16,
    experts: int = 0,
    capacity: int = 0,
    *,
    scan: bool = False,
    remat: bool | Callable = True,
    theta: float = 5e5,
    attend: Attend | None = None,
    dtype: Any = jnp.float32,
) -> Model:
    """A Llama; `scan` stacks the blocks and loops over them, `remat` recomputes each block in the backward pass: all of
    it, or what a policy of `jax.checkpoint` does not save.

    It computes in `dtype`, apart from norms, softmax and loss; parameters and moments are float32.

    Args:
        shared_heads: heads of keys and values; they divide `heads`.
        attend: computes attention; by default it is written out.
        experts: of each feed-forward layer; 0 for one that all tokens go through.
        capacity: tokens of a sentence that an expert takes.
    """
    keys = map(jax.random.fold_in, itertools.repeat(jax.random.key(0)), itertools.count())
    head = d_model // heads

    def random(*shape: int, fan: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * fan**-0.5

    def matrix(*shape: int, fan: int) -> jax.Array:
        return random(*((layers, *shape) if scan else shape), fan=fan)

    def ones() -> jax.Array:
        return jnp.ones((layers, d_model) if scan else (d_model,), jnp.float32)

    def made_block() -> Params:
        return {
            "norm1": ones(),
            "query": matrix(d_model, heads, head, fan=d_model),
            "key": matrix(d_model, shared_heads, head, fan=d_model),
            "value": matrix(d_model, shared_heads, head, fan=d_model),
            "out": matrix(heads, head, d_model, fan=d_model),
            "norm2": ones(),
            **({"experts": made_experts()} if experts else made_feed_forward()),
        }

    def made_feed_forward() -> Params:
        return {
            "gate": matrix(d_model, d_hidden, fan=d_model),
            "up": matrix(d_model, d_hidden, fan=d_model),
            "down": matrix(d_hidden, d_model, fan=d_hidden),
        }

    def made_experts() -> Params:
        return {
            "gate": matrix(d_model, experts, fan=d_model),
            "swish": matrix(experts, d_model, d_hidden, fan=d_model),
            "up": matrix(experts, d_model, d_hidden, fan=d_model),
            "down": matrix(experts, d_hidden, d_model, fan=d_hidden),
        }

    params = {
        "token": random(vocab, d_model, fan=1),
        "blocks": made_block() if scan else [made_block() for _ in range(layers)],
        "norm": jnp.ones((d_model,), jnp.float32),
        "head": random(d_model, vocab, fan=d_model),
    }
    optimizer = optax.adamw(3e-3, b2=0.95, eps=1e-6, weight_decay=0.1)

    def apply(p: Params, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        return block(p, x, theta, capacity, attend)

    if remat:
        apply = jax.checkpoint(apply, policy=None if remat is True else remat)

    def loss_of(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        x = named(params["token"].astype(dtype)[batch["inputs"]], "batch", "length", None)
        if scan:
            x, balances = jax.lax.scan(lambda x, p: apply(p, x), x, params["blocks"])
        else:
            balances = []
            for p in params["blocks"]:
                x, balance = apply(p, x)
                balances.append(balance)
        logits = named(normed(x, params["norm"]) @ params["head"].astype(dtype), "batch", None, "vocab")
        logits = logits.astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
        return loss + 0.01 * jnp.mean(jnp.asarray(balances)) if experts else loss

    def batches(i: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(i)
        start, stride = rng.integers(vocab, size=(batch, 1)), rng.integers(1, 4, size=(batch, 1))
        tokens = ((start + stride * np.arange(seq + 1)) % vocab).astype(np.int32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    return Model("llama", optax_step(loss_of, optimizer), (params, optimizer.init(params)), batches)
