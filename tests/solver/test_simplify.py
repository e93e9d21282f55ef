"""Simplified problems have the same optimum, and their choices lead back to it. An unsound reduction is caught."""

import itertools
import time

import numpy as np
import pytest
from problems import answer, answer_of_every_choice, assert_same, random_problem, some_of

from autoshard.errors import SolverError
from autoshard.solver import Problem
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.presolve.simplify import _Graph, simplify
from autoshard.solver.problem import Edge, InfeasibleError, LeastNeed, Live, Solution
from autoshard.solver.verify import fits, verify


def by_parts(problem: Problem) -> Solution:
    """The optimum of the simplified problem, led back; what the parts cost must be what the whole costs."""
    small = simplify(problem)
    if not fits(small.rest, problem.limit):
        raise InfeasibleError(problem.limit, LeastNeed("", np.nan))
    solutions = [exhaustive(part) for part in small.parts]
    choice = small.invert([solution.choice for solution in solutions])
    cost, _ = verify(problem, choice)
    np.testing.assert_allclose(small.constant + sum(solution.cost for solution in solutions), cost, rtol=1e-9)
    return Solution(choice, cost, cost, "optimal")


def assert_sound(seeds: range, **size: int) -> None:
    for seed in seeds:
        problem = random_problem(seed, **size)
        got, expected = answer(by_parts, problem), answer_of_every_choice(problem)
        if expected[0] == "needs":  # what is needed is another problem's answer
            assert got[0] == "needs", seed
        else:
            assert_same(got, expected)


@pytest.mark.parametrize("seeds", some_of(range(2000), 700))
def test_small_problems(seeds):
    assert_sound(seeds)


def test_larger_problems():
    assert_sound(range(5000, 5300), nodes=9, options=3)


def test_more_options_than_are_glanced_at():
    assert_sound(range(7000, 7100), nodes=5, options=7)


def test_no_option_is_left_that_another_one_beats():
    for seed in range(100):
        rng = np.random.default_rng(seed)
        costs = tuple(rng.integers(0, 9, 8).astype(float) for _ in range(3))
        tables = [np.where(rng.random((8, 8)) < 0.1, np.inf, rng.integers(0, 3, (8, 8))) for _ in range(2)]
        lives = tuple(Live(node, 0, 2, rng.integers(1, 5, 8)) for node in range(3))
        graph = _Graph(Problem(costs, (Edge(0, 1, tables[0]), Edge(1, 2, tables[1])), lives, limit=4.0))
        graph.compare(1)
        beside = np.concatenate([graph.tables[1][0], graph.tables[1][2]], axis=1)
        held = sum(graph.lives[1].values())
        for a, b in itertools.permutations(range(len(beside)), 2):
            more = [
                max(-np.inf if x == np.inf else y - x for x, y in zip(*rows, strict=True))
                for rows in ((beside[a, :8], beside[b, :8]), (beside[a, 8:], beside[b, 8:]))
            ]
            beaten = graph.costs[1][b] + sum(more) <= graph.costs[1][a] and held[b] <= held[a]
            assert not beaten or a < b


def _forget_points(graph) -> bool:
    graph.fixed, graph.lives = np.zeros(0), [{} for _ in graph.lives]
    return False


def _keep_cheapest(graph, node) -> None:
    graph.keep(node, np.arange(len(graph.costs[node])) == graph.costs[node].argmin())


@pytest.mark.parametrize(
    "method, unsound",
    [
        ("moments", lambda graph, node: np.zeros((0, len(graph.costs[node])))),  # dominance without a look at memory
        ("relax", _forget_points),  # memory that never matters
        ("eliminate", _keep_cheapest),  # a node's option without a look at its neighbours
    ],
)
def test_unsound_reductions_are_caught(monkeypatch, method, unsound):
    monkeypatch.setattr(_Graph, method, unsound)
    with pytest.raises((AssertionError, SolverError)):
        assert_sound(range(500))


def test_forbidden_names_the_node():
    never = Edge(0, 1, np.full((2, 2), np.inf))
    with pytest.raises(SolverError, match=r"every choice is forbidden: node \d \((weight|batch)\) has no option left"):
        simplify(Problem((np.zeros(2), np.zeros(2)), (never,), (), None, names=("weight", "batch")))


def test_trees_and_rings_without_memory_vanish():
    rng = np.random.default_rng(0)
    nodes = 300
    pairs = [(k, int(rng.integers(max(0, k - 5), k))) for k in range(1, nodes)] + [(0, nodes - 1)]
    edges = tuple(Edge(i, j, rng.random((6, 6))) for i, j in pairs)
    assert simplify(Problem(tuple(rng.random(6) for _ in range(nodes)), edges, (), None)).parts == ()


def test_memory_that_fits_anyhow_vanishes():
    lives = tuple(Live(node, node, node + 2, np.array([1, 4])) for node in range(10))
    costs = (np.array([1.0, 0.0]),) * 10
    assert simplify(Problem(costs, (), lives, limit=8)).parts == ()
    (part,) = simplify(Problem(costs, (), lives, limit=7)).parts
    assert len(part.costs) == 10


def test_parts_are_those_that_share_memory():
    lives = tuple(Live(node, node // 3, node // 3 + 1, np.array([1, 4])) for node in range(9))
    small = simplify(Problem((np.array([1.0, 0.0]),) * 9, (), lives, limit=8))
    assert [len(part.costs) for part in small.parts] == [3, 3, 3]


def test_time_grows_with_the_problem_only():
    """A chain of copies that all become one node; copying lists at each merge would take minutes."""
    nodes = 5000
    same = np.where(np.eye(5, dtype=bool), 0.0, np.inf)
    edges = tuple(Edge(k, k + 1, same) for k in range(nodes - 1))
    lives = tuple(Live(k, k, k + 2, np.arange(5)) for k in range(nodes))
    start = time.perf_counter()
    small = simplify(Problem((np.arange(5.0)[::-1],) * nodes, edges, lives, limit=7))
    assert time.perf_counter() - start < 60
    assert sum(len(part.costs) for part in small.parts) <= 1
