"""A pipelined step trains as on one device, on sub-meshes of CPU devices; what fails is named, and nothing hangs."""

import dataclasses

import jax
import numpy as np
import pytest
from equality import assert_equal
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from models import MODELS, MORE_MODELS, gpt
from oracles import SMALL, run
from pipeline_steps import STEPS

from autoshard import ArgumentError, MeshError, MicrobatchError, StageError, autoshard
from autoshard.pipeline import SCHEDULES
from autoshard.stages.running.views import joined, part_of
from autoshard.stages.sub_meshes import stage_meshes


def mesh_of(**shape):
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    return jax.make_mesh(tuple(shape.values()), tuple(shape), (AxisType.Auto,) * len(shape), devices=devices)


def trained_on(step, args, steps, is_state):
    """The results of some steps, each taking the state that the one before returned."""
    found = []
    for _ in range(steps):
        results = step(*args)
        args = [
            result if i < is_state else arg
            for i, (arg, result) in enumerate(zip(args, (*results, *args), strict=False))
        ]
        found.append(jax.tree.map(np.asarray, results))
    return found


def assert_trains_alike(make, steps=2, **options):
    step, args = make()
    is_state = 1 if make is STEPS["with rows"] else 2
    expected = trained_on(jax.jit(step), args, steps, is_state)
    sharded = autoshard(step, **options)
    for one, other in zip(trained_on(sharded, args, steps, is_state), expected, strict=True):
        assert_equal(one, other)
    return sharded


@pytest.fixture(scope="module")
def rows():
    """A step without a loop over layers, zero bubble, state donated."""
    pipeline = {"stages": 2, "microbatches": 2, "schedule": "zb_h1"}
    return assert_trains_alike(STEPS["with rows"], mesh=mesh_of(data=2, stage=2), pipeline=pipeline, donate_argnums=0)


def test_a_step_trains_as_on_one_device(rows):
    _, args = STEPS["with rows"]()
    planned = rows.pipeline(*args)
    assert [dict(mesh.shape) for mesh in planned.meshes] == [{"data": 2, "stage": 1}] * 2


def test_state_stays_on_the_devices_of_its_stage(rows):
    _, (weights, batch) = STEPS["with rows"]()
    first, _, (losses, _) = rows(weights, batch)
    second, _, _ = rows(first, batch)
    assert losses.shape == (8,)
    for old, new in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert old.is_deleted() and new.sharding == old.sharding and len(new.devices()) == 2
    assert len({frozenset(leaf.devices()) for leaf in jax.tree.leaves(second)}) == 2
    with pytest.raises(ArgumentError, match="weights/0/bias has been deleted"):
        rows(first, batch)


@pytest.fixture
def failing(rows):
    """The runtime of the step, in which one program fails when it runs for the second time."""
    _, args = STEPS["with rows"]()
    runtime = rows._runtime(rows.pipeline(*args))
    before = dict(runtime.runnable)

    def make(kind, stage):
        at = next(key for key, one in before.items() if (one.program.kind, one.program.stage) == (kind, stage))
        calls = []

        def fails(*arrays):
            calls.append(arrays)
            if len(calls) == 2:
                raise MemoryError("out of memory")
            return before[at].compiled(*arrays)

        runtime.runnable[at] = dataclasses.replace(before[at], compiled=fails)

    yield make
    runtime.runnable = before


@pytest.mark.parametrize("kind, stage, words", [("F", 0, "the forward pass"), ("B", 1, "the backward pass")])
def test_a_stage_that_fails_is_named_and_ends_the_step(rows, failing, kind, stage, words):
    _, args = STEPS["with rows"]()
    args = jax.device_put(args)
    failing(kind, stage)
    with pytest.raises(
        StageError, match=rf"stage {stage} in {words} of microbatch 1 failed: MemoryError: out of"
    ) as found:
        rows(*args)
    assert isinstance(found.value.__cause__, MemoryError)
    assert "Its arguments are as they were" in str(found.value)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(args))
    rows(*args)  # it failed the second time only


@pytest.mark.slow
def test_stacked_weights_are_one_array_over_the_stages():
    pipeline = {"stages": 2, "microbatches": 2, "schedule": "1f1b"}
    sharded = assert_trains_alike(STEPS["scanned"], mesh=mesh_of(stage=2, data=2), pipeline=pipeline)
    _, args = STEPS["scanned"]()
    weights, state, _ = sharded(*args)
    stack = weights["layers"]["up"]
    assert stack.shape[0] == 4 and stack.sharding.spec[0] in ("stages", ("stages",))
    assert {shard.data.shape[0] for shard in stack.addressable_shards} == {2}
    assert state[0].mu["layers"]["up"].sharding.spec[0] in ("stages", ("stages",))


