"""Steps whose reports are kept as text: the line numbers of this file stand in tests/golden."""

import jax
import jax.numpy as jnp


def mlp(params, batch):
    """One step of SGD with momentum on two layers."""

    def loss_of(weights):
        hidden = jax.nn.relu(batch["x"] @ weights["up"] + weights["bias"])
        return jnp.mean((hidden @ weights["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params["weights"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, params["momentum"], gradients)
    weights = jax.tree.map(lambda w, m: w - 0.1 * m, params["weights"], momentum)
    return {"weights": weights, "momentum": momentum}, loss
