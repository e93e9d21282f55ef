"""Plans with stages are saved, loaded, kept and compared as other plans are, and the loaded plan runs alike."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from pipeline_steps import STEPS, numbers

from autoshard import ArgumentError, ConflictError, Plan, PlanError, autoshard
from autoshard.plans.files import to_text
from autoshard.stage_planning.pipeline_plan import PipelinePlan
from autoshard.stages.pipelined_function import PipelinedFunction

LAYERS, WIDTH = 4, 8


def train(weights, x, y):
    def loss(weights):
        return jnp.mean((lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0] - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


ARGS = numbers(1, LAYERS, WIDTH, WIDTH), numbers(2, 6, WIDTH), numbers(3, 6, WIDTH)
PIPELINE = {"stages": 2, "microbatches": 2, "schedule": "zb_h1"}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def planned(mesh):
    return autoshard(train, mesh=mesh, pipeline=PIPELINE).plan(*ARGS)


@pytest.fixture(scope="module")
def loaded(planned, mesh, tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    planned.save(path)
    return Plan.load(path, mesh)


def test_a_loaded_plan_says_what_was_saved(planned, loaded):
    assert isinstance(loaded, PipelinePlan)
    assert loaded.dumps() == planned.dumps()
    assert loaded.flat_in_shardings == planned.flat_in_shardings
    assert loaded.flat_out_shardings == planned.flat_out_shardings
    assert str(loaded.timeline) == str(planned.timeline)
    assert loaded._stages_section() == planned._stages_section()
    assert not planned.diff(loaded)
    with pytest.raises(PlanError, match="knows no step to compile"):
        loaded.verify()


def test_a_loaded_plan_runs_without_planning(planned, loaded, mesh, monkeypatch):
    monkeypatch.setattr(PipelinedFunction, "_planned_stages", None)
    given = autoshard(train, mesh=mesh, plan=loaded)
    for one, other in zip(jax.tree.leaves(given(*ARGS)), jax.tree.leaves(jax.jit(train)(*ARGS)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert given.plan(*ARGS).dumps() == planned.dumps()
    other, args = STEPS["with rows"]()
    with pytest.raises(PlanError, match="made for another program"):
        autoshard(other, mesh=mesh, plan=loaded).plan(*args)


def test_arrays_are_split_by_the_part_of_the_mesh_that_their_stage_has():
    """A width of 12 is split by the four devices of a stage, and could not be by the eight of the mesh."""
    args = [jax.ShapeDtypeStruct(one, jnp.float32) for one in ((LAYERS, 12, 12), (64, 12), (64, 12))]
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    made = autoshard(train, mesh=mesh, pipeline=PIPELINE, fixed={"weights": P(None, None, ("a", "b"))}).plan(*args)
    read = Plan.loads(made.dumps(), mesh)
    assert read.dumps() == made.dumps() and not made.diff(read)


@pytest.mark.parametrize("is_moved", [False, True], ids=["as it is", "moved"])
def test_a_plan_is_given_back_without_a_file(planned, mesh, is_moved):
    given = autoshard(train, mesh=mesh, plan=planned.on(mesh) if is_moved else planned)
    assert given.plan(*ARGS).dumps() == planned.dumps()


def test_a_plan_that_is_given_agrees_with_what_is_fixed():
    mesh = jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4])
    fixed = {"weights": P(None, None, "data"), "x": P("data")}
    given = autoshard(train, mesh=mesh, pipeline=PIPELINE, fixed=fixed).plan(*ARGS)
    for agrees in (fixed, {"x": P("data")}, {"weights": P("stage", None, "data")}):  # trips are the stages'
        assert autoshard(train, mesh=mesh, plan=given, fixed=agrees).plan(*ARGS).dumps() == given.dumps()
    for differs in ({"weights": P(None, "data")}, {"x": P()}):
        with pytest.raises(ConflictError, match="the plan that is given has it"):
            autoshard(train, mesh=mesh, plan=given, fixed=differs).plan(*ARGS)


@pytest.mark.parametrize("said", [{"pad": "auto"}, {"search": "aceso"}, {"rewrites": "auto"}, {"refine": 2}], ids=str)
def test_options_that_a_given_plan_does_not_heed_are_refused(planned, mesh, said):
    with pytest.raises(ArgumentError, match=f"a plan with stages cannot be combined with {next(iter(said))}= yet"):
        autoshard(train, mesh=mesh, plan=planned, **said)


def test_another_step_cannot_lie_like_stages(planned, mesh):
    def evaluated(weights, x, y):
        return train(weights, x, y)[1]

    with pytest.raises(PlanError, match="Leave like= out, and each call moves its arguments"):
        autoshard(evaluated, like=planned)
    weights, _ = autoshard(train, mesh=mesh, plan=planned)(*ARGS)
    found = autoshard(evaluated, mesh=mesh)(weights, *ARGS[1:])  # as the message says
    np.testing.assert_allclose(found, evaluated(np.asarray(weights), *ARGS[1:]), rtol=1e-5)


def test_a_plan_with_stages_is_kept_in_the_cache(planned, mesh, tmp_path, monkeypatch):
    first = autoshard(train, mesh=mesh, pipeline=PIPELINE, cache=tmp_path).plan(*ARGS)
    monkeypatch.setattr(PipelinedFunction, "_planned_stages", None)
    again = autoshard(train, mesh=mesh, pipeline=PIPELINE, cache=tmp_path).plan(*ARGS)
    assert again.dumps() == first.dumps()
    with pytest.raises(TypeError, match="not callable"):  # another pipeline is planned anew
        autoshard(train, mesh=mesh, pipeline=PIPELINE | {"schedule": "gpipe"}, cache=tmp_path).plan(*ARGS)


DAMAGE = {
    "schedule": ("schedule", "none"),
    "places": ("parts", [[{"stage": 1}, [0]], [{"stage": 1}, [2]]]),
    "size of a part": ("parts", [[{"stage": 2}, [0]], [{"stage": 1}, [1]]]),
    "programs": ("programs", 3),
    "costs": ("task_costs", {"forward": [1.0]}),
    "layout": ("argument_parts", [[[0, [2], [["nowhere"]]]]]),
    "places of too few results": ("result_parts", []),
    "unknown": ("orders", []),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_named(planned, name):
    field, value = DAMAGE[name]
    content = json.loads(planned.dumps())
    content.pop("digest")
    content["pipeline"][field] = value
    with pytest.raises(PlanError, match="is not a plan that this version of autoshard can read"):
        Plan.loads(to_text(content), planned.mesh)


def test_programs_that_are_left_out_are_told(planned, mesh):
    content = json.loads(planned.dumps())
    content.pop("digest")
    content["pipeline"]["programs"].pop()
    with pytest.raises(PlanError, match="made for another program"):
        autoshard(train, mesh=mesh, plan=Plan.loads(to_text(content), mesh)).plan(*ARGS)


def test_a_plan_of_a_mesh_without_devices_moves_to_one(planned, mesh):
    moved = planned.on(AbstractMesh((2,), ("stage",)))
    assert moved.dumps() == planned.dumps()
    assert [stage.devices for stage in moved.stages] == [(0,), (1,)]
    assert moved.on(mesh).flat_in_shardings == planned.flat_in_shardings


def test_golden_plans_have_stages(planned, mesh, tmp_path):
    planned.save(tmp_path / "golden.json")
    planned.assert_same(tmp_path / "golden.json")
    other = autoshard(train, mesh=mesh, pipeline=PIPELINE | {"schedule": "gpipe"}).plan(*ARGS)
    with pytest.raises(PlanError, match="schedule: zb_h1 in the file, gpipe now"):
        other.assert_same(tmp_path / "golden.json")
    assert "schedule" in str(planned.diff(other))
