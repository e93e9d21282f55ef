"""Keys of random numbers that a step in microbatches makes."""

import jax
import jax.numpy as jnp
import pytest
from equality import assert_equal
from jax import lax
from test_microbatches import BATCH, WEIGHTS, in_parts, layers


def layers_with_keys(weights, keys, batch):
    """Layers that each hand on the key of the next step, as flax's dropout in a scanned stack does."""

    def loss(weights):
        def layer(x, key):
            now, then = jax.random.split(key)
            return x + jnp.where(jax.random.bernoulli(now, 0.8, x.shape), layers(weights, x), 0), then

        x, then = lax.scan(layer, batch["x"], keys)
        return jnp.mean((x - batch["y"]) ** 2), then

    (value, then), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), then, value


@pytest.mark.parametrize("kind, groups", [("threefry2x32", 1), ("rbg", 1), ("threefry2x32", 2)])
def test_keys_that_all_microbatches_make_alike_are_handed_on(kind, groups):
    """A sum of keys has no zero: this was a TypeError."""
    args = WEIGHTS, jax.random.split(jax.random.key(7, impl=kind), 3), BATCH
    expected, found = jax.jit(layers_with_keys)(*args), in_parts(layers_with_keys, args, 4, groups)
    *weights, keys, value = found
    assert (jax.random.key_data(keys) == jax.random.key_data(expected[1])).all()
    assert_equal([*weights, value], [*jax.tree.leaves(expected[0]), expected[2]])
