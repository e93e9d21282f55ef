"""rewrites= with stages that are asked for: the step is rewritten before it is cut, and plans in files know how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import ArgumentError, MemoryLimitError, autoshard
from autoshard.decorated import ShardedFunction
from autoshard.stage_planning import choosing, staged_function

LAWS = ["product_chain"]


def step(weights, x):
    def loss(w):
        x_ = jnp.tanh(x @ (w["a"] @ w["b"]))
        return jnp.mean(jnp.tanh(x_ @ (w["c"] @ w["d"])) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


@pytest.fixture
def how(monkeypatch):
    """Two stages on a machine whose tasks are dispatched in no time, so that what they compute counts."""
    for module in (choosing, staged_function):
        monkeypatch.setattr(module, "DISPATCH_SECONDS", 0.0)
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    return {"mesh": mesh, "topology": "v5e:2", "pipeline": {"stages": 2, "microbatches": 2}}


@pytest.mark.parametrize("pipeline", ["auto", {"stages": 2, "microbatches": 2}], ids=["searched", "asked for"])
def test_stages_of_the_rewritten_step_are_faster_and_compute_the_same(how, pipeline, tmp_path, monkeypatch):
    def nothing_fits(*args, **kwargs):
        raise MemoryLimitError("without stages", budget=0, needed=0)

    monkeypatch.setattr(ShardedFunction, "plan", nothing_fits)  # so that a search finds stages
    how = how | {"pipeline": pipeline}
    shapes = {"a": (256, 8), "b": (8, 256), "c": (256, 8), "d": (8, 256)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    weights = {name: jax.random.normal(keys[name], shape) / 16 for name, shape in shapes.items()}
    args = weights, jax.random.normal(jax.random.key(1), (16, 64, 256))
    train = autoshard(step, **how, rewrites=LAWS)
    made, before = train.plan(*args), autoshard(step, **how).plan(*args)
    assert made.predicted.step_seconds < before.predicted.step_seconds
    assert made.rewrites and not before.rewrites
    assert "rewrites: product_chain at test_rewrites_in_stages.py:" in str(made)
    found, expected = train(*args), jax.jit(step)(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    made.save(tmp_path / "plan.json")
    read = autoshard(step, mesh=how["mesh"], topology="v5e:2", plan=tmp_path / "plan.json").plan(*args)
    assert read.dumps() == made.dumps()
    assert made.what_if(memory="1GiB").rewrites == made.rewrites


def test_stages_of_one_program_refuse_rewrites(how):
    with pytest.raises(ArgumentError, match=r"pipeline= cannot be combined with rewrites=.*\n.*leave backend= out"):
        autoshard(step, **how | {"pipeline": {"stages": 2, "backend": "one_jit"}}, rewrites=LAWS)
