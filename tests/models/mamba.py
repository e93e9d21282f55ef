"""Selective state space model (Mamba, Gu and Dao 2023; its layer S6) by an associative scan; plain pytrees, AdamW."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .model import Model, named, optax_step


def normed(scale: jax.Array, x: jax.Array) -> jax.Array:
    """RMS norm over the last dim, in float32."""
    wide = x.astype(jnp.float32)
    return (scale * wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def causal_convolution(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """Each channel with its own filter over this and earlier times: `[batch, time, channels]` in and out."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1,),
        padding=[(len(kernel) - 1, 0)],
        dimension_numbers=("NTC", "TIO", "NTC"),
        feature_group_count=x.shape[-1],
    )


def selective_scan(x: jax.Array, delta: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """`h[t] = exp(delta a) h[t-1] + delta b x`, read as `c h[t]`; each of the channels of `x` has `h` of its own."""

    def combine(earlier, later):
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    decay = jnp.exp(delta[..., None] * a)  # [batch, time, channels, states]
    entering = (delta * x)[..., None] * b[:, :, None, :]
    _, h = jax.lax.associative_scan(combine, (decay, entering), axis=1)
    return jnp.einsum("btds,bts->btd", h, c)


def block(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """What the scan does is steered by its input: `delta`, `b` and `c` are made of it."""
    states = params["log_a"].shape[1]
    p = {name: params[name].astype(x.dtype) for name in ("in", "filter", "filter_bias", "select", "delta", "out")}
    inner, gate = (
        named(half, "batch", None, "hidden") for half in jnp.split(normed(params["norm"], x) @ p["in"], 2, axis=-1)
    )
    inner = named(jax.nn.silu(causal_convolution(p["filter"], inner) + p["filter_bias"]), "batch", None, "hidden")
    b, c, delta = jnp.split(inner @ p["select"], [states, 2 * states], axis=-1)
    delta = jax.nn.softplus((delta @ p["delta"]).astype(jnp.float32) + params["delta_bias"])
    inner, b, c = (value.astype(jnp.float32) for value in (inner, b, c))
    y = selective_scan(inner, delta, -jnp.exp(params["log_a"]), b, c) + params["skip"] * inner
    y = named(y.astype(x.dtype) * jax.nn.silu(gate), "batch", None, "hidden")
    return named(x + y @ p["out"], "batch", None, None)


def make(
    layers: int = 2,
    d_model: int = 32,
    inner: int = 64,
    states: int = 8,
    rank: int = 8,
    vocab: int = 64,
    seq: int = 16,
    batch: int = 16,
    dtype: Any = jnp.float32,
) -> Model:
    """A next-token model of `layers` blocks; `rank` is that of the map from a block's input to its `delta`.

    It computes in `dtype`, apart from norms, the selective scan and the loss.
    """
    keys = iter(jax.random.split(jax.random.key(0), 2 + 5 * layers))

    def normal(*shape, fan_in):
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    def weights():
        return {
            "norm": jnp.ones(d_model),
            "in": normal(d_model, 2 * inner, fan_in=d_model),
            "filter": normal(4, 1, inner, fan_in=4),
            "filter_bias": jnp.zeros(inner),
            "select": normal(inner, 2 * states + rank, fan_in=inner),
            "delta": normal(rank, inner, fan_in=rank),
            "delta_bias": jnp.full(inner, -2.0, jnp.float32),
            "log_a": jnp.log(jnp.tile(jnp.arange(1, states + 1, dtype=jnp.float32), (inner, 1))),
            "skip": jnp.ones(inner),
            "out": normal(inner, d_model, fan_in=inner),
        }

    params = {
        "embedding": normal(vocab, d_model, fan_in=1),
        "blocks": [weights() for _ in range(layers)],
        "norm": jnp.ones(d_model),
        "head": normal(d_model, vocab, fan_in=d_model),
    }
    optimizer = optax.adamw(3e-3, eps=1e-6)

    def loss_of(params, batch):
        x = named(params["embedding"].astype(dtype)[batch["inputs"]], "batch", None, None)
        for weights in params["blocks"]:
            x = block(weights, x)
        logits = named(normed(params["norm"], x) @ params["head"].astype(dtype), "batch", None, "vocab")
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def batches(i):
        rng = np.random.default_rng(i)
        start, stride = rng.integers(vocab, size=(batch, 1)), rng.integers(1, 4, size=(batch, 1))
        tokens = ((start + stride * np.arange(seq + 1)) % vocab).astype(np.int32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    return Model("mamba", optax_step(loss_of, optimizer), (params, optimizer.init(params)), batches)
