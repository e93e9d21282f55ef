"""Denoising diffusion (Ho et al. 2020) of images in flax linen, Adam, with a running mean of the parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from .model import Model


def embedded(times: jax.Array, width: int) -> jax.Array:
    """Sines and cosines of `times`, `[batch] -> [batch, width]`."""
    angles = times[:, None] * jnp.exp(-np.log(1e4) * jnp.arange(width // 2) / (width // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Denoiser(nn.Module):
    """Residual convolutions whose channels the time scales and shifts (FiLM)."""

    layers: int
    width: int

    @nn.compact
    def __call__(self, images: jax.Array, times: jax.Array) -> jax.Array:
        time = nn.silu(nn.Dense(self.width)(embedded(times, self.width)))
        x = nn.Conv(self.width, (3, 3))(images)
        for _ in range(self.layers):
            scale, shift = jnp.split(nn.Dense(2 * self.width)(time)[:, None, None], 2, axis=-1)
            x = x + nn.Conv(self.width, (3, 3))(nn.silu(x * (1 + scale) + shift))
        return nn.Conv(images.shape[-1], (3, 3))(x)


def make(
    layers: int = 2, width: int = 32, size: int = 8, channels: int = 8, times: int = 64, batch: int = 16
) -> Model:
    """Predicts the noise that was added to images of `size` x `size`; what it adds depends on the batch's seed only."""
    model = Denoiser(layers, width)
    params = model.init(jax.random.key(0), jnp.zeros((1, size, size, channels)), jnp.zeros(1))
    averaged = jax.tree.map(jnp.copy, params)  # buffers of its own, so that the state can be donated
    optimizer = optax.adam(3e-3, eps=1e-6)
    # The cosine schedule of Nichol and Dhariwal 2021: how much of an image's variance is left at each time.
    kept = jnp.asarray(np.cos(np.linspace(0.02, 0.98, times) * np.pi / 2) ** 2, jnp.float32)
    pattern = np.random.default_rng(0).normal(size=(size, size, channels))

    def step(state, batch):
        params, averaged, opt_state = state
        images = batch["images"]
        time_key, noise_key = jax.random.split(jax.random.key(batch["seed"]))
        t = jax.random.randint(time_key, (len(images),), 0, times)
        noise = jax.random.normal(noise_key, images.shape)
        signal = kept[t][:, None, None, None]
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
