"""Bucket elimination finds the cheapest choice, memory aside, and takes about what its order says."""

import math
from dataclasses import replace

import numpy as np
import pytest
from problems import random_problem

from autoshard.errors import SolverError
from autoshard.solver import Problem, solve
from autoshard.solver.exact import elimination, elimination_order, option_classes
from autoshard.solver.exact.elimination import NarrowWay, cheapest, narrow_way
from autoshard.solver.exact.elimination_order import _is_wider, order_of
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.exact.option_classes import with_classes
from autoshard.solver.problem import Edge
from autoshard.solver.verify import verify


def ladder(steps: int, options: int, seed: int = 0) -> Problem:
    """Two chains side by side, with rungs between them: its relaxation is loose."""
    rng = np.random.default_rng(seed)
    pairs = [(2 * i + a, 2 * i + b) for i in range(steps) for a, b in ((0, 1), (0, 2), (1, 3))]
    nodes = 2 * steps + 2
    edges = tuple(Edge(i, j, rng.integers(0, 100, (options, options)).astype(float)) for i, j in pairs)
    return Problem(tuple(rng.integers(0, 9, options).astype(float) for _ in range(nodes)), edges, (), None)


def stream(layers: int, layouts: int, seed: int = 0) -> Problem:
    """A value from layer to layer: who makes it sees one half of its option, who reads it the other."""
    rng = np.random.default_rng(seed)
    made, read = np.divmod(np.arange(layouts * layouts), layouts)
    costs, edges = [rng.random(layouts**2)], []
    for _ in range(layers):
        value, first, second = len(costs) - 1, len(costs), len(costs) + 1
        costs += [rng.random(layouts), rng.random(layouts), rng.random(layouts**2)]
        tables = rng.random((5, layouts, layouts))
        edges += [Edge(value, first, tables[0][read]), Edge(value, second, tables[1][read])]
        edges += [Edge(first, second, tables[2]), Edge(first, second + 1, tables[3][:, made])]
        edges.append(Edge(value, second + 1, tables[4][read][:, made]))
    return Problem(tuple(costs), tuple(edges), (), None)


def by_classes(problem: Problem) -> tuple[int, ...] | None:
    return NarrowWay(order_of(with_classes(problem).problem), has_classes=True).cheapest(problem)


def assert_cheapest(problem: Problem, solver=lambda problem: cheapest(problem, order_of(problem))) -> bool:
    """Whether there is a choice; it is the best."""
    free = replace(problem, lives=(), limit=None)
    choice = solver(free)
    try:
        best = exhaustive(free)
    except SolverError:
        assert choice is None
        return False
    assert verify(free, choice)[0] == pytest.approx(best.cost, rel=1e-9)
    return True


def test_random_problems():
    found = [assert_cheapest(random_problem(seed)) for seed in range(30_000, 30_500)]
    assert 50 < sum(found) < len(found)
    assert all(assert_cheapest(ladder(3, 3, seed)) for seed in range(20))


def test_by_classes():
    """Options that an edge cannot tell apart are one to it; the best choice is the same."""
    found = [assert_cheapest(random_problem(seed), by_classes) for seed in range(30_000, 30_200)]
    assert 20 < sum(found) < len(found)
    assert all(assert_cheapest(stream(1, 3, seed), by_classes) for seed in range(10))


def test_classes_make_a_stream_narrow():
    problem = stream(12, 9)
    plain, classed = order_of(problem, 1 << 40), order_of(with_classes(problem).problem, 1 << 40)
    assert classed.entries * 5 < plain.entries
    assert not narrow_way(problem, plain.entries).has_classes
    way = narrow_way(problem, classed.entries)
    assert way.has_classes
    expected = verify(problem, cheapest(problem, plain))[0]
    assert verify(problem, way.cheapest(problem))[0] == pytest.approx(expected, rel=1e-9)


def test_options_that_are_taken_for_alike_are_noticed(monkeypatch):
    monkeypatch.setattr(option_classes, "classes", lambda table: np.zeros(len(table), dtype=int))
    with pytest.raises(AssertionError):
        for seed in range(20):
            assert_cheapest(stream(1, 3, seed), by_classes)


def test_a_table_that_is_left_out_is_noticed(monkeypatch):
    monkeypatch.setattr(elimination.Turn, "of", lambda turn, table: np.zeros([1] * len(turn.shape)))
    with pytest.raises(AssertionError):
        for seed in range(20):
            assert_cheapest(ladder(3, 3, seed))


def test_tables_are_as_large_as_is_said(monkeypatch):
    problem, entries = ladder(30, 6), []
    order, real = order_of(problem), elimination.minimised

    def noted(factors, nodes, problem):
        entries.append(math.prod(len(problem.costs[node]) for node in nodes))
        return real(factors, nodes, problem)

    monkeypatch.setattr(elimination, "minimised", noted)
    assert cheapest(problem, order) is not None
    assert sum(entries) == order.entries < 62 * 6**4


def test_what_is_too_wide_is_left_alone():
    problem = ladder(30, 6)
    entries = order_of(problem).entries
    assert order_of(problem, entries).entries == entries and order_of(problem, entries // 30) is None


def test_long_ladders_are_solved_at_once():
    solution = solve(ladder(200, 8))
    assert solution.status == "optimal" and "integer program" not in solution.seconds


def test_only_weights_that_change_are_found_anew(monkeypatch):
    problems = [random_problem(seed, nodes=14, options=4) for seed in range(60)] + [stream(6, 4), ladder(20, 3)]
    found = [order_of(problem, 1 << 40) for problem in problems]
    monkeypatch.setattr(elimination_order, "_twice", lambda sets: set().union(*sets))
    assert [order_of(problem, 1 << 40) for problem in problems] == found
    monkeypatch.setattr(elimination_order, "_twice", lambda sets: set())
    assert [order_of(problem, 1 << 40) for problem in problems] != found


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
