"""The Problem refuses what contradicts itself."""

import numpy as np
import pytest

from autoshard.errors import SolverError
from autoshard.solver import Problem, Solution
from autoshard.solver.problem import Edge, Live

TWO, THREE = np.zeros(2), np.zeros(3)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"costs": (np.zeros((2, 2)), THREE)}, "node 0: costs of shape (2, 2)"),
        ({"costs": (np.zeros(0), THREE)}, "node 0: costs of shape (0,)"),
        ({"costs": (TWO, np.array([0, np.nan, 1]))}, "node 1: a cost is nan"),
        ({"costs": (TWO, np.array([0, -np.inf, 1]))}, "node 1: a cost is -inf"),
        ({"edges": (Edge(0, 2, np.zeros((2, 3))),)}, "edge 0 (0, 2) must join two different nodes of the 2 there are"),
        ({"edges": (Edge(-1, 1, np.zeros((2, 3))),)}, "edge 0 (-1, 1) must join"),
        ({"edges": (Edge(1, 1, np.zeros((3, 3))),)}, "edge 0 (1, 1) must join"),
        ({"edges": (Edge(0, 1, np.zeros((3, 2))),)}, "edge 0 (0, 1): costs of shape (3, 2); its nodes have (2, 3)"),
        ({"edges": (Edge(0, 1, np.full((2, 3), np.nan)),)}, "edge 0 (0, 1): a cost is nan"),
        ({"lives": (Live(2, 0, 1, TWO),)}, "a live of node 2; there are 2 nodes"),
        ({"lives": (Live(0, 0, 1, THREE),)}, "node 0: usage of shape (3,); it has 2 options"),
        ({"lives": (Live(0, 3, 1, TWO),)}, "node 0: live from 3 to 1, which is earlier"),
        ({"lives": (Live(0, 0, 1, np.array([-1, 2])),)}, "node 0: usage [-1  2] bytes"),
        ({"lives": (Live(0, 0, 1, np.array([np.nan, 2])),)}, "node 0: usage [nan  2.] bytes"),
        ({"lives": (Live(0, 0, 1, np.array([np.inf, 2])),)}, "node 0: usage [inf  2.] bytes"),
        ({"lives": (Live(0, 0, 1, np.array([2**62, 0])),) * 2}, "2**63 bytes or more together"),
        ({"costs": (np.array([0, 1e308]), np.array([1e308, np.inf, 0]))}, "their sum is beyond 1e308"),
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
    assert Solution((0,), cost=0.0, bound=-2.0, status="feasible").gap == 1.0
    assert Solution((0,), cost=-3.0, bound=-4.0, status="feasible").gap == 0.25
