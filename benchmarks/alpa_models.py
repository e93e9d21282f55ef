"""The models of Alpa's suites, in sizes of its own: mixtures of experts and Wide-ResNets, each with a train step.

What differs from Alpa's: attention is that of a Llama, as in the suite of GPTs, and norms are over groups of channels
where Alpa's are over the batch, which microbatches would change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from models import llama, moe
from models.model import optax_step
from workloads import Abstract, classified_images, sentences

GROUP = 2048  # tokens among which experts are dealt out (suite_manual_moe.py)
WIDER = 8  # hidden features of an MLP, in those of the model (benchmark_one_case_moe.py)
CLASSES, PIXELS = 1024, 224  # of images (benchmark_one_case_wresnet.py, suite_wresnet.py)
CHANNELS_OF_A_NORM = 32


def experts_step(
    sizes: tuple[int, int, int, int, int], experts: int, batch: int, dtype: Any = jnp.bfloat16
) -> Abstract:
    """Layers of experts and of one MLP in turns, a pair of them after the other, and Adafactor.

    Args:
        sizes: sequence, width, layers, heads, vocabulary.
    """
    seq, width, layers, heads, vocab = sizes
    hidden, pairs, head = WIDER * width, layers // 2, width // heads

    def made() -> dict[str, Any]:
        def ones(*shape: int) -> jax.Array:
            return jnp.ones(shape, jnp.float32)

        attention = {name: ones(pairs, width, heads, head) for name in ("query", "key", "value")}
        attention |= {"out": ones(pairs, heads, head, width), "norm1": ones(pairs, width), "norm2": ones(pairs, width)}
        own = {"gate": ones(pairs, width, experts), "up": ones(pairs, experts, width, hidden)}
        blocks = {
            "sparse": {**attention, **own, "down": ones(pairs, experts, hidden, width)},
            "dense": {**attention, "up": ones(pairs, width, hidden), "down": ones(pairs, hidden, width)},
        }
        return {"token": ones(vocab, width), "blocks": blocks, "norm": ones(width), "head": ones(width, vocab)}

    def through_experts(p: dict[str, Any], x: jax.Array) -> jax.Array:
        kernels = {"gate": p["gate"], "up": p["up"].astype(dtype), "down": p["down"].astype(dtype)}
        groups = x.reshape(-1, GROUP, width)
        return moe.layer(kernels, groups, 2 * GROUP // experts)[0].reshape(x.shape)

    def attended(p: dict[str, Any], x: jax.Array) -> jax.Array:
        return x + llama.attention(p, llama.normed(x, p["norm1"]), 1e4)

    @jax.checkpoint
    def sparse_layer(p: dict[str, Any], x: jax.Array) -> jax.Array:
        x = attended(p, x)
        return x + through_experts(p, llama.normed(x, p["norm2"]))

    @jax.checkpoint
    def dense_layer(p: dict[str, Any], x: jax.Array) -> jax.Array:
        x, up, down = attended(p, x), p["up"].astype(dtype), p["down"].astype(dtype)
        return x + jax.nn.relu(llama.normed(x, p["norm2"]) @ up) @ down

    def pair(x: jax.Array, p: dict[str, Any]) -> jax.Array:
        return dense_layer(p["dense"], sparse_layer(p["sparse"], x))

    def loss_of(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        x = params["token"].astype(dtype)[batch["inputs"]]
        x, _ = jax.lax.scan(lambda x, p: (pair(x, p), None), x, params["blocks"])
        logits = (llama.normed(x, params["norm"]) @ params["head"].astype(dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    optimizer = optax.adafactor(1e-2)
    params = jax.eval_shape(made)
    state = params, jax.eval_shape(optimizer.init, params)
    return Abstract(optax_step(loss_of, optimizer), state, sentences(batch=batch, seq=seq))


class Normalized(nn.Module):
    """Convolution and norm."""

    features: int
    kernel: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.features, (self.kernel, self.kernel), self.stride, use_bias=False)(x)
        return nn.GroupNorm(num_groups=None, group_size=CHANNELS_OF_A_NORM)(x)


class WideBlock(nn.Module):
    """A bottleneck whose 3 x 3 convolution is so many times wider."""

    features: int
    stride: int
    wider: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(Normalized(self.features, 1, 1)(x))
        y = nn.relu(Normalized(self.features * self.wider, 3, self.stride)(y))
        y = Normalized(4 * self.features, 1, 1)(y)
        if x.shape != y.shape:
            x = Normalized(4 * self.features, 1, self.stride, name="shortcut")(x)
        return nn.relu(x + y)


class WideResNet(nn.Module):
    """Stem, bottlenecks that are computed again, mean over the pixels, and the classes."""

    blocks: Sequence[int]
    width: int
    wider: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(Normalized(self.width, 7, 2)(images))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for size, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if size > 0 and block == 0 else 1
                x = nn.remat(WideBlock)(self.width * 2**size, stride, self.wider, name=f"size{size}_block{block}")(x)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


def wide_resnet_step(blocks: Sequence[int], width: int, wider: int, batch: int, pixels: int = PIXELS) -> Abstract:
    """A classifier of images in float32, and SGD with Nesterov's momentum.

    Args:
        blocks: of each size of image.
    """
    model = WideResNet(tuple(blocks), width, wider)

    def loss_of(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch["images"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, pixels, pixels, 3), jnp.float32))
    state = params, jax.eval_shape(optimizer.init, params)
    return Abstract(optax_step(loss_of, optimizer), state, classified_images(batch=batch, size=pixels))
