"""Keys of a random generator, one per layer, go to the stages of their layers as other stacks do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pipeline_steps import numbers

from autoshard import autoshard
from autoshard.stages.running import transfers, views

LAYERS, WIDTH, ROWS = 4, 8, 6


def mesh_of(first, count):
    return jax.make_mesh((count,), ("stage",), (AxisType.Auto,), devices=jax.devices()[first : first + count])


def step(weights, keys, x, y):
    """Dropout by a key per layer; the next step's keys are made of this step's."""

    def layer(h, own):
        weight, key = own
        return jnp.tanh(h @ (weight * jax.random.bernoulli(key, 0.7, weight.shape))), None

    def loss(weights):
        return jnp.mean((lax.scan(layer, x, (weights, keys))[0] - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys), value


def trained(fn, steps=2):
    weights, keys = numbers(1, LAYERS, WIDTH, WIDTH), jax.random.split(jax.random.key(0), LAYERS)
    batch = numbers(2, ROWS, WIDTH), numbers(3, ROWS, WIDTH)
    found = []
    for _ in range(steps):
        weights, keys, value = fn(weights, keys, *batch)
        found.append(jax.tree.map(np.asarray, (weights, jax.random.key_data(keys), value)))
    return found


def test_a_step_with_a_key_per_layer_trains_as_on_one_device():
    pipeline = {"stages": 2, "microbatches": 2}
    assert_equal(trained(autoshard(step, mesh=mesh_of(0, 2), pipeline=pipeline)), trained(jax.jit(step)))


@pytest.mark.parametrize("part_of", [views.part_of, transfers.part_of], ids=["one process", "several"])
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_a_part_of_a_stack_of_keys(part_of, is_split):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    if is_split:
        keys = jax.device_put(keys, NamedSharding(mesh_of(0, 2), PartitionSpec("stage")))
    part = part_of(keys, 2, 4, NamedSharding(mesh_of(1, 1), PartitionSpec()))
    assert part.devices() == {jax.devices()[1]}
    np.testing.assert_array_equal(jax.random.key_data(part), jax.random.key_data(keys)[2:4])
