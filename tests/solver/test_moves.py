"""Every choice that moves offer is allowed and fits; often it is the best one."""

import numpy as np
from problems import answer, hard_problem, random_problem

from autoshard.solver.exhaustive import exhaustive
from autoshard.solver.moves import good_choices
from autoshard.solver.verify import fits, verify


def test_choices_hold():
    found = best = feasible = 0
    for seed in range(300):
        problem = random_problem(seed)
        kind, value = answer(exhaustive, problem)
        last = np.inf
        for choice in good_choices(problem, seed=0):
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
    assert list(good_choices(problem, seed=1)) == list(good_choices(problem, seed=1))
