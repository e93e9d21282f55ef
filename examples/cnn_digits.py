"""A flax linen CNN with batch norm that learns scikit-learn's handwritten digits, split over all devices.

python examples/cnn_digits.py
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

from autoshard import autoshard

BATCH = 128
TEST = 360  # the last images are kept for the test


class CNN(nn.Module):
    """Two convolutions with batch norm and pooling, one dense layer."""

    @nn.compact
    def __call__(self, x, train):
        for features, pool in ((32, nn.avg_pool), (64, nn.max_pool)):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


class State(TrainState):
    """A TrainState that also carries batch norm's running statistics."""

    batch_stats: Any


def train_step(state, batch):
    """One step of SGD with momentum."""

    def loss_of(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, batch["images"], train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean(), updates["batch_stats"]

    (loss, batch_stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, batch_stats=batch_stats), loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 8)  # counts only where there is no accelerator
    mesh = jax.make_mesh((jax.device_count(),), ("devices",))

    digits = load_digits()
    images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:-TEST], order[-TEST:]

    model = CNN()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=True)
    state = State.create(apply_fn=model.apply, tx=optax.sgd(0.05, momentum=0.9), **variables)

    step = autoshard(train_step, mesh=mesh, donate_argnums=0)
    for i in range(options.steps):
        chosen = np.random.default_rng(i).choice(train, BATCH)
        batch = {"images": images[chosen], "labels": labels[chosen]}
        if i == 0:
            print(step.plan(state, batch))
        state, loss = step(state, batch)
        if (i + 1) % 20 == 0 or i + 1 == options.steps:
            print(f"step {i + 1:3}  loss {loss:.4f}")

    variables = {"params": state.params, "batch_stats": state.batch_stats}
    predicted = jnp.argmax(model.apply(variables, images[test], train=False), -1)
    print(f"Accuracy on {TEST} images it has not seen: {np.mean(predicted == labels[test]):.1%}")


if __name__ == "__main__":
    main()
