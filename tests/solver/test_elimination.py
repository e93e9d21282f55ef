"""Bucket elimination finds the cheapest choice, memory aside, and takes about what its order says."""

import math
from dataclasses import replace

import numpy as np
import pytest
from problems import random_problem

from autoshard.errors import SolverError
from autoshard.solver import Problem, solve
from autoshard.solver.exact import elimination
from autoshard.solver.exact.elimination import cheapest, order_of
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.problem import Edge
from autoshard.solver.verify import verify


def ladder(steps: int, options: int, seed: int = 0) -> Problem:
    """Two chains side by side, with rungs between them: its relaxation is loose."""
    rng = np.random.default_rng(seed)
    pairs = [(2 * i + a, 2 * i + b) for i in range(steps) for a, b in ((0, 1), (0, 2), (1, 3))]
    nodes = 2 * steps + 2
    edges = tuple(Edge(i, j, rng.integers(0, 100, (options, options)).astype(float)) for i, j in pairs)
    return Problem(tuple(rng.integers(0, 9, options).astype(float) for _ in range(nodes)), edges, (), None)


def assert_cheapest(problem: Problem) -> bool:
    """Whether there is a choice; it is the best."""
    free = replace(problem, lives=(), limit=None)
    choice = cheapest(free, order_of(free))
    try:
        best = exhaustive(free)
    except SolverError:
        assert choice is None
        return False
    assert verify(free, choice)[0] == pytest.approx(best.cost, rel=1e-12)
    return True


def test_random_problems():
    found = [assert_cheapest(random_problem(seed)) for seed in range(30_000, 30_500)]
    assert 50 < sum(found) < len(found)
    assert all(assert_cheapest(ladder(3, 3, seed)) for seed in range(20))


def test_a_table_that_is_left_out_is_noticed(monkeypatch):
    monkeypatch.setattr(elimination, "_spread", lambda own, table, nodes: np.zeros([1] * len(nodes)))
    with pytest.raises(AssertionError):
        for seed in range(20):
            assert_cheapest(ladder(3, 3, seed))


def test_tables_are_as_large_as_is_said(monkeypatch):
    problem, entries = ladder(30, 6), []
    order, real = order_of(problem), elimination._least

    def noted(factors, nodes, problem):
        entries.append(math.prod(len(problem.costs[node]) for node in nodes))
        return real(factors, nodes, problem)

    monkeypatch.setattr(elimination, "_least", noted)
    assert cheapest(problem, order) is not None
    assert sum(entries) == order.entries < 62 * 6**4


def test_what_is_too_wide_is_left_alone():
    problem = ladder(30, 6)
    entries = order_of(problem).entries
    assert order_of(problem, entries).entries == entries and order_of(problem, entries // 30) is None


def test_long_ladders_are_solved_at_once():
    solution = solve(ladder(200, 8))
    assert solution.status == "optimal" and "integer program" not in solution.seconds
