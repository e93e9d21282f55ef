"""Meshes to rows of devices and sub-meshes: shapes, places, links."""

import jax
import pytest

from autoshard import MeshError, topology
from autoshard.mesh.links import part_of_link
from autoshard.stage_planning.planned_stage import channel_between
from autoshard.stage_planning.sub_meshes import device_row, sub_mesh_shapes

HOSTS = {"data": 4, "model": 2}


def test_a_sub_mesh_has_a_part_of_one_axis_and_all_inside():
    shapes = sub_mesh_shapes(HOSTS, topology("h100:4x2", HOSTS), 1e9)
    assert [tuple(shape.axes.values()) for shape in shapes] == [(1, 1), (1, 2), (2, 2), (4, 2)]
    assert [shape.in_row.starts[:3] for shape in shapes] == [(0, 1, 2), (0, 2, 4), (0, 4), (0,)]
    assert [shape.in_row.name for shape in shapes] == ["1", "2", "2x2", "4x2"]


@pytest.mark.parametrize("axis", ["stage", "pipe"])
def test_an_axis_for_stages_leaves_one_shape(axis):
    axes = {axis: 4, "model": 2}
    (shape,) = sub_mesh_shapes(axes, topology("h100:4x2", axes), 1e9)
    assert shape.axes == {axis: 1, "model": 2}


def test_neighbours_talk_over_the_outermost_link_between_them():
    costs = topology("h100:4x2", HOSTS)
    row = device_row(HOSTS, costs)
    inside, network = costs.links["model"], costs.links["data"]
    assert [channel.bandwidth for channel in row.channels] == [
        (inside if position % 2 else network).bandwidth for position in range(1, 8)
    ]
    assert channel_between(HOSTS, costs, 0, 1).bandwidth == inside.bandwidth
    assert channel_between(HOSTS, costs, 0, 2).bandwidth == network.bandwidth


def test_part_of_a_ring_is_a_line_and_part_of_joined_links_is_inside():
    axes = {"data": 2, "x": 16, "y": 16}
    costs = topology("2x v5e:16x16", axes)
    half = next(one for one in sub_mesh_shapes(axes, costs, 1e9) if tuple(one.axes.values()) == (1, 8, 16))
    assert half.topology.links["x"].bandwidth == costs.links["x"].bandwidth / 2
    assert half.topology.links["y"] == costs.links["y"]
    joined = {"all": 8}
    over = topology("h100:4x2", joined)
    inside = next(one for one in sub_mesh_shapes(joined, over, 1e9) if one.axes == {"all": 2})
    assert inside.topology.links["all"].bandwidth == topology("h100:4x2", HOSTS).links["model"].bandwidth


def test_the_devices_of_a_stage_are_neighbours_in_the_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=jax.devices()[:8])
    pair = sub_mesh_shapes(HOSTS, topology("cpu:8", HOSTS), 1e9)[2]
    assert pair.on(mesh, 4).devices.ravel().tolist() == mesh.devices.ravel().tolist()[4:]


def test_devices_that_hosts_do_not_divide_talk_over_the_network():
    axes = {"data": 24}
    costs = topology("h100:3x8", axes)
    link = costs.links["data"]
    assert [shape.axes["data"] for shape in sub_mesh_shapes(axes, costs, 1e9)] == [1, 2, 3, 4, 6, 8, 12, 24]
    network, inside = (one.bandwidth for _, one in link.parts)
    assert network < inside
    for devices in (2, 4, 8):
        assert part_of_link(link, 24, devices).bandwidth == inside
    for devices in (3, 6, 12, 16, 24):
        assert part_of_link(link, 24, devices).bandwidth == network


def test_hosts_of_one_axis_talk_over_the_network():
    axes = {"data": 16}
    costs = topology("h100:2x8", axes)
    network, inside = (one for _, one in costs.links["data"].parts)
    assert channel_between(axes, costs, 0, 7).bandwidth == inside.bandwidth
    assert channel_between(axes, costs, 7, 8).bandwidth == network.bandwidth
    row = device_row(axes, costs)
    assert [one.bandwidth for one in row.channels] == [
        channel_between(axes, costs, at, at + 1).bandwidth for at in range(15)
    ]


def test_an_axis_for_stages_inside_another_is_refused():
    axes = {"data": 2, "stage": 4}
    with pytest.raises(MeshError, match=r"'stage' lies inside 'data'.*\n.*Put 'stage' first"):
        sub_mesh_shapes(axes, topology("h100:2x4", axes), 1e9)
    axes = {"data": 1, "stage": 4}
    assert len(sub_mesh_shapes(axes, topology("h100:1x4", axes), 1e9)) == 1


UNEVEN = {"hosts": 2, "model": 2}


def test_parts_of_a_machine_that_is_not_alike_are_shapes_of_their_own():
    plain = topology("h100:2x2", UNEVEN)
    costs = topology("h100:2x2", UNEVEN, speeds={"hosts": (1, 0.5)}, memories={"hosts": (1, 0.25)})
    shapes = sub_mesh_shapes(UNEVEN, costs, costs.memory_bytes)
    assert [(one.in_row.name, one.in_row.starts) for one in shapes] == [
        ("1 from 0", (0, 1)), ("1 from 2", (2, 3)), ("2 from 0", (0,)), ("2 from 2", (2,)), ("2x2", (0,)),
    ]  # fmt: skip
    fast, slow, whole = shapes[2:]
    assert fast.topology.flops == plain.flops and fast.topology.memory_bandwidth == plain.memory_bandwidth
    assert fast.in_row.memory_bytes == plain.memory_bytes
    assert slow.topology.flops["bfloat16"] == plain.flops["bfloat16"] / 2
    assert slow.in_row.memory_bytes == plain.memory_bytes / 4
    assert not fast.topology.uneven and not slow.topology.uneven
    assert whole.topology.flops == costs.flops and whole.topology.uneven == costs.uneven


def test_a_limit_for_all_holds_on_larger_devices_too():
    costs = topology("h100:2x2", UNEVEN, memories={"hosts": (1, 0.25)})
    rooms = [{one.in_row.memory_bytes for one in sub_mesh_shapes(UNEVEN, costs, 1e9, is_limit_for_all=held)}
             for held in (True, False)]  # fmt: skip
    assert rooms == [{1e9}, {1e9, 4e9}]
