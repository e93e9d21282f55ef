"""Seconds of collectives held against a simulation that sends every message of the textbook algorithm."""

import itertools

import pytest

from autoshard.errors import MeshError
from autoshard.mesh.collectives import KINDS, Collective, seconds
from autoshard.mesh.links import Link
from autoshard.mesh.presets import topology as machine
from autoshard.mesh.topology import Topology

FAST, SLOW = Link(1e-6, 1e9), Link(5e-6, 1e8)


def topology(**links):
    return Topology(links, memory_bytes=1e9, memory_bandwidth=1e10, flops={"float32": 1e12})


def ring_seconds(kind: str, devices: int, result: float, link: Link) -> float:
    """Every round of a ring, one by one: what one device sends, at the pace of its link."""
    if kind == "all_gather":
        blocks = [result / devices] * (devices - 1)
    elif kind == "reduce_scatter":
        blocks = [result] * (devices - 1)
    elif kind == "all_reduce":
        blocks = [result / devices] * (2 * (devices - 1))
    elif kind == "all_to_all":
        blocks = [result / devices] * (devices - 1)
    else:
        blocks = [result]
    return sum(link.latency + block / link.bandwidth for block in blocks)


@pytest.mark.parametrize("kind, devices, result", [*itertools.product(KINDS, (2, 4, 7), (64, 1_000_000))])
def test_one_axis(kind, devices, result):
    expected = ring_seconds(kind, devices, result, FAST)
    assert seconds(kind, ("x",), result, {"x": devices}, topology(x=FAST)) == pytest.approx(expected)


def test_two_equal_axes_move_as_many_bytes_as_one_ring():
    latency_free = Link(0, 1e9)
    for kind in ("all_gather", "all_reduce", "reduce_scatter"):
        two = seconds(kind, ("x", "y"), 1e6, {"x": 4, "y": 2}, topology(x=latency_free, y=latency_free))
        assert two == pytest.approx(ring_seconds(kind, 8, 1e6, latency_free))


def test_in_shared_memory_an_all_reduce_is_one_pass():
    memory, network = Link(1e-4, 3e8, shared=True), Link(1e-4, 1e8)
    here = Topology({"x": memory, "y": Link.join([(2, network), (4, memory)])}, 1e9, 1e9, {"float32": 1e9})
    shape = {"x": 4, "y": 8}
    assert seconds("all_reduce", ("x",), 4e6, shape, here) == seconds("all_gather", ("x",), 4e6, shape, here)
    for axes in (("y",), ("x", "y")):  # over the network they are two
        assert seconds("all_reduce", axes, 4e6, shape, here) == 2 * seconds("all_gather", axes, 4e6, shape, here)


def test_the_slow_link_carries_the_small_part():
    mesh, links = {"x": 4, "y": 2}, topology(x=FAST, y=SLOW)
    gathered_over_y = ring_seconds("all_gather", 2, 1e6 / 4, SLOW)
    expected = gathered_over_y + ring_seconds("all_gather", 4, 1e6, FAST)
    assert seconds("all_gather", ("x", "y"), 1e6, mesh, links) == pytest.approx(expected)
    assert seconds("all_gather", ("y", "x"), 1e6, mesh, links) == pytest.approx(expected)


def test_the_slowest_link_bounds_all_to_all_and_permute():
    mesh, links = {"x": 4, "y": 2}, topology(x=FAST, y=SLOW)
    assert seconds("all_to_all", ("x", "y"), 1e6, mesh, links) == pytest.approx(3e-6 + 5e-6 + 0.5e6 / 1e8)
    assert seconds("collective_permute", ("x", "y"), 1e6, mesh, links) == pytest.approx(5e-6 + 1e6 / 1e8)  # one way


def busiest_link(devices: int, ring: bool) -> float:
    """How many blocks the busiest wire of a torus dim carries one way, if every device sends one to every device."""
    load = {}
    for start, hops in itertools.product(range(devices), range(1, devices)):
        end = (start + hops) % devices
        ways = [end - start]
        if ring:  # the shorter way round, and from half way round both
            ways = [hops] if 2 * hops < devices else [hops - devices] if 2 * hops > devices else [hops, -hops]
        for way in ways:
            for hop in range(abs(way)):
                wire = (start + hop * (1 if way > 0 else -1)) % devices, way > 0
                load[wire] = load.get(wire, 0) + 1 / len(ways)
    return max(load.values())


