"""The integer program alone, on problems that nothing has simplified, against trying everything."""

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from problems import answer_of_every_choice, assert_same, every_choice, hard_problem, random_problem, some_of

from autoshard.solver import Problem
from autoshard.solver.exact import integer_program
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.exact.integer_program import cheapest, leanest
from autoshard.solver.problem import Edge, Live
from autoshard.solver.verify import verify


def assert_optimal(problem: Problem, first=None) -> None:
    outcome, (kind, value) = cheapest(problem, first, time_limit=60, seed=0), answer_of_every_choice(problem)
    if kind != "costs":
        assert outcome.choice is None and outcome.bound == np.inf
        return
    cost, _ = verify(problem, outcome.choice)
    assert_same(("costs", cost), (kind, value))
    assert outcome.bound <= value * (1 + 1e-9)
    np.testing.assert_allclose(outcome.bound, value, rtol=1e-6, atol=1e-9 * value)


@pytest.mark.parametrize("seeds", some_of(range(200), 60))
@pytest.mark.parametrize("few_entries", [integer_program.PROGRAM.few_entries, 0])
def test_cheapest(monkeypatch, few_entries, seeds):
    """With the rows of all pressure points, and with rows added as solutions violate them."""
    settings = replace(integer_program.PROGRAM, few_entries=few_entries, added_rows=2)
    monkeypatch.setattr(integer_program, "PROGRAM", settings)
    for seed in seeds:
        assert_optimal(random_problem(seed, nodes=5))


@pytest.mark.parametrize("seeds", some_of(range(200), 60))
def test_cheapest_from_a_known_choice(seeds):
    """Options and pairs that cost more than the known choice are left out; the optimum is not."""
    for seed in seeds:
        problem = random_problem(seed, nodes=5)
        if answer_of_every_choice(problem)[0] == "costs":
            rng = np.random.default_rng(seed)
            tries = ([int(rng.integers(len(costs))) for costs in problem.costs] for _ in range(20))
            limit = np.inf if problem.limit is None else problem.limit
            known = [c for c in tries if verify(problem, c)[0] < np.inf and verify(problem, c)[1] <= limit]
            assert_optimal(problem, first=known[0] if known else exhaustive(problem).choice)


def beside_of(problem: Problem, seed: int) -> Problem:
    """Other costs of the same options, on edges of their own, some of them forbidden."""
    rng = np.random.default_rng(seed)
    costs, _ = every_choice(problem)
    scale = (np.median(costs[np.isfinite(costs)]) if np.isfinite(costs).any() else 1.0) / len(problem.costs)

    def some(*shape: int) -> np.ndarray:
        return np.where(rng.random(shape) < 0.05, np.inf, rng.random(shape) * scale)

    sizes = list(map(len, problem.costs))
    pairs = [rng.choice(len(sizes), 2, replace=False) for _ in sizes[1:]]
    edges = tuple(Edge(int(i), int(j), some(sizes[i], sizes[j])) for i, j in pairs)
    return Problem(tuple(map(some, sizes)), edges, (), None)


def assert_larger_is_least(seeds: range) -> None:
    """The least of the larger of two costs is that of every choice."""
    for seed in seeds:
        problem = random_problem(seed, nodes=5)
        beside = beside_of(problem, seed)
        cost, peak = every_choice(problem)
        larger = np.maximum(cost, every_choice(beside)[0])
        larger[peak > (np.inf if problem.limit is None else problem.limit)] = np.inf
        outcome = cheapest(problem, None, time_limit=60, seed=0, beside=beside)
        if np.isinf(larger).all():
            assert outcome.choice is None and outcome.bound == np.inf
            continue
        found = max(verify(one, outcome.choice)[0] for one in (problem, beside))
        np.testing.assert_allclose([found, outcome.bound], larger.min(), rtol=1e-6)
        first = list(np.unravel_index(int(larger.argmin()), list(map(len, problem.costs))))
        outcome = cheapest(problem, first, time_limit=60, seed=0, beside=beside)
        np.testing.assert_allclose(outcome.bound, larger.min(), rtol=1e-6)


@pytest.mark.parametrize("seeds", some_of(range(100), 35))
def test_the_larger_of_two_costs(seeds):
    assert_larger_is_least(seeds)


