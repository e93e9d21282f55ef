"""The models of `models/` are what other tests take them for: float32, deterministic, learning, the same when split."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from models import MODELS, MORE_MODELS, gpt
from oracles import SMALL
from sweeps import some

CASES = {
    **{f"small {name}": make for name, make in SMALL.items()},
    **MODELS,
    **MORE_MODELS,
    "gpt scan": lambda: gpt.make(scan=True),
    "gpt remat": lambda: gpt.make(remat=True),
}
NAMES = some(CASES, "small cnn", "small gpt", "small lstm", "small tied", "mlp", "moe")


def run(model, steps, place=lambda batch: batch):
    """The losses of `steps` steps and the leaves of the state after them."""
    step, state, losses = jax.jit(model.step), model.state, []
    for i in range(steps):
        state, loss = step(state, place(model.batches(i)))
        losses.append(float(loss))
    assert jax.tree.structure(state) == jax.tree.structure(model.state)
    return losses, jax.tree.leaves(state)


@pytest.mark.parametrize("name", NAMES)
def test_same_in_every_process(name):
    first, second = (jax.tree.leaves((model.state, model.batches(3))) for model in (CASES[name](), CASES[name]()))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype in (np.float32, np.int32, np.uint32)


@pytest.mark.parametrize("name", some(CASES, "small gpt", "small tied", "mlp", "moe"))
def test_learns_and_does_not_mind_the_order_of_summation(name):
    """What a later test blames on a plan must not be the model's own noise."""
    model = CASES[name]()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("data"), PartitionSpec()))

    def place(batch):
        return {name: jax.device_put(x, split if x.ndim else whole) for name, x in batch.items()}

    losses, state = run(model, 5)
    split_losses, split_state = run(model, 5, place)
    assert losses[-1] < losses[0], losses
    np.testing.assert_allclose(split_losses, losses, rtol=1e-4)
    for leaf, expected, start in zip(split_state, state, jax.tree.leaves(model.state), strict=True):
        assert (leaf.shape, leaf.dtype) == (start.shape, start.dtype)
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)
