import jax
import jax.numpy as jnp


def train_step(weights, batch):
    """One step of gradient descent on two layers."""

    def loss_of(weights):
        hidden = jax.nn.relu(batch["x"] @ weights["up"])
        return jnp.mean((hidden @ weights["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients), loss


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


weights = {"up": float32(256, 1024), "down": float32(1024, 256)}
batch = {"x": float32(512, 256), "y": float32(512, 256)}
