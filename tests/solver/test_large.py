"""Compiled bounds, block moves and searches, each on its own: against trying everything, and against themselves."""

import ast
import itertools
import math
import threading
from pathlib import Path

import numpy as np
import pytest
from problems import binding_problem, hard_problem, random_problem
from test_message_passing import parts

from autoshard.solver import Problem
from autoshard.solver.arrays import graph_of, memory_of
from autoshard.solver.bounds import message_passing_compiled
from autoshard.solver.bounds.ascent import Ascent
from autoshard.solver.exact.integer_program import cheapest
from autoshard.solver.local_search import elimination_compiled, local_search_compiled
from autoshard.solver.local_search.block_moves import BlockSearch
from autoshard.solver.local_search.large_search import LargeSearch
from autoshard.solver.local_search.neighbourhoods import Neighbourhoods
from autoshard.solver.local_search.settings import RoundSettings
from autoshard.solver.problem import Edge, Live
from autoshard.solver.verify import fits, verify

pytestmark = pytest.mark.usefixtures("compiled")


def assert_bounds(seeds: range) -> int:
    """Holds every bound, under any prices, against trying everything; how many problems there were."""
    count = 0
    for part, expected in parts(seeds):
        optimum, least = expected[0].min(), np.concatenate(expected)
        ascent = LargeSearch(part, seed=0, threads=1).ascent
        rng = np.random.default_rng(0)
        for _ in range(8):
            bound = ascent.sweep(complete=True)
            assert bound <= optimum
            assert (bound + ascent.extra <= least + 1e-9 * abs(optimum)).all()
            size = len(ascent.prices)
            ascent.set_prices(rng.random(size) * (rng.random(size) < 0.3) * optimum / 100)
        ascent.set_prices(np.zeros(size))
        for _ in range(30):
            ascent.step(math.inf)
        assert ascent.best <= optimum
        assert (ascent.least() <= least + 1e-9 * abs(optimum)).all()
        count += 1
    return count


def test_bounds_hold():
    assert assert_bounds(range(800)) > 20


def test_a_refund_that_is_forgotten_is_caught(monkeypatch):
    def no_refund(self, prices, original=Ascent.set_prices):
        original(self, prices)
        self.refund = 0.0

    monkeypatch.setattr(Ascent, "set_prices", no_refund)
    with pytest.raises(AssertionError):
        assert_bounds(range(800))


def slices_filled_by_arrays(code: str) -> list[int]:
    """Lines on which a slice gets what is no number."""
    return [
        one.lineno
        for one in ast.walk(ast.parse(code))
        if isinstance(one, ast.Assign) and not isinstance(one.value, ast.Constant)
        for target in one.targets
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Slice)
    ]


def test_slices_are_filled_by_loops():
    """Else Numba compiles the text of an error about their shapes: 4 s of 40 for a single line."""
    files = list(Path(message_passing_compiled.__file__).parents[1].rglob("*_compiled.py"))
    assert len(files) > 3
    assert not [(path.name, found) for path in files if (found := slices_filled_by_arrays(path.read_text("utf-8")))]
    assert slices_filled_by_arrays("a[:2] = b[:2]\na[2:] = 0") == [1]


def test_trees_are_tight():
    rng = np.random.default_rng(0)
    edges = tuple(Edge(int(rng.integers(k)), k, rng.random((5, 5))) for k in range(1, 200))
    problem = Problem(tuple(rng.random(5) for _ in range(200)), edges, (), None)
    search = LargeSearch(problem, seed=0, threads=1)
    search.ascent.round(math.inf, search.stop, 1.0)
    assert verify(problem, search.ascent.choice)[0] == pytest.approx(search.ascent.best, rel=1e-9)
    assert search.ascent.best <= verify(problem, search.ascent.choice)[0]


def test_prices_lift_the_bound():
    """Ten tasks, of which each costs 1 or holds a byte, and room for half of them."""
    lives = tuple(Live(node, 0, 1, np.array([1, 0])) for node in range(10))
    search = LargeSearch(Problem((np.array([0.0, 1.0]),) * 10, (), lives, limit=5), seed=0, threads=1)
    while not search.ascent.settled:
        search.ascent.step(5.0)
    assert search.ascent.best == pytest.approx(5.0, rel=1e-2)


