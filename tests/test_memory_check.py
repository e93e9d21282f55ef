"""The compiled program against the memory limit: planned again where it is over, and compiled once where it is not."""

import json
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from oracles import mesh_of, v5e

from autoshard import MemoryLimitError, MemoryWarning, Plan, autoshard, planning
from autoshard.compiled import memory_check
from autoshard.compiled.memory_check import REPLANS, fitting_plan
from autoshard.model import memory_limit
from autoshard.options import bytes_of

SHAPE = {"x": 4, "y": 2}
MESH = mesh_of(SHAPE)
MACHINE = v5e(SHAPE)  # the fastest plan splits little and holds much
WEIGHTS = {"down": np.ones((512, 256), np.float32), "up": np.ones((256, 512), np.float32)}
BATCH = np.ones((64, 256), np.float32)
COMPILED = "/jax/core/compile/backend_compile_duration"


def step(weights, batch):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(batch @ weights["up"]) @ weights["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def decorated(**options):
    return autoshard(step, mesh=MESH, topology=MACHINE, donate_argnums=0, **options)


def state():
    return jax.tree.map(jnp.array, WEIGHTS)


@pytest.fixture
def compilations():
    """How often XLA compiled since it was last emptied."""
    seen = []

    def listen(event, *_, **__):
        if event == COMPILED:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def fastest_peak():
    """Bytes of the fastest plan, as compiled."""
    return decorated().plan(WEIGHTS, BATCH).verify().actual_peak


def test_a_wrong_prediction_is_found_and_planned_around(blind):
    limit = 0.6 * fastest_peak()
    blind(0.3)
    made = decorated(memory=limit).plan(WEIGHTS, BATCH)
    assert made.compiled_peak <= limit and made.verify().actual_peak == made.compiled_peak
    assert made.memory == limit and made.status == "feasible" and made.bound <= made.cost
    assert "memory: the first plan holds" in str(made) and "planned again" in str(made)


def test_without_the_check_the_limit_is_broken(blind, monkeypatch):
    limit = 0.6 * fastest_peak()
    blind(0.3)
    monkeypatch.setattr(planning, "fitting_plan", lambda plan, *_: plan)
    assert decorated(memory=limit).plan(WEIGHTS, BATCH).verify().actual_peak > limit


def test_what_cannot_be_mended_is_said_with_its_numbers(blind):
    blind(0.01)
    said = r"by XLA's account this plan holds .* where 1.0 KiB are allowed"
    with pytest.raises(MemoryLimitError, match=said) as caught:
        autoshard(jnp.tanh, mesh=MESH, memory="1KiB").plan(BATCH)
    assert caught.value.budget == 1024 and caught.value.needed == 2 * BATCH.nbytes // 8
    assert "memory='16KiB'" in str(caught.value)
    with pytest.raises(MemoryLimitError, match=said):  # nor does a call run it
        autoshard(jnp.tanh, mesh=MESH, memory="1KiB")(BATCH)
    fits = autoshard(jnp.tanh, mesh=MESH, memory=caught.value.needed).plan(BATCH)
    assert fits.compiled_peak == caught.value.needed


def test_a_small_step_is_over_its_limit_by_less_than_a_page(monkeypatch):
    made = autoshard(jnp.tanh, mesh=MESH, memory=80)
    monkeypatch.setattr(memory_check, "_compiled_peak", lambda *_: 90.0)
    with pytest.raises(MemoryLimitError) as caught:
        made.plan(jnp.ones(64))
    assert caught.value.needed == 90
    monkeypatch.setattr(memory_check, "_compiled_peak", lambda *_: 84.0)
    with pytest.warns(MemoryWarning):
        made.plan(jnp.ones(64))


def test_what_does_not_fit_the_devices_runs_with_a_warning(blind):
    """Their memory is a figure of the machine, and not what the user asked for."""
    blind(0.01)
    run = autoshard(jnp.tanh, mesh=MESH, topology=replace(MACHINE, memory_bytes=1024))
    with pytest.warns(MemoryWarning, match=r"by XLA's account this plan holds .* where 1.0 KiB are allowed"):
        np.testing.assert_allclose(run(BATCH), np.tanh(BATCH), rtol=1e-6)
    assert run.plan(BATCH).compiled_peak == 2 * BATCH.nbytes // 8


def test_the_program_that_was_checked_is_the_one_that_runs(compilations):
    for options in ({}, {"memory": "8MiB"}):
        run = decorated(**options)
        made = run.plan(WEIGHTS, BATCH)
        assert (made.compiled_peak is None) == (not options)
        placed = jax.device_put((state(), BATCH), made.in_shardings)
        before = len(compilations)
        run(*placed)
        assert len(compilations) - before == (not options)
        (planned,) = set(run._compiled.values())
        assert planned.is_checked and planned.plan.compiled_peak is not None


def test_a_call_is_planned_again_too(blind):
    limit = 0.6 * fastest_peak()
    want = jax.jit(step)(WEIGHTS, BATCH)
    blind(0.3)
    run = autoshard(step, mesh=MESH, topology=replace(MACHINE, memory_bytes=limit), donate_argnums=0)
    got = run(state(), BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5), got, want)
    assert run.plan(WEIGHTS, BATCH).compiled_peak <= limit


