"""The oracle itself, by hand."""

import numpy as np
import pytest
from problems import answer

from autoshard.errors import SolverError
from autoshard.solver import Problem
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.problem import Edge, Live

COSTS = (np.array([0.0, 1.0]), np.array([0.0, 5.0]))
CROSSED = (Edge(0, 1, np.array([[np.inf, 0.0], [0.0, np.inf]])),)
LIVES = (Live(0, 0, 2, np.array([4, 9])), Live(1, 1, 2, np.array([4, 2])))


@pytest.mark.parametrize(
    "edges, limit, expected",
    [
        ((), None, ("costs", 0)),
        (CROSSED, None, ("costs", 1)),
        (CROSSED, 12, ("costs", 5)),
        (CROSSED, 6, ("costs", 5)),
        (CROSSED, 5, ("needs", 6)),
        ((Edge(0, 1, np.full((2, 2), np.inf)),), 5, ("forbidden", np.inf)),
    ],
)
def test_by_hand(edges, limit, expected):
    assert answer(exhaustive, Problem(COSTS, edges, LIVES, limit)) == expected


def test_refuses_large_problems():
    with pytest.raises(SolverError, match="too many to try"):
        exhaustive(Problem((np.zeros(10),) * 10, (), (), None))
