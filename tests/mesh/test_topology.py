"""A Topology refuses what cannot be, and is guessed right from a mesh. Presets: see test_presets.py."""

import pickle
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from autoshard.errors import MeshError
from autoshard.mesh.presets import CHIPS
from autoshard.mesh.topology import Link, Topology

LINK = Link(1e-6, 45e9)


def make(**changed):
    numbers = {"links": {"x": LINK}, "memory_bytes": 16e9, "memory_bandwidth": 8e11, "flops": {"float32": 1e12}}
    return Topology(**numbers | changed)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"memory_bytes": 0}, "memory_bytes must be more than 0"),
        ({"memory_bandwidth": -1.0}, "memory_bandwidth must be more than 0"),
        ({"memory_bandwidth": float("nan")}, "more than 0"),
        ({"flops": {"float32": 0}}, r"flops\['float32'\] must be more than 0"),
    ],
)
def test_bad_numbers(changed, message):
    with pytest.raises(MeshError, match=message):
        make(**changed)


def test_bad_links():
    with pytest.raises(MeshError, match="bandwidth is bytes/s"):
        Link(1e-6, 0)
    with pytest.raises(MeshError, match="latency is seconds"):
        Link(-1e-6, 1e9)
    assert Link(0, 1e9).latency == 0


def test_check():
    make().check({"x": 4})
    make().check({"x": 4, "y": 1})  # nobody talks along an axis of one
    with pytest.raises(MeshError, match=r"'y' \(2 devices\) has no link; the topology has links for: x"):
        make().check({"x": 4, "y": 2})


@pytest.mark.parametrize(
    "dtype, rate",
    [("bfloat16", 2.0), ("float16", 2.0), ("float8_e4m3fn", 2.0), ("float32", 1.0), ("float64", 1.0), ("int32", 1.0),
     ("int8", 8.0), (np.dtype("float32"), 1.0), ("bool", 1.0), ("complex64", 1.0)],
)  # fmt: skip
def test_flops_for(dtype, rate):
    assert make(flops={"bfloat16": 2.0, "float32": 1.0, "int8": 8.0}).flops_for(dtype) == rate


def test_flops_for_what_is_not_there():
    assert make(flops={"bfloat16": 2.0}).flops_for("float32") == 2.0
    with pytest.raises(MeshError, match="no FLOP rates"):
        make(flops={}).flops_for("float32")


def test_a_topology_is_a_value():
    one, other = make(), make(memory_bytes=1e9)
    assert one == make() and hash(one) == hash(make()) and one != other
    assert pickle.loads(pickle.dumps(one)) == one


def fake_mesh(shape, names, kind, hosts=None, slices=None):
    """A Mesh of devices this machine does not have; `hosts` and `slices` give the process and slice of each."""
    count = int(np.prod(shape))
    places = zip(hosts or [0] * count, slices or [0] * count, strict=True)
    devices = np.array([SimpleNamespace(device_kind=kind, process_index=h, slice_index=s) for h, s in places])
    devices = devices.reshape(shape)
    return SimpleNamespace(devices=devices, axis_names=names, shape=dict(zip(names, shape, strict=True)))


def test_of_cpu_devices():
    assert Topology.of(Mesh(np.array(jax.devices()), ("x",))).links == {"x": CHIPS["cpu"].link}
    topology = Topology.of(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")))
    assert topology.links == {"data": CHIPS["cpu"].link, "model": CHIPS["cpu"].link}
    assert topology.memory_bytes == CHIPS["cpu"].memory_bytes


def test_of_an_abstract_mesh_is_v5e():
    topology = Topology.of(AbstractMesh((4, 2), ("data", "model")))
    assert topology.flops["bfloat16"] == 1.97e14
    assert set(topology.links) == {"data", "model"}


@pytest.mark.parametrize(
    "kind, chip",
    [("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"), ("TPU v5", "v5p"), ("TPU v5p", "v5p"),
     ("TPU v6 lite", "v6e"), ("TPU v6e", "v6e"), ("TPU7x", "7x"), ("NVIDIA A100-SXM4-80GB", "a100"),
     ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200")],
)  # fmt: skip
def test_of_known_kinds(kind, chip):
    topology = Topology.of(fake_mesh((2, 2), ("x", "y"), kind))
    assert topology.memory_bytes == CHIPS[chip].memory_bytes
    assert topology.links["x"] == CHIPS[chip].link


def test_of_gpus_on_two_hosts():
    topology = Topology.of(fake_mesh((2, 4), ("data", "model"), "NVIDIA H100 80GB HBM3", hosts=[0] * 4 + [1] * 4))
    assert topology.links == {"data": CHIPS["h100"].network, "model": CHIPS["h100"].link}


def test_of_a_tpu_slice_of_several_hosts_and_of_two_slices():
    hosts, slices = [0, 0, 1, 1, 2, 2, 3, 3], [0] * 4 + [1] * 4
    one = Topology.of(fake_mesh((2, 4), ("data", "model"), "TPU v5e", hosts=hosts))
    assert set(one.links.values()) == {CHIPS["v5e"].link}  # ICI runs between hosts
    two = Topology.of(fake_mesh((2, 4), ("data", "model"), "TPU v5e", hosts=hosts, slices=slices))
    assert two.links == {"data": CHIPS["v5e"].network, "model": CHIPS["v5e"].link}


def test_an_unknown_kind_warns():
    with pytest.warns(UserWarning, match="unknown device kind 'Abacus'"):
        topology = Topology.of(fake_mesh((2,), ("x",), "Abacus"))
    assert topology.memory_bytes == CHIPS["cpu"].memory_bytes
