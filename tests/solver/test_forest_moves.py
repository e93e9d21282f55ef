"""Every choice that moves offer is allowed and fits; often it is the best one."""

from dataclasses import replace

import numpy as np
from problems import answer, hard_problem, random_problem

from autoshard.solver import solve
from autoshard.solver.bounds.forbid_options import OptionBounds
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.local_search.forest_moves import ForestMoves, ForestState
from autoshard.solver.method import Method
from autoshard.solver.presolve.simplify import simplify
from autoshard.solver.problem import Edge, Problem
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.settings import Sizes
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
        before, after = (
            verify(free, choice)[0] for choice in (start, ForestState(free, RNG(seed)).improved(start, NONE, 2))
        )
        assert value * (1 - 1e-9) <= after <= before * (1 + 1e-9)
        better += after < before
        if problem.limit is not None:
            moves = ForestState(problem, RNG(seed))
            for price in (0.0, 1e-6, 1.0):
                choice = moves.improved(start, np.full(len(moves.prices), price), 2)
                assert choice is None or fits(verify(problem, choice)[1], problem.limit)
    assert better > 20


def test_moves_start_from_first_options_where_the_gap_is_large():
    """The first options suit each other, and the cheapest of all nodes do not."""
    nodes, options = 40, 6
    costs = tuple(np.append([50.0] * 3, RNG(node).random(options - 3)) for node in range(nodes))
    pairs = [(i, int(j)) for i in range(nodes) for j in RNG(i).choice(nodes, 4, replace=False) if i != j]
    tables = [100 + 100 * RNG(edge).random((options, options)) for edge in range(len(pairs))]
    for table in tables:
        table[:3, :3] = 50 * RNG(0).random((3, 3))
    edges = (Edge(i, j, table) for (i, j), table in zip(pairs, tables, strict=True))
    problem = Problem(costs, tuple(edges), (), None)

    def cost(far_gap):
        """What bounds and moves find, where no time is left for what follows them."""
        method = Method(
            (OptionBounds(moves=ForestMoves(far_gap=far_gap)),), sizes=Sizes(few_options=100, bounded_options=100)
        )
        return solve(problem, method=method, budget=Budget(work=0.3, until=np.inf)).cost

    assert cost(0.2) < cost(np.inf)


def test_a_start_of_the_parts_is_what_the_whole_has():
    """Presolve leads a choice of the parts to one of the whole; what the parts start from is then the same again."""
    for seed in range(20):
        small = simplify(hard_problem(nodes=20, options=6))
        choices = [tuple(int(RNG(seed).integers(len(costs))) for costs in part.costs) for part in small.parts]
        assert choices and small.starts(small.invert(choices)) == choices
