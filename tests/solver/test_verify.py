"""The verifier: by hand on one problem, and against every fault that a solution can have."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.errors import SolverError
from autoshard.solver import Problem, Solution
from autoshard.solver.problem import Edge, Live
from autoshard.solver.verify import check, verify

PROBLEM = Problem(
    costs=(np.array([1.0, 2.0]), np.array([10.0, 20.0, np.inf])),
    edges=(Edge(0, 1, np.array([[100.0, np.inf, 0], [300.0, 400.0, 0]])), Edge(1, 0, np.full((3, 2), 1000.0))),
    lives=(
        Live(0, 0, 3, np.array([5, 6])),
        Live(1, 2, 4, np.array([7, 8, 0])),
        Live(1, 3, 5, np.array([2, 9, 0])),
        Live(0, 4, 4, np.array([99, 99])),
    ),
    limit=17,
)
CHEAPEST = Solution((0, 0), cost=1111.0, bound=1111.0, status="optimal")


@pytest.mark.parametrize(
    "choice, cost, peak",
    [((0, 0), 1111, 12), ((1, 0), 1312, 13), ((1, 1), 1422, 17), ((0, 1), np.inf, 17), ((0, 2), np.inf, 5)],
)
def test_cost_and_peak(choice, cost, peak):
    assert verify(PROBLEM, choice) == (cost, peak)


def test_good_solution_passes():
    check(PROBLEM, CHEAPEST)


@pytest.mark.parametrize(
    "fault, message",
    [
        ({"choice": (1, 0)}, "says that it costs 1111.0; it costs 1312.0"),
        ({"choice": (0, 1)}, "a forbidden choice"),
        ({"choice": (0,)}, "1 options are chosen for 2 nodes"),
        ({"choice": (0, 3)}, "node 1 has 3 options; option 3 was chosen"),
        ({"choice": (0, -1)}, "option -1 was chosen"),
        ({"cost": 1110.0}, "says that it costs 1110.0"),
        ({"cost": np.nan}, "says that it costs nan"),
        ({"bound": 1112.0}, "less than its proven bound"),
        ({"bound": np.nan}, "less than its proven bound"),
        ({"bound": 1000.0}, "is called optimal"),
    ],
)
def test_faults_are_caught(fault, message):
    with pytest.raises(SolverError) as error:
        check(PROBLEM, replace(CHEAPEST, **fault))
    assert message in str(error.value)


def test_memory_fault_is_caught():
    with pytest.raises(SolverError, match="holds 12 bytes; the limit is 11"):
        check(replace(PROBLEM, limit=11), CHEAPEST)
