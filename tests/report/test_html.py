"""The report as HTML: escaped, in one file, as wide as the screen; and as a browser shows it, where there is one."""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
import sys
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from test_text import CHIP, mlp_plan

import autoshard
from autoshard import MissingPackageError, Plan, Topology
from autoshard.report.html.elements import Html, element
from autoshard.report.html.page import page
from autoshard.report.units import seconds_text

EVIL = "<script>document.title='run'</script>"
EMPTY = {"meta", "br", "col", "rect", "line", "path"}


@functools.cache
def plan() -> Plan:
    return mlp_plan(64, 1024, {"data": 2, "model": 2}, memory="2.4MiB").compare()


@functools.cache
def evil_plan() -> Plan:
    mesh = AbstractMesh((2, 2), (EVIL, "b&b"))
    link = CHIP.links["data"]
    machine = Topology(dict.fromkeys(mesh.axis_names, link), CHIP.memory_bytes, CHIP.memory_bandwidth, CHIP.flops)

    def step(weights, batch):
        return {EVIL: weights[EVIL] - 0.1 * (batch.T @ (batch @ weights[EVIL]))}

    step.__name__ = step.__qualname__ = EVIL
    arrays = {EVIL: jnp.ones((64, 64))}, jnp.ones((512, 64))
    return autoshard.plan(step, *arrays, mesh=mesh, topology=machine, donate_argnums=0)


class Elements(HTMLParser):
    """The elements and texts of a page; every element that is opened must be closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.names, self.texts, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        self.attributes += attributes
        if name not in EMPTY:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.names.append(name)
        self.attributes += attributes

    def handle_endtag(self, name):
        if name not in EMPTY:
            assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append(data)


def test_one_file_without_a_network(tmp_path):
    path = plan().show(tmp_path / "plan.html")
    text = path.read_text()
    found = Elements(text)
    assert "script" not in found.names and "link" not in found.names and "img" not in found.names
    assert not re.search(r"https?:|url\(|@import|\bsrc=", text) and text.startswith("<!doctype html>")
    assert plan().show().read_text() == text
    assert {"svg", "details", "table"} <= set(found.names) and "prefers-color-scheme: dark" in text


def test_it_says_what_the_printed_report_says(tmp_path):
    words = " ".join(" ".join(Elements(plan()._repr_html_()).texts).split())
    for one in plan().arguments:
        assert one.name.split("/")[-1] in words
    for name, figures in {"this plan": plan().predicted, **plan().alternatives}.items():
        assert name in words and (figures is None or f" {seconds_text(figures.step_seconds)} " in words)
    for one in plan().predicted.collectives[:3]:
        assert one.kind in words and one.source in words
    use = plan().memory_use
    assert use.lines[use.peak] in words and all(part.name in words for part in use.parts)
    assert max(use.totals) == pytest.approx(plan().predicted.peak_bytes, rel=0.01)


def test_names_are_escaped():
    text = page(EVIL, Html(evil_plan()._repr_html_()))
    found = Elements(text)
    assert "script" not in found.names and EVIL in "".join(found.texts)
    assert not any(key.startswith("on") for key, _ in found.attributes)
    assert EVIL not in text and "b&amp;b" in text


def test_what_is_not_escaped_is_found():
    assert "script" in Elements(page("", element("p", Html(EVIL)))).names
    with pytest.raises(AssertionError):
        Elements("<div><p></div>")


def test_a_loaded_plan_is_shown_alike():
    loaded = Plan.loads(plan().dumps(), plan().mesh)
    assert loaded._repr_html_() == plan()._repr_html_()


def test_answers_of_a_plan_are_shown_as_the_plan_is():
    other = plan().what_if(fixed={plan().arguments[0].name: jax.P("data")})
    for answer in (plan().explain(plan().arguments[0].name), plan().diff(other)):
        words = " ".join(" ".join(Elements(answer._repr_html_()).texts).split())
        assert seconds_text(plan().predicted.step_seconds) in words
        coloured = set(re.findall(r'class="axis axis(\d)">(\w+)<', answer._repr_html_()))
        assert ("0", "data") in coloured and coloured <= {("0", "data"), ("1", "model")}


def test_the_repr_is_one_line():
    assert repr(plan()).startswith("<Plan of 'mlp' on (data=2, model=2): 8 arguments, ") and len(repr(plan())) < 200


def test_plots():
    pytest.importorskip("matplotlib")
    figure = plan().plot()
    memory, seconds = figure.axes
    assert len(seconds.patches) == 2 * (1 + sum(one is not None for one in plan().alternatives.values()))
    heights = [collection.get_paths()[0].vertices[:, 1].max() for collection in memory.collections]
    assert max(heights) * 2**20 == pytest.approx(plan().predicted.peak_bytes, rel=0.01)


def test_plots_need_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'autoshard\[plot\]'"):
        plan().plot()


# In a browser.

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium to look at the page with: apt install chromium")
MEASURE = "<script>document.title = [innerWidth, document.documentElement.scrollWidth].join()</script>"


def browse(path, *options: str) -> str:
    profile = f"--user-data-dir={path.parent / 'profile'}"
    fixed = "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", profile
    command = [BROWSER, *fixed, *options, path.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def widths(path, width: int) -> tuple[int, int]:
    """The width of the window, and that of what is in it."""
    path.write_text(path.read_text() + MEASURE)
    dom = browse(path, f"--window-size={width},800", "--dump-dom")
    inner, scrolled = map(int, re.search(r"<title>(\d+),(\d+)</title>", dom).groups())
    return inner, scrolled


@needs_browser
def test_it_fits_a_narrow_screen(tmp_path):
    inner, scrolled = widths(plan().show(tmp_path / "plan.html"), 500)
    assert scrolled <= inner < 600
    planted = tmp_path / "wide.html"
    planted.write_text(page("", element("div", "wide", style="width:900px")))
    inner, scrolled = widths(planted, 500)
    assert scrolled > inner


@needs_browser
def test_screenshots(tmp_path):
    """Light and dark: both of the size asked for, neither blank, each on its own ground."""
    shown = {}
    for name, options in {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}.items():
        picture = tmp_path / f"{name}.png"
        browse(plan().show(tmp_path / "plan.html"), "--window-size=1200,1600", f"--screenshot={picture}", *options)
        shown[name] = picture.read_bytes()
        assert struct.unpack(">II", shown[name][16:24]) == (1200, 1600) and len(shown[name]) > 50_000
    assert shown["light"] != shown["dark"]


@needs_browser
def test_scripts_in_names_do_not_run(tmp_path):
    assert "<title>run</title>" not in browse(evil_plan().show(tmp_path / "plan.html"), "--dump-dom")


def test_arguments_of_many_shapes_are_shown():
    """What has no elements, no dims, or lies on the host is no special case of the page."""

    def step(state, x):
        return {"n": state["n"] + 1, "w": state["w"] + x.sum()}

    state = {"n": jnp.int32(0), "w": jnp.ones((4, 0))}
    made = autoshard.plan(step, state, np.ones(3, np.float32), mesh=AbstractMesh((8,), ("data",)), topology="cpu:8")
    Elements(made._repr_html_())
    assert jax.tree.leaves(made.in_shardings)
