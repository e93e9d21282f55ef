"""The Problem refuses what contradicts itself, and reads the contest's files."""

import gzip
import json

import numpy as np
import pytest

from autoshard.errors import SolverError
from autoshard.solver import Problem, Solution
from autoshard.solver.problem import Edge, Live

TWO, THREE = np.zeros(2), np.zeros(3)
CONTEST = {
    "problem": {
        "name": "tiny",
        "nodes": {
            "intervals": [[0, 5], [2, 2]],
            "costs": [[15, 55, 65], [45, 10**18]],
            "usages": [[10, 25, 30], [1, 2]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[30, 40, 20, 10**18, 5, 6]]},
        "usage_limit": 50,
    }
}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"costs": (np.zeros((2, 2)), THREE)}, "node 0: costs of shape (2, 2)"),
        ({"costs": (np.zeros(0), THREE)}, "node 0: costs of shape (0,)"),
        ({"costs": (TWO, np.array([0, np.nan, 1]))}, "node 1: a cost is nan"),
        ({"costs": (TWO, np.array([0, -np.inf, 1]))}, "node 1: a cost is -inf"),
        ({"edges": (Edge(0, 2, np.zeros((2, 3))),)}, "edge (0, 2) must join two different nodes of the 2 there are"),
        ({"edges": (Edge(-1, 1, np.zeros((2, 3))),)}, "edge (-1, 1) must join"),
        ({"edges": (Edge(1, 1, np.zeros((3, 3))),)}, "edge (1, 1) must join"),
        ({"edges": (Edge(0, 1, np.zeros((3, 2))),)}, "edge (0, 1): costs of shape (3, 2); its nodes have (2, 3)"),
        ({"edges": (Edge(0, 1, np.full((2, 3), np.nan)),)}, "edge (0, 1): a cost is nan"),
        ({"lives": (Live(2, 0, 1, TWO),)}, "a live of node 2; there are 2 nodes"),
        ({"lives": (Live(0, 0, 1, THREE),)}, "node 0: usage of shape (3,); it has 2 options"),
        ({"lives": (Live(0, 3, 1, TWO),)}, "node 0: live from 3 to 1, which is earlier"),
        ({"lives": (Live(0, 0, 1, np.array([-1, 2])),)}, "node 0: usage [-1  2] bytes"),
        ({"lives": (Live(0, 0, 1, np.array([np.nan, 2])),)}, "node 0: usage [nan  2.] bytes"),
        ({"lives": (Live(0, 0, 1, np.array([np.inf, 2])),)}, "node 0: usage [inf  2.] bytes"),
        ({"limit": -1}, "the memory limit is -1 bytes"),
        ({"limit": np.nan}, "the memory limit is nan bytes"),
        ({"names": ("w",)}, "1 names for 2 nodes"),
        ({"names": ("w", "x"), "costs": (TWO, np.array([np.nan] * 3))}, "node 1 (x): a cost is nan"),
    ],
)
def test_contradictions(fields, message):
    good = {"costs": (TWO, THREE), "edges": (), "lives": (), "limit": None}
    Problem(**good)
    with pytest.raises(SolverError) as error:
        Problem(**good | fields)
    assert message in str(error.value)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_read(tmp_path, suffix):
    path = tmp_path / f"tiny{suffix}"
    content = json.dumps(CONTEST).encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    problem = Problem.read(path)
    np.testing.assert_array_equal(problem.costs[1], [45, np.inf])
    np.testing.assert_array_equal(problem.edges[0].costs, [[30, 40], [20, np.inf], [5, 6]])
    assert problem.limit == 50
    (live,) = problem.lives  # the other one is empty
    assert (live.node, live.start, live.end, live.usage.tolist()) == (0, 0, 5, [10, 25, 30])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p["edges"]["nodes"].__setitem__(0, [0, 7]), "joins a node that does not exist"),
        (lambda p: p["edges"]["costs"][0].pop(), "has 5 costs; its nodes have (3, 2) options"),
        (lambda p: p["nodes"]["usages"].pop(), "a node needs one of each"),
        (lambda p: p["nodes"]["usages"][0].pop(), "usage of shape (2,)"),
        (lambda p: p["edges"]["costs"].pop(), "1 edges with 0 cost tables"),
        (lambda p: p.pop("nodes"), "not a contest problem"),
        (lambda p: p["nodes"]["costs"].__setitem__(0, ["much"]), "not a contest problem"),
    ],
)
def test_read_refuses(tmp_path, change, message):
    content = json.loads(json.dumps(CONTEST))
    change(content["problem"])
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SolverError) as error:
        Problem.read(path)
    assert message in str(error.value)


def test_pressure_points_decide():
    """Whatever is alive anywhere is alive together at a pressure point; none of them contains another."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        spans = np.sort(rng.integers(0, 12, (int(rng.integers(0, 8)), 2)), axis=1)
        lives = tuple(Live(0, int(start), int(end), np.array([1])) for start, end in spans)
        points = Problem((np.zeros(1),), (), lives, None).pressure_points()
        alive = [{k for k, (start, end) in enumerate(spans) if start <= t < end} for t in range(12)]
        at_points = [alive[t] for t in points]
        assert all(any(here <= there for there in at_points) for here in alive if here)
        assert not any(a <= b for k, a in enumerate(at_points) for m, b in enumerate(at_points) if k != m)


def test_restrict():
    problem = Problem((np.array([1.0, 2.0, 3.0]), np.array([4.0, np.inf])), (), (), None)
    restricted = problem.restrict({0: {0, 2}, 1: [1]})
    np.testing.assert_array_equal(restricted.costs[0], [1, np.inf, 3])
    np.testing.assert_array_equal(restricted.costs[1], [np.inf, np.inf])
    np.testing.assert_array_equal(problem.costs[0], [1, 2, 3])


def test_gap():
    assert Solution((0,), cost=4.0, bound=3.0, status="feasible").gap == 0.25
    assert Solution((0,), cost=0.0, bound=0.0, status="optimal").gap == 0.0
