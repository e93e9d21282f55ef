"""Denoising diffusion (Ho et al. 2020) of images in flax linen, Adam, with a running mean of the parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from .model import Model, named


def embedded(times: jax.Array, width: int) -> jax.Array:
    """Sines and cosines of `times`, `[batch] -> [batch, width]`."""
    angles = times[:, None] * jnp.exp(-np.log(1e4) * jnp.arange(width // 2) / (width // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Denoiser(nn.Module):
    """A U-Net of residual convolutions whose channels the time scales and shifts (FiLM); attention at the bottom."""

    layers: int  # at each size
    width: int  # channels of the largest size, twice as many at the next
    halvings: int
    heads: int  # of attention over the pixels of the smallest size; 0: none
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array, times: jax.Array) -> jax.Array:
        time = nn.silu(nn.Dense(self.width, dtype=self.dtype)(embedded(times, self.width)))

        def convolved(x: jax.Array, features: int, kernel: int = 3, stride: int = 1) -> jax.Array:
            x = nn.Conv(features, (kernel, kernel), stride, dtype=self.dtype)(x)
            return named(x, "batch", "height", None, "channels")

        def residual(x: jax.Array) -> jax.Array:
            features = x.shape[-1]
            scale, shift = jnp.split(nn.Dense(2 * features, dtype=self.dtype)(time)[:, None, None], 2, axis=-1)
            return x + convolved(nn.silu(x * (1 + scale) + shift), features)

        def residuals(x: jax.Array) -> jax.Array:
            for _ in range(self.layers):
                x = residual(x)
            return x

        x, skips = convolved(images, self.width), []
        for _ in range(self.halvings):
            x = residuals(x)
            skips.append(x)
            x = convolved(x, 2 * x.shape[-1], stride=2)
        x = residuals(x)
        if self.heads:
            pixels = nn.LayerNorm(dtype=self.dtype)(x.reshape(len(x), -1, x.shape[-1]))
            attention = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, use_bias=False)
            x = x + attention(pixels).reshape(x.shape)
        for skip in reversed(skips):
            x = nn.ConvTranspose(skip.shape[-1], (2, 2), strides=(2, 2), dtype=self.dtype)(x)
            x = residuals(convolved(jnp.concatenate([x, skip], axis=-1), skip.shape[-1], kernel=1))
        return convolved(x, images.shape[-1]).astype(jnp.float32)


def make(
    layers: int = 2,
    width: int = 32,
    halvings: int = 0,
    heads: int = 0,
    size: int = 8,
    channels: int = 8,
    times: int = 64,
    batch: int = 16,
    dtype: Any = jnp.float32,
) -> Model:
    """Predicts the noise that was added to images of `size` x `size`; what it adds depends on the batch's seed only.

    It computes in `dtype`, apart from the loss.
    """
    model = Denoiser(layers, width, halvings, heads, dtype)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, size, size, channels)), jnp.zeros(1))
    averaged = jax.tree.map(jnp.copy, params)  # buffers of its own, so that the state can be donated
    optimizer = optax.adam(3e-3, eps=1e-6)
    # The cosine schedule of Nichol and Dhariwal 2021: how much of an image's variance is left at each time.
    kept = (np.cos(np.linspace(0.02, 0.98, times) * np.pi / 2) ** 2).astype(np.float32)
    pattern = np.random.default_rng(0).normal(size=(size, size, channels))

    def step(state, batch):
        params, averaged, opt_state = state
        images = batch["images"]
        time_key, noise_key = jax.random.split(jax.random.key(batch["seed"]))
        t = jax.random.randint(time_key, (len(images),), 0, times)
        noise = jax.random.normal(noise_key, images.shape)
        signal = jnp.asarray(kept)[t][:, None, None, None]
        noisy = jnp.sqrt(signal) * images + jnp.sqrt(1 - signal) * noise

        def loss_of(params):
            return jnp.mean((model.apply(params, noisy, t) - noise) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        averaged = optax.incremental_update(params, averaged, 0.01)
        return (params, averaged, opt_state), loss

    def batches(i):
        rng = np.random.default_rng(i)
        images = pattern * rng.choice([-1, 1], size=(batch, 1, 1, 1)) + 0.1 * rng.normal(size=(batch, *pattern.shape))
        return {"images": images.astype(np.float32), "seed": np.asarray(i, np.int32)}

    return Model("diffusion", step, (params, averaged, optimizer.init(params)), batches)
