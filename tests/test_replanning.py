"""What a plan is asked: why an argument lies as it does, what differs from another plan, what a wish costs."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from steps import mlp

import autoshard
from autoshard import Link, Plan, PlanError, Topology
from autoshard.layout import layout_of
from autoshard.plans.chosen_options import prediction_of
from autoshard.replanning.near_choices import agreeing
from autoshard.replanning.signatures import signature_remark
from autoshard.report.difference import Difference
from autoshard.solver import solve

MESH = AbstractMesh((2, 4), ("data", "model"))
CHIP = Topology(
    links={"data": Link(latency=1e-6, bandwidth=10e9), "model": Link(latency=1e-6, bandwidth=50e9)},
    memory_bytes=2**30,
    memory_bandwidth=1e12,
    flops={"float32": 1e13},
)
SPECS = {"P()", "P('data')", "P(None, 'model')"}


def arguments(width=64, batch=1536):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, np.float32)

    weights = {"up": array(width, 4 * width), "bias": array(4 * width), "down": array(4 * width, width)}
    return {"weights": weights, "momentum": weights}, {"x": array(batch, width), "y": array(batch, width)}


def planned(batch=1536, **options) -> Plan:
    options = {"mesh": MESH, "topology": CHIP, "donate_argnums": 0} | options
    return autoshard.plan(mlp, *arguments(batch=batch), **options)


@functools.cache
def free() -> Plan:
    return planned()


@functools.cache
def explained(path):
    return free().explain(path)


@functools.cache
def tight() -> Plan:
    """Of 540 kB 459 may be filled. `free` holds more outside the chip; with batches over both axes it is 446.6."""
    return planned(memory=540_000)


def argument(plan, name):
    return next(placed for placed in plan.arguments if placed.name == name)


@pytest.mark.parametrize("plan", [free, tight])
def test_a_plan_is_found_again_among_the_choices(plan):
    """Of each node some options are the plan's; the cheapest of them cost what it does."""
    plan = plan()
    formulation = plan.planner.formulation({})
    options = agreeing(formulation, plan.annotations)
    assert all(options.values()) and sum(len(some) > 1 for some in options.values()) <= 3
    found = solve(replace(formulation.problem.restrict(options), limit=None))
    assert prediction_of(formulation, found.choice) == plan.predicted
    planted = dict(plan.annotations.homes) | {0: (("data",), ("model",))}
    assert not agreeing(formulation, replace(plan.annotations, homes=planted))[0]


def test_other_layouts_are_solved():
    """Each costs what the plan costs that is made with the argument fixed so."""
    explanation = explained("weights/up")
    assert explanation.argument.name == "params/weights/up" and explanation.chosen.spec == explanation.argument.spec
    assert explanation.chosen.step_seconds == free().predicted.step_seconds and len(explanation.others) == 4
    assert explanation.chosen.spec not in [other.spec for other in explanation.others]
    costs = [other.step_seconds for other in explanation.others]
    assert costs == sorted(costs) and costs[0] >= explanation.chosen.step_seconds * (1 - 1e-9)
    for other in explanation.others[:1]:
        fixed = planned(fixed={"params/weights/up": other.spec})
        assert other.step_seconds == pytest.approx(fixed.predicted.step_seconds, rel=1e-6)
        assert other.bound <= fixed.cost * (1 + 1e-9)
    assert "weights/up" in str(explanation) and all(reason in str(explanation) for reason in explanation.reasons)


@pytest.mark.usefixtures("little_work_once")
def test_memory_is_named_where_it_forces_a_layout():
    forced, bound = (" ".join(tight().explain(path).reasons) for path in ("batch/x", "weights/bias"))
    assert re.search(r"Memory forces it: .* KiB at steps\.py:\d+ .* lies as P\(\"model\"\)", forced)
    assert "Memory binds the plan but not this layout" in bound
    assert any("Memory forces nothing" in reason for reason in explained("weights/up").reasons)


def test_the_user_is_named_and_overruled():
    pinned = planned(fixed={"weights/u*": P("data")})
    explanation = pinned.explain("params/weights/up")
    assert "fixed['weights/u*']" in explanation.reasons[0]
    assert min(one.step_seconds for one in explanation.others) == pytest.approx(free().predicted.step_seconds, rel=1e-6)