def test_a_second_cost_that_is_forgotten_is_caught(monkeypatch):
    totals = integer_program._ChoiceProgram.totals
    monkeypatch.setattr(integer_program._ChoiceProgram, "totals", lambda *args: totals(*args)[:1])
    with pytest.raises(AssertionError):
        assert_larger_is_least(range(20))


@pytest.mark.parametrize("seeds", some_of(range(100), 35))
@pytest.mark.parametrize("few_entries", [integer_program.PROGRAM.few_entries, 0])
def test_leanest(monkeypatch, few_entries, seeds):
    settings = replace(integer_program.PROGRAM, few_entries=few_entries, added_rows=2)
    monkeypatch.setattr(integer_program, "PROGRAM", settings)
    for seed in seeds:
        problem = random_problem(seed, nodes=5)
        starved = Problem(problem.costs, problem.edges, problem.lives, limit=0.0)
        kind, needed = answer_of_every_choice(starved)
        outcome = leanest(problem, time_limit=60, seed=0)
        assert (outcome.choice is None) == (kind == "forbidden")
        if kind == "needs":
            assert verify(problem, outcome.choice)[1] == needed
            assert outcome.bound <= needed * (1 + 1e-9)


@pytest.mark.parametrize("over", [0, 1])
def test_a_single_byte_counts(over):
    """Sixteen GB and one byte is far within HiGHS's tolerance, but not within the limit."""
    sizes = np.array([3_999_999_001, 4_000_000_003, 3_999_998_999, 4_000_001_997]) + np.array([0, 0, 0, over])
    lives = tuple(Live(node, 0, 1, np.array([size, 0])) for node, size in enumerate(sizes))
    costs = tuple(np.array([0.0, cost]) for cost in (5.0, 3.0, 4.0, 6.0))
    problem = Problem(costs, (), lives, limit=16_000_000_000)
    outcome = cheapest(problem, None, time_limit=60, seed=0)
    assert verify(problem, outcome.choice)[0] == (3.0 if over else 0.0)


def test_what_is_far_too_large_for_what_is_left():
    """HiGHS refuses a model with an entry of 1e17, which is what the first option is times the room."""
    lives = (Live(0, 0, 1, np.array([100_000_000, 1])), Live(1, 0, 1, np.array([10_000_000, 0])))
    problem = Problem((np.array([1.0, 3.0]), np.array([1.0, 4.0])), (), lives, limit=1)
    outcome = cheapest(problem, None, time_limit=60, seed=0)
    assert (outcome.choice, outcome.bound) == ((1, 1), 7.0)


def test_the_oracle_can_fail(monkeypatch):
    """A program that forgets its memory rows is caught."""
    monkeypatch.setattr(integer_program._MemoryRows, "room", lambda self, limit: self.most - self.least)
    with pytest.raises(AssertionError):
        for seed in range(200):
            assert_optimal(random_problem(seed, nodes=5))


def test_ctrl_c_is_heard_while_highs_starts(monkeypatch):
    """Its thread runs by then, and the process would wait for it to end."""
    started = []

    class Interrupted(threading.Thread):
        def start(self):
            started.append(self)
            super().start()
            raise KeyboardInterrupt

    monkeypatch.setattr(threading, "Thread", Interrupted)
    outcome = cheapest(hard_problem(), None, time_limit=60.0, seed=0)
    assert outcome.interrupted
    started[0].join(timeout=20.0)
    assert not started[0].is_alive()


def test_a_highs_that_never_stops_does_not_keep_the_process():
    """It ran on after the best choice so far was there, and the process waited for it."""
    script = """
import sys, time
sys.path.insert(0, sys.argv[1])
from problems import hard_problem
from autoshard.solver.exact import highs, integer_program

def never_ends(self):
    print("runs")
    time.sleep(1000)

highs._SilentHighs.run = never_ends
highs.HIGHS = highs.HighsSettings(ending_seconds=0.1, abandoned_seconds=0.1)
print(integer_program.cheapest(hard_problem(), None, time_limit=2.0, seed=0).choice)
"""
    command = [sys.executable, "-c", script, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["runs", "None"]), done.stderr
