"""The larger of two costs, against every choice: bounds of mixtures, recombination, and what the bounds leave."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from problems import every_choice

from autoshard.errors import SolverError
from autoshard.plans import limited_overlap
from autoshard.plans.limited_overlap import best_mixture
from autoshard.solver import Problem
from autoshard.solver.exact import two_costs
from autoshard.solver.exact.two_costs import TwoCosts
from autoshard.solver.problem import Edge, InfeasibleError, LeastNeed, Live, Solution
from autoshard.solver.runtime.budget import Budget


def drawn(seed: int) -> TwoCosts:
    """A chain whose options are cheap by the one cost and dear by the other; a few pairs are forbidden."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, 5)
    work = [rng.random(size) for size in sizes]
    tables = [np.where(rng.random((a, b)) < 0.1, np.inf, rng.random((a, b))) for a, b in itertools.pairwise(sizes)]
    edges = tuple(Edge(i, i + 1, table) for i, table in enumerate(tables))
    others = tuple(Edge(i, i + 1, rng.random(table.shape) * 0.3) for i, table in enumerate(tables))
    second = tuple(1.2 - own + 0.2 * rng.random(len(own)) for own in work)
    return TwoCosts(Problem(tuple(work), edges, (), None), Problem(second, others, (), None))


def larger(costs: TwoCosts) -> np.ndarray:
    """Of every choice, in the order of `every_choice`."""
    return np.maximum(every_choice(costs.first)[0], every_choice(costs.second)[0])


def choice_at(costs: TwoCosts, place: int) -> tuple[int, ...]:
    return tuple(int(k) for k in np.unravel_index(place, list(map(len, costs.first.costs))))


def assert_solved(costs: TwoCosts) -> None:
    """Mixtures prove bounds; from a choice that is not the best, the best one is found and proven."""
    every = larger(costs)
    for share in (0.0, 0.4, 1.0):
        assert every_choice(costs.mixed(share))[0].min() <= every.min() * (1 + 1e-9)
    start = choice_at(costs, int(np.argsort(every)[min(20, np.isfinite(every).sum() - 1)]))
    found, bound = costs.solved(start, 0.6, gap=0.0, budget=Budget.of(60.0))
    np.testing.assert_allclose([max(costs.costs(found)), bound], every.min(), rtol=1e-6)


def test_solved():
    for seed in range(15):
        assert_solved(drawn(seed))


def test_bounds_that_are_too_high_are_caught(monkeypatch):
    mixed = TwoCosts.mixed

    def dearer(self, share):
        made = mixed(self, share)
        return replace(made, costs=tuple(1.5 * own for own in made.costs), checked=True)

    monkeypatch.setattr(TwoCosts, "mixed", dearer)
    with pytest.raises(AssertionError):
        test_solved()


def near(costs: TwoCosts, known: list[tuple[int, ...]], share: float) -> list[tuple[int, ...]]:
    """The known choices with those that are found near them, the cheapest one first."""
    for choice in costs.near(lambda: known, share, budget=Budget.of(60.0)):
        if choice is not None:
            known.append(choice)
            known.sort(key=lambda one: max(costs.costs(one)))
    return known


def test_near():
    """Four options of each node and more are all there are, so the best choice is found."""
    found = 0
    for seed in range(15):
        costs, every = drawn(seed), larger(drawn(seed))
        start = choice_at(costs, int(np.argsort(every)[min(20, np.isfinite(every).sum() - 1)]))
        best, *others = near(costs, [start], 0.6)
        np.testing.assert_allclose(max(costs.costs(best)), every.min(), rtol=1e-9)
        found += bool(others)
    assert found > 10


def test_a_search_near_the_wrong_options_is_caught(monkeypatch):
    monkeypatch.setattr(two_costs, "NEAR_OPTION_COUNTS", (0,))
    with pytest.raises(AssertionError):
        test_near()


def test_recombined():
    """Of the options of two choices, the best recombination; without them all, no better one."""
    for seed in range(10):
        costs = drawn(seed)
        ends = [choice_at(costs, int(every_choice(one)[0].argmin())) for one in (costs.first, costs.second)]
        ends.sort(key=lambda choice: max(costs.costs(choice)))
        if not np.isfinite(max(costs.costs(ends[0]))):
            continue
        found = costs.recombined(ends, gap=0.0, budget=Budget.of(60.0))
        places = np.indices(list(map(len, costs.first.costs))).reshape(len(ends[0]), -1).T
        among = ((places == ends[0]) | (places == ends[1])).all(axis=1)
        np.testing.assert_allclose(max(costs.costs(found)), larger(costs)[among].min(), rtol=1e-6)


