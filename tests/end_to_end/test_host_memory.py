"""Arguments in the host's memory: what is planned, what runs, and what a compiler without the machine counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from oracles import mesh_of

import autoshard
from autoshard import Plan
from autoshard.mesh.targets import target_mesh

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
SIZE = 128  # no padding on TPU


def step(state, batch):
    """Momentum that lives on the host, and comes over for the update."""
    w, momentum = state
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(batch @ w) @ w.T - batch) ** 2))(w)
    momentum = 0.9 * jax.device_put(momentum, DEVICE) + gradient
    return (w - 0.1 * momentum, jax.device_put(momentum, HOST)), loss


def on_host(mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")


def arguments(mesh):
    w = jax.random.normal(jax.random.key(0), (SIZE, SIZE)) * 0.1
    return (w, jax.device_put(jnp.zeros((SIZE, SIZE)), on_host(mesh))), jnp.ones((32, SIZE))


def planned(mesh, **options) -> Plan:
    """For shapes alone, the batch split."""
    w, batch = (jax.ShapeDtypeStruct((rows, SIZE), np.float32) for rows in (SIZE, 32))
    state = w, jax.ShapeDtypeStruct((SIZE, SIZE), np.float32, sharding=on_host(mesh))
    fixed = {"state/*": PartitionSpec(), "batch": PartitionSpec("x")}
    return autoshard.plan(step, state, batch, mesh=mesh, donate_argnums=0, fixed=fixed, **options)


@pytest.mark.parametrize("memory", [None, "240KB"])
def test_state_on_the_host(memory):
    mesh = mesh_of({"x": 4, "y": 2})
    machine = autoshard.topology("v5e:4x2", {"x": 4, "y": 2})
    fn = autoshard.autoshard(step, mesh=mesh, donate_argnums=0, memory=memory, topology=machine)
    state, batch = arguments(mesh)
    made = fn.plan(state, batch)
    (w, momentum), _ = made.in_shardings
    assert (w.memory_kind, momentum.memory_kind) == ("device", "pinned_host")
    assert made.out_shardings[0][1] == momentum  # the next step's
    share = 4 * SIZE**2 // np.prod([mesh.shape[axis] for axis in jax.tree.leaves(tuple(momentum.spec))], dtype=int)
    assert made.predicted.host_bytes == share
    assert "<host>" in str(made)
    plain = jax.jit(step)
    other = arguments(mesh)[0]
    for _ in range(3):
        state, loss = fn(state, batch)
        other, expected = plain(other, batch)
        assert state[1].sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(state[1], other[1], rtol=1e-4, atol=1e-7)


def test_the_host_s_memory_is_not_the_device_s(tmp_path):
    mesh = mesh_of({"x": 8})
    away = planned(mesh)
    assert away.predicted.host_bytes == 4 * SIZE**2
    assert sum(x.local_bytes for x in away.arguments if x.on_host) == 4 * SIZE**2
    away.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", mesh)
    assert loaded.in_shardings == away.in_shardings and loaded.predicted == away.predicted


def test_what_stays_on_the_host_takes_no_memory_of_devices():
    mesh = mesh_of({"x": 8})
    x, away = jnp.ones((8, SIZE)), jax.device_put(jnp.ones((SIZE, SIZE)), on_host(mesh))
    alone = autoshard.plan(lambda x: 2 * x, x, mesh=mesh)
    beside = autoshard.plan(lambda x, away: (2 * x, away), x, away, mesh=mesh)
    assert beside.predicted.peak_bytes == alone.predicted.peak_bytes
    assert beside.predicted.host_bytes > 0 == alone.predicted.host_bytes


def test_a_compiler_for_tpu_counts_the_same():
    pytest.importorskip("libtpu")
    mesh = target_mesh("v5e:4x2", {"x": 8})
    made = planned(mesh, topology=autoshard.topology("v5e:4x2", {"x": 8}))
    memory = made.lowering().compile().memory_analysis()
    assert memory.host_argument_size_in_bytes == made.predicted.host_bytes
    on_device = sum(placed.local_bytes for placed in made.arguments if not placed.on_host)
    assert memory.argument_size_in_bytes == pytest.approx(on_device, rel=0.01)
