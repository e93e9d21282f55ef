"""Labels of two costs against every choice of small problems with cycles: what is found, and what is proven."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from problems import every_choice

from autoshard.solver import Problem
from autoshard.solver.exact import two_cost_labels
from autoshard.solver.exact.two_costs import TwoCosts
from autoshard.solver.problem import Edge
from autoshard.solver.runtime.budget import Budget


def drawn(seed: int) -> TwoCosts:
    """Options that are cheap by the one cost are dear by the other; a few pairs are forbidden, and one node decided."""
    rng = np.random.default_rng(seed)
    sizes = [*rng.integers(2, 5, 6), 1]
    pairs = [pair for pair in itertools.combinations(range(7), 2) if pair[1] - pair[0] == 1 or rng.random() < 0.2]
    work = [rng.random(size) for size in sizes]
    tables = [rng.random((sizes[i], sizes[j])) for i, j in pairs]
    edges = [
        Edge(i, j, np.where(rng.random(t.shape) < 0.1, np.inf, t)) for (i, j), t in zip(pairs, tables, strict=True)
    ]
    others = [
        Edge(i, j, 0.3 * rng.random(t.shape)) for (i, j), t in zip(pairs, tables, strict=True) if rng.random() < 0.8
    ]
    second = tuple(1.2 - own + 0.2 * rng.random(len(own)) for own in work)
    return TwoCosts(Problem(tuple(work), tuple(edges), (), None), Problem(second, tuple(others), (), None))


def best_of(costs: TwoCosts) -> float:
    return float(np.maximum(every_choice(costs.first)[0], every_choice(costs.second)[0]).min())


def problems(count=15):
    for seed in range(count):
        costs = drawn(seed)
        if math.isfinite(best := best_of(costs)):
            yield costs, best


def assert_labels_hold(most: int, monkeypatch) -> tuple[int, int]:
    """No bound is above the best choice; how many bounds are lower, and how many choices are not the best."""
    monkeypatch.setattr(two_cost_labels, "TWO_COST_LABELS", replace(two_cost_labels.TWO_COST_LABELS, most_labels=most))
    lower = worse = 0
    for costs, best in problems():
        for share in (0.3, 0.7):
            found = two_cost_labels.labelled(costs.first, costs.second, costs.mixed, share, math.inf)
            assert found.bound <= best * (1 + 1e-9)
            lower += found.bound < best * (1 - 1e-9)
            cost = max(costs.costs(found.choice)) if found.choice else math.inf
            assert cost >= best * (1 - 1e-9)
            worse += cost > best * (1 + 1e-9)
            nothing = two_cost_labels.labelled(costs.first, costs.second, costs.mixed, share, best * (1 - 1e-6))
            assert nothing.choice is None and (most < 100 or nothing.bound == math.inf)
    return lower, worse


def test_enough_labels_find_and_prove_the_best(monkeypatch):
    assert assert_labels_hold(10**6, monkeypatch) == (0, 0)


@pytest.mark.parametrize("most", [1, 3])
def test_few_labels_prove_nothing_that_is_not_true(most, monkeypatch):
    assert assert_labels_hold(most, monkeypatch)[0], "where labels are dropped, the bound is lower"


def by_one_cost(kept, floors, options):
    return kept(np.array([floors[1], floors[1], *floors[2:]]), options)


def without_options(kept, floors, options):
    return kept(floors, {})


@pytest.mark.parametrize("fault", [by_one_cost, without_options])
def test_labels_that_are_told_apart_too_little_are_caught(fault, monkeypatch):
    kept = two_cost_labels._kept
    monkeypatch.setattr(two_cost_labels, "_kept", lambda floors, options: fault(kept, floors, options))
    with pytest.raises(AssertionError):
        test_enough_labels_find_and_prove_the_best(monkeypatch)


def test_more_and_more_options():
    """From a bad choice, ceilings that rise lead to the best one and prove it, and no bound on the way is too high."""
    solved = 0
    for costs, best in problems(15):
        start = next(
            choice
            for choice in itertools.product(*(range(len(own)) for own in costs.first.costs))
            if math.isfinite(max(costs.costs(choice)))
        )
        cost, bound = max(costs.costs(start)), 0.0
        for choice, known in costs.labelled(start, 0.6, gap=0.0, budget=Budget.of(60.0)):
            assert known <= best * (1 + 1e-9)
            cost, bound = min(cost, max(costs.costs(choice)) if choice else math.inf), max(bound, known)
        solved += cost <= best * (1 + 1e-9) and bound >= best * (1 - 1e-6)
    assert solved == 15 - sum(not math.isfinite(best_of(drawn(seed))) for seed in range(15))


def test_wide_problems_have_none(monkeypatch):
    monkeypatch.setattr(two_cost_labels, "TWO_COST_LABELS", replace(two_cost_labels.TWO_COST_LABELS, most_entries=1))
    costs = drawn(0)
    assert two_cost_labels.labelled(costs.first, costs.second, costs.mixed, 0.5, math.inf) is None
