"""Labels against every choice of small problems in which memory decides: what is found, and what is proven."""

import math

import numpy as np
import pytest
from problems import answer_of_every_choice, binding_problem

from autoshard.solver import solve
from autoshard.solver.exact.elimination_order import order_of
from autoshard.solver.exact.labels import LABELS, LabelOutcome, LabelSearch
from autoshard.solver.exact.narrow_parts import Elimination
from autoshard.solver.incumbent import most_sum
from autoshard.solver.method import Method
from autoshard.solver.problem import Live, Problem
from autoshard.solver.verify import fits, verify


def searches(count=80):
    """Problems of which some choice fits, a search in each under random prices, what the best choice
    costs, and what rounding may make of it."""
    for seed in range(count):
        problem = binding_problem(seed)
        said, best = answer_of_every_choice(problem)
        points = len(problem.pressure_points())
        if said == "costs" and problem.limit is not None and points:
            rng = np.random.default_rng(seed)
            values = rng.exponential(0.02 * most_sum(problem), points) * rng.integers(0, 2)
            yield problem, LabelSearch(problem, order_of(problem), values), best, 1e-9 * most_sum(problem)


def test_enough_labels_find_and_prove_the_best():
    count = 0
    for problem, search, best, rounding in searches():
        found = search.run(wanted=math.inf, most=10**6)
        assert verify(problem, found.choice)[0] == pytest.approx(best, abs=rounding)
        assert found.bound == pytest.approx(best, abs=rounding)
        assert search.run(wanted=best, most=10**6).bound >= best - rounding, "nothing is cheaper"
        count += 1
    assert count > 30


@pytest.mark.parametrize("most", [1, 3])
def test_few_labels_prove_nothing_that_is_not_true(most):
    dropped = 0
    for problem, search, best, rounding in searches():
        found = search.run(wanted=math.inf, most=most)
        assert found.bound <= best + rounding
        dropped += found.bound < best - rounding
        if found.choice is not None:
            cost, peak = verify(problem, found.choice)
            assert fits(peak, problem.limit) and cost >= best - rounding
    assert dropped, "where labels are dropped, the bound is lower"


def test_labels_compared_by_cost_alone_are_caught(monkeypatch):
    compare = LabelSearch._undominated

    def by_cost_alone(search, made, step, spend):
        with monkeypatch.context() as patch:
            patch.setattr(search, "later", np.zeros_like(search.later))  # as if no later node held anything
            return compare(search, made, step, spend)

    monkeypatch.setattr(LabelSearch, "_undominated", by_cost_alone)
    with pytest.raises((AssertionError, TypeError)):  # a choice that is dearer, or none
        test_enough_labels_find_and_prove_the_best()


def test_what_no_price_decides_is_solved_without_an_integer_program():
    """Few large values, of which some have to go: under the best prices the bound is far from any choice."""
    usage = np.random.default_rng(0).integers(20, 60, 14)
    costs = tuple(np.array([0.0, 1.0 + 0.01 * node]) for node in range(14))
    lives = tuple(Live(node, 0, 1, np.array([held, 0])) for node, held in enumerate(usage))
    problem = Problem(costs, (), lives, float(usage.sum() // 2))

    def gap(**numbers):
        return solve(problem, method=Method(algorithms=(Elimination(**numbers),)), time_limit=20).gap

    assert gap() < 1e-6 < 1e-3 < gap(most_labels=())


def test_labels_end_where_iterations_are_counted(monkeypatch):
    """They count none, so work ends them."""
    spent = []
    monkeypatch.setattr(LabelSearch, "run", lambda self, *, spend, **_: spent.append(spend(1e6)))
    usage = np.random.default_rng(0).integers(20, 60, 14)
    lives = tuple(Live(node, 0, 1, np.array([held, 0])) for node, held in enumerate(usage))
    costs = tuple(np.array([0.0, 1.0 + 0.01 * node]) for node in range(14))
    problem = Problem(costs, (), lives, float(usage.sum() // 2))
    solve(problem, method=Method(algorithms=(Elimination(),)), iterations=3)
    assert not spent, "the clock has ended them"


def test_labels_are_as_many_as_memory_allows_and_none_where_all_is_forbidden():
    lives = tuple(Live(0, point, point + 1, np.array([0, 1])) for point in range(0, 2000, 2))
    wide = Problem((np.array([1.0, 0.0]),), (), lives, 1)
    search = LabelSearch(wide, order_of(wide), np.full(len(wide.pressure_points()), 1e-3))
    assert 1 <= search.most * LABELS.candidates * len(wide.pressure_points()) <= LABELS.most_cells
    search.floor = math.inf
    assert search.run(wanted=math.inf, most=9) == LabelOutcome(None, math.inf)
