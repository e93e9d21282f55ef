"""Compiled reductions keep the optimum, alone and before `simplify` goes on; their way back is right."""

from dataclasses import replace

import numpy as np
import pytest
from problems import answer, answer_of_every_choice, assert_same, binding_problem, random_problem, some_of

from autoshard.errors import SolverError
from autoshard.solver import Problem
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.presolve import simplify_compiled
from autoshard.solver.presolve import simplify_large as module
from autoshard.solver.presolve.settings import PRESOLVE
from autoshard.solver.presolve.simplify import simplify
from autoshard.solver.presolve.simplify_large import reduce
from autoshard.solver.problem import Edge, InfeasibleError, LeastNeed, Live, Solution
from autoshard.solver.verify import fits, verify

pytestmark = pytest.mark.usefixtures("compiled")


def by_parts(problem: Problem) -> Solution:
    """The optimum of what is left, led back."""
    small = simplify(problem, reduce=reduce)
    if not fits(small.rest, problem.limit):
        raise InfeasibleError(problem.limit, LeastNeed("", np.nan))
    solutions = [exhaustive(part) for part in small.parts]
    choice = small.invert([solution.choice for solution in solutions])
    cost, _ = verify(problem, choice)
    np.testing.assert_allclose(small.constant + sum(solution.cost for solution in solutions), cost, rtol=1e-9)
    return Solution(choice, cost, cost, "optimal")


def assert_sound(problem: Problem) -> None:
    got, expected = answer(by_parts, problem), answer_of_every_choice(problem)
    if expected[0] == "needs":  # what is needed is another problem's answer
        assert got[0] == "needs"
    else:
        assert_same(got, expected)


@pytest.mark.parametrize("seeds", some_of(range(1500), 500))
def test_small_problems(seeds):
    for seed in seeds:
        assert_sound(random_problem(seed))


@pytest.mark.parametrize("seeds", some_of(range(500), 150))
def test_problems_in_which_memory_decides(seeds):
    for seed in seeds:
        assert_sound(binding_problem(seed))


def test_larger_problems():
    for seed in range(5000, 5200):
        assert_sound(random_problem(seed, nodes=9, options=3))


def test_no_room_to_spare(monkeypatch):
    """The pool is full again and again; what would not fit is not begun."""
    monkeypatch.setattr(module, "PRESOLVE", replace(PRESOLVE, spare=1, least_spare=8))
    for seed in range(300):
        assert_sound(random_problem(seed))


def test_a_wrong_way_back_is_caught(monkeypatch):
    def wrong(state, original=module._result):
        reduced = original(state)
        for followed in reduced.followed:
            followed.labels[:, 1] = followed.labels[::-1, 1]
        return reduced

    monkeypatch.setattr(module, "_result", wrong)
    with pytest.raises((AssertionError, SolverError)):
        for seed in range(300):
            assert_sound(random_problem(seed))


def test_lost_memory_is_caught(monkeypatch):
    def forgetful(problem, original=module._state):
        state = original(problem)
        state.usage[:] = state.usage[0] if len(state.usage) else 0  # all lives hold what the first one holds
        return state

    monkeypatch.setattr(module, "_state", forgetful)
    with pytest.raises((AssertionError, SolverError)):
        for seed in range(300):
            assert_sound(random_problem(seed))


def test_chain_of_copies_becomes_one_node():
    """Each of 100,000 options stands for one of the next node; copying what was merged at each merge would not end."""
    nodes = 20_000
    same = np.where(np.eye(5, dtype=bool), 0.0, np.inf)
    edges = tuple(Edge(k, k + 1, same) for k in range(nodes - 1))
    lives = tuple(Live(k, k, k + 2, np.arange(5)) for k in range(nodes))
    reduced = reduce(Problem((np.arange(5.0)[::-1],) * nodes, edges, lives, limit=7), lambda: None)
    assert sum(len(costs) > 0 for costs in reduced.costs) <= 1


def test_forbidden_names_the_node():
    never = Edge(0, 1, np.full((2, 2), np.inf))
    problem = Problem((np.zeros(2), np.zeros(2)), (never,), (), None, names=("weight", "batch"))
    with pytest.raises(SolverError, match=r"every choice is forbidden: node \d \((weight|batch)\) has no option left"):
        reduce(problem, lambda: None)


def test_the_clock_is_looked_at(monkeypatch):
    monkeypatch.setattr(module, "PRESOLVE", replace(PRESOLVE, steps=1))
    looks = []
    reduce(random_problem(3), lambda: looks.append(None))
    assert len(looks) > 3
    assert simplify_compiled.MORE != simplify_compiled.FULL
