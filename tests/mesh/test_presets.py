"""Machines by name: their links, and what is refused. The numbers themselves stand in the table with their sources."""

import dataclasses
import tempfile

import pytest
from jax.sharding import AbstractMesh

from autoshard.errors import MeshError
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.links import Link
from autoshard.mesh.machines import Machine, parse_machine
from autoshard.mesh.presets import topology
from autoshard.mesh.topology import Topology
from autoshard.options import options_of

MACHINES = [  # name, what it says
    ("v5e:4x4", Machine("v5e", 1, (4, 4))),
    ("TPU v5e:4x4", Machine("v5e", 1, (4, 4))),
    ("tpuv5e:4x4", Machine("v5e", 1, (4, 4))),
    ("v5e:8", Machine("v5e", 1, (8,))),
    ("2x v5e:4x4", Machine("v5e", 2, (4, 4))),
    ("2xv5e:4x4", Machine("v5e", 2, (4, 4))),
    ("2 x v5e:4x4", Machine("v5e", 2, (4, 4))),
    ("7x:4x4x4", Machine("7x", 1, (4, 4, 4))),
    ("TPU7x:4x4x4", Machine("7x", 1, (4, 4, 4))),
    ("2x7x:2x2x1", Machine("7x", 2, (2, 2, 1))),
    ("2x tpu7x:2x2x1", Machine("7x", 2, (2, 2, 1))),
    ("h100:8", Machine("h100", 1, (8,))),
    ("h100:2x8", Machine("h100", 2, (8,))),
]


@pytest.mark.parametrize("name, expected", MACHINES)
def test_parse_machine(name, expected):
    machine = parse_machine(name)
    assert machine == expected and parse_machine(str(machine)) == machine


AXES = [  # (machine, its dims as mesh axes)
    ("v5e:4x4", {"x": 4, "y": 4}),
    ("2x v5e:4x8", {"slice": 2, "x": 4, "y": 8}),
    ("3x7x:2x2x1", {"slice": 3, "x": 2, "y": 2, "z": 1, "w": 2}),
    ("h100:8", {"x": 8}),
    ("h100:2x8", {"x": 2, "y": 8}),
]


@pytest.mark.parametrize("name, expected", AXES)
def test_axes_of_a_machine(name, expected):
    assert list(parse_machine(name).axes.items()) == list(expected.items())


LINKS = [  # (machine, axes, bytes/s per axis in GB/s, of each part if there are several)
    ("v5e:4x4", None, {"x": 50, "y": 50}),  # no ring below 16
    ("v5e:16x16", None, {"x": 100, "y": 100}),
    ("v5e:8x16", None, {"x": 50, "y": 100}),
    ("v5e:4x4", {"data": 16}, {"data": [50, 50]}),  # both dims side by side
    ("v5e:4x4", {"data": 4, "model": 4}, {"data": 50, "model": 50}),
    ("v5e:4x4", {"data": 8, "model": 2}, {"data": [50, 25], "model": 50}),  # every second chip of a dim, and pairs
    ("v5e:4x4", {"a": 2, "b": 2, "c": 2, "d": 2}, {"a": 50, "b": 50, "c": 50, "d": 50}),  # lines laid through the torus
    ("v5e:4x4", {"data": 16, "model": 1}, {"data": [50, 50], "model": 50}),
    ("v5e:16x16", {"data": 16, "fsdp": 4, "model": 4}, {"data": 100, "fsdp": 25, "model": 50}),  # every fourth chip
    ("v5p:4x4x4", {"data": 16, "model": 4}, {"data": [200, 200], "model": 200}),
    ("V5P:2x2x4", None, {"x": 100, "y": 100, "z": 100}),  # no whole cube
    ("v5p:4x4", None, {"x": 100, "y": 100}),  # of one layer
    ("v5p:4x4x8", {"data": 8, "model": 16}, {"data": 200, "model": [200, 200]}),
    ("tpu7x:2x2x1", {"data": 8}, {"data": [50, 50, 600]}),  # two devices per chip
    ("tpu7x:2x2x1", {"data": 4, "model": 2}, {"data": [50, 50], "model": 600}),
    ("2x v5e:4x4", None, {"slice": 3.125, "x": 50, "y": 50}),
    ("2x v5e:4x4", {"data": 2, "model": 16}, {"data": 3.125, "model": [50, 50]}),
    ("2x v5e:4x4", {"data": 8, "model": 4}, {"data": [3.125, 50], "model": 50}),
    ("2x v5e:4x4", {"data": 32}, {"data": [3.125, 50, 50]}),
    ("4x v5e:4x4", {"stage": 2, "data": 8, "model": 4}, {"stage": 3.125, "data": [3.125, 50], "model": 50}),
    ("h100:8", None, {"x": 450}),
    ("h100:2x8", {"data": 2, "model": 8}, {"data": 50, "model": 450}),
    ("h100:2x8", {"data": 16}, {"data": [50, 450]}),
    ("h100:2x8", {"data": 4, "model": 4}, {"data": [50, 450], "model": 450}),
    ("h100:2x8", {"pipe": 2, "data": 2, "model": 4}, {"pipe": 50, "data": 450, "model": 450}),
    ("cpu:8", {"data": 4, "model": 2}, {"data": 0.3, "model": 0.3}),
]


