"""remat='auto' with stages: steps that fit no pipeline without, what each stage computes again, plans in files."""

import dataclasses
import json
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from models import gpt

from autoshard import ArgumentError, MemoryLimitError, Plan, PlanError, autoshard, plan
from autoshard.stage_planning import choosing
from autoshard.stage_planning.recomputing.asked_stages import StageLevels
from autoshard.stage_planning.recomputing.levels import RecomputationLevels
from autoshard.stage_planning.space import PlannedSpace

LAYERS, WIDTH = 4, 8


def step(weights, x):
    def loss(weights):
        def layer(x, w):
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), weights, gradients), value


def sizes(layers, width, rows):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    return {"up": array(layers, width, 4 * width), "down": array(layers, 4 * width, width)}, array(rows, width)


def large(**said):
    """Eight layers of width 4,096, in four stages of one chip each."""
    pipeline = {"stages": 4, "microbatches": 8}
    mesh = AbstractMesh((4,), ("stage",))
    return plan(step, *sizes(8, 4096, 16384), mesh=mesh, topology="v5e:4", pipeline=pipeline, **said)


@pytest.fixture(scope="module")
def mixed():
    return large(remat="auto", memory="3.3GiB")


def test_stages_with_more_microbatches_in_flight_compute_more_again(mixed):
    with pytest.raises(MemoryLimitError, match="pipeline: ") as refused:
        large(memory="3.3GiB")
    assert refused.value.needed > 3.3 * 2**30 and "remat='auto'" in str(refused.value)
    again = mixed.pipeline.programs.recomputed.seconds
    assert again[0] > 2 * max(again[1:]) and min(again) > 0
    assert max(stage.peak_bytes for stage in mixed.stages) < 0.85 * 3.3 * 2**30
    assert mixed.warnings[0].startswith("remat='auto': stage 0 keeps 32.0 MiB of each microbatch")
    assert "stage 1 keeps 160.0 MiB" in str(mixed)


def test_levels_of_their_own_are_faster_than_one_level_for_all_stages_and_than_none(mixed, monkeypatch):
    monkeypatch.setattr(StageLevels, "parts", [frozenset(range(4))])
    alike, nothing = large(remat="auto", memory="3.3GiB"), large()
    assert alike.predicted.peak_bytes < 0.85 * 3.3 * 2**30 < nothing.predicted.peak_bytes
    seconds = [one.predicted.step_seconds for one in (mixed, alike, nothing)]
    assert seconds[0] < min(seconds[1:])
    some, most = (one.pipeline.programs.recomputed.seconds for one in (mixed, alike))
    assert some[0] == most[0] and all(0 < one < 0.5 * two for one, two in zip(some[1:], most[1:], strict=True))


@pytest.fixture(scope="module")
def small():
    """A step with its arguments, the limit that it meets only by computing again, and what it is planned with."""
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (LAYERS, WIDTH, 4 * WIDTH)) / 8
    down = jax.random.normal(keys[1], (LAYERS, 4 * WIDTH, WIDTH)) / 8
    args = {"up": up, "down": down}, jax.random.normal(keys[2], (64, WIDTH))
    how = {"mesh": jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "memory": "44KiB"}
    return args, how | {"pipeline": {"stages": 2, "microbatches": 4}}


def test_a_step_that_fits_no_pipeline_trains_with_values_computed_again(small, tmp_path):
    args, how = small
    with pytest.raises(MemoryLimitError):
        autoshard(step, **how).plan(*args)
    train = autoshard(step, **how, remat="auto", cache=tmp_path / "cache")
    made = train.plan(*args)
    plain, staged = args[0], args[0]
    for _ in range(5):
        plain, expected = jax.jit(step)(plain, args[1])
        staged, found = train(staged, args[1])
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(staged), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)

    made.save(tmp_path / "plan.json")  # the plan knows what is computed again, whoever runs by it
    mesh = how["mesh"]
    assert autoshard(step, mesh=mesh, plan=tmp_path / "plan.json").plan(*args).dumps() == made.dumps()
    read = autoshard(step, mesh=mesh, plan=tmp_path / "plan.json", topology="v5e:2").plan(*args)
    assert read.pipeline.programs.recomputed.cuts == made.pipeline.programs.recomputed.cuts
    assert [one.fingerprint for one in read.pipeline.plans] == [one.fingerprint for one in made.pipeline.plans]
    again = autoshard(step, **how, remat="auto", cache=tmp_path / "cache").plan(*args)
    assert again.dumps() == made.dumps()
    with pytest.raises(MemoryLimitError):  # the cache knows that it was asked for
        autoshard(step, **how, cache=tmp_path / "cache").plan(*args)

    assert made.explain("weights/up").reasons[0].startswith("It is a stack of layers: rows 0 to 1 on stage 0")
    assert made.what_if(memory="1MiB").pipeline.programs.recomputed == made.pipeline.programs.recomputed

    content = json.loads(made.dumps())
    del content["digest"]
    for damaged in ({"cuts": [[[0]]], "seconds": []}, {"cuts": []}):
        with pytest.raises(PlanError, match="recomputed"):
            Plan.loads(json.dumps(content | {"pipeline": content["pipeline"] | {"recomputed": damaged}}), mesh)


