"""A plan file that was edited is refused, or what it says still computes the step's own numbers."""

import contextlib
import copy
import json
import random

import jax
import jax.numpy as jnp
import pytest
from cases import integers, normal
from equality import are_equal, assert_equal
from jax import lax
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips

from autoshard import Plan, PlanError, autoshard

MESH = mesh_of({"x": 4, "y": 2})
GROUPS = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 4}


def gradient(x, y):
    return jnp.tanh(x.T @ y) @ y.T


def convolution(image, kernel):
    convolved = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", **GROUPS)  # noqa: E731
    return jax.grad(lambda w: jnp.sin(convolved(image, w)).sum())(kernel)


PROGRAMS = {
    "gradient": (gradient, normal(64, 16), normal(64, 16, seed=1)),
    "convolution": (convolution, normal(8, 4, 4, 8), normal(3, 3, 2, 16)),
    "fold": (lambda x: lax.reduce_xor(x * 2, (1,)), integers(9, 16, 16)),
}
WORDS = ["", "x", "y", "x,y", "y,x", "z"]


def planned(name):
    fn, *args = PROGRAMS[name]
    fixed = {"*": P(("x", "y"))} if name == "gradient" else {}
    made = autoshard(fn, mesh=MESH, topology=slow_chips(MESH.shape), fixed=fixed).plan(*args)
    return json.loads(made.dumps()), jax.jit(fn)(*args)


def run(name, document):
    fn, *args = PROGRAMS[name]
    return autoshard(fn, mesh=MESH, plan=Plan.loads(json.dumps(document), MESH))(*args)


def edited(document, rng):
    """The plan with one thing said of its inner values changed or taken out."""
    changed = copy.deepcopy(document)
    part = rng.choice([key for key in ("homes", "copies", "wants", "scatters", "sums") if changed[key]])
    entries = changed[part]
    place = rng.choice(list(entries) if isinstance(entries, dict) else range(len(entries)))
    if rng.random() < 0.25:
        del entries[place]
    elif part == "scatters":
        scatter = entries[place]
        field = rng.choice(["dim", "stages", "others"])
        scatter[field] = {
            "dim": lambda: rng.randrange(3),
            "stages": lambda: rng.choice([scatter["stages"][::-1], scatter["stages"] * 2, [[["x"], None]], []]),
            "others": lambda: rng.choice([[], ["x"], ["y"], ["x", "y"]]),
        }[field]()
    else:
        layout = entries[place] if isinstance(entries, dict) else entries[place][-1]
        if layout:
            layout[rng.randrange(len(layout))] = rng.choice(WORDS)
        else:
            layout.append("x")
    return changed


@pytest.mark.parametrize("name", PROGRAMS)
def test_edits(name):
    document, expected = planned(name)
    assert_equal(run(name, document), expected)
    rng, refused = random.Random(0), 0
    for _ in range(15):
        try:
            found = run(name, edited(document, rng))
        except PlanError:
            refused += 1
        else:
            assert_equal(found, expected)
    assert 0 < refused < 15


def test_a_scatter_of_the_wrong_dim_is_refused():
    document, _ = planned("gradient")
    assert document["scatters"]
    for scatter in document["scatters"].values():
        scatter["dim"] = 1 - scatter["dim"]
    with pytest.raises(PlanError, match="contradict each other"):
        run("gradient", document)


@pytest.mark.parametrize("stages", [[], [[["x"], None]]])
def test_unchecked_another_scatter_goes_wrong(monkeypatch, stages):
    """That it is the check which keeps the numbers."""
    document, expected = planned("gradient")
    for scatter in document["scatters"].values():
        scatter["stages"] = stages
    with pytest.raises(PlanError):
        run("gradient", document)
    monkeypatch.setattr("autoshard.planning.check_plan", lambda *args: None)
    with contextlib.suppress(ValueError, TypeError):  # or JAX finds shapes that do not fit
        assert not are_equal(run("gradient", document), expected)