@pytest.mark.parametrize("name, axes, expected", LINKS)
def test_links(name, axes, expected):
    machine = topology(name, axes)
    machine.check(axes or parse_machine(name).axes)
    parts = {axis: [part.bandwidth / 1e9 for _, part in link.over(1)] for axis, link in machine.links.items()}
    assert parts == {axis: rates if isinstance(rates, list) else [rates] for axis, rates in expected.items()}


@pytest.mark.parametrize(
    "name", ["v5e", "v5e:", "v5e:4x", "z80:4", "v5e:0x4", "v5e:4,4", "0x v5e:4x4", "x v5e:4x4", "2x", "-1x v5e:4x4"]
)
def test_no_such_machine(name):
    with pytest.raises(MeshError, match=r"no machine .*write chip:shape"):
        topology(name)


def test_other_shapes_than_the_chip_has():
    with pytest.raises(MeshError, match=r"no machine '2x h100:8'; write hosts .* after the chip: 'h100:2x8'"):
        parse_machine("2x h100:8")
    with pytest.raises(MeshError, match="the torus of v5e has 2 dims, not 3"):
        parse_machine("v5e:4x4x4")


def test_axes_of_another_size():
    with pytest.raises(MeshError, match=r"has 16 devices, the axes .* have 8"):
        topology("v5e:4x4", {"data": 8})


@pytest.mark.parametrize("name", CHIPS)
def test_rows_are_whole_and_plausible(name):
    chip = CHIPS[name]
    assert {"bfloat16", "float32"} <= set(chip.flops)
    assert chip.link.bandwidth >= chip.network.bandwidth and chip.link.latency <= chip.network.latency
    assert 5e8 <= chip.memory_bandwidth <= 1e13 and 1e9 <= chip.memory_bytes <= 3e11


def test_the_numbers_of_two_known_machines():
    v5e, h100 = topology("v5e:16x16"), topology("h100:8")
    assert (v5e.flops["bfloat16"], v5e.memory_bandwidth, v5e.memory_bytes) == (1.97e14, 8.19e11, 16 * 2**30)
    assert (h100.flops["bfloat16"], h100.memory_bandwidth, h100.memory_bytes) == (9.895e14, 3.35e12, 80e9)


def changed(machine):
    return dataclasses.replace(machine, host_bandwidth=1e9)


def saved(machine):
    with tempfile.TemporaryDirectory() as folder:
        machine.save(f"{folder}/machine.json")
        return Topology.load(f"{folder}/machine.json")


def uneven(machine):
    return machine.with_positions("x", memories=(1, *[0.5] * 7))


@pytest.mark.parametrize(
    "made", [lambda machine: machine, changed, saved, uneven], ids=["same", "changed", "saved", "uneven"]
)
@pytest.mark.parametrize("name", ["h100:1x8", "v5p:2x2x2", "cpu:8", "2x v5e:2x2"])
def test_a_topology_knows_whose_compiler_counts(name, made):
    mesh, topology_of_name = AbstractMesh((8,), ("x",)), topology(name, {"x": 8})
    assert options_of(mesh, topology=made(topology_of_name)).backend == options_of(mesh, topology=name).backend


def test_a_topology_without_a_machine_is_planned_for_v5e():
    machine = Topology({"x": Link(1e-6, 45e9)}, 16e9, 8.1e11, {"float32": 4.9e13})
    assert options_of(AbstractMesh((8,), ("x",)), topology=machine).backend.chip == "v5e"
