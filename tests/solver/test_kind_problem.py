"""Problems that repeat themselves, solved with one option for what is alike."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest

from autoshard.solver.bounds.message_passing import Relaxation, finite
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.method import Method
from autoshard.solver.problem import Edge, InfeasibleError, Live, Problem, Solution
from autoshard.solver.run import SolverRun
from autoshard.solver.settings import Goal
from autoshard.solver.solve import solve
from autoshard.solver.symmetry.kind_problem import kind_problem
from autoshard.solver.symmetry.node_kinds import NodeKinds
from autoshard.solver.symmetry.repeated_nodes import RepeatedNodes
from autoshard.solver.verify import verify

CLOSE = 0.01  # the gap with which nodes alike may keep one option
GOAL = Goal(gap=CLOSE, priced_gap=CLOSE / 2, repeated_gap=CLOSE, prefers_lean=True)
METHOD = Method(repeated_nodes=RepeatedNodes(least_options=0))  # however few they are


def solve_repeated(problem: Problem) -> Solution:
    return solve(problem, goal=GOAL, method=METHOD)


def chain(layers: int, seed: int, limit: float | None = None, options: int = 3) -> Problem:
    """Layers of two nodes, one after the other, between two ends; what a layer makes is held until the last one ran."""
    rng = np.random.default_rng(seed)
    first, second, end = (np.round(rng.random(options), 3) for _ in range(3))
    inside, between = (np.round(rng.random((options, options)), 3) for _ in range(2))
    inside[rng.integers(options), rng.integers(options)] = np.inf
    usage = rng.integers(1, 9, options).astype(float)
    count = 2 * layers
    edges = [Edge(2 * i, 2 * i + 1, inside) for i in range(layers)]
    edges += [Edge(2 * i + 1, 2 * i + 2, between) for i in range(layers - 1)]
    edges += [Edge(count, 0, between), Edge(count - 1, count + 1, inside)]
    lives = tuple(Live(2 * i, i, 2 * layers - i, usage) for i in range(layers))
    return Problem((*([first, second] * layers), end, end), tuple(edges), lives, limit)


@pytest.mark.parametrize("seed", range(20))
def test_choices_of_kinds_cost_and_hold_the_same(seed):
    problem, rng = chain(6, seed), np.random.default_rng(seed)
    small = kind_problem(NodeKinds(problem))
    assert len(small.problem.costs) < len(problem.costs)
    for _ in range(20):
        choice = [int(rng.integers(len(costs))) for costs in small.problem.costs]
        of_small, of_whole = verify(small.problem, choice), verify(problem, small.expand(choice))
        assert of_small == pytest.approx(of_whole, rel=1e-12)


def test_more_layers_are_no_more_kinds():
    counts = {len(kind_problem(NodeKinds(chain(layers, 0))).problem.costs) for layers in (5, 10, 40)}
    assert len(counts) == 1


def test_pressure_points_are_the_same():
    """Prices that are found on the small problem are those of the whole one's points."""
    problem = chain(8, 1, limit=20.0)
    np.testing.assert_array_equal(kind_problem(NodeKinds(problem)).problem.pressure_points(), problem.pressure_points())


@pytest.mark.parametrize("change", ["costs", "usage", "table", "direction"])
def test_what_differs_is_not_alike(change):
    problem = chain(4, 0)
    nodes, edges, lives = list(problem.costs), list(problem.edges), list(problem.lives)
    if change == "costs":
        nodes[4] = nodes[4] + 1
    if change == "usage":
        lives[2] = replace(lives[2], usage=lives[2].usage + 1)
    if change == "table":
        edges[2] = replace(edges[2], costs=edges[2].costs + 1)
    if change == "direction":
        edges[2] = replace(edges[2], costs=edges[2].costs.T)
    kind = kind_problem(NodeKinds(replace(problem, costs=tuple(nodes), edges=tuple(edges), lives=tuple(lives)))).kind
    assert kind_problem(NodeKinds(problem)).kind[4] == kind_problem(NodeKinds(problem)).kind[2]
    assert kind[4] not in kind[[2, 6]]


@pytest.mark.parametrize("seed", range(20))
def test_bounds_of_the_finite_problem_hold(seed):
    problem = chain(3, seed)
    best = exhaustive(problem).cost
    for ceiling in (best, 2 * best):
        relaxation = Relaxation(finite(problem, ceiling))
        for forward in (True, False) * 5:
            assert relaxation.sweep(forward=forward) <= best * (1 + 1e-12)


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 30))])
def test_within_a_percent_of_every_choice(seed):
    rng = np.random.default_rng(seed)
    free = chain(3, seed)
    best = exhaustive(free)
    peak = verify(free, best.choice)[1]
    for share in (None, 1.0, 0.8 + 0.2 * rng.random()):
        problem = replace(free, limit=None if share is None else share * peak)
        try:
            expected = exhaustive(problem).cost
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                solve_repeated(problem)
            continue
        found = solve_repeated(problem)
        assert found.bound <= expected * (1 + 1e-9) <= found.cost * (1 + 2e-9)
        assert found.cost <= expected * (1 + CLOSE)


def test_what_is_alike_may_differ_where_that_pays():
    """Two layers have room for one of the two fast options."""
    fast = np.array([1.0, 10.0])
    lives = tuple(Live(node, 0, 1, np.array([8.0, 0.0])) for node in range(4))
    problem = Problem((fast,) * 4, (), lives, 24.0)
    assert sorted(solve_repeated(problem).choice) == [0, 0, 0, 1]


def test_a_large_problem_is_solved_as_one(monkeypatch):
    """Nothing else is asked of a problem whose layers are alike: neither its own parts nor the integer program."""
    sizes = []
    whole = SolverRun.solve

    def noted(self, incumbent, **options):
        sizes.append(len(incumbent.problem.costs))
        return whole(self, incumbent, **options)

    monkeypatch.setattr(SolverRun, "solve", noted)
    problem = chain(200, 3)
    found = solve_repeated(problem)
    assert max(sizes) < 20 and found.gap <= CLOSE


def test_an_infinite_limit_is_none():
    """Memory then has no prices: a price of 0 for each byte of an infinite room would be worth 0 * inf."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert solve_repeated(chain(50, 0, math.inf)).cost == solve_repeated(chain(50, 0)).cost
