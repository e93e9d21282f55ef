"""State with keys of all kinds and arrays with odd names: planned, run, saved, loaded, cached, fixed, printed."""

import enum
import functools
import warnings
from collections import OrderedDict
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips

import autoshard
from autoshard import CacheWarning, Plan, planning
from autoshard.layout import with_auto_axes
from autoshard.program.paths import printable

MESH = mesh_of({"x": 4, "y": 2})
OPTIONS = {"mesh": MESH, "topology": slow_chips("xy")}


class Color(enum.Enum):
    RED, BLUE = 1, 2

    def __lt__(self, other):
        return self.value < other.value


class Level(enum.IntEnum):
    LOW, HIGH = 0, 1


class Name(str, enum.Enum):  # noqa: UP042, since its text is not its value
    UP, DOWN = "up", "down"


@functools.total_ordering
@dataclass(frozen=True)
class Own:
    number: int

    def __lt__(self, other):
        return self.number < other.number


@functools.total_ordering
class Nameless:
    """A key whose text is its address."""

    def __init__(self, number):
        self.number = number

    def __lt__(self, other):
        return self.number < other.number

    def __eq__(self, other):
        return self.number == other.number

    def __hash__(self):
        return self.number


ONE, OTHER = np.ones((8, 16), np.float32), np.full((16, 8), 2, np.float32)
STATES = {  # two keys of a dict
    "text": ("w", "v"),
    "integers": (1, 0),
    "negative": (-1, 2),
    "booleans": (True, False),
    "floats": (0.5, -0.5),
    "none": (None,),
    "tuples": ((0, "a"), (0, "b")),
    "nested tuples": ((0, ("a", b"k")), (1, ("a", b"k"))),
    "bytes": (b"w", b"\xff"),
    "enum": (Color.BLUE, Color.RED),
    "integer enum": (Level.HIGH, Level.LOW),
    "text enum": (Name.UP, Name.DOWN),
    "mixed with an enum": (Level.HIGH, 0),
    "numpy": (np.int64(1), np.int64(0)),
    "own": (Own(2), Own(1)),
    "nameless": (Nameless(2), Nameless(1)),
    "own in tuples": ((0, Own(1)), (1, Own(0))),
    "slash": ("a/b", "a"),
    "escape": ("\x1b[31mred\x07", "w"),
    "markup": ("[red]w[/red]", "[/]"),
    "line": ("a\nb", "\r"),
    "unseen": ("\u202ew\u200b", "\ud800"),
    "empty": ("", " "),
    "globs": ("w[0]", "w0"),
}


def step(state, batch):
    return {key: value + jnp.sum(batch) for key, value in state.items()}


@pytest.fixture
def searches(monkeypatch):
    count, solved = [], planning._solved
    monkeypatch.setattr(planning, "_solved", lambda *args: count.append(1) or solved(*args))
    return count


@pytest.fixture(autouse=True)
def strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        yield


def keys_of(name, fresh=False):
    """The keys; if fresh, equal ones that are other objects."""
    if name == "nameless" and fresh:
        return tuple(Nameless(key.number) for key in STATES[name])
    return STATES[name]


def state_of(name, fresh=False):
    return dict(zip(keys_of(name, fresh), (ONE, OTHER), strict=False))


@pytest.mark.parametrize("name", STATES)
def test_any_key_of_a_dict(name, tmp_path, searches):
    state, batch = state_of(name), ONE
    expected = step(state, batch)
    decorated = autoshard.autoshard(step, cache=tmp_path, **OPTIONS)
    found = decorated(state, batch)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-6)
    plan = decorated.plan(state, batch)
    assert str(plan).replace("\n", "").isprintable()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", MESH)
    assert loaded.flat_in_shardings == plan.flat_in_shardings
    assert [spec.sharding for spec in jax.tree.leaves(loaded.abstract(0))]
    assert loaded.dumps() == plan.dumps()
    run = autoshard.autoshard(step, plan=loaded, **OPTIONS)
    assert jax.tree.structure(run.plan(state, batch).in_shardings[0]) == jax.tree.structure(state)
    again = autoshard.autoshard(step, cache=tmp_path, **OPTIONS)
    again.plan(state_of(name, fresh=True), batch)
    assert len(searches) == 1  # `again` found it


