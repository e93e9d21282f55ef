"""A Topology refuses what cannot be, and is guessed right from a mesh. Presets: see test_presets.py."""

import itertools
import pickle
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from autoshard.errors import MeshError
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.links import Cache, Link
from autoshard.mesh.topology import Topology

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
    with pytest.raises(MeshError, match="torus=True"):
        Link(1e-6, 1e9, ring=True)
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


def test_an_axis_of_another_size_than_its_link():
    joined = make(links={"x": Link.join([(2, LINK), (4, LINK)])})
    joined.check({"x": 8})
    with pytest.raises(MeshError, match="'x' has 4 devices, its link in the topology 8"):
        joined.check({"x": 4})


def test_a_cache_has_bytes():
    for bytes, bandwidth in ((0, 1e9), (1e6, 0), (float("nan"), 1e9)):
        with pytest.raises(MeshError, match="a cache has bytes"):
            Cache(bytes, bandwidth)


def test_joined_links_sum_up():
    slow, line, ring = Link(1e-5, 3e9), Link(1e-6, 5e10, torus=True), Link(1e-6, 1e11, torus=True, ring=True)
    assert Link.join([(4, line)]) == line
    side_by_side, through_slices = Link.join([(4, line), (16, ring)]), Link.join([(2, slow), (4, line)])
    assert (side_by_side.bandwidth, side_by_side.torus) == (1.5e11, True)
    assert (through_slices.latency, through_slices.bandwidth, through_slices.torus) == (1e-5, 3e9, False)
    assert through_slices.over(8) == ((2, slow), (4, line)) and line.over(4) == ((4, line),)


@pytest.mark.parametrize("links", [{"x": LINK}, {"x": Link.join([(2, LINK), (4, Link(0, 1e9, True, True))])}, {}])
@pytest.mark.parametrize("cache", [None, Cache(3e6, 3e9)])
def test_a_topology_comes_back_from_its_file(links, cache, tmp_path):
    topology = make(links=links, cache=cache)
    topology.save(tmp_path / "machine.json")
    assert Topology.load(tmp_path / "machine.json") == topology


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"links": {}}', '{"links": {"x": 3}, "flops": {}}', None])
def test_a_file_that_is_no_topology(text, tmp_path):
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(MeshError, match=r"machine\.json is not a topology .*\n.*Topology.save"):
        Topology.load(path)


def test_flops_for_what_is_not_there():
    assert make(flops={"bfloat16": 2.0}).flops_for("float32") == 2.0
    with pytest.raises(MeshError, match="no FLOP rates"):
        make(flops={}).flops_for("float32")


def test_a_topology_is_a_value():
    one, other = make(), make(memory_bytes=1e9)
    assert one == make() and hash(one) == hash(make()) and one != other
    assert pickle.loads(pickle.dumps(one)) == one


def fake_mesh(shape, names, kind, processes=None, **places):
    """A Mesh of devices this machine does not have; `places` has a `slice_index` for each, say, or `coords`."""
    count = int(np.prod(shape))
    rows = {"process_index": processes or [0] * count, **places}
    devices = np.empty(count, object)
    for i in range(count):
        devices[i] = SimpleNamespace(device_kind=kind, **{name: row[i] for name, row in rows.items()})
    devices = devices.reshape(shape)
    return SimpleNamespace(devices=devices, axis_names=names, shape=dict(zip(names, shape, strict=True)))


def torus_mesh(shape, kind, dims, slices=1, cores=1, order=None):
    """A mesh of axes a, b, ... over slices of a torus, its chips in row-major `order` of its dims or another."""
    chips = [(*place, 0, 0)[:3] for place in itertools.product(*map(range, dims))]
    chips = [chips[i] for i in order] if order else chips
    devices = [(index, place, core) for index in range(slices) for place in chips for core in range(cores)]
    places = dict(zip(("slice_index", "coords", "core_on_chip"), zip(*devices, strict=True), strict=True))
    return fake_mesh(shape, "abc"[: len(shape)], kind, **places)


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
    nvlink, network = CHIPS["h100"].link, CHIPS["h100"].network
    hosts = [0] * 4 + [1] * 4
    for places in ({"processes": hosts}, {"processes": [*range(8)], "slice_index": hosts}, {"processes": [*range(8)]}):
        topology = Topology.of(fake_mesh((2, 4), ("data", "model"), "NVIDIA H100 80GB HBM3", **places))
        told = places["processes"] == hosts or "slice_index" in places
        assert topology.links == {"data": network, "model": nvlink if told else network}
    one_axis = Topology.of(fake_mesh((8,), ("data",), "NVIDIA H100 80GB HBM3", processes=hosts))
    assert one_axis.links["data"].parts == ((2, network), (4, nvlink))


