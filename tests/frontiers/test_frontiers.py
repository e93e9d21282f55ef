"""The frontier is monotone and its ends are the ends; the largest batch and the fewest devices are those."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from models import mlp

import autoshard
from autoshard.errors import SolverError
from autoshard.frontiers import search
from autoshard.frontiers.devices import machine_of
from autoshard.frontiers.traced_step import FrontierStep
from autoshard.frontiers.traced_variants import FrontierVariants
from autoshard.model.memory_limit import ANY_GAP
from autoshard.report.units import bytes_text

MODEL = mlp.make(layers=2, width=64, batch=64, bias=False)
STATE, BATCH = jax.eval_shape(lambda: MODEL.state), jax.eval_shape(lambda: MODEL.batches(0))
MESH = AbstractMesh((8,), ("data",))
GIVEN = {"mesh": MESH, "topology": "v5e:2x4", "donate_argnums": 0}


pytestmark = pytest.mark.usefixtures("little_work")


@pytest.fixture(scope="module")
def found(little_work):
    return autoshard.frontier(MODEL.step, STATE, BATCH, points=4, **GIVEN)


def is_monotone(plans):
    """Whether seconds go up and bytes go down."""
    pairs = itertools.pairwise(plans)
    return all(
        a.predicted.step_seconds < b.predicted.step_seconds and a.predicted.peak_bytes > b.predicted.peak_bytes
        for a, b in pairs
    )


def test_seconds_go_up_and_bytes_go_down(found):
    assert len(found) >= 2 and is_monotone(found.plans)
    assert not is_monotone(found.plans[::-1])
    assert all(plan.bound <= plan.cost for plan in found)
    bounds = [plan.bound for plan in found]
    assert bounds == sorted(bounds)


def test_the_ends_are_the_free_plan_and_the_smallest(found):
    free = autoshard.plan(MODEL.step, STATE, BATCH, memory="1GiB", **GIVEN)
    assert found.plans[0].cost == pytest.approx(free.cost)
    assert found.plans[0].predicted.peak_bytes == free.predicted.peak_bytes
    smallest = found.plans[-1]
    with pytest.raises(autoshard.MemoryLimitError):
        autoshard.plan(MODEL.step, STATE, BATCH, memory=0.8 * found.limit_of(smallest), **GIVEN)


def test_planning_under_its_limit_finds_nothing_faster(found):
    for plan in found:
        again = autoshard.plan(MODEL.step, STATE, BATCH, memory=plan.memory, **GIVEN)
        assert plan.bound * (1 - 1e-6) <= again.cost
        assert plan.predicted.peak_bytes <= 0.85 * plan.memory
        assert found.limit_of(plan) <= plan.memory


def test_the_frontier_answers_and_shows(found):
    assert found.within("1GiB") is found.plans[0]
    assert found.within(found.limit_of(found.plans[-1])) is found.plans[-1]
    with pytest.raises(autoshard.MemoryLimitError, match="no plan of the frontier of step fits in 1 B"):
        found.within(1)
    assert str(found).startswith("step: fits in")
    assert str(found).count("us") + str(found).count("ns") + str(found).count("ms") >= len(found)
    assert "<table>" in found._repr_html_()
    (axes,) = found.plot().axes
    assert axes.get_ylabel() == "ms per step"


def product(w, x):
    return w - jnp.mean(x @ w), jnp.sum(w)


FEW = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)


def test_a_memory_limit_is_where_it_begins():
    limited = autoshard.frontier(product, *FEW, points=2, memory="72KiB", **GIVEN)
    assert limited.plans[0].predicted.peak_bytes <= 0.85 * 72 * 2**10
    assert "within the memory that was given" in str(limited)


def test_the_largest_batch_is_the_largest():
    best = autoshard.largest_batch(product, *FEW, memory="72KiB", multiple=64, **GIVEN)
    assert best.refused == best.rows + 64
    assert f"{best.refused} do not fit" in str(best)

    def planned(rows):
        return autoshard.plan(product, FEW[0], jax.ShapeDtypeStruct((rows, 64), jnp.float32), memory="72KiB", **GIVEN)

    assert planned(best.rows).cost == pytest.approx(best.plan.cost)
    with pytest.raises(autoshard.MemoryLimitError):
        planned(best.refused)


def test_a_frontier_says_what_the_time_limit_left_out(found, monkeypatch):
    assert found.left_out == "" and "time limit" not in str(found)

    def ended_after(searches):
        monkeypatch.setattr(search._FrontierSearch, "is_late", property(lambda self: len(self.known) >= searches))
        return autoshard.frontier(MODEL.step, STATE, BATCH, points=4, **GIVEN)

    fastest = ended_after(1)
    (only,) = fastest
    assert fastest.left_out == f"less than {bytes_text(only.predicted.peak_bytes)}"
    both = ended_after(2)
    high, low = (bytes_text(plan.predicted.peak_bytes) for plan in both)
    assert both.left_out == f"less than {low}, between {low} and {high}"
    assert "before plans were sought that hold less than" in str(both) and "raise time_limit" in both._repr_html_()


def test_rows_and_devices_that_are_not_decided_in_time_count_as_no_fit(monkeypatch):
    within = FrontierVariants.within

    def late(step, memory, gap=0.0):
        rows, devices = step.as_written.program.arguments[1].shape[0], math.prod(step.options.mesh.shape.values())
        if rows == 256 or devices == 2:
            raise SolverError("not found in time")
        return within(step, memory, gap)

    monkeypatch.setattr(FrontierVariants, "within", late)
    best = autoshard.largest_batch(product, *FEW, memory="10MiB", multiple=64, most=512, **GIVEN)
    assert (best.rows, best.undecided) == (192, 256) and "whether 256 do was not found in time" in str(best)
    given = {"chip": "v5e", "axes": ("data",), "memory": "10MiB", "donate_argnums": 0, "time_limit": 4}
    assert autoshard.fewest_devices(product, *FEW, most=4, **given).mesh.size == 4
    with pytest.raises(SolverError):
        autoshard.fewest_devices(product, *FEW, most=2, **given)


def test_each_number_of_rows_is_asked_about_with_a_share_of_the_work(monkeypatch):
    """So one that is hard to refuse leaves time for the others."""
    within, asked = FrontierVariants.within, []

    def noted(step, memory, gap=0.0):
        asked.append((gap, step.options.time_limit))
        return within(step, memory, gap)

    monkeypatch.setattr(FrontierVariants, "within", noted)
    autoshard.largest_batch(product, *FEW, memory="72KiB", multiple=64, **GIVEN | {"time_limit": 8})
    assert dict(asked) == {ANY_GAP: 1.0, 0.0: 8.0} and asked[-1][0] == 0.0 and len(asked) > 3


def scaled(rate, w, kind, *, x):
    assert kind == "static"
    return w - rate * jnp.mean(x @ w)


def test_a_batch_is_found_beside_scalars_and_static_arguments():
    given = {"mesh": MESH, "topology": "v5e:2x4", "static_argnums": 2, "donate_argnums": 1, "time_limit": 2}
    found = autoshard.largest_batch(
        scaled, 0.1, FEW[0], "static", kwargs={"x": FEW[1]}, most=30, search="pase", **given
    )
    assert (found.rows, found.refused) == (24, None)
    assert {array.name: array.type for array in found.plan.arguments}["x"] == "float32[24, 64]"


def test_rows_are_a_multiple_of_devices_and_microbatches():
    given = {"mesh": AbstractMesh((2,), ("data",)), "topology": "v5e:1x2", "donate_argnums": 0, "time_limit": 2}
    found = autoshard.largest_batch(MODEL.step, STATE, BATCH, most=20, microbatches=8, **given)
    assert found.rows == 16


def test_the_fewest_devices_are_the_fewest(monkeypatch):
    solved, solution = [], FrontierStep.solution

    def noted(step, memory, enough=None, gap=0.0):
        solved.append(tuple(step.options.mesh.shape.items()))
        return solution(step, memory, enough, gap)

    monkeypatch.setattr(FrontierStep, "solution", noted)
    given = {"chip": "v5e", "axes": ("data",), "memory": "64KiB", "donate_argnums": 0, "time_limit": 4}
    plan = autoshard.fewest_devices(product, *FEW, most=32, **given)
    assert len(solved) == len(set(solved))
    assert 1 < plan.mesh.size <= 32
    with pytest.raises(autoshard.MemoryLimitError):
        autoshard.fewest_devices(product, *FEW, most=plan.mesh.size // 2, **given)


def test_machines_of_a_chip():
    assert [machine_of("v5e", 2**i) for i in range(5)] == ["v5e:1x1", "v5e:1x2", "v5e:2x2", "v5e:2x4", "v5e:4x4"]
    assert machine_of("v5p", 64) == "v5p:4x4x4"


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: autoshard.frontier(MODEL.step, STATE, BATCH, points=1, **GIVEN), "points=1"),
        (lambda: autoshard.frontier(MODEL.step, STATE, BATCH, microbatches="auto", **GIVEN), "Give the number"),
        (lambda: autoshard.largest_batch(MODEL.step, STATE, BATCH, multiple=0, **GIVEN), "multiple=0"),
        (lambda: autoshard.largest_batch(MODEL.step, STATE, BATCH, most="9", **GIVEN), "most='9'"),
        (lambda: autoshard.largest_batch(MODEL.step, STATE, BATCH, most=1e3, **GIVEN), "most=1000.0"),
        (lambda: autoshard.frontier(MODEL.step, STATE, BATCH, refine=2, **GIVEN), "refine cannot be among"),
        (lambda: autoshard.fewest_devices(product, *FEW, chip="v5e", mesh=MESH), "mesh cannot be among"),
        (lambda: autoshard.fewest_devices(product, *FEW, chip="v5e", axes=1), "axes=1"),
        (lambda: autoshard.fewest_devices(product, *FEW, chip="v5e", axes=("a", "a")), "axes="),
        (lambda: autoshard.fewest_devices(MODEL.step, STATE, BATCH, chip="v99"), "chip='v99'"),
        (lambda: autoshard.fewest_devices(MODEL.step, STATE, BATCH, chip="v5e", axes=("a", "b", "c")), "axes="),
        (lambda: autoshard.fewest_devices(MODEL.step, STATE, BATCH, chip="v5e", most=0), "most=0"),
    ],
)
def test_wrong_options_are_one_error(call, said):
    with pytest.raises(autoshard.ArgumentError, match=said):
        call()
