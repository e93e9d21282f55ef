"""Which variant of a step runs: chosen again once one is compiled, and found again by a second start."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import mesh_of

from autoshard import CacheWarning, ProcessError, autoshard, planning, topology
from autoshard import refine as refining
from autoshard.processes.agreement import Claims, text_of_all
from autoshard.variants import open_choice
from autoshard.variants.choosing import LEAST_GAIN
from autoshard.variants.open_choice import OpenChoice

LAYERS, WIDTH, ROWS = 6, 32, 2048
MESH = mesh_of({"data": 4})
MACHINE = replace(topology("cpu:4", {"data": 4}), flops={"float32": 1e9})  # slow enough that values are worth keeping
COMPILED = "/jax/core/compile/backend_compile_duration"
WEIGHTS = {
    name: np.random.default_rng(seed).standard_normal((LAYERS, *shape)).astype(np.float32) / 8
    for seed, (name, shape) in enumerate({"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}.items())
}
X = np.random.default_rng(2).standard_normal((ROWS, WIDTH)).astype(np.float32)


def step(weights, x):
    def loss(weights):
        y, _ = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w["up"]) @ w["down"], None), x, weights)
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def decorated(**options):
    return autoshard(step, mesh=MESH, topology=MACHINE, donate_argnums=0, remat="auto", **options)


def kept_of(plan):
    """What a plan says that it keeps."""
    return next(one for one in plan.warnings if one.startswith("remat='auto'"))


@pytest.fixture(scope="module")
def free():
    """The plan without a limit that binds."""
    return decorated().plan(WEIGHTS, X)


@pytest.fixture
def compilations():
    seen = []
    listen = lambda event, *_, **__: seen.append(event) if event == COMPILED else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_level_that_does_not_fit_as_compiled_makes_room_for_a_leaner_one(blind, free, compilations):
    limit = 0.75 * free.verify().actual_peak
    compilations.clear()
    blind(0.5)
    made = decorated(memory=limit).plan(WEIGHTS, X)
    assert made.compiled_peak <= limit < free.verify().actual_peak
    assert kept_of(made) != kept_of(free) and "planned again to hold less" in made.warnings[-1]
    assert made.bound <= made.cost and made.memory == limit


def test_room_to_spare_is_filled_by_a_level_that_keeps_more(blind, free, compilations):
    limit = 1.1 * free.verify().actual_peak
    compilations.clear()
    blind(1.6)
    made = decorated(memory=limit).plan(WEIGHTS, X)
    assert len(compilations) == 2
    assert kept_of(made) == kept_of(free) and made.compiled_peak <= limit


def test_no_room_is_looked_for_where_memory_does_not_bind(free, compilations):
    made = decorated(memory=10 * free.verify().actual_peak)
    compilations.clear()
    assert kept_of(made.plan(WEIGHTS, X)) == kept_of(free)
    assert len(compilations) == 1


@pytest.mark.parametrize("refine", [2, 3])
def test_refine_compiles_other_variants_too(monkeypatch, free, refine):
    """Of variants that are predicted to be close the one is kept that is faster as compiled."""
    tried = []

    def seconds(plan, _):
        tried.append(plan)
        return float(plan.predicted.peak_bytes)  # the leanest is the fastest

    monkeypatch.setattr(refining, "compiled_seconds", seconds)
    monkeypatch.setattr(refining, "different", lambda formulation, best, *_: [best])
    monkeypatch.setattr(open_choice, "CLOSE", 10.0)
    made = decorated(refine=refine).plan(WEIGHTS, X)
    assert len(tried) == refine  # the third is of the kept variant, whose other plans are sought
    assert kept_of(tried[0]) == kept_of(free) != kept_of(made)
    assert made.predicted.peak_bytes == min(plan.predicted.peak_bytes for plan in tried)
    assert made.bound <= free.bound and (refine == 3 or "2 plans that were compiled" in made.warnings[-1])
    monkeypatch.setattr(open_choice, "CLOSE", 0.0)
    assert kept_of(decorated(refine=refine).plan(WEIGHTS, X)) == kept_of(free)


def test_a_second_start_plans_nothing(tmp_path, free, monkeypatch, compilations):
    options = {"memory": 0.7 * free.verify().actual_peak, "cache": tmp_path}
    first = decorated(**options).plan(WEIGHTS, X)
    compilations.clear()
    with monkeypatch.context() as patch:
        patch.setattr(planning, "formulator", None)
        second = decorated(**options)
        assert second.plan(WEIGHTS, X).dumps() == first.dumps()
    assert not compilations  # what was held against the limit is known, too
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-6),
        second(jax.tree.map(jnp.array, WEIGHTS), X),
        jax.jit(step)(WEIGHTS, X),
    )


def test_a_choice_that_is_not_what_was_written_is_made_anew(tmp_path, free):
    first = decorated(cache=tmp_path).plan(WEIGHTS, X)
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace('"level": ', '"level": 7'))
    with pytest.warns(CacheWarning, match="The step is planned anew"):
        second = decorated(cache=tmp_path).plan(WEIGHTS, X)
    assert kept_of(second) == kept_of(first)


def test_the_leanest_of_one_variant_makes_room_for_another_that_is_leaner(free):
    """A plan that only fits without what is kept free fills more than other variants were chosen within."""
    run = decorated(microbatches="auto")
    planned = run._planned((WEIGHTS, X), {})
    leaner = planned.choice.within(0.9 * planned.plan.predicted.peak_bytes, planned.plan)
    assert leaner.predicted.peak_bytes <= 0.9 * free.predicted.peak_bytes
    choice = replace(planned.choice, options=replace(planned.choice.options, memory=planned.plan.predicted.peak_bytes))
    again = choice.within(0.9 * planned.plan.predicted.peak_bytes, planned.plan)  # above the share that plans may fill
    assert again.predicted.peak_bytes <= 0.9 * free.predicted.peak_bytes


def test_a_padded_batch_has_levels_too():
    uneven = np.concatenate([X, X[:3]])
    run = autoshard(step, mesh=MESH, topology=MACHINE, remat="auto", pad="batch")
    assert "of these are kept" in kept_of(run.plan(WEIGHTS, uneven))
    np.testing.assert_allclose(run(WEIGHTS, uneven)[1], jax.jit(step)(WEIGHTS, uneven)[1], rtol=1e-5)


@pytest.mark.parametrize("is_said", [True, False])
def test_a_leader_that_has_planned_a_variant_and_goes_on_is_no_other_step(is_said):
    """A process that waits for a variant's plan may look only after the leader has run the step in another variant."""

    def claims(key):
        return Claims("step", key, {"plan": "found by the search", "program": key}, (), ())

    def leader_says(key, _, watch):
        watch()
        return key

    posted = {"run/0": claims("another variant").dumps()}
    group = SimpleNamespace(
        round=0, leader=0, here=1, peek=posted.get, has_said=lambda key: is_said, leader_says=leader_says
    )
    with contextlib.nullcontext() if is_said else pytest.raises(ProcessError, match="differ in program"):
        assert text_of_all(group, claims("this variant"), "plan", str) == "plan/this variant"


@pytest.mark.parametrize("gain, is_taken", [(0.5 * LEAST_GAIN, False), (2 * LEAST_GAIN, True)])
def test_a_plan_that_fills_more_is_compiled_if_it_is_faster(monkeypatch, gain, is_taken):
    options = SimpleNamespace(memory=100.0, backend=SimpleNamespace(usable=0.9))
    choice = OpenChoice(None, options, None, None, {}, {}, None)
    known = SimpleNamespace(cost=1.0, predicted=SimpleNamespace(peak_bytes=89.0))
    other = SimpleNamespace(cost=1 - gain)
    monkeypatch.setattr(OpenChoice, "_within", lambda *_: other)
    assert choice.within(95.0, known) is (other if is_taken else None)
