"""`mesh="auto"`: the mesh that is chosen is the best of all meshes planned one by one, and the step runs on it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.mesh.machines import parse_machine
from autoshard.meshes import mesh_function
from autoshard.meshes.candidates import aligned_sizes, named_meshes
from autoshard.meshes.places import DevicePlace
from autoshard.solver.runtime import cutoff

WEIGHTS = {"down": jax.ShapeDtypeStruct((512, 128), np.float32), "up": jax.ShapeDtypeStruct((128, 512), np.float32)}
BATCH = jax.ShapeDtypeStruct((64, 128), np.float32)


def step(weights, batch):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(batch @ weights["up"]) @ weights["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def hidden(weights, batch):
    return jnp.tanh(batch @ weights["up"]) @ weights["down"]


def alone(fn, mesh, machine):
    """Seconds and peak of the step on one mesh that the caller gives."""
    predicted = autoshard.plan(fn, WEIGHTS, BATCH, mesh=mesh, topology=machine).predicted
    return predicted.step_seconds, predicted.peak_bytes


def assert_best_of_all(plan, fn, machine):
    """The chosen mesh is the fastest of all candidates, the second is the next, and the table has their figures."""
    place = DevicePlace.of(machine)
    meshes = {tuple(mesh.shape.items()): mesh for mesh in place.meshes([])}
    figures = {shape: alone(fn, mesh, machine) for shape, mesh in meshes.items()}
    for shape, *found in plan.meshes:
        assert found == pytest.approx(figures[tuple(shape.items())], rel=1e-9)
    fastest = sorted(seconds for seconds, _ in figures.values())
    left_out = [shape for shape in named_meshes(aligned_sizes(place.dims), []) if tuple(shape.items()) not in meshes]
    assert all(alone(fn, place.mesh(shape), machine)[0] >= fastest[0] * (1 - 1e-9) for shape in left_out)
    ordered = [seconds for _, seconds, _ in plan.meshes]
    assert ordered == sorted(ordered) and ordered[:2] == pytest.approx(fastest[:2], rel=1e-9)
    assert dict(plan.mesh.shape) == plan.meshes[0][0]
    assert plan.predicted.step_seconds == plan.meshes[0][1]


def chosen(machine, fn=hidden, **options):
    return autoshard.plan(fn, WEIGHTS, BATCH, mesh="auto", topology=machine, **options)


@pytest.mark.parametrize("fn, machine", [(hidden, "v5e:4x4"), (hidden, "h100:2x8")])
def test_the_best_of_all_meshes_is_chosen(fn, machine):
    assert_best_of_all(chosen(machine, fn), fn, machine)


def test_the_oracle_finds_a_wrong_choice(monkeypatch):
    monkeypatch.setattr(mesh_function.PlannedMesh, "place", property(lambda self: -self.seconds))
    with pytest.raises(AssertionError):
        assert_best_of_all(chosen("h100:2x8"), hidden, "h100:2x8")


def test_the_oracle_finds_a_mesh_that_should_not_be_left(monkeypatch):
    real, calls = cutoff.Cutoff.__call__, itertools.count()

    def hasty(self, progress):
        real(self, progress)
        if next(calls) < 3:
            raise cutoff.CutoffEnd(0.0)

    monkeypatch.setattr(cutoff.Cutoff, "__call__", hasty)
    with pytest.raises(AssertionError):
        assert_best_of_all(chosen("h100:2x8"), hidden, "h100:2x8")


def test_a_number_of_devices():
    plan = chosen(6)
    assert plan.mesh.size == 6 and isinstance(plan.mesh, AbstractMesh)


@pytest.fixture(scope="module")
def sharded():
    return autoshard.autoshard(step, mesh="auto", donate_argnums=0)


def test_it_runs_on_the_devices_at_hand(sharded, tmp_path):
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=one.shape).astype(np.float32) for name, one in WEIGHTS.items()}
    batch = rng.normal(size=BATCH.shape).astype(np.float32)
    expected, loss = jax.jit(step)(weights, batch)
    state, found = sharded(jax.tree.map(jnp.asarray, weights), batch)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_allclose(state["up"], expected["up"], rtol=1e-4, atol=1e-5)
    plan = sharded.plan(state, batch)
    assert state["up"].sharding.mesh.shape == plan.mesh.shape
    assert "Meshes" in str(plan) and len(plan.meshes) >= 2
    plan.save(tmp_path / "plan.json")
    again = autoshard.autoshard(step, mesh="auto", plan=tmp_path / "plan.json", donate_argnums=0).plan(state, batch)
    assert again.meshes == plan.meshes and again.mesh.shape == plan.mesh.shape
    assert autoshard.Plan.load(tmp_path / "plan.json", plan.mesh).meshes == plan.meshes


def test_the_mesh_stays_for_other_arguments(sharded):
    first = sharded.plan(WEIGHTS, BATCH)
    other = sharded.plan(WEIGHTS, jax.ShapeDtypeStruct((8, 128), np.float32))
    assert other.mesh.shape == first.mesh.shape and other.meshes == first.meshes


def test_only_meshes_with_the_axes_of_fixed_count():
    plan = chosen("v5e:2x2", fixed={"up": P(None, "expert")})
    assert all("expert" in shape for shape, _, _ in plan.meshes)
    assert plan.in_shardings[0]["up"].spec == P(None, "expert")
    assert chosen("v5e:2x2", fixed={"up": P("model")}).mesh.axis_names[-1] == "model"


def test_a_step_that_names_axes_is_planned_on_meshes_that_have_them():
    def constrained(weights, batch):
        return hidden(weights, jax.lax.with_sharding_constraint(batch, P("fsdp")))

    plan = chosen("v5e:4x4", constrained)
    assert all("fsdp" in shape for shape, _, _ in plan.meshes)


def test_memory():
    assert chosen("h100:4", memory="50MiB").predicted.peak_bytes <= 50 * 2**20
    with pytest.raises(autoshard.MemoryLimitError) as caught:
        chosen("h100:4", memory="1KiB")
    assert caught.value.needed > 2**10


def test_padding():
    padded = autoshard.autoshard(hidden, mesh="auto", topology="v5e:2x2", pad="batch")
    made = padded.plan(WEIGHTS, jax.ShapeDtypeStruct((62, 128), np.float32))
    assert any("pad='batch'" in warning for warning in made.warnings)


WRONG = [  # topology, fixed, error
    (autoshard.topology("v5e:4x4"), {}, autoshard.ArgumentError),
    (0, {}, autoshard.ArgumentError),
    ("v5e:four", {}, autoshard.MeshError),
    ("v5e:2x2", {"up": P(("a", "b"), ("c", "d"))}, autoshard.MeshError),
]


@pytest.mark.parametrize("topology, fixed, error", WRONG)
def test_what_cannot_be_chosen_from(topology, fixed, error):
    with pytest.raises(error):
        chosen(topology, fixed=fixed)


def test_the_devices_of_a_machine_are_counted():
    for name in ("v5e:4x4", "2x v5e:2x4", "h100:2x8", "tpu7x:2x2x1", "v5p:4x4x4"):
        assert DevicePlace.of(name).dims.devices == np.prod([*parse_machine(name).axes.values()])


def test_only_meshes_with_the_axes_of_tactics_count():
    plan = chosen(
        "v5e:2x2", step, tactics=[autoshard.tactics.DataParallel("data"), autoshard.tactics.Megatron("model")]
    )
    assert [set(shape) for shape, _, _ in plan.meshes] == [{"data", "model"}]
