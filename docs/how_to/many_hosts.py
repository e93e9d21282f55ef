"""Trains two layers on the devices of all processes, each of which runs this file."""

import jax
import jax.numpy as jnp
import numpy as np

import autoshard

mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "model"))


@autoshard.autoshard(mesh=mesh, donate_argnums=0)
def train_step(weights, batch):
    def loss_of(weights):
        return jnp.mean((jax.nn.relu(batch["x"] @ weights["up"]) @ weights["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients), loss


def init(key):
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (64, 128)) / 8, "down": jax.random.normal(down, (128, 64)) / 11}


def load(step):
    """What a data loader gives: the same whole batch on every process."""
    x = np.random.default_rng(step).standard_normal((32, 64), np.float32)
    return {"x": x, "y": np.tanh(x)}


key = jax.random.key(0)
plan = train_step.plan(jax.eval_shape(init, key), load(0))  # the same on every process
if jax.process_index() == 0:
    print(plan)

weights = plan.init(init, key)  # born on the devices that it belongs on
losses = []
for step in range(3):
    weights, loss = train_step(weights, plan.shard_batch(load(step)))
    losses.append(float(loss))
assert losses[-1] < losses[0]
