"""The printed plan, compared as prose with files in tests/golden.

A report that changed on purpose is written anew by ``PYTHONPATH=tests python tests/report/test_text.py``, to be read in
the diff.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from steps import mlp

import autoshard
from autoshard import Link, Topology
from autoshard.layout import layout_of, spec_text
from autoshard.plans import alternatives
from autoshard.plans.plan import PlacedArray
from autoshard.report.folding import folded
from autoshard.report.plan_sections import plan_sections
from autoshard.report.section import Bytes, Seconds, Section, Share
from autoshard.report.text import text_of
from autoshard.report.units import bytes_text, seconds_text
from autoshard.user_plan import Plan

GOLDEN = Path(__file__).parent.parent / "golden"
CHIP = Topology(
    links={"data": Link(latency=1e-6, bandwidth=10e9), "model": Link(latency=1e-6, bandwidth=50e9)},
    memory_bytes=2**30,
    memory_bandwidth=1e12,
    flops={"float32": 1e13},
)


def mlp_plan(width: int, batch: int, mesh: dict[str, int], **options) -> Plan:
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, np.float32)

    weights = {"up": array(width, 4 * width), "bias": array(4 * width), "down": array(4 * width, width)}
    data = {"x": array(batch, width), "y": array(batch, width)}
    return autoshard.plan(
        mlp, {"weights": weights, "momentum": weights}, data,
        mesh=AbstractMesh(tuple(mesh.values()), tuple(mesh)), topology=CHIP, donate_argnums=0, **options,
    )  # fmt: skip


PLANS = {
    "large_batch": lambda: mlp_plan(64, 65536, {"data": 8}).compare(),
    "not_compared": lambda: mlp_plan(64, 65536, {"data": 8}),
    "one_device": lambda: mlp_plan(64, 128, {"data": 1}).compare(),
    "tight_memory": lambda: mlp_plan(512, 8192, {"data": 8}, memory="50 MB").compare(),
    "wide_layers": lambda: mlp_plan(2048, 16, {"data": 2, "model": 4}).compare(),
}


@pytest.mark.parametrize("name", PLANS)
def test_printed_plans(name):
    assert f"{PLANS[name]()}\n" == (GOLDEN / f"{name}.txt").read_text()


def test_the_golden_text_tells_plans_apart():
    plan = PLANS["one_device"]()
    other = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, peak_bytes=1))
    assert f"{other}\n" != (GOLDEN / "one_device.txt").read_text()


def test_printing_searches_for_nothing(monkeypatch):
    plan, searches = PLANS["not_compared"](), []
    solve = alternatives.solve

    def counted(problem, **options):
        searches.append(problem)
        return solve(problem, **options)

    monkeypatch.setattr(alternatives, "solve", counted)
    assert "plan.compare()" in str(plan) and "plan.compare()" in plan._repr_html_() and not searches
    assert "plan.compare()" not in str(plan.compare()) and len(searches) == 3 <= len(plan.alternatives)
    assert "tensor parallel" in str(plan) and len(searches) == 3


def test_cpu_devices_are_said_to_share_their_cores():
    mesh = jax.make_mesh((8,), ("data",))
    plan = autoshard.plan(lambda w, x: w + x.sum(), np.ones(8, np.float32), np.ones(8, np.float32), mesh=mesh)
    note = "8 CPU devices share the cores of one machine"
    assert note in str(plan) and note in plan._repr_html_()
    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    assert "share the cores" not in str(autoshard.plan(lambda w: w + 1, np.ones(8, np.float32), mesh=one))
    assert "share the cores" not in str(PLANS["not_compared"]())


def test_sections_are_data():
    """Figures stay figures until a renderer writes them."""
    plan = PLANS["large_batch"]()
    sections = plan_sections(plan, plan.comparison.known)
    figures = {piece for section in sections for row in section.rows for piece in row if not isinstance(piece, str)}
    assert {Seconds(plan.predicted.step_seconds), Bytes(plan.predicted.peak_bytes)} <= figures
    assert all(len(row) == 1 + len(section.columns) for section in sections for row in section.rows)
    assert text_of(sections) == str(plan)


def test_what_is_empty_is_left_out():
    said = Section(("Title",), lines=(("a line of ", Share(0.5)),))
    assert text_of([Section(), said, Section(("only a title",))]) == "Title\na line of 50.00%"


@pytest.mark.parametrize("size, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (14 * 2**30, "14.0 GiB")])
def test_bytes(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize("seconds, text", [(0, "0 s"), (2e-10, "2e-10 s"), (1.5e-6, "1.5 us"), (61, "61 s")])
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize("layout", [(), ((), ()), (("a",), ()), ((), ("a", "b")), (("b",), (), ("a",))])
def test_specs_are_python(layout):
    assert layout_of(eval(spec_text(layout), {"P": jax.P}), len(layout)) == layout


def arrays(*names: str, layout=((),)) -> list[PlacedArray]:
    return [PlacedArray(name, (8,), "float32", layout, 32) for name in names]


FOLDS = [  # arrays, the lines they become
    (arrays("a/0", "a/1", "a/2"), [("a/*", 3)]),
    (arrays("a/0/q", "a/0/k", "a/1/q", "a/1/k"), [("a/*/{q,k}", 4)]),
    (arrays("a/0", "a/1", "b/0"), [("a/*", 2), ("b/0", 1)]),
    (arrays("a/0", "a/2") + arrays("a/1", layout=(("x",),)), [("a/{0,2}", 2), ("a/1", 1)]),
    (arrays("m/w", "v/w", "m/b"), [("{m,v}/w", 2), ("m/b", 1)]),
    (arrays("loss"), [("loss", 1)]),
]


@pytest.mark.parametrize("placed, lines", FOLDS)
def test_long_lists_are_folded(placed, lines):
    found = folded(placed)
    assert [(name, len(same)) for name, same in found] == lines
    assert sorted(one.name for _, same in found for one in same) == sorted(one.name for one in placed)


if __name__ == "__main__":
    for name in sys.argv[1:] or PLANS:
        (GOLDEN / f"{name}.txt").write_text(f"{PLANS[name]()}\n")
