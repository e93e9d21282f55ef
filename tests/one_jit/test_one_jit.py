"""backend="one_jit": equal stages in one program train as one device does; what is no such loop is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from autoshard import ArgumentError, MemoryLimitError, MeshError, Plan, PlanError, StageError, autoshard, plan
from autoshard.one_jit import lockstep
from autoshard.one_jit.plan import StagesOnMesh
from autoshard.stages.planning import StagePlanner

LAYERS, WIDTH, ROWS, WORDS = 4, 8, 12, 16
PIPELINE = {"stages": 2, "microbatches": 3, "backend": "one_jit"}


def loss_of(weights, batch, layer=lambda h, w: jnp.tanh(h @ w)):
    """A tied embedding before and after the loop, a mask that all layers read, a number per row."""
    mask = jnp.where(batch["words"] > 0, 1.0, 0.0)[..., None]
    h = weights["embedding"][batch["words"]]
    h, _ = lax.scan(lambda h, w: (layer(h, w) * mask + h, None), h, weights["layers"])
    losses = jnp.mean((h @ weights["embedding"].T - batch["targets"]) ** 2, axis=-1)
    return jnp.mean(losses), losses


def step(weights, batch):
    (value, losses), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, batch)
    size = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
    weights = jax.tree.map(lambda w, g: w - 0.5 * g / jnp.maximum(size, 0.1), weights, gradients)
    return weights, value, losses


def arguments():
    made = np.random.default_rng(0)
    weights = {
        "embedding": made.standard_normal((WORDS, WIDTH)).astype(np.float32) / 3,
        "layers": made.standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32) / 3,
    }
    words = made.integers(0, WORDS, ROWS).astype(np.int32)
    return weights, {"words": words, "targets": made.standard_normal((ROWS, WORDS)).astype(np.float32)}


def mesh_of(**shape):
    count = int(np.prod(list(shape.values())))
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), (AxisType.Auto,) * len(shape), devices=jax.devices()[:count]
    )


@pytest.fixture(scope="module")
def sharded():
    return autoshard(step, mesh=mesh_of(stage=2, data=2), pipeline=PIPELINE, donate_argnums=0)


def trained(fn, steps=3):
    weights, batch = arguments()
    found = []
    for _ in range(steps):
        weights, value, losses = fn(weights, batch)
        found.append(jax.tree.map(np.asarray, (weights, value, losses)))
    return found, weights


def test_it_trains_as_one_device_does(sharded):
    found, weights = trained(sharded)
    expected, _ = trained(jax.jit(step))
    assert_equal(found, expected)
    assert weights["layers"].sharding.spec[0] in ("stage", ("stage",))


def test_the_oracle_finds_a_stage_that_is_a_tick_late(monkeypatch):
    monkeypatch.setattr(lockstep.Lockstep, "slots", property(lambda self: 1))
    late = autoshard(step, mesh=mesh_of(stage=2), pipeline=PIPELINE)
    with pytest.raises(AssertionError):
        assert_equal(trained(late, 1)[0], trained(jax.jit(step), 1)[0])


def test_the_plan_says_how_arrays_lie(sharded):
    made = sharded.plan(*arguments())
    assert "2 stages run in lockstep over 'stage': 3 microbatches take 5 ticks" in str(made)
    assert made.in_shardings[0]["layers"].spec[0] in ("stage", ("stage",))
    assert {one.axes for one in made.predicted.collectives if one.kind == "collective_permute"} == {("stage",)}


def test_a_saved_plan_runs_without_planning(sharded, tmp_path, monkeypatch):
    made, mesh = sharded.plan(*arguments()), mesh_of(stage=2, data=2)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", mesh)
    assert loaded.dumps() == made.dumps() and str(loaded.remark) == str(made.remark)
    assert not made.diff(loaded)
    made.assert_same(tmp_path / "plan.json")
    monkeypatch.setattr(StagePlanner, "plans", None)
    given = autoshard(step, mesh=mesh, plan=loaded, donate_argnums=0)
    assert_equal(trained(given, 1)[0], trained(jax.jit(step), 1)[0])
    with pytest.raises(PlanError, match="made for another program"):
        autoshard(evaluation, mesh=mesh, plan=loaded).plan(*arguments())


def test_plans_in_the_cache_are_told_apart_by_what_is_asked(tmp_path, monkeypatch):
    said = {"mesh": mesh_of(stage=2), "cache": tmp_path}
    first = autoshard(step, pipeline=PIPELINE, **said).plan(*arguments())
    monkeypatch.setattr(StagesOnMesh, "plan", None)
    assert autoshard(step, pipeline=PIPELINE, **said).plan(*arguments()).dumps() == first.dumps()
    with pytest.raises(TypeError, match="not callable"):
        autoshard(step, pipeline=PIPELINE | {"microbatches": 2}, **said).plan(*arguments())


def test_a_plan_is_explained_and_asked_what_if(sharded):
    made = sharded.plan(*arguments())
    stack = made.explain("weights/layers")
    assert stack.chosen.layout[0] == ("stage",) and all(one.layout[0] == ("stage",) for one in stack.others)
    assert stack.others and "F of stage 1" in stack.reasons[0]
    wished = made.what_if(fixed={"weights/embedding": P("data")})
    assert wished.in_shardings[0]["embedding"].spec == P("data")
    with pytest.raises(MeshError, match="stages=2, and 'stage' has 4 devices"):
        made.what_if(mesh=AbstractMesh((4,), ("stage",)))
    with pytest.raises(MemoryLimitError):
        made.what_if(memory="1KiB")
    # More than is usable, though less than there is.
    with pytest.raises(MemoryLimitError, match=r"and .* of .* are usable"):
        made.what_if(memory=made.predicted.peak_bytes * 1.05)


def test_a_state_is_born_as_the_plan_has_it(sharded):
    made, (weights, _) = sharded.plan(*arguments()), arguments()
    born = made.init(lambda: jax.tree.map(jnp.asarray, weights))
    assert jax.tree.map(lambda one: one.sharding, born) == made.in_shardings[0]


@pytest.mark.slow
def test_it_is_compiled_for_tpu(sharded):
    """Ahead of time, where libtpu is."""
    pytest.importorskip("libtpu")
    found = sharded.plan(*arguments()).verify("v5e:2x2")
    assert "collective_permute" in str(found)


def evaluation(weights, batch):
    return loss_of(weights, batch)


def from_the_last_layer(weights, batch):
    h = weights["embedding"][batch["words"]]
    return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights["layers"], reverse=True)[0] ** 2)


def reversed_step(weights, batch):
    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(from_the_last_layer)(weights, batch))


def without_a_loop(weights, batch):
    def loss(weights):
        h = weights["embedding"][batch["words"]]
        for layer in range(LAYERS):
            h = jnp.tanh(h @ weights["layers"][layer])
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


REFUSED = {
    "no loop": (without_a_loop, {"stage": 2}, {}, StageError, "no scan over stacked parameters"),
    "no gradient": (evaluation, {"stage": 2}, {}, StageError, "takes no gradient through the loop over layers"),
    "from the last layer": (from_the_last_layer, {"stage": 2}, {}, StageError, "reverse=True"),
    "gradient from the last layer": (reversed_step, {"stage": 2}, {}, StageError, "reverse=True"),
    "layers do not divide": (step, {"stage": 3}, {"stages": 3}, StageError, "stages=3 do not divide the 4 layers"),
    "part of an axis": (step, {"stage": 4}, {}, MeshError, "stages=2, and 'stage' has 4 devices"),
    "schedule": (step, {"stage": 2}, {"schedule": "gpipe"}, ArgumentError, "takes no schedule='gpipe'"),
    "one stage": (step, {"stage": 1}, {"stages": 1}, ArgumentError, "takes 2 stages or more"),
    "backend": (step, {"stage": 2}, {"backend": "two"}, ArgumentError, "'programs' or 'one_jit' is needed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_run_is_refused(name):
    fn, shape, said, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        plan(fn, *arguments(), mesh=mesh_of(**shape), pipeline=PIPELINE | said)
