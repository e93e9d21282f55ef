"""Plans with stages answer as other plans do: why arguments lie so, what a wish costs; they make a state sharded."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from pipeline_steps import STEPS, numbers

from autoshard import MemoryLimitError, MeshError, Plan, PlanError, autoshard, topology
from autoshard.stages.planning import StagePlanner

LAYERS, WIDTH, ROWS = 4, 8, 8


def train(state, x, y):
    def loss(weights):
        h = x * weights["scale"]
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights["layers"])
        return jnp.mean((h @ weights["head"] - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value


def initial(key):
    one, other = jax.random.split(key)
    layers = jax.random.normal(one, (LAYERS, WIDTH, WIDTH)) / 3
    return {"layers": layers, "head": jax.random.normal(other, (WIDTH, 3)), "scale": jnp.ones(WIDTH)}


BATCH = numbers(2, ROWS, WIDTH), numbers(3, ROWS, 3)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4])


@pytest.fixture(scope="module")
def sharded(mesh):
    return autoshard(train, mesh=mesh, pipeline={"stages": 2, "microbatches": 2, "schedule": "1f1b"})


@pytest.fixture(scope="module")
def planned(sharded):
    return sharded.plan(jax.eval_shape(initial, jax.random.key(0)), *BATCH)


@pytest.fixture(scope="module")
def born(planned):
    return planned.init(initial, jax.random.key(0))


def test_a_state_is_born_on_the_devices_of_its_stages(planned, born):
    assert jax.tree.map(lambda one: one.sharding, born) == planned.in_shardings[0]
    expected = jax.jit(initial)(jax.random.key(0))
    for one, other in zip(jax.tree.leaves(born), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    assert {device.id for device in born["scale"].devices()} == {0, 1}
    assert {device.id for device in born["head"].devices()} == {2, 3}
    assert len(born["layers"].devices()) == 4  # a stack, over both stages


def test_what_is_born_and_sharded_so_is_stepped_without_a_move(sharded, planned, born):
    batch = planned.shard_batch(BATCH)
    assert {device.id for device in batch[0].devices()} == {0, 1}  # the first stage reads it
    _, loss = sharded(born, *batch)
    np.testing.assert_allclose(loss, train(jax.device_get(born), *BATCH)[1], rtol=1e-5)


def test_a_loaded_plan_makes_a_state_alike(planned, born, mesh):
    again = Plan.loads(planned.dumps(), mesh).init(initial, jax.random.key(0))
    assert jax.tree.map(lambda one: one.sharding, again) == jax.tree.map(lambda one: one.sharding, born)


def test_an_argument_is_explained_by_its_stage(planned):
    found = planned.explain("head")
    assert found.chosen.step_seconds == planned.predicted.step_seconds
    assert found.reasons[0].startswith("Stage 1 keeps it; F of stage 1")
    assert "'data' (2 devices) does not divide it, but divides 2 and 4" in str(found)
    assert {one.spec for one in found.others} <= {P("data"), P()} - {found.chosen.spec}
    assert found.others and all(one.step_seconds > 0 for one in found.others)


def test_a_stack_is_explained_over_its_stages(planned):
    found = planned.explain("layers")
    assert "rows 0 to 1 on stage 0, rows 2 to 3 on stage 1" in found.reasons[0]
    assert found.others and all(one.layout[0] == () for one in found.others)  # trips are never split


def test_other_layouts_cost_what_planning_with_them_fixed_does(planned):
    """The oracle: the same stages, planned with the argument fixed so."""
    explained = planned.explain("scale")
    other = next(one for one in explained.others if one.fits)
    fixed = planned.what_if(fixed={"state/scale": other.spec})
    assert other.step_seconds <= fixed.predicted.step_seconds * 1.0001  # one of two ways to plan the rest
    assert fixed.explain("scale").reasons[1].startswith("The user says so: fixed['state/scale']")


def test_a_layout_fits_where_planning_with_it_does(planned):
    """A limit of which the plan takes more than is usable, and less than all."""
    backend = planned.planner.options.backend
    for usable in (1.01, 0.99):
        limited = replace(planned, memory=planned.predicted.peak_bytes / backend.usable * usable)
        assert limited.explain("scale").chosen.fits == (usable > 1)


def test_a_path_that_nothing_fits_is_told(planned):
    with pytest.raises(PlanError, match="no argument of train has the path 'headd'; near ones are"):
        planned.explain("headd")


def test_a_wish_is_planned_on_the_same_stages(planned, mesh):
    wished = planned.what_if(fixed={"head": P("data")})
    assert "What if fixed={'head': P" in str(wished)
    assert wished.timeline.schedule == planned.timeline.schedule
    assert wished.in_shardings[0]["head"].spec == P("data")
    assert autoshard(train, mesh=mesh, plan=wished).plan(jax.eval_shape(initial, jax.random.key(0)), *BATCH)
    larger = planned.what_if(mesh=AbstractMesh((2, 4), ("stage", "data")), topology="cpu:8")
    assert [dict(stage.mesh.shape) for stage in larger.stages] == [{"stage": 1, "data": 4}] * 2
    uneven = planned.what_if(topology=topology("cpu:4", {"stage": 2, "data": 2}, speeds={"stage": (1, 0.5)}))
    even = planned.what_if(topology=topology("cpu:4", {"stage": 2, "data": 2}))
    assert uneven.stages[0].seconds == even.stages[0].seconds and uneven.stages[1].seconds > even.stages[1].seconds


WISHES = {
    "too little memory": ({"memory": "1KiB"}, MemoryLimitError, "of stage"),
    "other mesh": ({"mesh": AbstractMesh((3,), ("data",))}, MeshError, "stages=2 divide no axis"),
}


@pytest.mark.parametrize("name", WISHES)
def test_a_wish_that_stages_cannot_have_is_refused(planned, name):
    wish, kind, message = WISHES[name]
    with pytest.raises(kind, match=message):
        planned.what_if(**wish)


def test_a_plan_with_stages_is_no_code_for_jit(planned):
    with pytest.raises(PlanError, match=r"takes one program\.\nplan\.stages\[0\]\.plans"):
        planned.to_code()
    assert "def in_shardings" in planned.stages[0].plan.to_code()  # as the message says


def test_the_oracle_sees_a_stage_that_is_not_planned_again(planned, monkeypatch):
    monkeypatch.setattr(StagePlanner, "of_stage", lambda self, stage, mesh, start: {})
    found = planned.explain("scale")
    assert all(one.step_seconds == planned.predicted.step_seconds for one in found.others)


@pytest.mark.parametrize("name", ["scanned", "unrolled"])
def test_what_brings_results_to_where_other_programs_have_them_is_predicted(name, tmp_path):
    """Backward programs, planned first, say how residuals lie: what makes these has to leave them so."""
    step, args = STEPS[name]()
    eight = jax.make_mesh((4, 2), ("data", "model"))
    plan = autoshard(step, mesh=eight, pipeline={"stages": 2, "microbatches": 2}).plan(*args)
    programs = plan.verify().programs
    assert len(programs) >= 8 and all(one.collectives_agree for one in programs.values())
    plan.save(tmp_path / "plan.json")
    loaded = autoshard(step, mesh=eight, plan=tmp_path / "plan.json").plan(*args)
    names = [one.fingerprint for one in plan.pipeline.plans]
    assert [one.fingerprint for one in loaded.pipeline.plans] == names