def test_dims_that_nothing_divides_are_named():
    plan = autoshard.plan(lambda w, x: x @ w, jnp.ones((63, 512)), jnp.ones((64, 63)), mesh=MESH, topology=CHIP)
    explanation = plan.explain("w")
    reason = next(reason for reason in explanation.reasons if reason.startswith("Dim"))
    assert "Dim 0 has 63 elements" in reason and "62 and 64" in reason and "60 and 64" in reason
    assert not any(axes for axes in layout_of(explanation.chosen.spec, 2)[0])


def test_paths_are_found_or_near_ones_are_named():
    for path in ("params/weights/bias", "weights/bias", "params/*/bias"):
        (found,) = free().planner.arguments_at(path)[:1]
        assert free().arguments[found].name == f"params/{'weights' if 'weights' in path else 'momentum'}/bias"
    with pytest.raises(PlanError, match=r"'weights/bais'.*params/weights/bias"):
        free().explain("weights/bais")


def test_a_plan_of_a_file_knows_no_step():
    loaded = Plan.loads(free().dumps(), MESH)
    for ask in (lambda plan: plan.explain("weights/up"), lambda plan: plan.what_if(memory="1GiB")):
        with pytest.raises(PlanError, match=r"knows no step.*\n.*autoshard\(step, mesh=..., plan=...\)"):
            ask(loaded)
    bound = autoshard.autoshard(mlp, mesh=MESH, topology=CHIP, donate_argnums=0, plan=loaded).plan(*arguments())
    again, first = bound.explain("weights/up"), explained("weights/up")
    assert [one.layout for one in again.others] == [one.layout for one in first.others]


def test_what_a_sharding_by_hand_leaves_on_the_table():
    by_hand = autoshard.evaluate(
        mlp, *arguments(), mesh=MESH, topology=CHIP, donate_argnums=0,
        in_shardings=(None, P(("data", "model"))),
    )  # fmt: skip
    explanation = by_hand.explain("weights/up")
    assert "in_shardings" in explanation.reasons[0] and explanation.chosen.spec == P() and explanation.others
    assert by_hand.what_if(fixed={"batch/x": P("data")}).predicted.step_seconds > 0


WISHES = [
    {"fixed": {"params/weights/up": P("data", "model")}},
    {"memory": "560KiB"},
    {"memory": "1GiB", "fixed": {"batch/x": P()}},
    {"mesh": AbstractMesh((8,), ("data",)), "topology": "v5e:2x4"},
    {"mesh": AbstractMesh((8,), ("data",)), "topology": "cpu:8", "memory": "1000KiB"},
]


@pytest.mark.usefixtures("little_work_once")
@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: "+".join(wish))
def test_wishes_are_granted_as_if_planned_anew(wish):
    found, anew = tight().what_if(**wish), planned(**({"memory": tight().memory} | wish))
    assert found.predicted.step_seconds == pytest.approx(anew.predicted.step_seconds, rel=0.01)
    assert found.bound <= anew.cost * (1 + 1e-9) and found.memory == anew.memory
    assert found.predicted.peak_bytes <= found.memory and dict(found.mesh.shape) == dict(anew.mesh.shape)
    assert "What if" in str(found) and "with the wish" in str(found) and str(anew) not in str(found)
    for pattern, spec in wish.get("fixed", {}).items():
        assert argument(found, pattern).spec == spec


def test_another_machine_leaves_the_other_options_as_they_were():
    asked = {"rewrites": ("loop_sum",), "reductions": "auto", "remat": "auto", "microbatches": 2, "trips": {"f": 3}}
    made = free().planner
    moved = replace(made, options=replace(made.options, **asked)).options_under({"topology": "cpu:8", "mesh": MESH})
    assert {name: getattr(moved, name) for name in asked} == asked
    assert moved.topology != CHIP and moved.memory == moved.topology.memory_bytes


