"""Random train steps for hypothesis: stacked blocks, looped over or not, rematerialised or not, and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax


@dataclass(frozen=True)
class TrainStep:
    """A step `(state, batch) -> (state, loss)`, and numbers to start with."""

    text: str
    run: Callable
    state: Callable[[np.random.Generator], Any]
    batch: Callable[[np.random.Generator], Any]

    def __call__(self, state: Any, batch: Any) -> Any:
        return self.run(state, batch)

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Sizes:
    """Of the batch, the time, the features, and what is inside a block: hidden features, heads or experts."""

    batch: int
    time: int
    features: int
    inner: int
    layers: int
    vocabulary: int


@st.composite
def steps(draw, sizes: Sequence[int]) -> TrainStep:
    """Steps of a few blocks whose dims have such sizes."""
    size = st.sampled_from(sizes)
    of = Sizes(draw(size), draw(size), draw(size), draw(size), draw(st.integers(1, 3)), draw(size))
    kinds = draw(st.lists(st.sampled_from(sorted(_BLOCKS)), min_size=1, max_size=2))
    loop, remat = draw(st.booleans()), draw(st.sampled_from(["none", "all", "dots"]))
    optimizer = draw(st.sampled_from(sorted(_OPTIMIZERS)))
    micro = draw(st.sampled_from([n for n in range(1, of.batch + 1) if of.batch % n == 0]))
    tied, lookup = draw(st.booleans()), draw(st.sampled_from(["take", "one hot"]))

    def layer(x, weights):
        for i, kind in enumerate(kinds):
            x = x + _BLOCKS[kind][1](_normalised(x) * weights[f"scale {i}"], weights[f"{i}"])
        return x

    if remat != "none":
        policy = jax.checkpoint_policies.dots_saveable if remat == "dots" else None
        layer = jax.checkpoint(layer, policy=policy)

    def loss(params, tokens, targets):
        table = params["table"]
        x = table[tokens] if lookup == "take" else jax.nn.one_hot(tokens, of.vocabulary) @ table
        if loop:
            x, _ = lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
        else:
            for i in range(of.layers):
                x = layer(x, jax.tree.map(lambda stack, i=i: stack[i], params["layers"]))
        logits = _normalised(x) @ (table.T if tied else params["head"])
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
        return -jnp.mean(found)

    def gradient(params, batch):
        if micro == 1:
            return jax.value_and_grad(loss)(params, *batch)
        turns = jax.tree.map(lambda x: x.reshape(micro, -1, *x.shape[1:]), batch)

        def add(total, turn):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *turn)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = lax.scan(add, zero, turns)
        return jax.tree.map(lambda x: x / micro, total)

    def run(state, batch):
        value, gradients = gradient(state["params"], batch)
        return _OPTIMIZERS[optimizer][1](state, gradients), value

    def state(rng):
        def normal(*shape):
            return jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32)

        layers = {f"{i}": _BLOCKS[kind][0](partial(normal, of.layers), of) for i, kind in enumerate(kinds)}
        scales = {f"scale {i}": 1 + normal(of.layers, of.features) for i in range(len(kinds))}
        params = {"table": normal(of.vocabulary, of.features), "layers": layers | scales}
        if not tied:
            params["head"] = normal(of.features, of.vocabulary)
        return {"params": params, "moments": [jax.tree.map(jnp.zeros_like, params)] * _OPTIMIZERS[optimizer][0]}

    def batch(rng):
        return tuple(jnp.asarray(rng.integers(0, of.vocabulary, (of.batch, of.time)), jnp.int32) for _ in range(2))

    text = f"{of}, {' and '.join(kinds)}{', scanned' * loop}, remat {remat}, {optimizer}, {micro} microbatches, "
    return TrainStep(f"{text}{'tied, ' * tied}{lookup}", run, state, batch)


def _normalised(x):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-3)


# Blocks: what makes the weights of all layers, and what they do with [batch, time, features].


def _mlp(normal, of):
    return {"in": normal(of.features, of.inner), "bias": normal(of.inner), "out": normal(of.inner, of.features)}


def _run_mlp(x, w):
    return jnp.tanh(x @ w["in"] + w["bias"]) @ w["out"]


def _attention(normal, of):
    weights = {name: normal(of.features, of.inner, 4) for name in ("q", "k", "v")}
    return weights | {"out": normal(of.inner, 4, of.features)}


def _run_attention(x, w):
    q, k, v = (jnp.einsum("btd,dhe->bhte", x, w[name]) for name in ("q", "k", "v"))
    scores = jnp.einsum("bhte,bhse->bhts", q, k)
    mask = lax.broadcasted_iota(jnp.int32, scores.shape, 2) >= lax.broadcasted_iota(jnp.int32, scores.shape, 3)
    return jnp.einsum("bhts,bhse,hed->btd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v, w["out"])


def _experts(normal, of):
    return {
        "gate": normal(of.features, of.inner),
        "in": normal(of.inner, of.features, 6),
        "out": normal(of.inner, 6, of.features),
    }


def _run_experts(x, w):
    hidden = jnp.tanh(jnp.einsum("btd,edf->betf", x, w["in"]))
    return jnp.einsum("bte,betf,efd->btd", jax.nn.softmax(x @ w["gate"]), hidden, w["out"])


def _recurrent(normal, of):
    weights = {"in": normal(of.features, of.inner), "again": normal(of.inner, of.inner)}
    return weights | {"out": normal(of.inner, of.features)}


def _run_recurrent(x, w):
    def turn(hidden, x):
        hidden = jnp.tanh(x @ w["in"] + hidden @ w["again"])
        return hidden, hidden @ w["out"]

    start = jnp.zeros((x.shape[0], w["in"].shape[1]))
    return jnp.swapaxes(lax.scan(turn, start, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def _convolution(normal, of):
    return {"kernel": normal(3, of.features, of.features)}


def _run_convolution(x, w):
    return lax.conv_general_dilated(x, w["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


_BLOCKS = {
    "mlp": (_mlp, _run_mlp),
    "attention": (_attention, _run_attention),
    "experts": (_experts, _run_experts),
    "recurrence": (_recurrent, _run_recurrent),
    "convolution": (_convolution, _run_convolution),
}


# Optimizers: how many moments, and what makes the next state of one and gradients.


def _sgd(state, gradients):
    return state | {"params": jax.tree.map(lambda p, g: p - 0.05 * g, state["params"], gradients)}


def _momentum(state, gradients):
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"][0], gradients)
    return {"params": jax.tree.map(lambda p, m: p - 0.05 * m, state["params"], moments), "moments": [moments]}


def _clipped(state, gradients):
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    return _momentum(state, jax.tree.map(lambda g: g * jnp.minimum(1.0, 1 / norm), gradients))


def _adam(state, gradients):
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["moments"][0], gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["moments"][1], gradients)
    params = jax.tree.map(lambda p, m, v: p - 0.01 * m / (jnp.sqrt(v) + 1e-3), state["params"], first, second)
    return {"params": params, "moments": [first, second]}


_OPTIMIZERS = {"sgd": (0, _sgd), "momentum": (1, _momentum), "clipped": (1, _clipped), "adam": (2, _adam)}