@pytest.fixture(scope="module")
def narrow():
    """A step whose width no axis divides, with what it is planned with."""
    keys = jax.random.split(jax.random.key(0), 3)
    up, down = jax.random.normal(keys[0], (3, 13, 53)) / 8, jax.random.normal(keys[1], (3, 53, 13)) / 8
    args = {"up": up, "down": down}, jax.random.normal(keys[2], (8, 16, 13))
    return args, {"mesh": jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), "memory": "100KiB"}


def test_the_search_finds_stages_that_fit_by_computing_again(narrow, tmp_path):
    args, how = narrow
    for said in ({"pipeline": "auto"}, {"remat": "auto"}):
        with pytest.raises(MemoryLimitError):
            autoshard(step, **how, **said).plan(*args)
    train = autoshard(step, **how, pipeline="auto", remat="auto")
    made = train.plan(*args)
    again = made.pipeline.programs.recomputed.seconds
    assert again[0] > 0 == again[1]  # which has fewer microbatches in flight
    assert made.bound <= made.predicted.step_seconds
    assert "remat='auto': stage 0 keeps" in str(made)
    (weights, loss), (expected, known) = train(*args), jax.jit(step)(*args)
    np.testing.assert_allclose(loss, known, rtol=1e-4)
    for one, other in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    made.save(tmp_path / "plan.json")
    read = autoshard(step, mesh=how["mesh"], plan=tmp_path / "plan.json").plan(*args)
    assert read.dumps() == made.dumps()


def test_levels_that_compute_again_for_too_long_are_not_planned(narrow, monkeypatch):
    args, how = narrow
    before, planned = RecomputationLevels.of, []

    def slow(traced, on):
        found = before(traced, on)
        return dataclasses.replace(found, seconds=dict.fromkeys(found.seconds, 1.0))

    monkeypatch.setattr(RecomputationLevels, "of", slow)
    monkeypatch.setattr(PlannedSpace, "with_level", lambda self, request: planned.append(request.level) or self)
    autoshard(step, **how | {"memory": "1MiB"}, pipeline="auto", remat="auto").plan(*args)
    assert planned == []
    with pytest.raises(MemoryLimitError):  # as long as nothing fits, nothing is too slow
        autoshard(step, **how, pipeline="auto", remat="auto").plan(*args)
    assert planned == ["remat 1", "remat 2", "remat 3"][: len(planned)] != []


def test_the_error_of_a_step_that_fits_in_no_way_has_the_figures_of_the_leanest(small):
    args, how = small
    with pytest.raises(MemoryLimitError, match=r"is predicted to hold .* per device, and 17\.0 KiB of") as no:
        autoshard(step, **how | {"memory": "20KiB"}, remat="auto").plan(*args)
    assert "Use more stages" in str(no.value) and 20 * 2**10 < no.value.needed < 44 * 2**10


@pytest.mark.parametrize("fits", [True, False])
def test_levels_have_time_of_their_own_where_nothing_fits_without(monkeypatch, fits):
    ends, space = [], SimpleNamespace(space=SimpleNamespace(row=SimpleNamespace(devices=2)), shapes={})
    space.with_level = lambda request: space
    best = SimpleNamespace(simulated=SimpleNamespace(seconds=1.0)) if fits else None

    def searched(found, steps, machine, settings, until, enough=None):
        ends.append(until)
        time.sleep(0.1)
        return choosing._Outcome(best, 1.0, None, 1.0), found, None

    monkeypatch.setattr(choosing, "planned_space", lambda _: space)
    monkeypatch.setattr(choosing, "_searched", searched)
    machine = SimpleNamespace(mesh_shape={}, topology=None, backend=None, memory=1.0)
    steps = SimpleNamespace(cut_into_units=lambda *_: None, units_of=lambda _: SimpleNamespace(units=()))
    choosing.choose_pipeline(steps, machine, counts=[2], until=time.monotonic() + 0.1, levels={"remat 1": 0.5})
    assert (ends[0] == ends[1]) == fits and ends[1] - ends[0] < 0.1


def test_one_program_for_all_stages_computes_nothing_again(small):
    _, how = small
    with pytest.raises(ArgumentError, match="pipeline= cannot be combined with remat="):
        autoshard(step, **how | {"pipeline": {"stages": 2, "backend": "one_jit"}}, remat="auto")


@pytest.mark.slow
@pytest.mark.parametrize("scan, schedule", [(True, "1f1b"), (True, "gpipe"), (False, "1f1b"), (False, "gpipe")])
def test_a_model_trains_as_on_one_device_with_values_computed_again(scan, schedule):
    def trained(wrapped):
        model = gpt.make(layers=4, d_model=32, heads=4, vocab=64, seq=16, batch=16, scan=scan)
        train, state, losses = wrapped(model.step), model.state, []
        for i in range(5):
            state, loss = train(state, model.batches(i))
            losses.append(float(loss))
        return losses, jax.tree.leaves(state)

    mesh, pipeline = jax.make_mesh((4, 2), ("stage", "data")), {"stages": 4, "microbatches": 8, "schedule": schedule}
    staged = []

    def sharded(train):
        staged.append(autoshard(train, mesh=mesh, pipeline=pipeline, topology="v5e:4x2", memory="512KiB", remat="auto"))
        return staged[0]

    (losses, weights), (expected, known) = trained(sharded), trained(nnx.jit)
    assert "computes again for" in next(iter(staged[0]._plans.values())).warnings[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for one, other in zip(weights, known, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=2e-5)
