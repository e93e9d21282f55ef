"""Plans: what they give to JAX, how they are saved and found again, and that they are the same in every process."""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import SMALL, TEXTBOOK, adjusted, mesh_of, slow_chips
from sweeps import some

import autoshard
from autoshard import Link, Plan, PlanError, Topology, options

SHAPE = {"x": 4, "y": 2}
MESH = mesh_of(SHAPE)
OPTIONS = {"mesh": MESH, "topology": slow_chips(SHAPE), "donate_argnums": 0, "time_limit": 10}
MODELS = ["mlp", "gpt", "cnn", "moe"]  # plain pytrees, nnx modules, a linen TrainState, tuples and optax


@pytest.fixture(scope="module")
def planned():
    """Model name -> the model, its decorated step, and the plan."""
    made = {}

    def get(name):
        if name not in made:
            model = SMALL[name]()
            step = autoshard.autoshard(model.step, **OPTIONS)
            made[name] = model, step, step.plan(model.state, model.batches(0))
        return made[name]

    return get


@pytest.mark.parametrize("name", some(["mlp", "cnn"], "mlp"))
def test_shardings_go_into_jit_and_device_put(planned, name):
    model, _, plan = planned(name)
    arguments = model.state, model.batches(0)
    placed = jax.device_put(arguments, plan.in_shardings)
    jitted = jax.jit(model.step, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    state, loss = jitted(*placed)
    assert [leaf.sharding for leaf in jax.tree.leaves(state)] == jax.tree.leaves(plan.in_shardings[0])
    np.testing.assert_allclose(loss, jax.jit(model.step)(*arguments)[1], rtol=1e-4)


@pytest.mark.parametrize("name", ["mlp", "moe"])
def test_checkpoints_are_restored_sharded(planned, name, tmp_path):
    model, _, plan = planned(name)
    state = jax.device_put(model.state, plan.in_shardings[0])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", plan.abstract(0))
    for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert leaf.sharding == expected.sharding
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize("name", MODELS)
def test_abstract_arguments_lower_like_arrays(planned, name):
    model, step, plan = planned(name)
    for found, leaf in zip(jax.tree.leaves(plan.abstract(0)), jax.tree.leaves(model.state), strict=True):
        assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
    assert step.lower(plan.abstract(0), plan.abstract(1)).as_text() == plan.lowering().as_text()


# Saved and loaded.


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_plan_is_the_plan(planned, name, axis_type, tmp_path):
    model, step, plan = planned(name)
    arguments = model.state, model.batches(0)
    file = tmp_path / "plan.json"
    plan.save(file)
    mesh = mesh_of(SHAPE, axis_type)
    loaded = Plan.load(file, mesh)
    assert loaded.mesh == MESH
    for field in ("name", "fingerprint", "arguments", "results", "carried", "predicted", "status", "bound", "memory"):
        assert getattr(loaded, field) == getattr(plan, field), field
    assert loaded.annotations == plan.annotations
    again = tmp_path / "again.json"
    loaded.save(again)
    assert again.read_bytes() == file.read_bytes()
    used = autoshard.autoshard(model.step, mesh=mesh, donate_argnums=0, plan=file)
    bound = used.plan(*arguments)
    for ours, theirs in ((bound.in_shardings, plan.in_shardings), (bound.out_shardings, plan.out_shardings)):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        assert jax.tree.leaves(ours) == jax.tree.leaves(theirs)
    assert used.lower(*arguments).as_text() == step.lower(*arguments).as_text()


def test_a_loaded_plan_runs(planned, tmp_path):
    model, step, plan = planned("cnn")
    plan.save(tmp_path / "plan.json")
    mesh = mesh_of(SHAPE, AxisType.Explicit)
    used = autoshard.autoshard(model.step, mesh=mesh, donate_argnums=0, plan=tmp_path / "plan.json")
    (_, expected), (_, found) = (run(model.state, model.batches(0)) for run in (step, used))
    np.testing.assert_array_equal(found, expected)


def test_loaded_trees_of_standard_containers_are_the_steps_own(planned, tmp_path):
    model, _, plan = planned("mlp")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", MESH)
    assert loaded.in_shardings == plan.in_shardings and loaded.out_shardings == plan.out_shardings
    assert jax.tree.structure(loaded.in_shardings[0]) == jax.tree.structure(model.state)
    assert loaded.abstract(0) == plan.abstract(0)


def test_loaded_trees_of_modules_are_nested_dicts(planned, tmp_path):
    _, _, plan = planned("gpt")
    plan.save(tmp_path / "plan.json")
    (net, optimizer), batch = Plan.load(tmp_path / "plan.json", MESH).in_shardings
    expected = {placed.name: NamedSharding(MESH, placed.spec) for placed in plan.arguments}
    assert net["blocks"]["0"]["up"]["kernel"] == expected["state/0/blocks/0/up/kernel"]
    assert batch["inputs"] == expected["batch/inputs"]
    assert {"step", "opt_state"} <= set(optimizer)


def odd_containers(state, *rest, **more):
    return [state[1], None, (state[0]["b"], {}), rest[0]], more


def test_loaded_trees_keep_none_empty_and_keyword_arguments(tmp_path):
    args = ([{"b": np.ones((8, 8)), "a": None}, (np.ones(8), [])], np.ones(16))
    step = autoshard.autoshard(odd_containers, mesh=MESH)
    plan = step.plan(*args, z=np.ones(2), a=np.ones(4))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", MESH)
    for name in ("in_shardings", "keyword_shardings", "out_shardings"):
        assert getattr(loaded, name) == getattr(plan, name)
    assert jax.tree.structure(loaded.in_shardings) == jax.tree.structure(args)


class Single(NamedTuple):
    """A state of one field, as `optax.masked` has."""

    inner: Any


@jax.tree_util.register_pytree_with_keys_class
class OddKeys(tuple):
    """A container whose keys are none of JAX's."""

    def tree_flatten_with_keys(self):
        return tuple(zip((None, "text", 3), self, strict=True)), None

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(children)


STATES = {
    "nothing": Single(()),
    "none": Single(None),
    "empty dict": Single({}),
    "one array": Single(np.ones(8)),
    "nothing below": Single(Single(Single(optax.EmptyState()))),
    "masked": optax.adamw(1e-3, mask={"w": True, "b": False}).init({"w": np.ones((8, 8)), "b": np.ones(8)}),
    "multi_transform": optax.multi_transform(
        {"a": optax.sgd(0.1), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}
    ).init({"w": np.ones((8, 8)), "b": np.ones(8)}),
    "keys": OddKeys((np.ones(8), np.ones(16), np.ones(24))),
}


@pytest.mark.parametrize("name", STATES)
def test_any_container_of_a_state_is_saved(name):
    """Saving raised a TypeError where a class of one field holds nothing: JAX's keys cannot be compared with None."""
    state = STATES[name]
    plan = autoshard.plan(lambda state, x: (state, x + 1), state, np.ones(8), mesh=MESH)
    loaded = Plan.loads(plan.dumps(), MESH)
    assert not plan.diff(loaded) and loaded.dumps() == plan.dumps()
    assert len(jax.tree.leaves(loaded.in_shardings[0])) == len(jax.tree.leaves(state))


@pytest.mark.parametrize("step", [lambda: None, lambda: jnp.zeros(8), lambda *x: x], ids=["none", "constant", "empty"])
def test_a_step_that_takes_nothing_is_read(step):
    """Nothing holds memory at any moment."""
    plan = autoshard.plan(step, mesh=MESH)
    loaded = Plan.loads(plan.dumps(), MESH)
    assert str(loaded) and loaded._repr_html_() and str(plan) and plan._repr_html_()


def test_alternatives_are_saved_once_asked_for(planned, tmp_path):
    _, _, plan = planned("mlp")
    found = plan.alternatives
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", MESH)
    assert loaded.alternatives == found and found.keys() >= {"data parallel", "FSDP", "tensor parallel"}
    assert str(loaded) == str(plan)


# Plan files that do not fit.


def mean(w, x):
    return w - x.mean(0), x.sum()


W, X = np.ones((8, 8), np.float32), np.ones((16, 8), np.float32)
OTHERS = {  # function, arguments, options, what the message says is different
    "shape": (mean, (W, X[:8]), {}, "x float32[16, 8] in the plan is x float32[8, 8] in the step"),
    "dtype": (mean, (W, X.astype(np.float16)), {}, "x float32[16, 8] in the plan is x float16[16, 8] in the step"),
    "name": (lambda v, x: mean(v, x), (W, X), {}, "w float32[8, 8] in the plan is v float32[8, 8] in the step"),
    "more": (lambda w, x, y=0.0: mean(w, x), (W, X, 1.0), {}, "the plan has 2 arrays for arguments, the step 3"),
    "donation": (mean, (W, X), {"donate_argnums": 0}, "other results take the place of arguments"),
    "operations": (lambda w, x: (w * x.mean(0), x.sum()), (W, X), {}, "but not the operations on them"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    autoshard.plan(mean, W, X, mesh=MESH).save(file)
    return file


@pytest.mark.parametrize("case", OTHERS)
def test_a_plan_for_another_program(saved, case):
    fn, args, options, difference = OTHERS[case]
    step = autoshard.autoshard(fn, mesh=MESH, plan=saved, **options)
    with pytest.raises(PlanError, match="the plan was made for another program than") as caught:
        step(*args)
    assert difference in str(caught.value)
    assert "Plan the step anew" in str(caught.value)


@pytest.mark.parametrize("shape", [{"x": 2, "y": 4}, {"x": 8}, {"y": 2, "x": 4}, {"a": 4, "b": 2}])
def test_a_plan_for_another_mesh(saved, shape):
    text = f"was made for the mesh {SHAPE}, not for {shape}.\nPlan the step anew on this mesh, or use a mesh of the"
    for use in (
        lambda mesh: Plan.load(saved, mesh),
        lambda mesh: autoshard.autoshard(mean, mesh=mesh, plan=saved),
        lambda mesh: Plan.load(saved, MESH).on(mesh),
    ):
        with pytest.raises(PlanError) as caught:
            use(mesh_of(shape))
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "no JSON",
        lambda content: "[1, 2]",
        lambda content: json.dumps(content | {"format": 99}),
        lambda content: json.dumps({key: value for key, value in content.items() if key != "homes"}),
        lambda content: json.dumps(content | {"arguments": [1]}),
        lambda content: json.dumps(content | {"argument_slots": {"set": [0]}}),
        lambda content: json.dumps(content | {"predicted": {"speed": 1}}),
    ],
)
def test_a_file_that_is_no_plan(saved, tmp_path, damage):
    file = tmp_path / "damaged.json"
    file.write_text(damage(json.loads(saved.read_text())))
    with pytest.raises(PlanError, match=r"damaged.json (is not a plan that|has format 99)"):
        Plan.load(file, MESH)


@pytest.mark.parametrize(
    "question",
    [
        lambda plan: plan.explain(3),
        lambda plan: plan.diff(3),
        lambda plan: plan.abstract(7),
        lambda plan: plan.abstract("x"),
        lambda plan: plan.init(3),
        lambda plan: Plan.loads(3, MESH),
        lambda plan: Plan.load(3, MESH),
        lambda plan: autoshard.autoshard(jnp.sin, mesh=MESH, like=3),
    ],
    ids=["explain", "diff", "abstract", "a name", "init", "loads", "load", "like"],
)
def test_what_is_no_path_plan_number_or_text(planned, question):
    with pytest.raises((autoshard.ArgumentError, PlanError), match=r"\b[37]\b|'x'"):
        question(planned("mlp")[2])


def test_key_arrays_have_abstract_types_after_loading(tmp_path):
    def draw(key, x):
        key, now = jax.random.split(key)
        return key, x + jax.random.normal(now, x.shape)

    args = jax.random.key(0, impl="rbg"), X
    plan = autoshard.plan(draw, *args, mesh=MESH, donate_argnums=0)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", MESH)
    assert loaded.abstract(0) == plan.abstract(0)
    assert loaded.abstract(0).dtype == args[0].dtype and loaded.abstract(1).dtype == jnp.float32
    assert loaded.in_shardings[0] == NamedSharding(MESH, P())


# What runs behind compute.


def fully_sharded(hides, monkeypatch, **machine):
    """One layer under FSDP, for a compiler that hides these shares of its collectives."""
    monkeypatch.setattr(options, "backend_of", lambda *_: adjusted(TEXTBOOK, "overlap", hidden_share=hides))
    figures = {"memory_bytes": 1e9, "memory_bandwidth": 1e9, "flops": {"float32": 1e9}} | machine
    links = {axis: Link(latency=1e-6, bandwidth=1e9) for axis in SHAPE}
    return autoshard.evaluate(
        lambda w, x: w - x.T @ jnp.sin(x @ w), W, np.ones((256, 8), np.float32),
        mesh=MESH, topology=Topology(links, **figures), in_shardings=(P(("x", "y")), P(("x", "y"))), donate_argnums=0,
    ).predicted  # fmt: skip


def test_what_runs_behind_compute_is_not_waited_for(monkeypatch):
    """Of all of it, any number of gathers would cost nothing, and be as good as one."""
    plain, quarter, half, most = (fully_sharded({"all_gather": share}, monkeypatch) for share in (0.0, 0.25, 0.5, 0.9))
    gathering = 1e-6 + 1.2 * (4e-6 + 256 / 1e9 * 7 / 8)  # 8 x 8 floats over 4 devices, then 2; other figures: prices
    assert "all_gather" in {one.kind for one in plain.collectives}
    for predicted, share in ((plain, 0.0), (quarter, 0.25), (half, 0.5), (most, 0.9)):
        assert predicted.collectives == plain.collectives
        assert (predicted.compute_seconds, predicted.communication_seconds) == (
            plain.compute_seconds, plain.communication_seconds,
        )  # fmt: skip
        assert predicted.exposed_seconds == pytest.approx(plain.communication_seconds - share * gathering)
        assert predicted.step_seconds == predicted.compute_seconds + predicted.exposed_seconds


def test_what_arrives_anew_is_written_before_the_program_starts():
    def arrival(step, sharding, **how):
        links = {axis: Link(latency=1e-6, bandwidth=1e9) for axis in SHAPE}
        machine = Topology(links, memory_bytes=1e9, memory_bandwidth=1e9, flops={"float32": 1e9})
        made = autoshard.evaluate(
            step, W, np.ones((256, 8), np.float32), mesh=MESH, topology=machine, in_shardings=(P(), sharding), **how
        )  # fmt: skip
        assert made.predicted.step_seconds == pytest.approx(made.cost)
        assert made.predicted.compute_seconds >= made.predicted.arrival_seconds
        return made.predicted.arrival_seconds

    def step(w, x):
        return w - x.T @ jnp.sin(x @ w)

    batch, weights = 256 * 8 * 4 / 1e9, 8 * 8 * 4 / 1e9
    assert arrival(step, P(), donate_argnums=0) == pytest.approx(batch)
    assert arrival(step, P(("x", "y")), donate_argnums=0) == pytest.approx(batch / 8)
    assert arrival(lambda w, x: jnp.sum(x @ w), P("x")) == pytest.approx(batch / 4 + weights)  # nothing is carried


def test_no_more_is_hidden_than_there_is_compute(monkeypatch):
    fast = {"memory_bandwidth": 1e15, "flops": {"float32": 1e15}}
    predicted = fully_sharded({"all_gather": 1.0, "reduce_scatter": 1.0}, monkeypatch, **fast)
    assert 0 < predicted.compute_seconds < 1e-9
    assert predicted.exposed_seconds == predicted.communication_seconds - predicted.compute_seconds
    assert predicted.step_seconds == pytest.approx(predicted.communication_seconds)