def test_wishes_add_up():
    once = free().what_if(fixed={"params/weights/up": P("data")})
    twice = once.what_if(fixed={"params/weights/down": P("data")})
    assert [argument(twice, f"params/weights/{name}").spec for name in ("up", "down")] == [P("data")] * 2
    back = once.what_if(fixed={"params/weights/up": argument(free(), "params/weights/up").spec})
    assert back.predicted.step_seconds == pytest.approx(free().predicted.step_seconds, rel=1e-6)


def test_what_a_plan_has_already_costs_no_search(monkeypatch):
    """The last solution is where the search begins: it stays if the wish takes nothing of it away."""
    plan = free()
    monkeypatch.setattr("autoshard.replanning.planner.solved", lambda *_: pytest.fail("searched among all choices"))
    same = plan.what_if(fixed={one.name: one.spec for one in plan.arguments})
    assert not plan.diff(same) and same.bound == plan.bound and same.status == plan.status


def test_wishes_are_checked():
    with pytest.raises(autoshard.AutoshardError, match="no argument"):
        free().what_if(fixed={"nobody": P()})
    with pytest.raises(autoshard.AutoshardError, match="not a size"):
        free().what_if(memory="lots")
    with pytest.raises(TypeError, match="speed"):
        free().what_if(speed=2)


def test_differences():
    here, there = free(), tight()
    difference = here.diff(there)
    moved = {one.name: (one.spec, one.other_spec) for one in difference.arguments if one.count == 1}
    for name, specs in moved.items():
        if "{" not in name and "*" not in name:
            assert specs == (argument(here, name).spec, argument(there, name).spec) and specs[0] != specs[1]
    assert sum(one.count for one in difference.arguments) == sum(
        a.layout != b.layout for a, b in zip(here.arguments, there.arguments, strict=True)
    )
    assert difference.step_seconds == (here.predicted.step_seconds, there.predicted.step_seconds)
    total = sum(one.bytes for one in here.predicted.collectives) - sum(one.bytes for one in there.predicted.collectives)
    assert sum(one.more_bytes for one in difference.collectives) == total and difference
    assert "Arguments that lie otherwise" in str(difference) and "Collectives per step" in str(difference)


def test_differences_of_saved_plans():
    loaded = Plan.loads(free().dumps(), MESH)
    assert not free().diff(loaded) and str(loaded.diff(free())) == "The plans are the same."
    assert str(loaded.diff(tight())) == str(free().diff(tight()))
    planted = replace(loaded, predicted=replace(loaded.predicted, peak_bytes=1))
    assert Difference.of(loaded, planted).peak_bytes[1] == 1


def test_arrays_that_only_one_plan_has():
    other = autoshard.plan(lambda w: w * 2.0, jnp.ones((8, 8)), mesh=MESH, topology=CHIP)
    text = str(free().diff(other))
    assert "is compared with" in text and "(none)" in text


def test_another_signature_says_what_changes():
    step = autoshard.autoshard(mlp, mesh=MESH, topology=CHIP, donate_argnums=0)
    first, same = step.plan(*arguments()), step.plan(*arguments())
    second = step.plan(*arguments(batch=2048))
    assert not first.remark and not same.remark
    assert "batch/x is float32[2048, 64], before float32[1536, 64]" in str(second)
    moved = sum(
        a.layout != b.layout for a, b in zip(first.arguments, second.arguments, strict=True) if "batch" not in a.name
    )
    assert ("State lies as in the plan before" in second.remark) == (moved == 0)
    planted = replace(first.arguments[0], layout=(("data",),))
    remark = signature_remark(second, replace(first, arguments=(planted, *first.arguments[1:])))
    assert "1 arrays of state lie otherwise" in remark and planted.name in remark and "like=" in remark


def test_a_limit_that_is_small_beside_the_chips_own_memory():
    """Temporaries lie on the chip. So the plan fits, however much they hold, and so does one near it."""
    plan = planned(batch=8192, topology="v5e:2x4", memory=3e6)
    asked = plan.what_if(fixed={"params/momentum/up": P(None, "model")})
    assert max(plan.predicted.peak_bytes, asked.predicted.peak_bytes) < 3e6
    reasons = " ".join(plan.explain("weights/up").reasons)
    assert "Memory forces nothing" in reasons
