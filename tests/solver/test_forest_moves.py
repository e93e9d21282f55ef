"""Every choice that moves offer is allowed and fits; often it is the best one."""

from dataclasses import replace

import numpy as np
from problems import answer, hard_problem, random_problem

from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.local_search.forest_moves import ForestMoves, Moves
from autoshard.solver.verify import fits, verify

RNG, NONE = np.random.default_rng, np.zeros(0)


def test_choices_hold():
    found = best = feasible = 0
    for seed in range(300):
        problem = random_problem(seed)
        kind, value = answer(exhaustive, problem)
        last = np.inf
        for choice in ForestMoves().choices(problem, seed=0):
            if choice is not None:
                cost, peak = verify(problem, choice)
                assert cost < np.inf and fits(peak, problem.limit)
                assert value * (1 - 1e-9) <= cost <= last
                last = cost
        assert kind == "costs" or last == np.inf
        feasible += kind == "costs"
        found += last < np.inf
        best += kind == "costs" and np.isclose(last, value)
    assert found > 0.95 * feasible and best > 0.8 * feasible


def test_same_seed_same_choices():
    problem = hard_problem(nodes=30)
    assert list(ForestMoves().choices(problem, seed=1)) == list(ForestMoves().choices(problem, seed=1))


def test_a_choice_from_elsewhere_gets_better_or_stays():
    """Whatever prices are, what comes back fits; without prices and limit it costs no more than what went in."""
    better = 0
    for seed in range(100):
        problem = random_problem(seed)
        free = replace(problem, limit=None)
        kind, value = answer(exhaustive, free)
        if kind != "costs":
            continue
        start = [0] * len(problem.costs)
        before, after = (verify(free, choice)[0] for choice in (start, Moves(free, RNG(seed)).improved(start, NONE, 2)))
        assert value * (1 - 1e-9) <= after <= before * (1 + 1e-9)
        better += after < before
        if problem.limit is not None:
            moves = Moves(problem, RNG(seed))
            for price in (0.0, 1e-6, 1.0):
                choice = moves.improved(start, np.full(len(moves.prices), price), 2)
                assert choice is None or fits(verify(problem, choice)[1], problem.limit)
    assert better > 20
