"""`remat="auto"` with the hosts' memory: chosen where a step fits no other way or is faster, and the numbers stay."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from oracles import mesh_of

from autoshard import ArgumentError, MemoryLimitError, Plan, autoshard, planning, topology
from autoshard.jaxprs import HOST
from autoshard.mesh.targets import target_mesh
from autoshard.variants import open_choice

LAYERS, WIDTH, ROWS = 4, 32, 64
MESH = mesh_of({"data": 2})
# Slow enough that values are worth keeping; a link to hosts that is as fast as memory.
MACHINE = replace(topology("cpu:2", {"data": 2}), flops={"float32": 1e9}, host_bandwidth=6.5e8)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
WEIGHTS = {
    name: np.random.default_rng(seed).standard_normal((LAYERS, *shape)).astype(np.float32) / 8
    for seed, (name, shape) in enumerate({"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}.items())
}
STATE = WEIGHTS, OPTIMIZER.init(WEIGHTS)
X = np.random.default_rng(2).standard_normal((ROWS, WIDTH)).astype(np.float32)


def loss(weights, x):
    y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, weights)
    return jnp.mean(y**2)


def step(state, x):
    weights, kept = state
    value, gradients = jax.value_and_grad(loss)(weights, x)
    updates, kept = OPTIMIZER.update(gradients, kept, weights)
    return (optax.apply_updates(weights, updates), kept), value


@pytest.fixture
def as_predicted(monkeypatch):
    """Compiled programs hold what is predicted: on CPU, hosts have no memory of their own."""

    def compiled(plan):
        sizes = {"argument_size_in_bytes": plan.predicted.peak_bytes, "output_size_in_bytes": 0}
        sizes |= {"alias_size_in_bytes": 0, "temp_size_in_bytes": 0}
        return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes))

    for module in (planning, open_choice):
        monkeypatch.setattr(module, "compiled", compiled)


needs_hosts = pytest.mark.usefixtures("as_predicted", "little_work")


def decorated(machine=MACHINE, **options):
    return autoshard(step, mesh=MESH, topology=machine, donate_argnums=0, remat="auto", time_limit=60, **options)


@needs_hosts
def test_nothing_is_on_hosts_where_that_does_not_pay():
    slow = replace(MACHINE, host_bandwidth=1e3)
    assert decorated(slow, memory="1GB").plan(STATE, X).predicted.host_bytes == 0


def smallest_limit(machine):
    with pytest.raises(MemoryLimitError) as refused:
        decorated(machine, memory=1).plan(STATE, X)
    return refused.value.needed


@needs_hosts
def test_what_fits_on_no_devices_fits_with_hosts_and_runs_as_before():
    memory = 1.02 * smallest_limit(MACHINE)
    assert memory < 0.9 * smallest_limit(replace(MACHINE, host_bandwidth=None))
    run = decorated(memory=memory)
    made = run.plan(STATE, X)
    assert made.predicted.peak_bytes <= memory and made.predicted.host_bytes > 0 and made.bound <= made.cost
    there_and_back = 2 * made.predicted.host_bytes / MACHINE.host_bandwidth
    assert made.predicted.communication_seconds > there_and_back * (1 - 1e-6)
    assert sum("trace" in one.name and one.on_host for one in made.arguments) == 2
    loaded = Plan.loads(made.dumps(), MESH)
    for one in (made, loaded):
        with pytest.raises(ArgumentError, match=r"state/1/.*trace.* cannot be written as code"):
            one.to_code()
    assert decorated(memory=memory, plan=loaded).plan(STATE, X).arguments == made.arguments
    plain, state, other = jax.jit(step), STATE, STATE
    for _ in range(2):
        state, value = run(state, X)
        other, expected = plain(other, X)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        assert state[1][0].trace["up"].sharding.memory_kind == "pinned_host"
        assert run.plan(state, X).fingerprint == made.fingerprint  # whatever memory the state is in
    np.testing.assert_allclose(state[0]["up"], other[0]["up"], rtol=1e-4, atol=1e-6)


def test_what_the_user_keeps_on_hosts_is_written_as_code():
    table = jax.device_put(X, NamedSharding(MESH, PartitionSpec(), memory_kind=HOST))
    made = autoshard(lambda x, table: x + jax.device_put(table, jax.memory.Space.Device), mesh=MESH).plan(X, table)
    for one in (made, Plan.loads(made.dumps(), MESH)):
        assert f'memory_kind="{HOST}"' in one.to_code()


@pytest.mark.slow
def test_a_compiler_for_tpu_holds_as_much_as_is_said():
    """State of 805 MiB per device beside gradients of 256 MiB, within 768 MiB."""
    pytest.importorskip("libtpu")
    array = jax.ShapeDtypeStruct
    weights = {"down": array((16, 8192, 2048), jnp.float32), "up": array((16, 2048, 8192), jnp.float32)}
    adam = optax.adamw(1e-3)

    def trained(state, x):
        weights, kept = state
        value, gradients = jax.value_and_grad(loss)(weights, x)
        updates, kept = adam.update(gradients, kept, weights)
        return (optax.apply_updates(weights, updates), kept), value

    mesh, limit = target_mesh("v5e:4x2", {"data": 8}), 768 * 2**20
    run = autoshard(trained, mesh=mesh, topology="v5e:4x2", donate_argnums=0, remat="auto", memory=limit)
    state = weights, jax.eval_shape(adam.init, weights)
    made = run.plan(state, array((4096, 2048), jnp.float32))
    assert made.compiled_peak <= limit and made.predicted.peak_bytes == pytest.approx(made.compiled_peak, rel=0.2)
    memory = made.lowering().compile().memory_analysis()
    assert memory.host_argument_size_in_bytes == made.predicted.host_bytes == 512 * 2**20