def test_a_given_plan_is_run_as_it_is(blind):
    limit = 0.6 * fastest_peak()
    fast = decorated().plan(WEIGHTS, BATCH)
    run = decorated(plan=Plan.loads(fast.dumps(), MESH), memory=limit)
    with pytest.warns(MemoryWarning):
        run(state(), BATCH)
    assert run.plan(WEIGHTS, BATCH).in_shardings == fast.in_shardings


def test_plans_without_devices_are_not_compiled(compilations):
    abstract = AbstractMesh(tuple(SHAPE.values()), tuple(SHAPE))
    before = len(compilations)
    made = autoshard(step, mesh=abstract, topology=MACHINE, memory="8MiB").plan(WEIGHTS, BATCH)
    assert made.compiled_peak is None and len(compilations) == before


def test_a_kept_plan_has_been_checked(tmp_path, compilations):
    first = decorated(memory="8MiB", cache=tmp_path).plan(WEIGHTS, BATCH)
    before = len(compilations)
    second = decorated(memory="8MiB", cache=tmp_path).plan(WEIGHTS, BATCH)
    assert second.compiled_peak == first.compiled_peak is not None and len(compilations) == before
    assert json.loads(first.dumps())["compiled_peak"] == first.compiled_peak


LARGE_INSIDE = {  # what holds much while it runs, and a limit that a whole copy of its operand would break
    "top_k": (lambda x: jax.lax.top_k(x, 8)[0], (2048, 512), "3MiB"),
    "gamma": (lambda x: jax.random.gamma(jax.random.key(0), x), (512, 512), "5.4MiB"),
    "svd": (lambda x: jnp.linalg.svd(x)[0], (64, 64, 64), "700KiB"),
    "grouped convolution": (
        lambda x: jax.lax.conv_general_dilated(x, x[:, :16, :3], (1,), "SAME", feature_group_count=8),
        (64, 128, 128),
        "2MiB",
    ),
}


@pytest.mark.parametrize("name", LARGE_INSIDE)
def test_no_plan_is_over_its_limit(name):
    fn, shape, limit = LARGE_INSIDE[name]
    made = autoshard(fn, mesh=mesh_of({"x": 8}), memory=limit).plan(jax.ShapeDtypeStruct(shape, np.float32))
    assert made.verify().actual_peak <= bytes_of(limit)


class Compiled:
    """What `peak_bytes` asks of a compiled program, for CPU."""

    input_shardings = output_shardings = ()

    def __init__(self, peak):
        self.peak = peak

    def memory_analysis(self):
        sizes = dict.fromkeys(("argument", "output", "alias"), 0) | {"temp": self.peak}
        return type("Sizes", (), {f"{name}_size_in_bytes": size for name, size in sizes.items()})()


