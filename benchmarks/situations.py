"""Small programs of the kinds that public bug reports are about, for `strangers.py`: each with shapes of its arguments.

Sizes are such that a batch, or a weight, can be split over eight devices and is worth it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Situation:
    """A program and the shapes that it is called with."""

    name: str
    fn: Callable
    args: tuple


SITUATIONS: list[Situation] = []


def situation(*args: Any) -> Callable[[Callable], Callable]:
    """Enters a function into the list, under its name."""

    def enter(fn: Callable) -> Callable:
        SITUATIONS.append(Situation(fn.__name__.replace("_", " "), fn, args))
        return fn

    return enter


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@situation(f32(2048, 4096))
def top_logits(logits):
    return jax.lax.top_k(logits, 16)


@situation(f32(2048, 1024))
def nucleus_sampling(logits):
    """Sorted probabilities, cut where their sum is large enough."""
    ordered = jnp.sort(jax.nn.softmax(logits), axis=-1)[:, ::-1]
    kept = jnp.cumsum(ordered, axis=-1) < 0.9
    return jnp.where(kept, ordered, 0.0)


@situation(f32(1024, 128), f32(8, 128, 256), i32(8))
def ragged_experts(tokens, weights, counts):
    return jax.lax.ragged_dot(tokens, weights, counts)


@situation(f32(1024, 1024))
def gamma_samples(shape):
    return jax.random.gamma(jax.random.key(0), shape)


@situation(f32(256, 256))
def poisson_samples(rate):
    return jax.random.poisson(jax.random.key(0), rate)


@situation(f32(256, 64, 64))
def whitening(batch):
    values, vectors = jnp.linalg.eigh(batch @ batch.mT + jnp.eye(64))
    return vectors * jax.lax.rsqrt(values)[:, None, :] @ vectors.mT


@situation(f32(256, 64, 64), f32(256, 64))
def batched_solve(matrices, right):
    return jnp.linalg.solve(matrices + 64 * jnp.eye(64), right[..., None])


@situation(f32(512, 64, 64))
def singular_values(batch):
    return jnp.linalg.svd(batch)[0]


@situation(f32(64, 256, 256))
def spectral_filter(images):
    spectrum = jnp.fft.rfft2(images)
    return jnp.fft.irfft2(spectrum * jnp.exp(-jnp.abs(spectrum)))


@situation(f32(64, 32, 32, 128), f32(3, 3, 16, 128))
def grouped_convolution(images, kernel):
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8
    )


@situation(f32(64, 32, 32, 128), f32(3, 3, 1, 128))
def depthwise_convolution(images, kernel):
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=128
    )


@situation(bf16(64, 1024), jax.ShapeDtypeStruct((1024, 4096), jnp.int8), bf16(4096))
def weights_of_int8(x, weights, scales):
    return x @ (weights.astype(jnp.bfloat16) * scales)


@situation(bf16(64, 1024), jax.ShapeDtypeStruct((1024, 4096), jnp.float8_e4m3fn), bf16(4096))
def weights_of_fp8(x, weights, scales):
    return x @ (weights.astype(jnp.bfloat16) * scales)


@situation(f32(64, 512), f32(512, 512))
def conjugate_gradients(right, matrix):
    system = matrix @ matrix.T + 512 * jnp.eye(512)
    solve = jax.vmap(lambda b: jax.scipy.sparse.linalg.cg(lambda x: system @ x, b, maxiter=20)[0])
    return solve(right)


@situation(f32(1024, 1024), f32(1024, 1024))
def newton_schulz(gradient, momentum):
    """Five turns of Muon's orthogonalisation, unrolled."""
    momentum = 0.95 * momentum + gradient
    x = momentum / (jnp.linalg.norm(momentum) + 1e-7)
    for _ in range(5):
        product = x @ x.T
        x = 3.4445 * x + (-4.775 * product + 2.0315 * product @ product) @ x
    return x, momentum


@situation(f32(2048, 1024), f32(2048, 1024), f32(2048, 1024))
def lion_with_average(weights, momentum, average):
    gradient = jnp.sin(weights)
    update = jnp.sign(0.9 * momentum + 0.1 * gradient)
    weights = weights - 1e-3 * (update + 0.1 * weights)
    return weights, 0.99 * momentum + 0.01 * gradient, 0.999 * average + 0.001 * weights


@situation(f32(4096, 256), f32(256, 1024), f32(1024, 256))
def residual_mlp(x, up, down):
    return jax.value_and_grad(lambda up: ((x + jax.nn.gelu(x @ up) @ down) ** 2).mean())(up)


@situation(f32(32, 8, 256, 64), f32(32, 8, 256, 64), f32(32, 8, 256, 64))
def attention(queries, keys, values):
    scores = jax.nn.softmax(queries @ keys.mT / 8, axis=-1)
    return scores @ values


@situation(f32(4096, 128), i32(16384), i32(16384))
def graph_messages(nodes, senders, receivers):
    return jax.ops.segment_sum(nodes[senders], receivers, 4096)


@situation(f32(4096, 256))
def running_statistics(series):
    return jax.lax.associative_scan(lambda a, b: 0.9 * a + b, series, axis=1)


@situation(f32(64, 128))
def fixed_point(x):
    """A loop that ends when every row has settled."""
    return jax.vmap(lambda row: jax.lax.while_loop(lambda c: jnp.abs(c).max() > 1e-3, lambda c: jnp.sin(c) * 0.5, row))(
        x
    )


@situation(f32(1024, 512), i32(1024))
def dropout_cross_entropy(logits, labels):
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, logits.shape)
    return -jnp.take_along_axis(jax.nn.log_softmax(jnp.where(kept, logits, 0.0)), labels[:, None], 1).mean()


@situation(f32(512, 512), f32(512, 512), f32(64, 512))
def recurrence(w, u, x):
    def turn(state, _):
        state = jnp.tanh(state @ w + x @ u)
        return state, state.mean()

    return jax.lax.scan(turn, x, None, length=16)


@situation(f32(1024, 1024))
def quantiles(x):
    return jnp.quantile(x, jnp.array([0.1, 0.5, 0.9]), axis=1)


@situation(f32(2048, 256), i32(2048))
def tokens_of_experts(tokens, experts):
    order = jnp.argsort(experts)
    return tokens[order]
