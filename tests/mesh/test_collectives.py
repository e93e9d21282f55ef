"""Seconds of collectives held against a simulation that sends every message of the textbook algorithm."""

import itertools

import pytest

from autoshard.errors import MeshError
from autoshard.mesh.collectives import KINDS, Collective, seconds
from autoshard.mesh.topology import Link, Topology

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


def test_the_slow_link_carries_the_small_part():
    mesh, links = {"x": 4, "y": 2}, topology(x=FAST, y=SLOW)
    gathered_over_y = ring_seconds("all_gather", 2, 1e6 / 4, SLOW)
    expected = gathered_over_y + ring_seconds("all_gather", 4, 1e6, FAST)
    assert seconds("all_gather", ("x", "y"), 1e6, mesh, links) == pytest.approx(expected)
    assert seconds("all_gather", ("y", "x"), 1e6, mesh, links) == pytest.approx(expected)


def test_the_slowest_link_bounds_all_to_all_and_permute():
    mesh, links = {"x": 4, "y": 2}, topology(x=FAST, y=SLOW)
    assert seconds("all_to_all", ("x", "y"), 1e6, mesh, links) == pytest.approx(3e-6 + 5e-6 + 0.5e6 / 1e8)
    assert seconds("collective_permute", ("x", "y"), 1e6, mesh, links) == pytest.approx(6e-6 + 1e6 / 1e8)


def torus_all_to_all_seconds(devices: int, result: float, one_way: float) -> float:
    """Every block walked along the shorter way round a ring; the busiest link bounds it."""
    load = {}
    for start, hops in itertools.product(range(devices), range(1, devices)):
        forward = hops if hops <= devices - hops else hops - devices
        both = [forward, -forward] if 2 * hops == devices else [forward]  # half way round: half each way
        for way in both:
            step = 1 if way > 0 else -1
            for hop in range(abs(way)):
                link = (start + step * hop) % devices, step
                load[link] = load.get(link, 0) + result / devices / len(both)
    return max(load.values()) / one_way


@pytest.mark.parametrize("devices", [4, 8, 16])
def test_all_to_all_on_a_ring_passes_through_the_devices_between(devices):
    ring = Link(0, 2e9, torus=True)  # 1e9 each way
    assert seconds("all_to_all", ("x",), 1e6, {"x": devices}, topology(x=ring)) == pytest.approx(
        torus_all_to_all_seconds(devices, 1e6, 1e9)
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
