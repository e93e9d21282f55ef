"""U-Net for segmentation (Ronneberger et al. 2015, with group norm) in flax linen, Adam."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from .model import Model, named, optax_step


class Convolve(nn.Module):
    """Convolution, group norm and relu."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.features, (3, 3), strides=self.stride, use_bias=False)(x)
        return named(nn.relu(nn.GroupNorm(num_groups=self.features // 4)(x)), "batch", "height", None, "channels")


class UNet(nn.Module):
    """Down twice by strides, up once by a transposed convolution and once by a resize, with a skip at each size."""

    width: int
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        whole = Convolve(self.width)(images)
        half = Convolve(2 * self.width, stride=2)(whole)
        x = Convolve(4 * self.width, stride=2)(half)
        x = nn.ConvTranspose(2 * self.width, (2, 2), strides=(2, 2))(x)
        x = Convolve(2 * self.width)(jnp.concatenate([x, half], axis=-1))
        x = jax.image.resize(x, (*whole.shape[:-1], x.shape[-1]), "nearest")
        x = Convolve(self.width)(jnp.concatenate([x, whole], axis=-1))
        return nn.Conv(self.classes, (1, 1))(x)


def make(width: int = 16, size: int = 16, classes: int = 8, batch: int = 16) -> Model:
    """The class of every pixel of `size` x `size` RGB images; each class has its colour, under noise."""
    model = UNet(width, classes)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, size, size, 3)))
    optimizer = optax.adam(3e-3, eps=1e-6)
    colours = np.random.default_rng(0).normal(size=(classes, 3))

    def loss_of(params, batch):
        logits = model.apply(params, batch["images"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def batches(i):
        rng = np.random.default_rng(i)
        squares = rng.integers(classes, size=(batch, size // 4, size // 4)).astype(np.int32)
        labels = squares.repeat(4, axis=1).repeat(4, axis=2)
        images = colours[labels] + 0.5 * rng.normal(size=(batch, size, size, 3))
        return {"images": images.astype(np.float32), "labels": labels}

    return Model("unet", optax_step(loss_of, optimizer), (params, optimizer.init(params)), batches)
