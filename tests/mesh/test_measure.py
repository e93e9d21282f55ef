"""Measuring finds what times were made from, tells what it does only to a terminal, and keeps what it has."""

import sys

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from autoshard.errors import MeshError
from autoshard.mesh import measure as measuring
from autoshard.mesh.collectives import KINDS, seconds
from autoshard.mesh.links import Link
from autoshard.mesh.measure import Workload, fit, measure
from autoshard.mesh.presets import topology
from autoshard.mesh.topology import Topology

TINY = Workload(sizes=(64, 4096), side=16, pass_bytes=4096, repeats=2, runs=1)
SIZES = [4096 * 16**i for i in range(4)]

FOUND = [  # (latency, bandwidth) of a link that the times are made from, unlike the one that is guessed
    (1e-6, 1e10),
    (3e-5, 1e9),
    (1e-7, 3e11),
]


def rows_of(axis: str, size: int, guess: Topology, real: Topology):
    """(time, guessed latency, guessed transfer) of every collective, as `fit` takes them."""
    mesh = {axis: size}
    for kind in KINDS:
        for result in SIZES:
            latency, whole = (seconds(kind, (axis,), bytes, mesh, guess) for bytes in (0, result))
            yield seconds(kind, (axis,), result, mesh, real), latency, whole - latency


@pytest.mark.parametrize("latency, bandwidth", FOUND)
@pytest.mark.parametrize("disturbed", [0, 3])
def test_fit_finds_the_link(latency, bandwidth, disturbed):
    def machine(link):
        return Topology({"x": link}, 1e9, 1e9, {"float32": 1e9})

    rows = np.array([*rows_of("x", 8, machine(Link(1e-5, 5e9)), machine(Link(latency, bandwidth)))])
    rows[np.random.default_rng(0).choice(len(rows), disturbed, replace=False), 0] *= 10
    a, b = fit(*rows.T)
    assert (a * 1e-5, 5e9 / b) == pytest.approx((latency, bandwidth), rel=0.01)


def test_fit_finds_the_scale_of_several_links():
    guess, real = topology("2x v5e:4x4", {"x": 32}), topology("2x v5e:4x4", {"x": 32})
    real.links["x"] = measuring._scaled(real.links["x"], 3.0, 0.5)
    assert fit(*zip(*rows_of("x", 32, guess, real), strict=True)) == pytest.approx((3.0, 0.5), rel=0.01)


def test_fit_stays_with_the_guess_where_the_times_tell_nothing():
    a, b = fit([2e-5, 2e-5], [1e-5, 1e-5], [1e-14, 1e-14])
    assert a == pytest.approx(2, rel=0.01) and b == pytest.approx(1, rel=0.1)


def test_measured_on_cpu_devices(tmp_path, capsys):
    mesh = jax.make_mesh((4, 2, 1), ("data", "model", "one"))  # of Explicit axes
    found = measure(mesh, Topology.of(mesh), path=tmp_path / "machine.json", workload=TINY)
    found.check(mesh.shape)
    assert found.links["one"] == Topology.of(mesh).links["one"] and set(found.flops) == {"float32", "bfloat16"}
    assert all(np.isfinite([link.latency, link.bandwidth]).all() for link in found.links.values())
    assert found.memory_bytes == Topology.of(mesh).memory_bytes  # a CPU does not say
    assert Topology.load(tmp_path / "machine.json") == found
    assert capsys.readouterr() == ("", "")


def test_progress_is_one_line_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(measuring._Timer, "_seconds", lambda *_: 1e-6)
    mesh = jax.make_mesh((8,), ("data",))
    measure(mesh, Topology.of(mesh), workload=TINY)
    shown = capsys.readouterr().err
    assert "\n" not in shown and shown.endswith("\r\033[K")
    assert "measuring float32 matmuls (1 of 4)" in shown and "measuring axis data (4 of 4)" in shown
    measure(mesh, Topology.of(mesh), workload=TINY, progress=False)
    assert capsys.readouterr().err == ""


def test_an_interrupt_keeps_the_axes_that_are_done(monkeypatch, tmp_path):
    def link(timer, axis, guess):
        if axis == "model":
            raise KeyboardInterrupt
        return 2.0, 0.5

    monkeypatch.setattr(measuring._Timer, "_seconds", lambda *_: 1e-6)
    monkeypatch.setattr(measuring._Timer, "link", link)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(KeyboardInterrupt):
        measure(mesh, Topology.of(mesh), path=tmp_path / "machine.json", workload=TINY)
    kept, guess = Topology.load(tmp_path / "machine.json"), Topology.of(mesh).links["data"]
    assert kept.links == {"data": Link(2 * guess.latency, 2 * guess.bandwidth, shared=True)}
    assert kept.cache == Topology.of(mesh).cache is not None
    assert kept.flops["float32"] == 2 * TINY.side**3 / 1e-6
    with pytest.raises(MeshError, match="'model'"):
        kept.check(mesh.shape)


def test_there_is_nothing_to_measure():
    with pytest.raises(MeshError, match="has no devices to measure"):
        Topology.measure(AbstractMesh((8,), ("data",)))