ON_TPU = [  # (kind, torus, slices, mesh, GB/s of the parts of each axis, how many parts are rings)
    ("TPU v5 lite", (4, 4), 1, (4, 4), [[50], [50]], 0),
    ("TPU v5 lite", (16, 16), 1, (16, 16), [[100], [100]], 2),
    ("TPU v5 lite", (8, 16), 1, (8, 16), [[50], [100]], 1),
    ("TPU v5 lite", (16, 16), 1, (256,), [[100, 100]], 2),
    ("TPU v5 lite", (4, 4), 1, (2, 8), [[25], [50, 50]], 0),  # every second row shares the wires of its column
    ("TPU v5 lite", (4, 4), 1, (8, 2), [[50, 25], [50]], 0),
    ("TPU v5 lite", (4, 4), 2, (2, 4, 4), [[3.125], [50], [50]], 0),
    ("TPU v5 lite", (4, 4), 2, (8, 4), [[3.125, 50], [50]], 0),
    ("TPU v5 lite", (4, 4), 4, (2, 2, 16), [[3.125], [3.125], [50, 50]], 0),
    ("TPU v5", (4, 4, 8), 1, (16, 8), [[200, 200], [200]], 3),
    ("TPU v5", (2, 2, 4), 1, (4, 4), [[100, 100], [100]], 0),  # no whole cube
    ("TPU v4", (8, 4, 4), 1, (2, 4, 16), [[22.5], [45], [90, 90]], 3),  # pairs across a ring of 8
]


@pytest.mark.parametrize("kind, dims, slices, shape, bandwidths, rings", ON_TPU)
def test_of_a_torus(kind, dims, slices, shape, bandwidths, rings):
    mesh = torus_mesh(shape, kind, dims, slices)
    topology = Topology.of(mesh)
    topology.check(mesh.shape)
    parts = [topology.links[axis].over(size) for axis, size in mesh.shape.items()]
    assert [[link.bandwidth / 1e9 for _, link in over] for over in parts] == bandwidths
    assert sum(link.ring for over in parts for _, link in over) == rings


def test_of_two_cores_per_chip():
    chip = CHIPS["7x"]
    links = Topology.of(torus_mesh((4, 2), "TPU7x", (2, 2, 1), cores=2)).links
    assert links["b"] == chip.core_link and links["a"].parts == ((2, chip.link), (2, chip.link))
    both = Topology.of(torus_mesh((8,), "TPU7x", (2, 2, 1), cores=2)).links["a"]
    assert both.parts == ((2, chip.link), (2, chip.link), (2, chip.core_link))


def test_of_chips_in_any_order():
    order = np.random.default_rng(0).permutation(16).tolist()
    whole = Topology.of(torus_mesh((16,), "TPU v5e", (4, 4), order=order)).links["a"]
    assert whole.parts == ((4, CHIPS["v5e"].link),) * 2
    torn = Topology.of(torus_mesh((4, 4), "TPU v5e", (4, 4), order=order)).links
    assert torn == {"a": CHIPS["v5e"].link, "b": CHIPS["v5e"].link}  # lines laid through it


def test_of_a_tpu_slice_of_several_hosts():
    hosts = [0, 0, 1, 1, 2, 2, 3, 3]
    one = Topology.of(fake_mesh((2, 4), ("data", "model"), "TPU v5e", processes=hosts))
    assert set(one.links.values()) == {CHIPS["v5e"].link}  # ICI runs between hosts


def test_an_unknown_kind_warns():
    with pytest.warns(UserWarning, match="unknown device kind 'Abacus'"):
        topology = Topology.of(fake_mesh((2,), ("x",), "Abacus"))
    assert topology.memory_bytes == CHIPS["cpu"].memory_bytes
