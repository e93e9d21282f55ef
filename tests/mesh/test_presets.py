"""Machines by name: their links, and what is refused. The numbers themselves stand in the table with their sources."""

import pytest

from autoshard.errors import MeshError
from autoshard.mesh.presets import CHIPS, topology

LINKS = [  # (machine, axes, bytes/s per axis in GB/s)
    ("v5e:4x4", None, {"x": 50, "y": 50}),  # no ring below 16
    ("v5e:16x16", None, {"x": 100, "y": 100}),
    ("v5e:4x4", {"data": 16}, {"data": 100}),  # a ring through both dims
    ("v5e:4x4", {"data": 4, "model": 4}, {"data": 50, "model": 50}),
    ("v5e:4x4", {"data": 8, "model": 2}, {"data": 50, "model": 50}),
    ("v5p:4x4x4", {"data": 16, "model": 4}, {"data": 200, "model": 200}),
    ("V5P:2x2x4", None, {"x": 100, "y": 100, "z": 200}),
    ("tpu7x:2x2x1", {"data": 8}, {"data": 100}),  # two devices per chip
    ("h100:8", None, {"x": 450}),
    ("h100:2x8", {"data": 2, "model": 8}, {"data": 50, "model": 450}),
    ("h100:2x8", {"data": 16}, {"data": 50}),
    ("h100:2x8", {"data": 4, "model": 4}, {"data": 50, "model": 450}),
    ("h100:2x8", {"pipe": 2, "data": 2, "model": 4}, {"pipe": 50, "data": 450, "model": 450}),
    ("cpu:8", {"data": 4, "model": 2}, {"data": 1.5, "model": 1.5}),
]


@pytest.mark.parametrize("name, axes, expected", LINKS)
def test_links(name, axes, expected):
    links = topology(name, axes).links
    assert {axis: link.bandwidth / 1e9 for axis, link in links.items()} == expected


@pytest.mark.parametrize("name", ["v5e", "v5e:", "v5e:4x", "z80:4", "v5e:0x4", "v5e:4,4"])
def test_no_such_machine(name):
    with pytest.raises(MeshError, match=r"no machine .*write chip:shape"):
        topology(name)


def test_axes_of_another_size():
    with pytest.raises(MeshError, match=r"has 16 devices, the axes .* have 8"):
        topology("v5e:4x4", {"data": 8})


@pytest.mark.parametrize("name", CHIPS)
def test_rows_are_whole_and_plausible(name):
    chip = CHIPS[name]
    assert {"bfloat16", "float32"} <= set(chip.flops)
    assert chip.link.bandwidth >= chip.network.bandwidth and chip.link.latency <= chip.network.latency
    assert 1e9 <= chip.memory_bandwidth <= 1e13 and 1e9 <= chip.memory_bytes <= 3e11


def test_the_numbers_of_two_known_machines():
    v5e, h100 = topology("v5e:16x16"), topology("h100:8")
    assert (v5e.flops["bfloat16"], v5e.memory_bandwidth, v5e.memory_bytes) == (1.97e14, 8.19e11, 16 * 2**30)
    assert (h100.flops["bfloat16"], h100.memory_bandwidth, h100.memory_bytes) == (9.895e14, 3.35e12, 80e9)
