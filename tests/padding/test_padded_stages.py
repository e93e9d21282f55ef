"""`pad="batch"` with `pipeline=`: a batch that devices do not divide runs in stages, with the results of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from jax.sharding import AxisType

from autoshard import ArgumentError, Plan, StageError, autoshard
from autoshard.padding import padded_function
from autoshard.stage_planning.pipeline_plan import PipelinePlan

LAYERS, WIDTH = 4, 16
ASKED = {"stages": 2, "microbatches": 3, "schedule": "1f1b"}
MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def train(weights, batch):
    def loss(weights):
        hidden = batch["x"]
        for w in weights:
            hidden = jnp.tanh(hidden @ w)
        return jnp.mean((hidden - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


def arguments(rows):
    random = np.random.default_rng(rows)
    weights = [random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for _ in range(LAYERS)]
    return weights, {name: random.normal(size=(rows, WIDTH)).astype(np.float32) for name in "xy"}


@pytest.fixture(scope="module")
def asked():
    return autoshard(train, mesh=MESH, pipeline=ASKED, pad="batch")


@pytest.mark.parametrize("rows", [24, 13])
def test_stages_compute_what_one_device_does(asked, rows):
    """Of 13 rows each of three microbatches has 5, and gets 8. Nothing is added to 24."""
    args = arguments(rows)
    assert_equal(asked(*args), jax.jit(train)(*args))
    plan = asked.plan(*args)
    assert isinstance(plan, PipelinePlan) and len(plan.stages) == 2
    assert [one.shape[0] for one in plan.arguments[-2:]] == [24, 24]
    assert any(one.startswith("pad='batch': the batch of 13 rows has 24") for one in plan.warnings) == (rows == 13)
    assert len(asked.pipeline(*args).layers) == 2
    with pytest.raises(StageError, match="several programs"):
        asked.lower(*args)


def test_a_plan_from_a_file_runs_the_padded_batch(asked, monkeypatch):
    args = arguments(13)
    loaded = Plan.loads(asked.plan(*args).dumps(), MESH)
    monkeypatch.setattr("autoshard.stages.pipelined_function.PipelinedFunction._planned_stages", None)
    assert_equal(autoshard(train, mesh=MESH, plan=loaded, pad="batch")(*args), jax.jit(train)(*args))


def test_the_best_stages_are_found_for_the_padded_batch():
    args = arguments(7)
    step = autoshard(train, mesh=MESH, pipeline="auto", pad="batch", time_limit=5)
    assert_equal(step(*args), jax.jit(train)(*args))
    plan = step.plan(*args)
    assert plan.arguments[-1].shape[0] == 8 and plan.warnings[-1].startswith("pad='batch': the batch of 7 rows has 8")
    if not isinstance(plan, PipelinePlan):
        assert step.lower(*args).compile() is not None


@pytest.mark.parametrize("said", [{"pad": "auto"}, {"pipeline": ASKED | {"backend": "one_jit"}}], ids=str)
def test_what_is_not_padded_in_stages_is_refused(said):
    with pytest.raises(ArgumentError, match="cannot be combined with pad="):
        autoshard(train, mesh=MESH, **{"pad": "batch", "pipeline": ASKED} | said)


def test_rows_that_count_are_caught(monkeypatch):
    """Without the rewriting the mean is over added rows, too."""
    monkeypatch.setattr(padded_function, "_run", lambda step, padded, batch, *arrays: padded_run(padded, *arrays))
    args = arguments(13)
    found = autoshard(train, mesh=MESH, pipeline="auto", pad="batch", time_limit=5)(*args)
    with pytest.raises(AssertionError):
        assert_equal(found, jax.jit(train)(*args))


def padded_run(padded, *arrays):
    return jax.core.eval_jaxpr(padded.large.jaxpr, padded.large.consts, *arrays)
