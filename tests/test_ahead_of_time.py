"""Steps compiled ahead of time refuse other arguments by name; they, decorated functions and plans can be copied."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import autoshard

STATE = {"w": np.full((16, 8), 0.5, np.float32)}
BATCH = {"x": np.linspace(-1, 1, 32 * 16, dtype=np.float32).reshape(32, 16)}


def mesh_of():
    return jax.make_mesh((4, 2), ("data", "model"))


def step(state, batch, turns=2):
    made = batch["x"] @ state["w"]
    return {"w": state["w"] * turns - 0.1 * batch["x"].T @ made}, made.mean()


@pytest.fixture(scope="module")
def decorated():
    return autoshard.autoshard(step, mesh=mesh_of(), static_argnames="turns")


@pytest.fixture(scope="module")
def compiled(decorated):
    return decorated.lower(STATE, BATCH).compile()


def x(shape, dtype=np.float32):
    return {"x": np.ones(shape, dtype)}


OTHERS = {
    "shape": ((STATE, x((32, 17))), {}, r"batch/x is float32\[32, 17\], and step was compiled for float32\[32, 16\]"),
    "dtype": ((STATE, x((32, 16), np.int32)), {}, r"batch/x is int32\[32, 16\], and"),
    "a text": ((STATE, {"x": "text"}), {}, "leaves that are no arrays are static.\nGiven: 'text'\nLowered: none"),
    "nothing": ((STATE, {"x": None}), {}, "another structure.\nGiven: .*None"),
    "static": ((STATE, BATCH), {"turns": 2}, "another structure(.|\n)*Static arguments are left out here"),
    "no numbers": ((STATE, {"x": jax.ShapeDtypeStruct((32, 16), np.float32)}), {}, "has no numbers to run with"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_arguments_are_named(compiled, case):
    args, kwargs, text = OTHERS[case]
    with pytest.raises(autoshard.ArgumentError, match=text):
        compiled(*args, **kwargs)


def test_a_dtype_that_jax_makes_the_same_is_taken(compiled):
    np.testing.assert_allclose(compiled(STATE, x((32, 16), np.float64))[1], 8.0, rtol=1e-6)


def test_a_padded_step_takes_the_batch_as_it_is():
    batch = {"x": BATCH["x"][:13]}
    padded = autoshard.autoshard(step, mesh=mesh_of(), pad="batch", static_argnames="turns")
    compiled = padded.lower(STATE, batch, turns=3).compile()
    for got, want in zip(*map(jax.tree.leaves, (compiled(STATE, batch), step(STATE, batch, 3))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    with pytest.raises(autoshard.ArgumentError, match=r"batch/x is float32\[16, 16\], .* for float32\[13, 16\]"):
        compiled(STATE, x((16, 16)))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_what_never_changes_is_its_own_copy(decorated, compiled, copied):
    copies = compiled, decorated.lower(STATE, BATCH), decorated, decorated.plan(STATE, BATCH)
    again, lowered, function, plan = map(copied, copies)
    for run in (again, lowered.compile(), function):
        np.testing.assert_allclose(run(STATE, BATCH)[1], step(STATE, BATCH)[1], atol=1e-6)
    assert plan is copies[3]


def test_a_pickled_step_is_planned_anew():
    decorated = autoshard.autoshard(step, mesh=AbstractMesh((4, 2), ("data", "model")), topology="v5e:2x4", pad="batch")
    planned = decorated.plan(STATE, BATCH)
    again = pickle.loads(pickle.dumps(decorated))
    assert type(again) is type(decorated) and again.plan(STATE, BATCH).dumps() == planned.dumps()


def test_a_copied_trainer_steps_by_itself():
    class Trainer:
        def __init__(self):
            self.rate = 2.0
            self.step = autoshard.autoshard(self._step, mesh=mesh_of())

        def _step(self, x):
            return jnp.sum(x) * self.rate

    first = Trainer()
    assert first.step(np.ones(8, np.float32)) == 16.0
    second = copy.deepcopy(first)
    second.rate = 3.0
    assert (second.step(np.ones(8, np.float32)), first.step(np.ones(8, np.float32))) == (24.0, 16.0)


def test_a_pickled_plan_is_what_its_file_says():
    plan = autoshard.plan(step, STATE, BATCH, mesh=mesh_of(), fixed={"state/w": P("model")})
    loaded = pickle.loads(pickle.dumps(plan))
    assert loaded.dumps() == plan.dumps()
    assert loaded.on(mesh_of()).in_shardings == plan.in_shardings