ROUND_TRIP = [name for name in STATES if not {*name.split()} & {"enum", "own", "nameless", "numpy"}]


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_keys_that_a_file_can_hold_come_back(name):
    loaded = Plan.loads(autoshard.plan(step, state_of(name), ONE, **OPTIONS).dumps(), MESH)
    assert list(loaded.in_shardings[0]) == sorted(keys_of(name)) if name != "none" else [None]
    assert set(map(type, loaded.in_shardings[0])) == set(map(type, keys_of(name)))


def test_others_come_back_as_their_text():
    loaded = Plan.loads(autoshard.plan(step, state_of("mixed with an enum"), ONE, **OPTIONS).dumps(), MESH)
    assert set(loaded.in_shardings[0]) == {"0", "1"}
    loaded = Plan.loads(autoshard.plan(step, state_of("nameless"), ONE, **OPTIONS).dumps(), MESH)
    first, second = loaded.in_shardings[0]
    assert "Nameless object" in first and "0x" not in first and second == f"{first}#1"


def test_containers_whose_keys_are_written_alike(tmp_path):
    state = OrderedDict([("1", ONE), (1, OTHER)])
    plan = autoshard.plan(lambda state: OrderedDict(state), state, **OPTIONS)
    loaded = Plan.loads(plan.dumps(), MESH)
    assert loaded.flat_in_shardings == plan.flat_in_shardings and len(loaded.in_shardings[0]) == 2


@pytest.mark.parametrize(
    "pattern, arguments",
    [
        ("w[0]", ["state/w[0]"]),  # which as a glob would be w0
        ("state/w[0]", ["state/w[0]"]),
        ("w[[]0]", ["state/w[0]"]),
        ("w?", ["state/w0"]),
        ("state/*", ["state/w0", "state/w[0]"]),
    ],
)
def test_a_path_with_brackets_can_be_named(pattern, arguments):
    plan = autoshard.plan(step, {"w[0]": ONE, "w0": ONE}, ONE, fixed={pattern: P(None, ("x", "y"))}, **OPTIONS)
    other = autoshard.plan(step, {"w[0]": ONE, "w0": ONE}, ONE, fixed={"state/*": P()}, **OPTIONS)
    assert {one.name for one in other.arguments if one.spec != P()} <= {"batch"}
    assert {one.name for one in plan.arguments if one.spec == P(None, ("x", "y"))} - {"batch"} >= set(arguments)


def test_a_path_with_an_escape_can_be_named():
    plan = autoshard.plan(step, {"\x1b[1mw": ONE}, ONE, fixed={"\x1b[1mw": P("x")}, **OPTIONS)
    assert plan.arguments[0].spec == P("x") and plan.arguments[0].name == "state/\\x1b[1mw"


@pytest.mark.parametrize("axes", [("a,b", "c"), ("a", "a,b"), ("x y", "[bold]"), ("\x1b[31m", "m")])
def test_a_mesh_axis_of_any_name(axes, tmp_path):
    mesh = with_auto_axes(jax.make_mesh((4, 2), axes))
    options = {"mesh": mesh, "topology": slow_chips(axes), "fixed": {"batch": P(axes)}}
    plan = autoshard.plan(step, {"w": ONE}, np.ones((16, 8), np.float32), **options, cache=tmp_path)
    assert str(plan).replace("\n", "").isprintable()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", mesh)
    assert loaded.flat_in_shardings == plan.flat_in_shardings and loaded.annotations == plan.annotations


def test_markup_in_a_heading_is_text():
    def red(state):
        return state * 2

    red.__name__ = "[red]step[/red]"
    assert "[red]step[/red] on 8 devices" in str(autoshard.plan(red, ONE, mesh=AbstractMesh((8,), ("x",))))


def test_what_is_shown_of_a_text():
    assert printable("a\tb\x7f\x85") == "a\\tb\\x7f\\x85" and printable("naïve [0] ✓") == "naïve [0] ✓"