def tried(true_peak, limit=100.0, refused=lambda plan: None):
    """The predicted peaks of the plans that are tried, and the one that is kept, if `true_peak` is of a prediction."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = autoshard(step, mesh=MESH, topology=MACHINE).plan(WEIGHTS, BATCH)
    seen = []

    def of(peak):
        return replace(first, predicted=replace(first.predicted, peak_bytes=int(peak)))

    def compiled(plan):
        seen.append(plan.predicted.peak_bytes)
        refused(plan)
        return Compiled(true_peak(plan.predicted.peak_bytes))

    return seen, fitting_plan(of(80), limit, compiled, of)


def test_what_is_tried_after_a_miss():
    seen, kept = tried(lambda predicted: predicted)
    assert seen == [80] and kept.compiled_peak == 80 and not kept.warnings
    seen, kept = tried(lambda predicted: 1.5 * predicted)  # off by a factor
    assert seen == [80, 66] and kept.predicted.peak_bytes == 66 and kept.compiled_peak == 99
    seen, kept = tried(lambda predicted: predicted + 60)  # off by an amount
    assert seen == [80, 57, 40] and kept.compiled_peak == 100
    seen, kept = tried(lambda predicted: 300 - predicted / 10)  # nothing helps
    assert len(seen) == 1 + REPLANS and kept.compiled_peak > 100 and "don't fit, either" in kept.warnings[-1]


def test_compilers_that_run_out_of_memory_or_refuse():
    def out_of_memory(plan):
        if plan.predicted.peak_bytes > 60:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: XLA ran out of memory")

    def refuse(plan):
        raise NotImplementedError("no lowering rule")

    seen, kept = tried(lambda predicted: predicted, refused=out_of_memory)
    assert seen == [80, 56] and "more than the compiler may use" in kept.warnings[-1]
    seen, kept = tried(lambda predicted: predicted, refused=refuse)
    assert seen == [80] and kept.compiled_peak is None and not kept.warnings


@pytest.mark.usefixtures("little_work_once")
def test_what_fits_by_a_hair_is_asked_of_the_compiler():
    """A limit below what predictions are relied on for: devices that are there say whether the leanest plan fits."""
    mesh, machine = mesh_of({"x": 8}), v5e({"x": 8})

    def with_devices(memory):
        return autoshard(step, mesh=mesh, topology=machine, donate_argnums=0, memory=memory)

    with pytest.raises(MemoryLimitError) as caught:
        with_devices(1).plan(WEIGHTS, BATCH)
    needed = caught.value.needed
    made = with_devices(0.9 * needed).plan(WEIGHTS, BATCH)
    assert made.memory == 0.9 * needed and 0.85 * made.memory < made.predicted.peak_bytes <= made.memory
    assert "Its compiled program is held against the limit" in made.warnings[-1]
    assert made.compiled_peak == made.verify().actual_peak <= made.memory

    def without_devices(memory):  # for TPU, where temporaries lie on the chip
        return autoshard(step, mesh=mesh.abstract_mesh, topology=machine, donate_argnums=0, memory=memory)

    with pytest.raises(MemoryLimitError) as caught:
        without_devices(1).plan(WEIGHTS, BATCH)
    assert without_devices(caught.value.needed).plan(WEIGHTS, BATCH).predicted.peak_bytes < 0.9 * caught.value.needed
    with pytest.raises(MemoryLimitError):
        without_devices(0.9 * caught.value.needed).plan(WEIGHTS, BATCH)


def test_the_limit_that_a_refusal_names_holds_as_compiled(blind):
    """However wrong predictions are: the leanest plan is compiled before its limit is named."""
    limit = BATCH.nbytes // 8
    blind(0.6)
    with pytest.raises(MemoryLimitError, match="by XLA's account of its compiled program") as caught:
        autoshard(jnp.tanh, mesh=MESH, memory=limit).plan(BATCH)
    assert caught.value.budget == limit and caught.value.needed == 2 * BATCH.nbytes // 8
    assert "\nLargest values, before sharding:\n  x float32[64, 256] 64.0 KiB (argument)\n" in str(caught.value)
    assert autoshard(jnp.tanh, mesh=MESH, memory=caught.value.needed).plan(BATCH).compiled_peak == caught.value.needed


def test_what_a_refusal_names_is_sought_once_it_is_read(compilations, monkeypatch):
    sought, lean = [], memory_limit._lean_solutions
    monkeypatch.setattr(memory_limit, "_lean_solutions", lambda *args: sought.append(args) or lean(*args))
    with pytest.raises(MemoryLimitError) as caught:
        autoshard(jnp.tanh, mesh=MESH, memory=700).plan(BATCH)
    assert not sought and not compilations
    assert caught.value.needed >= 2 * BATCH.nbytes // 8 and len(sought) == len(compilations) == 1


def test_a_refusal_that_holds_as_compiled_is_the_planner_s():
    with pytest.raises(MemoryLimitError, match="as far as predictions can be off") as caught:
        autoshard(jnp.tanh, mesh=MESH, memory=BATCH.nbytes // 8).plan(BATCH)
    made = autoshard(jnp.tanh, mesh=MESH, memory=caught.value.needed).plan(BATCH)
    assert made.compiled_peak <= caught.value.needed