def pointers(array):
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def test_views_share_buffers_with_the_arrays_of_stages():
    meshes = stage_meshes(mesh_of(x=2, y=2), 2)
    parts = [
        jax.device_put(np.full((2, 4), i), NamedSharding(mesh, PartitionSpec(None, "y")))
        for i, mesh in enumerate(meshes)
    ]
    whole = joined(parts)
    np.testing.assert_array_equal(whole, np.repeat([[0] * 4, [1] * 4], 2, axis=0))
    assert pointers(whole) == pointers(parts[0]) | pointers(parts[1])
    again = part_of(whole, 2, 4, parts[1].sharding)
    assert pointers(again) == pointers(parts[1])
    moved = part_of(whole, 1, 3, parts[1].sharding)
    np.testing.assert_array_equal(moved, np.asarray(whole)[1:3])
    uneven = joined([parts[0], jax.device_put(np.full((1, 4), 7), parts[1].sharding)])
    np.testing.assert_array_equal(uneven, [[0] * 4, [0] * 4, [7] * 4])
    assert {shard.data.shape for shard in uneven.addressable_shards} == {(3, 1)}
    odd = joined([jax.device_put(np.ones((rows, 6)), parts[0].sharding) for rows in (1, 2)])  # of one stage
    assert odd.shape == (3, 6) and {shard.data.shape for shard in odd.addressable_shards} == {(3, 3)}


@pytest.mark.parametrize(
    "pipeline, message",
    [
        (4, "a dict is needed"),
        ({"stages": 2, "order": "1f1b"}, "It may have stages, microbatches, schedule, chunks"),
        ({"stages": 0}, "stages=0; how many"),
        ({"stages": 2, "microbatches": 1}, "microbatches=1; stages take 2 or more"),
        ({"stages": 2, "schedule": "pipedream"}, "changes weights while microbatches are in flight"),
        ({"stages": 2, "schedule": "1f1bb"}, "no schedule is called '1f1bb'. Did you mean '1f1b'"),
        ({"stages": 2, "chunks": 3}, "one virtual stage per device"),
    ],
)
def test_what_cannot_be_asked_is_named(pipeline, message):
    with pytest.raises(ArgumentError, match=message):
        autoshard(lambda x: x, mesh=mesh_of(data=4), pipeline=pipeline)


def test_what_cannot_be_cut_is_refused():
    step, args = STEPS["with rows"]()
    with pytest.raises(MeshError, match=r"stages=3 divide no axis of \{'data': 4\}"):
        autoshard(step, mesh=mesh_of(data=4), pipeline={"stages": 3, "microbatches": 2}).pipeline(*args)
    with pytest.raises(StageError, match="can be cut into"):
        autoshard(step, mesh=mesh_of(stage=8), pipeline={"stages": 8, "microbatches": 2}).pipeline(*args)
    with pytest.raises(MicrobatchError, match="microbatches=3 do not divide the 8 rows"):
        autoshard(step, mesh=mesh_of(data=4), pipeline={"stages": 2, "microbatches": 3}).pipeline(*args)
    with pytest.raises(ArgumentError, match="pipeline= and microbatches= both"):
        autoshard(step, mesh=mesh_of(data=4), pipeline={"stages": 2}, microbatches=2)
    planned = autoshard(step, mesh=AbstractMesh((4,), ("data",)), pipeline={"stages": 2}, topology="cpu:4")
    with pytest.raises(MeshError, match="has no devices"):
        planned(*args)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STEPS))
def test_steps_of_every_form_train_alike(name):
    pipeline = {"stages": 2, "microbatches": 4, "schedule": "1f1b"}
    assert_trains_alike(STEPS[name], steps=5, mesh=mesh_of(stage=2, data=2), pipeline=pipeline)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_alike(name):
    pipeline = {"stages": 2, "microbatches": 4, "schedule": name}
    assert_trains_alike(STEPS["unrolled"], steps=5, mesh=mesh_of(data=4), pipeline=pipeline)


TINY = {"layers": 2, "d_model": 16, "heads": 4, "vocab": 32, "seq": 8, "batch": 8}
LARGER = {
    "gpt": lambda: gpt.make(**TINY),
    "gpt scan": lambda: gpt.make(**TINY, scan=True),
    "llama": lambda: MORE_MODELS["llama"](**TINY, shared_heads=2, d_hidden=32),
    "lstm": SMALL["lstm"],
    "mlp": lambda: MODELS["mlp"](layers=4, width=32, batch=16),
    "moe": SMALL["moe"],
    "tied": SMALL["tied"],
    "unet": lambda: MORE_MODELS["unet"](width=8, size=8, batch=8),
    "vit": lambda: MORE_MODELS["vit"](layers=2, width=16, heads=4, size=8, batch=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LARGER))
def test_models_train_alike(name):
    model = LARGER[name]()
    step = autoshard(model.step, mesh=mesh_of(stage=2, data=2), pipeline={"stages": 2, "microbatches": 2})
    losses, state, _ = run(step, model)
    expected_losses, expected_state, _ = run(jax.jit(model.step), model)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for leaf, expected in zip(state, expected_state, strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)
