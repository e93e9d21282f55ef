"""ResNet (He et al. 2015, with the stride in the 3 x 3 convolution) in flax linen, SGD with momentum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .cnn import classifier
from .model import Model


class Normalized(nn.Module):
    """Convolution and batch norm."""

    features: int
    kernel: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = (self.kernel, self.kernel)
        x = nn.Conv(self.features, kernel, self.stride, use_bias=False, dtype=self.dtype, name="conv")(x)
        return nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype, name="norm")(x)


class Bottleneck(nn.Module):
    """Narrow by 1 x 1, 3 x 3, wide by 1 x 1, beside a shortcut: by 1 x 1 where the shape changes."""

    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(Normalized(self.features, 1, 1, self.dtype, name="narrow")(x))
        y = nn.relu(Normalized(self.features, 3, self.stride, self.dtype, name="middle")(y))
        y = Normalized(4 * self.features, 1, 1, self.dtype, name="wide")(y)
        if x.shape != y.shape:
            x = Normalized(4 * self.features, 1, self.stride, self.dtype, name="shortcut")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Stem, `stages[i]` bottlenecks of `width * 2**i` features, mean over the pixels, and the classes."""

    stages: tuple[int, ...]
    width: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(Normalized(self.width, 7, 2, self.dtype, name="stem")(images))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(self.width * 2**stage, stride, self.dtype, name=f"stage{stage}_block{block}")(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x.mean((1, 2))).astype(jnp.float32)


def make(
    stages: tuple[int, ...] = (1, 1),
    width: int = 8,
    size: int = 16,
    classes: int = 16,
    batch: int = 32,
    dtype: Any = jnp.float32,
) -> Model:
    """A classifier of `size` x `size` RGB images, ResNet-50 at `stages=(3, 4, 6, 3), width=64`; computes in `dtype`."""
    return classifier("resnet", ResNet(stages, width, classes, dtype), size, classes, batch)
