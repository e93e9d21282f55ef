"""Graph network: messages along edges, summed at their receivers by segment; plain pytrees, Adam."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .model import Model, named, optax_step


def perceptron(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """One hidden layer."""
    up, bias, down = (params[name].astype(x.dtype) for name in ("up", "bias", "down"))
    return jax.nn.relu(x @ up + bias) @ down


def predict(params: dict, batch: dict[str, jax.Array], dtype: Any) -> jax.Array:
    """A vector per node, after one round of messages per entry of `params["rounds"]`; it computes in `dtype`."""
    nodes, edges = (batch[name].astype(dtype) @ params[name].astype(dtype) for name in ("nodes", "edges"))
    senders, receivers = batch["senders"], batch["receivers"]
    nodes, edges = named(nodes, "nodes", None), named(edges, "edges", None)
    for weights in params["rounds"]:
        ends = named(jnp.concatenate([nodes[senders], nodes[receivers], edges], axis=-1), "edges", None)
        messages = perceptron(weights["edge"], ends)
        received = jax.ops.segment_sum(messages, receivers, num_segments=len(nodes))
        nodes = named(nodes + perceptron(weights["node"], jnp.concatenate([nodes, received], axis=-1)), "nodes", None)
    return nodes.astype(jnp.float32) @ params["out"]


def make(
    nodes: int = 64,
    edges: int = 256,
    features: int = 8,
    width: int = 32,
    rounds: int = 3,
    dtype: Any = jnp.float32,
) -> Model:
    """Predicts for each node the sum over its incoming edges of a fixed map of edge and sender; computes in `dtype`."""
    keys = iter(jax.random.split(jax.random.key(0), 3 + 4 * rounds))

    def matrix(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    def weights(inputs):
        return {"up": matrix(inputs, width), "bias": jnp.zeros(width), "down": matrix(width, width)}

    params = {
        "nodes": matrix(features, width),
        "edges": matrix(features, width),
        "rounds": [{"edge": weights(3 * width), "node": weights(2 * width)} for _ in range(rounds)],
        "out": matrix(width, features),
    }
    optimizer = optax.adam(1e-3, eps=1e-6)
    teacher = np.random.default_rng(0).normal(size=(features, features)) * features**-0.5

    def loss_of(params, batch):
        return jnp.mean((predict(params, batch, dtype) - batch["targets"]) ** 2)

    def batches(i):
        rng = np.random.default_rng(i)
        senders, receivers = rng.integers(nodes, size=(2, edges)).astype(np.int32)
        of_nodes = rng.normal(size=(nodes, features)).astype(np.float32)
        of_edges = rng.normal(size=(edges, features)).astype(np.float32)
        targets = np.zeros((nodes, features))
        np.add.at(targets, receivers, np.tanh((of_nodes[senders] + of_edges) @ teacher))
        return {
            "nodes": of_nodes,
            "edges": of_edges,
            "senders": senders,
            "receivers": receivers,
            "targets": targets.astype(np.float32),
        }

    return Model("gnn", optax_step(loss_of, optimizer), (params, optimizer.init(params)), batches)
