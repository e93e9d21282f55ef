"""Bounds never exceed the optimum, nor what options cost at least; on trees and with time they reach it."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from problems import every_choice, random_problem

import autoshard.solver.symmetry.lifted_problem
from autoshard.errors import SolverError
from autoshard.solver import Problem, solve
from autoshard.solver.bounds import message_passing
from autoshard.solver.bounds.message_passing import Relaxation
from autoshard.solver.bounds.prices import Prices
from autoshard.solver.bounds.settings import RELAXATION, BlockSettings
from autoshard.solver.presolve.simplify import simplify
from autoshard.solver.problem import Edge, Live
from autoshard.solver.symmetry.lifted_problem import lifted_problem
from autoshard.solver.symmetry.node_kinds import NodeKinds
from autoshard.solver.verify import fits, verify


def least_costs(problem: Problem) -> list[np.ndarray]:
    """Node -> option -> the cost of the cheapest choice with that option that fits, by trying everything."""
    cost, peak = every_choice(problem)
    if problem.limit is not None:
        cost = np.where(peak <= problem.limit * (1 + 1e-12), cost, np.inf)
    table = cost.reshape([len(costs) for costs in problem.costs])
    others = [tuple(other for other in range(table.ndim) if other != node) for node in range(table.ndim)]
    return [table.min(axis=axes) for axes in others]


@functools.cache
def parts_of(seed: int) -> list[tuple[Problem, list[np.ndarray]]]:
    """The parts of a random problem as a relaxation wants them, that have a choice, and their least costs."""
    try:
        small = simplify(random_problem(seed, nodes=7, options=3))
    except SolverError:
        return []
    found = [(part, least_costs(part)) for part in small.parts]
    return [(part, least) for part, least in found if np.isfinite(least[0]).any()]


def parts(seeds: range) -> Iterator[tuple[Problem, list[np.ndarray]]]:
    for seed in seeds:
        yield from parts_of(seed)


def assert_bounds(seeds: range) -> int:
    """Holds every bound against trying everything; how many problems there were."""
    count = 0
    for part, expected in parts(seeds):
        count += 1
        optimum = expected[0].min()
        slack = 1e-9 * abs(optimum)
        relaxation = Relaxation(part)
        rng = np.random.default_rng(0)
        for forward in (True, False) * 5:
            assert relaxation.sweep(forward=forward) <= optimum + slack
            for got, costs in zip(relaxation.least(forward=bool(rng.random() < 0.5)), expected, strict=True):
                assert (got <= costs + slack).all()
            values = relaxation.prices.values
            relaxation.prices.set(rng.random(len(values)) * (rng.random(len(values)) < 0.3) * optimum / 100)
    return count


def test_bounds_hold():
    assert assert_bounds(range(1000)) > 20


@pytest.mark.parametrize("fault", ["refund", "share"])
def test_the_oracle_can_fail(monkeypatch, fault):
    if fault == "refund":  # memory is paid, and what the limit allows is not given back

        def no_refund(self, values, original=Prices.set):
            original(self, values)
            self.refund = 0.0

        monkeypatch.setattr(Prices, "set", no_refund)
    else:  # what a node has to share is spent twice

        def twice(self, costs, end, original=message_passing.ColourClass.least):
            return 2 * original(self, costs, end)

        monkeypatch.setattr(message_passing.ColourClass, "least", twice)
    with pytest.raises(AssertionError):
        assert_bounds(range(1000))


def test_trees_are_tight():
    rng = np.random.default_rng(0)
    edges = tuple(Edge(int(rng.integers(k)), k, rng.random((5, 5))) for k in range(1, 200))
    relaxation = Relaxation(Problem(tuple(rng.random(5) for _ in range(200)), edges, (), None))
    *_, (choice, bound) = relaxation.rounds(lambda: np.inf)
    assert verify(relaxation.problem, choice)[0] == pytest.approx(bound, rel=1e-9)


def test_rounds_find_choices():
    """Every round's bound holds; with prices on memory, most problems end with a good choice."""
    good = cases = 0
    for part, least in parts(range(1000)):
        optimum, cost = least[0].min(), np.inf
        for choice, bound in Relaxation(part).rounds(lambda: cost):  # noqa: B023  (used within this turn)
            assert bound <= optimum * (1 + 1e-9)
            if choice is None:
                continue
            value, peak = verify(part, choice)
            if fits(peak, part.limit):
                cost = min(cost, value)
        cases += 1
        good += cost <= 1.1 * optimum
    assert cases > 20 and good > 0.8 * cases, (cases, good)


