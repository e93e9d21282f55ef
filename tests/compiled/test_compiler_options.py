"""Options of XLA that `refine` chooses: the best by the compiled program is kept, saved, and handed to `jax.jit`."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import refine
from autoshard.plans import compiler_options
from autoshard.plans.compiler_options import SCHEDULING_OPTIONS, TRIED, options_for
from autoshard.plans.files import from_text, to_text

WEIGHTS, BATCH = jax.ShapeDtypeStruct((64, 64), np.float32), jax.ShapeDtypeStruct((32, 64), np.float32)
GOOD, BAD, UNKNOWN = "xla_cpu_enable_concurrency_optimized_scheduler", "xla_cpu_enable_fast_min_max", "xla_no_such"


def step(weights, batch):
    return jnp.tanh(batch @ weights)


@pytest.fixture
def options_of_cpu(monkeypatch):
    """Three groups for CPU, of which the first saves a tenth by what is told of compiled programs."""
    groups = ({GOOD: True}, {BAD: True}, {UNKNOWN: True})
    monkeypatch.setattr(refine, "TRIED", {"cpu": groups})
    monkeypatch.setattr(compiler_options, "TRIED", {"cpu": groups})
    real = refine.compiled_seconds

    def seconds(plan, options):
        real(plan, options)  # so that XLA takes or refuses the options
        factor = (0.9 if plan.compiler_options.get(GOOD) else 1.0) * (1.1 if plan.compiler_options.get(BAD) else 1.0)
        return plan.predicted.step_seconds * factor

    monkeypatch.setattr(refine, "compiled_seconds", seconds)


def planned(**options):
    mesh = jax.make_mesh((8,), ("data",))
    return autoshard.autoshard(step, mesh=mesh, refine=2, **options)


def test_what_saves_is_taken_and_runs(options_of_cpu):
    sharded = planned()
    plan = sharded.plan(WEIGHTS, BATCH)
    assert plan.compiler_options == {GOOD: True}
    assert any(GOOD in warning for warning in plan.warnings)
    weights, batch = jnp.ones(WEIGHTS.shape), jnp.ones(BATCH.shape)
    np.testing.assert_allclose(sharded(weights, batch), jax.jit(step)(weights, batch), rtol=1e-6)


def test_options_of_the_user_stay(options_of_cpu):
    plan = planned(compiler_options={GOOD: False}).plan(WEIGHTS, BATCH)
    assert plan.compiler_options == {}


def test_options_reach_xla(monkeypatch):
    monkeypatch.setattr(compiler_options, "TRIED", {"cpu": ({UNKNOWN: True},)})
    plan = autoshard.autoshard(step, mesh=jax.make_mesh((8,), ("data",))).plan(WEIGHTS, BATCH)
    with pytest.raises(jax.errors.JaxRuntimeError, match=UNKNOWN):
        refine._compiled_with(plan, {UNKNOWN: True}).lowering().compile()


def test_another_platform_has_none_of_them():
    chosen = dict(TRIED["gpu"][0])
    assert options_for("gpu", chosen) == chosen and options_for("cpu", chosen) == options_for("tpu", chosen) == {}


def test_without_refine_there_are_none():
    plan = autoshard.plan(step, WEIGHTS, BATCH, mesh=jax.make_mesh((8,), ("data",)))
    assert plan.compiler_options == {} and "compiler_options" not in from_text(plan.dumps())


def test_files_keep_known_options_and_refuse_others():
    mesh = jax.make_mesh((8,), ("data",))
    plan = autoshard.plan(step, WEIGHTS, BATCH, mesh=mesh)
    name = sorted(SCHEDULING_OPTIONS)[0]
    saved = refine._compiled_with(plan, {name: True}).dumps()
    assert autoshard.Plan.loads(saved, mesh).compiler_options == {name: True}
    content = from_text(saved)
    content.pop("digest", None)
    content["compiler_options"] = {"xla_allow_excess_precision": True}
    with pytest.raises(autoshard.PlanError, match="xla_allow_excess_precision"):
        autoshard.Plan.loads(to_text(json.loads(json.dumps(content))), mesh)


def test_a_program_that_does_not_fit_is_not_taken(options_of_cpu, monkeypatch):
    told = refine.compiled_seconds
    monkeypatch.setattr(
        refine, "compiled_seconds", lambda plan, options: math.inf if plan.compiler_options else told(plan, options)
    )
    assert planned().plan(WEIGHTS, BATCH).compiler_options == {}