@pytest.mark.parametrize("devices, ring", [*itertools.product([2, 3, 4, 5, 8, 16], [False, True])])
def test_on_a_torus_messages_pass_through_the_devices_between(devices, ring):
    one_way = 1e9
    link = Link(1e-6, 2 * one_way if ring else one_way, torus=True, ring=ring)
    block, hops = 1e6 / devices, devices // 2 if ring else devices - 1
    expected = hops * 1e-6 + busiest_link(devices, ring) * block / one_way
    assert seconds("all_to_all", ("x",), 1e6, {"x": devices}, topology(x=link)) == pytest.approx(expected)
    # a device sends all to one at random: the same load in the mean, but one message is never in parts
    expected = hops * 1e-6 + max(busiest_link(devices, ring) * block, 1e6) / one_way
    assert seconds("collective_permute", ("x",), 1e6, {"x": devices}, topology(x=link)) == pytest.approx(expected)


@pytest.mark.parametrize("devices", [2, 4, 6, 16])
def test_a_ring_is_gone_round_both_ways_at_once(devices):
    ring = Link(1e-6, 2e9, torus=True, ring=True)
    rounds = [2] * ((devices - 1) // 2) + [1] * (1 - devices % 2)  # blocks that arrive in each, half way round only one
    expected = len(rounds) * 1e-6 + sum(blocks * 1e6 / devices / 2e9 for blocks in rounds)
    assert seconds("all_gather", ("x",), 1e6, {"x": devices}, topology(x=ring)) == pytest.approx(expected)


def test_dims_of_a_torus_work_side_by_side():
    line, mesh = Link(1e-6, 1e9, torus=True), {"x": 4, "y": 4}
    # half of the data is gathered over x first, half over y: both wires are always in use
    phases = ring_seconds("all_gather", 4, 1e6 / 4 / 2, line) + ring_seconds("all_gather", 4, 1e6 / 2, line)
    assert seconds("all_gather", ("x", "y"), 1e6, mesh, topology(x=line, y=line)) == pytest.approx(phases)


def test_what_the_scaling_book_says_of_tpu_v4():
    """Chapter 3, question 2: bf16[1024, 4096] gathered over X and Y of a 4x4x4 slice takes 46 us, at least 4 hops."""
    axes = {"X": 4, "Y": 4, "Z": 4}
    v4 = machine("v4:4x4x4", axes)
    gathered = 2 * 1024 * 4096
    assert seconds("all_gather", ("X", "Y"), 0, axes, v4) == pytest.approx(4e-6)
    without_hops = seconds("all_gather", ("X", "Y"), gathered, axes, v4) - 4e-6
    assert without_hops == pytest.approx(46e-6 * 15 / 16, rel=0.02)  # the book has n/n for (n - 1)/n


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name, outer, inner", [("h100:2x8", 2, 8), ("2x v5e:4x4", 2, 16), ("v5e:4x4", 4, 4), ("7x:4x4x4", 64, 2)]
)
def test_one_axis_over_several_links_costs_as_much_as_an_axis_for_each(kind, name, outer, inner):
    apart, together = {"a": outer, "b": inner}, {"ab": outer * inner}
    assert seconds(kind, ("ab",), 1e6, together, machine(name, together)) == pytest.approx(
        seconds(kind, ("a", "b"), 1e6, apart, machine(name, apart))
    )


def test_oracle_can_fail():
    wrong = Link(FAST.latency, 2 * FAST.bandwidth)
    with pytest.raises(AssertionError):
        assert seconds("all_reduce", ("x",), 1e6, {"x": 4}, topology(x=wrong)) == pytest.approx(
            ring_seconds("all_reduce", 4, 1e6, FAST)
        )


def test_axes_of_one_device_cost_nothing():
    assert seconds("all_reduce", ("x",), 1e6, {"x": 1}, topology()) == 0
    both = seconds("all_reduce", ("x", "y"), 1e6, {"x": 4, "y": 1}, topology(x=FAST))
    assert both == seconds("all_reduce", ("x",), 1e6, {"x": 4}, topology(x=FAST))


def test_unknown_kind():
    with pytest.raises(MeshError, match="unknown collective 'broadcast'"):
        seconds("broadcast", ("x",), 1, {"x": 2}, topology(x=FAST))
    with pytest.raises(MeshError, match="unknown collective"):
        Collective("broadcast", ("x",), 1, 1, "")
