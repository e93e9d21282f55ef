"""What is leaner costs no more, fits, and holds fewer byte points; a choice that nothing ties with stays."""

from dataclasses import replace

import numpy as np
import pytest
from problems import random_problem

from autoshard.errors import SolverError
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.local_search import reduce_memory
from autoshard.solver.local_search.reduce_memory import LEAN, leaner_choice
from autoshard.solver.problem import Edge, Live, Problem
from autoshard.solver.verify import fits, verify


def byte_points(problem: Problem, choice) -> float:
    return sum(live.usage[choice[live.node]] * (live.end - live.start) for live in problem.lives)


def assert_leaner(problem: Problem, choice) -> bool:
    """Whether what is leaner differs."""
    found = leaner_choice(problem, choice, seed=0)
    (cost, _), (before, _) = verify(problem, found), verify(problem, choice)
    assert cost <= before + reduce_memory.LEAN.memory_value * abs(before)
    assert fits(verify(problem, found)[1], problem.limit)
    assert cost < before or byte_points(problem, found) <= byte_points(problem, choice)
    return found != tuple(choice)


def test_never_worse():
    changed = 0
    for seed in range(200):
        problem = random_problem(seed)
        try:
            choice = exhaustive(problem).choice
        except SolverError:  # no choice fits
            continue
        changed += assert_leaner(problem, choice)
    assert changed < 100  # of most problems one choice alone is the cheapest


def test_the_leanest_of_equals():
    """Chains in which everything costs the same: the leanest option of every node is found."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lives = tuple(Live(node, node, node + 2, rng.permutation(4) + 1) for node in range(30))
        edges = tuple(Edge(node, node + 1, np.zeros((4, 4))) for node in range(29))
        problem = Problem((np.ones(4),) * 30, edges, lives, None)
        assert assert_leaner(problem, (0,) * 30)
        assert byte_points(problem, leaner_choice(problem, (0,) * 30, seed=0)) == 60


def test_what_holds_as_much_stays():
    """Of options that cost and hold the same, the one in hand."""
    lives = tuple(Live(node, node, node + 2, np.array([3, 2, 2, 2])) for node in range(30))
    problem = Problem((np.ones(4),) * 30, tuple(Edge(k, k + 1, np.zeros((4, 4))) for k in range(29)), lives, None)
    assert not assert_leaner(problem, (1, 2, 3) * 10)
    assert leaner_choice(problem, (0, 2, 3) * 10, seed=0)[1::3] == (2,) * 10


def test_the_limit_holds():
    """Fewer byte points can be a higher peak."""
    lives = (Live(0, 0, 9, np.array([5, 0])), Live(0, 3, 4, np.array([0, 9])))
    either = Problem((np.ones(2),), (), lives, limit=6.0)
    assert leaner_choice(either, (0,), seed=0) == (0,)
    assert leaner_choice(replace(either, limit=None), (0,), seed=0) == (1,)


def test_the_oracle_can_fail(monkeypatch):
    monkeypatch.setattr(
        reduce_memory, "LEAN", replace(LEAN, memory_value=10.0)
    )  # memory is worth more than what choices cost
    monkeypatch.setattr(reduce_memory, "fits", lambda *_: True)
    with pytest.raises(AssertionError):
        test_never_worse()
