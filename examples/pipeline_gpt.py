"""Trains a small GPT in four stages of two devices each, on 8 CPU devices: `python examples/pipeline_gpt.py`.

The step is an ordinary one: no marks between stages, no loop over microbatches, no gradient function of its own.
"""

import argparse

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from autoshard import autoshard  # noqa: E402

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, ROWS = 8, 32, 4, 64, 16, 16


def weights(key):
    """The layers' weights are stacked: [LAYERS, ...]. Every stage gets the layers that it runs."""
    keys = jax.random.split(key, 6)

    def normal(key, *shape):
        return jax.random.normal(key, shape) * shape[-2] ** -0.5

    return {
        "embedding": jax.random.normal(keys[0], (VOCABULARY, WIDTH)) * 0.02,
        "layers": {
            "attention": normal(keys[1], LAYERS, WIDTH, 3 * WIDTH),
            "out": normal(keys[2], LAYERS, WIDTH, WIDTH),
            "up": normal(keys[3], LAYERS, WIDTH, 4 * WIDTH),
            "down": normal(keys[4], LAYERS, 4 * WIDTH, WIDTH),
        },
        "head": normal(keys[5], WIDTH, VOCABULARY),
    }


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def layer(x, weights):
    query, key, value = jnp.split(normalized(x) @ weights["attention"], 3, axis=-1)
    query, key, value = (y.reshape(*y.shape[:2], HEADS, -1) for y in (query, key, value))
    x = x + jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(normalized(x) @ weights["up"]) @ weights["down"], None


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def loss_of(weights, batch):
    x = weights["embedding"][batch["inputs"]]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, weights["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ weights["head"], batch["targets"]).mean()


def train_step(state, batch):
    weights, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
    updates, moments = optimizer.update(gradients, moments, weights)
    return (optax.apply_updates(weights, updates), moments), loss


def batches(steps):
    """Sequences that count up by 1, 2 or 3: their next token can be learnt."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        start, stride = rng.integers(VOCABULARY, size=(ROWS, 1)), rng.integers(1, 4, size=(ROWS, 1))
        tokens = ((start + stride * np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--schedule", default="1f1b", help="one of autoshard.pipeline.SCHEDULES")
    options = parser.parse_args()
    mesh = jax.make_mesh((4, 2), ("stage", "data"))
    pipeline = {"stages": 4, "microbatches": 8, "schedule": options.schedule}
    step = autoshard(train_step, mesh=mesh, pipeline=pipeline, donate_argnums=0)
    first = weights(jax.random.key(0))
    state = first, optimizer.init(first)
    for i, batch in enumerate(batches(options.steps)):
        if i == 0:
            print(step.pipeline(state, batch))
        state, loss = step(state, batch)
        if i % 10 == 0 or i == options.steps - 1:
            print(f"step {i:3}: loss {float(loss):.3f}", flush=True)
    print("layers/up lies", state[0]["layers"]["up"].sharding.spec)


if __name__ == "__main__":
    main()
