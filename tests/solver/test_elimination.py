"""Bucket elimination finds the cheapest choice, memory aside, and takes about what its order says."""

import math
from dataclasses import replace

import numpy as np
import pytest
from problems import random_problem

from autoshard.errors import SolverError
from autoshard.solver import Problem, solve
from autoshard.solver.exact import elimination, elimination_order
from autoshard.solver.exact.elimination import cheapest
from autoshard.solver.exact.elimination_order import _is_wider, order_of
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


def widest_table(problem: Problem) -> float:
    """The logarithm of the entries of the largest table in the best order that is found without a limit."""
    order = order_of(problem, 1 << 62)
    tables = zip(order.nodes, order.scopes, strict=True)
    return max(sum(math.log2(len(problem.costs[node])) for node in (own, *scope)) for own, scope in tables)


def test_no_order_is_called_too_wide_that_is_not():
    noticed = 0
    for seed in range(400):
        problem = replace(random_problem(seed, nodes=12, options=4), lives=(), limit=None)
        logs = [math.log2(len(costs)) for costs in problem.costs]
        width = widest_table(problem)
        assert not _is_wider(problem, logs, width)
        noticed += _is_wider(problem, logs, width - 1.5)
    assert noticed > 100, noticed


def test_what_is_wide_is_told_without_a_search(monkeypatch):
    """Nodes in a row, each with edges to the next six, but only one edge at either end."""
    pairs = [(i, i + step) for step in range(1, 7) for i in range(94 - step)]
    pairs += [(94, 0), (95, 93)]
    band = Problem((np.zeros(32),) * 96, tuple(Edge(i, j, np.zeros((32, 32))) for i, j in pairs), (), None)
    monkeypatch.setattr(elimination_order, "_greedy", None)
    assert order_of(band) is None