def test_the_limit_holds_for_recombinations():
    costs, budget = drawn(0), Budget.of(60.0)
    choice = choice_at(costs, int(larger(costs).argmin()))
    assert costs.recombined([choice], gap=0.0, budget=budget) == choice
    life = Live(0, 0, 1, np.ones(len(costs.first.costs[0])))
    tight = TwoCosts(replace(costs.first, lives=(life,), limit=0.5), costs.second)
    assert tight.recombined([choice], gap=0.0, budget=budget) is None


def test_best_mixture():
    """Where lines cross: by hand, and no mixture of known choices has a larger least cost."""
    assert best_mixture([(5.0, 7.0), (8.0, 4.0)]) == (0.5, 6.0)
    assert best_mixture([(5.0, 7.0)])[1] == np.inf  # nothing is known of choices that hide less
    rng = np.random.default_rng(0)
    for _ in range(50):
        costs = rng.random((4, 2))
        share, least = best_mixture([(2.0, 0.0), *map(tuple, costs)])
        lines = np.outer(np.linspace(0, 1, 1001), np.append(2.0, costs[:, 0])) + np.outer(
            np.linspace(1, 0, 1001), np.append(0.0, costs[:, 1])
        )
        assert lines.min(axis=1).max() <= least + 1e-12 and 0 <= share <= 1


@pytest.mark.parametrize(
    "failure", [InfeasibleError(1, LeastNeed("too lean", 2)), SolverError("too late"), KeyboardInterrupt()]
)
def test_a_mixture_that_cannot_be_solved_costs_no_plan(failure, monkeypatch):
    """The choice that is known fits, whatever a search in a mixture does not find."""

    def solve(problem, budget):
        raise failure

    problem, waits = (Problem((np.array(costs),), (), (), 10.0) for costs in ([1.0, 2.0], [3.0, 2.5]))
    formulation = SimpleNamespace(problem=problem, waits=lambda until: waits, accepted_peak=lambda choice: 1)
    waiting = SimpleNamespace(communication_seconds=3.0)
    monkeypatch.setattr(limited_overlap, "prediction_of", lambda formulation, choice: waiting)
    best = Solution((0,), 1.0, 1.0, "optimal")
    found = limited_overlap.with_limited_overlap(formulation, best, solve, Budget.of(5.0), 10.0)
    assert (found.choice, found.cost, found.bound) == ((0,), 3.0, 1.0)


@pytest.mark.parametrize("rise", [0.1, -0.1])
def test_mixtures_that_bring_no_other_choice_are_few(rise, monkeypatch):
    """Where memory leaves no choice that hides less, smaller shares bring the same choice, and bounds of their own."""
    shares = []

    def solve(problem, budget):
        shares.append((problem.costs[0][0] - 3.0) / (1.0 - 3.0))
        return Solution((0,), float(problem.costs[0][0]), 0.5 - rise * shares[-1], "feasible")

    problem, waits = (Problem((np.array(costs),), (), (), 10.0) for costs in ([1.0, 2.0], [3.0, 0.5]))
    held = {(0,): 1, (1,): 11}  # bytes
    formulation = SimpleNamespace(problem=problem, waits=lambda until: waits, accepted_peak=held.__getitem__)
    waiting = SimpleNamespace(communication_seconds=3.0)
    monkeypatch.setattr(limited_overlap, "prediction_of", lambda formulation, choice: waiting)
    best = Solution((0,), 1.0, 0.01, "feasible")
    found = limited_overlap.with_limited_overlap(formulation, best, solve, Budget.of(5.0), 10.0)
    assert found.choice == (0,) and found.bound <= found.cost == 3.0
    assert found.bound >= 0.5 and len(shares) <= 4 and shares[-1] == 0.0


def test_mixtures_that_bring_ever_other_choices_end(monkeypatch):
    """Each smaller share brings a choice that hides a little less, but more than there is to hide behind."""
    count, shares = 60, []
    costs = np.linspace(1.0, 2.0, count), np.linspace(3.0, 2.5, count)

    def solve(problem, budget):
        shares.append((problem.costs[0][0] - 3.0) / (1.0 - 3.0))
        place = min(len(shares), count - 1)
        return Solution((place,), float(problem.costs[0][place]), 0.0, "feasible")

    problem, waits = (Problem((own,), (), (), 10.0) for own in costs)
    formulation = SimpleNamespace(problem=problem, waits=lambda until: waits, accepted_peak=lambda choice: 1)
    waiting = SimpleNamespace(communication_seconds=3.0)
    monkeypatch.setattr(limited_overlap, "prediction_of", lambda formulation, choice: waiting)
    best = Solution((0,), 1.0, 0.01, "feasible")
    found = limited_overlap.with_limited_overlap(formulation, best, solve, Budget.of(5.0), 10.0)
    assert found.cost == pytest.approx(2.5) and 0.0 in shares and len(shares) <= 12
