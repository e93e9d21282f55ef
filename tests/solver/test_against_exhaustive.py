"""Thousands of random small problems in which memory decides, and every choice of them: the oracle of all that solves.

`solve` finds the optimum, or says that and why there is none; `simplify` keeps it and its way back leads to it; what is
called a bound is one, at any time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from problems import answer, answer_of_every_choice, assert_same, binding_problem, every_choice, random_problem, some_of

from autoshard.errors import SolverError
from autoshard.solver import Problem, Progress, Solution, solve
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.presolve.simplify import Simplification, simplify
from autoshard.solver.problem import InfeasibleError, LeastNeed
from autoshard.solver.verify import fits, verify

SEEDS = range(400)
MORE_SEEDS = range(400, 5000)  # behind the marker `slow`


@cache
def case(seed: int) -> tuple[Problem, tuple[str, float]]:
    """A problem and its answer."""
    problem = binding_problem(seed)
    return problem, answer_of_every_choice(problem)


def test_the_oracles_agree():
    """Written twice, one choice at a time and all at once."""
    for seed in range(150):
        problem, expected = case(seed)
        assert_same(answer(exhaustive, problem), expected)
        problem = random_problem(seed)
        assert_same(answer(exhaustive, problem), answer_of_every_choice(problem))


def test_problems_are_of_all_kinds():
    kinds = Counter(case(seed)[1][0] for seed in SEEDS)
    assert min(kinds["costs"], kinds["needs"]) > len(SEEDS) / 10 and kinds["forbidden"] > 10, kinds
    left = sum(bool(parts_of(case(seed)[0])) for seed in SEEDS[:300])
    assert left > 100, left  # that reductions alone do not solve


def parts_of(problem: Problem) -> tuple[Problem, ...]:
    try:
        return simplify(problem).parts
    except SolverError:
        return ()


def assert_solved(solver: Callable[[Problem], Solution], seeds: range) -> None:
    for seed in seeds:
        problem, expected = case(seed)
        assert_same(answer(solver, problem), expected)


def assert_simplified(simplifier: Callable[[Problem], Simplification], seeds: range) -> None:
    """The parts and their way back have the problem's optimum, or no choice where it has none."""
    for seed in seeds:
        problem, expected = case(seed)
        if expected[0] == "costs":
            found = by_parts(problem, simplifier)
            cost, peak = verify(problem, found.choice)
            assert fits(peak, problem.limit), seed
            np.testing.assert_allclose([found.cost, cost], expected[1], rtol=1e-9, atol=1e-12, err_msg=str(seed))
        else:
            with pytest.raises(SolverError):
                by_parts(problem, simplifier)


def by_parts(problem: Problem, simplifier: Callable[[Problem], Simplification]) -> Solution:
    """The best choice of each part, led back, and what they cost by the parts' own account."""
    small = simplifier(problem)
    if not fits(small.rest, problem.limit):
        raise InfeasibleError(problem.limit, LeastNeed("", np.nan))
    choices, total = [], small.constant
    for part in small.parts:
        cost, peak = every_choice(part)
        if part.limit is not None:
            cost = np.where(peak <= part.limit * (1 + 1e-12), cost, np.inf)
        if not np.isfinite(cost).any():
            raise InfeasibleError(part.limit, LeastNeed("", np.nan))
        total += cost.min()
        choices.append(np.unravel_index(cost.argmin(), [len(costs) for costs in part.costs]))
    return Solution(small.invert(choices), float(total), float(total), "optimal")


def assert_bounded(solver: Callable[..., Solution], seeds: range) -> int:
    """What a search that is ended early says is true; how many were ended before they had proved their choice."""
    early = 0
    for seed in seeds:
        problem, expected = case(seed)
        if expected[0] != "costs":
            continue
        for time_limit in (1e-9, 1e-3):
            try:
                solution = solver(problem, time_limit=time_limit)
            except SolverError as error:
                assert not isinstance(error, InfeasibleError) and "forbidden" not in str(error), seed
                continue
            slack = 1e-9 * abs(expected[1])
            assert solution.bound - slack <= expected[1] <= solution.cost + slack, seed
            early += solution.status == "feasible"
    return early


