"""Machines whose devices are not alike: planned for the slowest and the smallest, with what that costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import ArgumentError, MemoryLimitError, MeshError, Topology, topology
from autoshard.mesh.unevenness import Unevenness

AXES = {"hosts": 2, "chips": 4}
MESH = AbstractMesh(tuple(AXES.values()), tuple(AXES))


def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.square(jnp.tanh(x @ w) @ w.T)))(w)
    return w - 0.1 * gradient, loss


ARGUMENTS = jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((65536, 512), "float32")


def planned(machine, **options):
    return autoshard.plan(step, *ARGUMENTS, mesh=MESH, topology=machine, **options)


def test_a_machine_is_as_fast_as_its_slowest_and_as_large_as_its_smallest_device():
    whole = topology("h100:2x4", AXES)
    uneven = topology("h100:2x4", AXES, speeds={"hosts": (1, 0.5)}, memories={"chips": (1, 1, 0.25, 1)})
    assert uneven.memory_bytes == whole.memory_bytes / 4
    assert uneven.flops == {dtype: rate / 2 for dtype, rate in whole.flops.items()}
    assert uneven.memory_bandwidth == whole.memory_bandwidth / 2 and uneven.links == whole.links


def test_a_plan_says_what_is_lost_to_the_slowest():
    plan = planned(topology("h100:2x4", AXES, speeds={"hosts": (1, 0.6)}))
    even = planned(topology("h100:2x4", AXES))
    assert plan.cost > even.cost
    (remark,) = (one for one in plan.warnings if one.startswith("speed:"))
    assert "devices along 'hosts' run at 1 and 0.6 of the machine's rates" in remark
    assert "Shares of 40960 and 24576 of the 65536 rows of x would save" in remark and "They are not run" in remark
    assert not any("speed:" in one for one in even.warnings)


def test_layouts_of_your_own_and_frontiers_say_it_too():
    machine = topology("h100:2x4", AXES, speeds={"hosts": (1, 0.6)})
    layouts = P(), P(("hosts", "chips"))
    evaluated = autoshard.evaluate(step, *ARGUMENTS, mesh=MESH, topology=machine, in_shardings=layouts)
    for plan in (evaluated, *autoshard.frontier(step, *ARGUMENTS, mesh=MESH, topology=machine, points=2)):
        assert any("of the 65536 rows of x would save" in one for one in plan.warnings)


def test_rows_are_those_of_a_named_argument():
    """A step that carries no state may have a weight as its largest argument."""

    def forward(w, x):
        return jnp.tanh(x @ w)

    machine = topology("h100:2x4", AXES, speeds={"hosts": (1, 0.6)})
    fixed = {"w": P(("hosts", "chips")), "x": P()}
    arrays = jax.ShapeDtypeStruct((65536, 512), "float32"), jax.ShapeDtypeStruct((8, 65536), "float32")
    plan = autoshard.plan(forward, *arrays, mesh=MESH, topology=machine, fixed=fixed)
    assert any("of the 65536 rows of w would save" in one for one in plan.warnings)


def test_devices_that_only_hold_others_up_are_named():
    plan = planned(topology("h100:2x4", AXES, speeds={"hosts": (1, 0.3)}))
    assert any("fastest 1 alone would compute it in 60% of the time" in one for one in plan.warnings)


def test_the_memory_limit_is_that_of_the_smallest():
    small = topology("h100:2x4", AXES, memories={"hosts": (1, 1e-5)})
    with pytest.raises(MemoryLimitError):
        planned(small)
    assert any("memory: devices along 'hosts'" in one for one in planned(small, memory="80GiB").warnings)


def test_stages_in_lockstep_on_such_a_machine_are_an_error():
    asked = {"stages": 2, "microbatches": 4, "backend": "one_jit"}
    with pytest.raises(ArgumentError, match=r"pipeline= cannot be combined with .*uneven"):
        planned(topology("h100:2x4", AXES, speeds={"hosts": (1, 0.6)}), pipeline=asked)


def test_a_saved_machine_has_its_positions(tmp_path):
    machine = topology("h100:2x4", AXES, speeds={"hosts": (1, 0.6)})
    machine.save(tmp_path / "machine.json")
    assert Topology.load(tmp_path / "machine.json") == machine and hash(machine) != hash(topology("h100:2x4", AXES))


@pytest.mark.parametrize(
    "said, message",
    [
        ({"speeds": {"hosts": (1, 0.5, 1)}}, "'hosts' has 2 devices, the topology has 3 speeds"),
        ({"speeds": {"rows": (1, 0.5)}}, "'rows' has 1 devices"),
        ({"speeds": {"hosts": (1, 0)}}, "factors of more than 0"),
        ({"memories": {"hosts": ()}}, "nothing is said"),
        ({"speeds": (1, 0.6)}, "a number for each position"),
        ({"speeds": {"hosts": 0.6}}, "a number for each position"),
        ({"memories": {"hosts": "ab"}}, "a number for each position"),
        ({"memories": {"hosts": ("1", None)}}, "a number for each position"),
    ],
)
def test_what_is_no_machine_is_an_error(said, message):
    with pytest.raises(MeshError, match=message):
        topology("h100:2x4", AXES, **said)


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_whole_rows_and_near_the_speeds(seed):
    random = np.random.default_rng(seed)
    speeds, rows = random.uniform(0.1, 2, random.integers(1, 9)), int(random.integers(1, 1000))
    uneven = Unevenness("x", tuple(speeds))
    shares = uneven.shares(rows)
    assert sum(shares) == rows and np.all(np.abs(np.array(shares) - rows * speeds / speeds.sum()) < 1)
    # As a simulation has it: the time of the last device, with shares of any size and with equal ones.
    proportional = np.max(speeds / speeds.sum() / speeds)
    equal = np.max(1 / len(speeds) / speeds)
    assert uneven.saved_by_shares == pytest.approx(1 - proportional / equal)
    assert uneven.waiting == pytest.approx(np.mean(equal - 1 / len(speeds) / speeds) / equal)
    alone = uneven.fastest_alone or len(speeds)
    ranked = np.sort(speeds)[::-1]
    best = min(1 / (n * ranked[n - 1]) for n in range(1, len(speeds) + 1))
    assert 1 / (alone * ranked[alone - 1]) == pytest.approx(best)