def layers_of_all_sizes(seed: int, layers: int = 12) -> Problem:
    """Layers of nodes with more and fewer options, some of which cost the same over an edge."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 9, size=8)
    costs = [rng.random(size) for size in sizes]
    ends = [(i, j) for i in range(8) for j in range(i + 1, 16) if rng.random() < 0.3 and i != j - 8]
    tables = [rng.integers(0, 4, size=(sizes[i], sizes[j % 8])) * 0.5 for i, j in ends]
    edges = [
        Edge(8 * layer + i, 8 * layer + j, table)
        for layer in range(layers)
        for (i, j), table in zip(ends, tables, strict=True)
        if 8 * layer + j < 8 * layers
    ]
    return Problem(tuple(costs) * layers, tuple(edges), (), None)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_padding_changes_nothing(seed, whole, monkeypatch):
    """Tables stand side by side with larger ones; nodes alike have one message over tables that are padded apart."""
    monkeypatch.setattr(autoshard.solver.symmetry.lifted_problem, "LIFTED_RADIUS", 1)
    problem = layers_of_all_sizes(seed)
    small = problem if whole else lifted_problem(NodeKinds(problem))
    padded = Relaxation(small)
    plain = Relaxation(small, replace(RELAXATION, blocks=BlockSettings(padded_entries=-1)))
    assert blocks(padded) < blocks(plain) / 2
    for turn in range(20):
        forward = turn % 2 == 0
        assert padded.sweep(forward=forward, choose=whole) == pytest.approx(plain.sweep(forward=forward, choose=whole))
        for a, b in zip(padded.least(forward=forward), plain.least(forward=forward), strict=True):
            assert a == pytest.approx(b)
    assert not whole or padded.cost == pytest.approx(plain.cost)


def blocks(relaxation: Relaxation) -> int:
    return sum(len(colour.blocks[0]) for colour in relaxation._colours)


def test_prices_lift_the_bound():
    """Ten tasks, of which each costs 1 or holds a byte, and room for half of them."""
    one = (np.array([0.0, 1.0]),) * 10
    lives = tuple(Live(node, 0, 1, np.array([1, 0])) for node in range(10))
    bound = max(bound for _, bound in Relaxation(Problem(one, (), lives, limit=5)).rounds(lambda: 5.0))
    assert bound == pytest.approx(5.0, rel=1e-2)


def torus(seed: int, side: int = 12) -> Problem:
    """Nodes of four options, the last of which holds a byte and does not fit."""
    rng = np.random.default_rng(seed)
    nodes = np.arange(side**2).reshape(side, side)
    ends = [pair for axis in (0, 1) for pair in zip(nodes.flat, np.roll(nodes, -1, axis).flat, strict=True)]
    edges = [Edge(*sorted(map(int, pair)), rng.random((4, 4)) * (1 - np.eye(4))) for pair in ends]
    costs = tuple(0.3 * rng.random(4) for _ in nodes.flat)
    lives = tuple(Live(int(node), 0, 1, np.array([0, 0, 0, 1])) for node in nodes.flat)
    return Problem(costs, tuple(edges), lives, limit=0)


def test_memory_has_no_price_before_the_bound_settles():
    """On a torus, where it takes long to, passing choices hold what the cheapest does not."""
    waited = 0
    for seed in range(6):
        problem = torus(seed)
        free = solve(replace(problem, limit=None))
        if not fits(verify(problem, free.choice)[1], problem.limit):
            continue
        relaxation = Relaxation(problem)
        over = [0.0]
        for count, _ in enumerate(relaxation.rounds(lambda: np.inf)):
            assert not relaxation.prices.values.any()
            if count % 2:  # backward, which chooses
                over.append(relaxation.prices.over(relaxation.prices.taken(relaxation.choice)).max())
        waited += max(over) > 0
    assert waited > 1, waited


@pytest.mark.filterwarnings("error")
def test_what_is_over_by_next_to_nothing_moves_no_price():
    """Of what does not fit, choices are mixed with shares whose squares are 0 to a float: no price is infinite."""
    relaxation = Relaxation(torus(3))
    bounds = [bound for _, bound in relaxation.rounds(lambda: np.inf)]
    assert np.isfinite(bounds).all() and np.isfinite(relaxation.prices.values).all()


def test_over_of_a_mix():
    """Half of one choice and half of another one hold the mean of both."""
    for seed in range(100):
        problem = random_problem(seed)
        if problem.limit is None or not len(problem.pressure_points()):
            continue
        prices = Prices(problem)
        both = [prices.taken([0] * len(problem.costs)), prices.taken([len(costs) - 1 for costs in problem.costs])]
        assert prices.over(sum(both) / 2) == pytest.approx(sum(map(prices.over, both)) / 2, abs=1e-5)


def test_over():
    """Bytes over the limit, at each pressure point, as the verifier counts them."""
    for seed in range(200):
        problem = random_problem(seed)
        if problem.limit is None or not len(problem.pressure_points()):
            continue
        choice = [len(costs) - 1 for costs in problem.costs]
        prices = Prices(problem)
        over = prices.over(prices.taken(choice)).max()
        assert over == pytest.approx(verify(problem, choice)[1] - problem.limit, abs=1e-6)