def free_problem(seed: int, nodes: int) -> Problem:
    """A random graph without memory, with some forbidden pairs."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 4, nodes)
    edges = []
    for i, j in itertools.combinations(range(nodes), 2):
        if rng.random() < 0.5:
            table = rng.integers(0, 10, (sizes[i], sizes[j])).astype(float)
            edges.append(Edge(i, j, np.where(rng.random(table.shape) < 0.1, np.inf, table)))
    return Problem(tuple(rng.integers(0, 10, size).astype(float) for size in sizes), tuple(edges), (), None)


@pytest.mark.parametrize("entries", [3, 30, 1e6])
def test_block_moves_find_the_best_for_what_is_not_frozen(entries):
    """With no table too large, the optimum; with some frozen, the best choice that shares their options."""
    frozen = 0
    for seed in range(150):
        problem = free_problem(seed, nodes=7)
        graph, rng = graph_of(problem), np.random.default_rng(seed)
        movable = rng.random(7) < 0.9
        plan = elimination_compiled.plan(graph, movable, rng.random(7), rng.random(7), math.log(entries))
        choice = np.array([rng.integers(len(costs)) for costs in problem.costs])
        before = choice.copy()
        elimination_compiled.move(graph, graph.costs, plan, choice)
        assert set(plan.frozen) >= set(np.flatnonzero(~movable))
        assert (choice[plan.frozen] == before[plan.frozen]).all()
        kept = {int(node): [int(before[node])] for node in plan.frozen}
        options = [kept.get(node, range(len(costs))) for node, costs in enumerate(problem.costs)]
        least = min(verify(problem, other)[0] for other in itertools.product(*options))
        cost = verify(problem, choice.tolist())[0]
        assert cost == least
        assert message_passing_compiled.cost_of(graph, graph.costs, choice) == cost
        frozen += len(plan.frozen) - int((~movable).sum())
    assert (frozen > 0) == (entries < 1000)


def test_bytes_over_the_limit_are_those_of_the_verifier():
    for seed in range(200):
        problem = binding_problem(seed)
        memory = memory_of(problem)
        if not len(memory.room):  # nothing is ever held
            continue
        choice = np.array([len(costs) - 1 for costs in problem.costs])
        over = message_passing_compiled.over(memory, choice).max()
        assert over == pytest.approx(verify(problem, choice.tolist())[1] - problem.limit, abs=1e-6)


def test_repaired_choices_fit_and_descent_never_loses():
    repaired = tried = 0
    for seed in range(300):
        problem = binding_problem(seed)
        graph, memory = graph_of(problem), memory_of(problem)
        search = BlockSearch(graph, memory, (seed,))
        choice = np.array([int(costs.argmin()) for costs in problem.costs])
        over = message_passing_compiled.over(memory, choice)
        tried += over.max(initial=0.0) > 0
        parts = graph, memory, search.starts, search.lives, choice, over
        if not local_search_compiled.repair(*parts, 20)[0]:
            continue
        repaired += 1
        assert fits(verify(problem, choice.tolist())[1], problem.limit)
        np.testing.assert_allclose(over, message_passing_compiled.over(memory, choice), atol=1e-6)
        before = verify(problem, choice.tolist())[0]
        local_search_compiled.descend(*parts)
        after, peak = verify(problem, choice.tolist())
        assert after <= before and fits(peak, problem.limit)
    assert tried > 50 and repaired > 50, (tried, repaired)


def answers(problem: Problem, rounds: int, threads: int) -> list[tuple[tuple[int, ...] | None, float]]:
    """What each of the first rounds of a search says."""
    rounds_of = RoundSettings(entries=3e5, long_entries=3e5)
    search = LargeSearch(problem, seed=1, threads=threads, settings=rounds_of)
    seen = [(None, -math.inf)]
    for found in itertools.islice(search.rounds(lambda: seen[-1][0], lambda: 100.0, lambda: None), rounds):
        seen.append((found.choice, found.bound))
    return seen


@pytest.mark.parametrize("threads", [1, 2])
def test_same_seed_same_rounds(threads):
    problem = hard_problem(nodes=40)
    first, second = answers(problem, 25, threads), answers(problem, 25, threads)
    assert first == second
    costs = [math.inf if choice is None else verify(problem, choice)[0] for choice, _ in first]
    assert costs == sorted(costs, reverse=True) and costs[-1] < math.inf
    assert all(bound <= cost for cost, (_, bound) in zip(costs, first, strict=True))


def test_neighbourhoods_improve_choices():
    problem = hard_problem(nodes=40)
    graph = graph_of(problem)
    neighbourhoods = Neighbourhoods(problem, graph, np.random.default_rng(0))
    neighbourhoods.size = 6
    choice = tuple(int(np.argmin(live.usage)) for live in problem.lives)
    before = verify(problem, choice)[0]
    better = neighbourhoods.improve(choice, np.ones(len(graph.costs), dtype=bool), 100.0, threading.Event())
    cost, peak = verify(problem, better)
    assert cost < before and fits(peak, problem.limit)
    assert sum(a != b for a, b in zip(choice, better, strict=True)) <= 6


def test_a_tick_that_raises_ends_the_search():
    def stop():
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        for _ in LargeSearch(hard_problem(), seed=0, threads=2).rounds(lambda: None, lambda: 1.0, stop):
            pass
    assert threading.active_count() <= before


def test_problems_of_one_node_and_of_no_edge():
    for problem in (Problem((np.array([1.0, 0.0]),), (), (), None), random_problem(0, nodes=1)):
        found = next(LargeSearch(problem, seed=0, threads=2).rounds(lambda: None, lambda: 1.0, lambda: None))
        assert found.bound <= min(problem.costs[0])


def test_what_is_stopped_ends_at_once():
    """An integer program that would run for minutes, and rounds that would never end."""
    problem = hard_problem()
    search = LargeSearch(problem, seed=0, threads=2)
    search.stop.set()
    search.ascent.round(math.inf, search.stop, math.inf)
    search.searches[0].round(search.stop, math.inf)
    threading.Timer(1.0, (stop := threading.Event()).set).start()
    assert cheapest(problem, None, time_limit=math.inf, seed=0, stop=stop).bound < math.inf