def test_solve():
    assert_solved(solve, SEEDS[:70])


@pytest.mark.slow
def test_solve_more():
    assert_solved(solve, SEEDS[70:])
    assert_solved(solve, MORE_SEEDS)


def test_simplify():
    assert_simplified(simplify, SEEDS)


@pytest.mark.slow
def test_simplify_more():
    assert_simplified(simplify, MORE_SEEDS)


def test_bounds():
    assert assert_bounded(solve, SEEDS[:250]) > 10


@pytest.mark.parametrize("seeds", some_of(SEEDS[:80], 24))
def test_progress(seeds):
    """Whatever is told on the way is true, and never less than before."""
    for seed in seeds:
        problem, (kind, optimum) = case(seed)
        told: list[Progress] = []
        with contextlib.suppress(SolverError):
            solve(problem, progress=told.append)
        assert all(now.bound >= before.bound and now.cost <= before.cost for before, now in itertools.pairwise(told))
        if kind == "costs":
            slack = 1e-9 * abs(optimum)
            assert told and all(now.bound - slack <= optimum <= now.cost + slack for now in told), seed
        else:
            assert all(now.cost == np.inf for now in told), seed


def without_memory(problem: Problem) -> Problem:
    return replace(problem, limit=None)


def with_dearer_edges(problem: Problem) -> Problem:
    return replace(problem, edges=tuple(replace(edge, costs=1.001 * edge.costs) for edge in problem.edges))


def without_parallel_edges(problem: Problem) -> Problem:
    return replace(problem, edges=tuple({frozenset((edge.i, edge.j)): edge for edge in problem.edges}.values()))


def with_one_life_each(problem: Problem) -> Problem:
    return replace(problem, lives=tuple({live.node: live for live in problem.lives}.values()))


def with_one_byte_less(problem: Problem) -> Problem:
    return replace(problem, limit=None if problem.limit is None else problem.limit - 1 if problem.limit else 0)


def with_one_byte_more(problem: Problem) -> Problem:
    return replace(problem, limit=None if problem.limit is None else problem.limit + 1)


def greedy(problem: Problem) -> Problem:
    """As if the first node's cheapest option were always best."""
    return problem.restrict({0: [int(problem.costs[0].argmin())]})


FAULTS = [
    greedy,
    with_dearer_edges,
    with_one_byte_less,
    with_one_byte_more,
    with_one_life_each,
    without_memory,
    without_parallel_edges,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_solver_is_caught(fault):
    with pytest.raises((AssertionError, SolverError)):
        assert_solved(lambda problem: solve(fault(problem)), SEEDS[:200])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_reduction_is_caught(fault):
    with pytest.raises((AssertionError, pytest.fail.Exception, SolverError)):
        assert_simplified(lambda problem: simplify(fault(problem)), SEEDS[:200])


def test_a_faulty_way_back_is_caught():
    def astray(problem: Problem) -> SimpleNamespace:
        small = simplify(problem)

        def invert(choices):
            first, *others = small.invert(choices)
            return (max(0, first - 1), *others)

        return SimpleNamespace(parts=small.parts, constant=small.constant, rest=small.rest, invert=invert)

    with pytest.raises(AssertionError):
        assert_simplified(astray, SEEDS[:200])


@pytest.mark.parametrize("factor, term", [(1.001, 0.0), (1.0, 1e-4)])
def test_a_bound_too_high_is_caught(factor, term):
    def boastful(problem: Problem, time_limit: float) -> Solution:
        solution = solve(problem, time_limit=time_limit)
        return replace(solution, bound=solution.bound * factor + term)

    with pytest.raises(AssertionError):
        assert_bounded(boastful, SEEDS[:500])
