"""Small train steps of many forms, each with its arguments: what pipelines are tested on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

ROWS, WIDTH, LAYERS, VOCABULARY, LENGTH = 8, 8, 4, 16, 4


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 3


def weights_of_layer(seed):
    return {
        "up": numbers(seed, WIDTH, 2 * WIDTH),
        "bias": numbers(seed + 1, 2 * WIDTH),
        "down": numbers(seed + 2, 2 * WIDTH, WIDTH),
    }


def layer(weights, x):
    scaled = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(scaled @ weights["up"] + weights["bias"]) @ weights["down"]


def trained(loss, weights, batch, *, optimizer=None, key=None):
    """A step of an optimizer on a loss of (weights, batch, key), and its arguments."""
    optimizer = optimizer or optax.adamw(1e-2, eps=1e-4)

    def step(weights, state, batch, key):
        value, gradients = jax.value_and_grad(loss)(weights, batch, key)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    return step, (weights, optimizer.init(weights), batch, jax.random.key(3) if key is None else key)


def tokens():
    made = np.random.default_rng(9).integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    return {"inputs": made[:, :-1], "targets": made[:, 1:]}


def language_model_weights(stacked):
    layers = [weights_of_layer(10 * i) for i in range(LAYERS)]
    if stacked:
        layers = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    return {"embedding": numbers(1, VOCABULARY, WIDTH), "layers": layers, "head": numbers(2, WIDTH, VOCABULARY)}


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def unrolled():
    def loss(weights, batch, key):
        x = weights["embedding"][batch["inputs"]]
        for one in weights["layers"]:
            x = layer(one, x)
        return cross_entropy(x @ weights["head"], batch["targets"])

    return trained(loss, language_model_weights(False), tokens())


def scanned(*, remat=False, optimizer=None):
    def loss(weights, batch, key):
        body = jax.checkpoint(layer) if remat else layer
        x = weights["embedding"][batch["inputs"]]
        x, _ = lax.scan(lambda x, one: (body(one, x), None), x, weights["layers"])
        return cross_entropy(x @ weights["head"], batch["targets"])

    return trained(loss, language_model_weights(True), tokens(), optimizer=optimizer)


def scanned_and_clipped():
    return scanned(remat=True, optimizer=optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4)))


def tied():
    """The embedding is read by the first stage and by the last; gradients are clipped by their norm."""

    def loss(weights, batch, key):
        x = weights["embedding"][batch["inputs"]]
        for one in weights["layers"]:
            x = layer(one, x)
        return cross_entropy(x @ weights["embedding"].T, batch["targets"])

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    weights = language_model_weights(False)
    del weights["head"]
    return trained(loss, weights, tokens(), optimizer=optimizer)


def masked_with_dropout():
    """A mean over tokens that count, whose number every microbatch needs; one random mask for all rows."""

    def loss(weights, batch, key):
        x = weights["embedding"][batch["inputs"]]
        x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0)
        for one in weights["layers"]:
            x = layer(one, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ weights["head"], batch["targets"])
        counts = (batch["targets"] > 3).astype(jnp.float32)
        return jnp.sum(losses * counts) / jnp.sum(counts)

    return trained(loss, language_model_weights(False), tokens())


def two_towers():
    """Branches: two towers that meet in the last layers, as encoder and decoder do."""

    def loss(weights, batch, key):
        one = functools.reduce(lambda x, each: layer(each, x), weights["left"], batch["x"])
        other = functools.reduce(lambda x, each: layer(each, x), weights["right"], batch["y"])
        return jnp.mean((layer(weights["joint"], one * jnp.tanh(other)) - batch["y"]) ** 2)

    weights = {
        "left": [weights_of_layer(i) for i in (0, 10)],
        "right": [weights_of_layer(i) for i in (20, 30)],
        "joint": weights_of_layer(40),
    }
    return trained(loss, weights, {"x": numbers(50, ROWS, WIDTH), "y": numbers(51, ROWS, WIDTH)})


def skips():
    """As in a U-Net, early results are read late."""

    def loss(weights, batch, key):
        x, kept = batch["x"], []
        for one in weights["down"]:
            x = layer(one, x)
            kept.append(x)
        for one in weights["up"]:
            x = layer(one, x + kept.pop())
        return jnp.mean((x - batch["y"]) ** 2)

    weights = {"down": [weights_of_layer(i) for i in (0, 10)], "up": [weights_of_layer(i) for i in (20, 30)]}
    return trained(loss, weights, {"x": numbers(50, ROWS, WIDTH), "y": numbers(51, ROWS, WIDTH)})


def with_rows():
    """A step that also returns a number per row, and the largest."""

    def step(weights, batch):
        def loss(weights):
            x = functools.reduce(lambda x, one: layer(one, x), weights, batch["x"])
            losses = jnp.mean((x - batch["y"]) ** 2, axis=-1)
            return losses.mean(), (losses, lax.stop_gradient(losses).max())

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value, rest

    weights = [weights_of_layer(i) for i in (0, 10, 20)]
    return step, (weights, {"x": numbers(50, ROWS, WIDTH), "y": numbers(51, ROWS, WIDTH)})


STEPS = {
    "masked with dropout": masked_with_dropout,
    "scanned": scanned,
    "scanned and clipped": scanned_and_clipped,
    "skips": skips,
    "tied": tied,
    "two towers": two_towers,
    "unrolled": unrolled,
    "with rows": with_rows,
}
