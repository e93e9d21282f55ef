"""How much memory would do, where the integer program does not find it: choices and bounds against every choice."""

from dataclasses import replace

import numpy as np
import pytest
from problems import answer, random_problem

from autoshard.solver import least_memory
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.least_memory import LeanChoice, lean, leanest
from autoshard.solver.method import USUAL
from autoshard.solver.problem import Edge, Live, Problem
from autoshard.solver.run import NoChoice, SolverRun
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.settings import PROVEN
from autoshard.solver.verify import verify


def run_of(problem: Problem, seconds: float = 60.0) -> SolverRun:
    run = SolverRun(
        problem,
        seed=0,
        threads=1,
        budget=Budget.of(seconds),
        iterations=None,
        counts_work=True,
        goal=PROVEN,
        sizes=USUAL.sizes,
        algorithms=USUAL.algorithms,
        progress=None,
    )
    run.clock.grace = 0.0
    return run


def assert_lean(problem: Problem, needed: float, found: LeanChoice | None) -> float:
    """The choice is allowed and the bound is one; the factor by which the choice's peak is above the least."""
    assert found is not None
    cost, peak = verify(problem, found.choice)
    assert np.isfinite(cost) and found.bound <= needed * (1 + 1e-9) <= peak * (1 + 2e-9)
    return peak / needed if needed else 1.0


def factors() -> list[float]:
    found = []
    for seed in range(150):
        problem = random_problem(seed)
        if not problem.lives:
            continue
        starved = replace(problem, limit=0.0)
        kind, needed = answer(exhaustive, starved)
        if kind == "forbidden":
            with pytest.raises(NoChoice):
                lean(starved, run_of(starved))
        elif kind == "needs":
            found.append(assert_lean(problem, needed, lean(starved, run_of(starved))))
    assert len(found) > 50
    return found


def test_choices_are_lean_and_bounds_hold():
    ordered = sorted(factors())
    assert ordered[len(ordered) // 2] == 1.0 and ordered[-1] <= 1.5


def test_the_oracle_sees_a_bound_that_is_none(monkeypatch):
    """Weights that add up to more than one, as if a peak were held at several points at once."""
    real = least_memory._Points.weighted
    monkeypatch.setattr(least_memory._Points, "weighted", lambda self, weights: real(self, 2 * weights))
    with pytest.raises(AssertionError):
        factors()


def test_without_time_there_is_none():
    problem = next(problem for seed in range(100) if len((problem := random_problem(seed)).lives) > 4)
    run = run_of(problem, seconds=0.0)
    assert lean(replace(problem, limit=0.0), run) is None


def test_what_holds_no_memory_takes_no_work():
    """A long chain of equations that nobody holds, as callbacks of single rows are, beside one value that is held."""
    count = 5000
    chain = tuple(Edge(i, i + 1, np.array([[0.0, 1.0], [1.0, 0.0]])) for i in range(count - 1))
    held = Live(0, 0, count, np.array([7.0, 3.0]))
    problem = Problem(tuple(np.zeros(2) for _ in range(count)), chain, (held,), 0.0)
    run = run_of(problem, seconds=0.5)
    found = leanest(problem, run)
    assert found.is_exact and verify(problem, found.choice)[1] == 3.0
    assert run.clock.budget.done < 0.05  # s, where a step of simplifying per node took 0.5
