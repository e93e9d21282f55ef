"""Bounds from one node per kind, held against the best choice of the whole problem."""

from dataclasses import replace

import numpy as np
import pytest
from sweeps import spread

from autoshard.solver.bounds.message_passing import Relaxation
from autoshard.solver.method import Method
from autoshard.solver.problem import Edge, Problem
from autoshard.solver.settings import Goal
from autoshard.solver.solve import solve
from autoshard.solver.symmetry.lifted_problem import ALONE, lifted_problem
from autoshard.solver.symmetry.node_kinds import NodeKinds
from autoshard.solver.symmetry.repeated_nodes import RepeatedNodes

SWEEPS = 40
ROUNDING = 1e-9


def chain(layers: int, seed: int, options: int = 3) -> Problem:
    """Layers of two nodes, one after the other, with ways past a node, between two ends."""
    rng = np.random.default_rng(seed)
    first, second, start, end = (np.round(rng.random(options), 3) for _ in range(4))
    inside, between, skipped = (np.round(rng.random((options, options)), 3) for _ in range(3))
    count = 2 * layers
    edges = [Edge(2 * i, 2 * i + 1, inside) for i in range(layers)]
    edges += [Edge(2 * i + 1, 2 * i + 2, between) for i in range(layers - 1)]
    edges += [Edge(2 * i, 2 * i + 3, skipped) for i in range(layers - 1)]
    edges += [Edge(count, 0, between), Edge(count + 1, count - 1, inside)]
    return Problem((*([first, second] * layers), start, end), tuple(edges), (), None)


def comb(seed: int, teeth: int = 6, options: int = 3) -> Problem:
    """Teeth of three nodes, one tied to the next, with ends of two sorts at random places."""
    rng = np.random.default_rng(seed)
    root, middle = (np.round(rng.random(options), 3) for _ in range(2))
    ends = [np.round(rng.random(options) * 4, 3) for _ in range(2)]
    first, second, along = (np.round(rng.random((options, options)) * 2, 3) for _ in range(3))
    nodes = [costs for _ in range(teeth) for costs in (root, middle, ends[rng.integers(2)])]
    edges = [Edge(3 * i, 3 * i + 1, first) for i in range(teeth)]
    edges += [Edge(3 * i + 1, 3 * i + 2, second) for i in range(teeth)]
    edges += [Edge(3 * i + 1, 3 * i + 3, along) for i in range(teeth - 1)]
    return Problem(tuple(nodes), tuple(edges), (), None)


def stairs(nodes: int, steps: int = 10) -> Problem:
    """A start high up, then nodes that are all alike, each of which may be one step lower than the one before."""
    free, high = np.array([0.0] + [1.0] * steps), np.array([1000.0] * steps + [0.0])
    start = np.where(np.eye(steps + 1), 0.0, 1000.0)
    down = np.subtract.outer(np.arange(steps + 1), np.arange(steps + 1))
    edges = [Edge(0, 1, start), *(Edge(i, i + 1, np.where(down > 1, 100.0, 0.0)) for i in range(1, nodes))]
    return Problem((high, *[free] * nodes), tuple(edges), (), None)


def stairwells(seed: int, nodes: int = 40, steps: int = 6) -> Problem:
    """Stairs that branch, of two sorts, with landings at random heights here and there."""
    rng = np.random.default_rng(seed)
    level = np.arange(steps + 1)
    down = np.subtract.outer(level, level)
    either, both = np.where(down > 1, 100.0, 0.0), np.where(np.abs(down) > 1, 100.0, 0.0)
    usual, width = (either, both)[rng.integers(2)], int(rng.integers(1, 5))
    costs, edges = [np.where(level == steps, 0.0, 1000.0)], []
    for node in range(1, nodes):
        landing = rng.random() < 0.08
        costs.append(np.where(level == rng.integers(steps + 1), 0.0, 1000.0) if landing else 1.0 * (level > 0))
        edges.append(Edge(int(rng.integers(max(0, node - width), node)), node, both if rng.random() < 0.15 else usual))
    return Problem(tuple(costs), tuple(edges), (), None)


def row(seed: int, nodes: int = 30, options: int = 4) -> Problem:
    """Nodes that are all alike, but for the first."""
    rng = np.random.default_rng(seed)
    costs, table = np.round(rng.random(options), 3), np.round(rng.random((options, options)) * 9, 3)
    start = np.where(np.arange(options) == rng.integers(options), 0.0, 50.0)
    edges = tuple(Edge(i, i + 1, table) for i in range(nodes))
    return Problem((start, *[costs] * nodes), edges, (), None)


def bounds(relaxation: Relaxation) -> list[float]:
    return [relaxation.sweep(forward=turn % 2 == 0, choose=False) for turn in range(SWEEPS)]


@pytest.mark.parametrize("far", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", spread(range(12), 3))
def test_no_choice_costs_less(seed, far, monkeypatch):
    monkeypatch.setattr("autoshard.solver.symmetry.lifted_problem.LIFTED_RADIUS", far)
    for problem in (chain(24, seed), comb(seed), row(seed)):
        best = solve(problem)
        assert best.status == "optimal"
        assert max(bounds(Relaxation(lifted_problem(NodeKinds(problem))))) <= best.cost + ROUNDING


@pytest.mark.parametrize("nodes", [20, 80])
def test_what_lies_beyond_sight_is_not_forgotten(nodes):
    """Nodes that look alike cannot all be low: the way down from the start, one step a node, costs 10."""
    assert solve(stairs(nodes)).cost == 10.0
    assert max(bounds(Relaxation(lifted_problem(NodeKinds(stairs(nodes)))))) <= 10.0


@pytest.mark.parametrize("far", [1, 2])
@pytest.mark.parametrize("seed", spread(range(40), 4))
def test_what_is_left_out_at_one_end_is_at_the_other(seed, far, monkeypatch):
    """Some nodes of a kind would otherwise get a message that others, whose edge was left out, do not."""
    monkeypatch.setattr("autoshard.solver.symmetry.lifted_problem.LIFTED_RADIUS", far)
    problem = stairwells(seed)
    best = solve(problem)
    assert best.status == "optimal"
    assert max(bounds(Relaxation(lifted_problem(NodeKinds(problem))))) <= best.cost + ROUNDING


def test_the_way_down_is_found_and_proven():
    method = Method(repeated_nodes=RepeatedNodes(least_options=100))
    solution = solve(stairs(100), goal=Goal(gap=0.01, priced_gap=0.01, repeated_gap=0.01), method=method)
    assert solution.bound <= 10.0 <= solution.cost <= 10.0 * 1.01


def test_messages_of_one_role_have_to_be_one(monkeypatch):
    """With messages of their own, all nodes of a kind are offered what only some of them get."""
    monkeypatch.setattr("autoshard.solver.symmetry.lifted_problem.LIFTED_RADIUS", 1)
    too_high = 0
    for seed in range(10):
        small = lifted_problem(NodeKinds(comb(seed)))
        apart = replace(small, roles=np.full_like(small.roles, ALONE))
        too_high += max(bounds(Relaxation(apart))) > solve(comb(seed)).cost + ROUNDING
    assert too_high


@pytest.mark.parametrize("seed", range(10))
def test_bounds_are_near_those_of_the_whole(seed):
    problem = chain(60, seed)
    small = lifted_problem(NodeKinds(problem))
    whole = max(bounds(Relaxation(problem)))
    assert len(small.problem.costs) < len(problem.costs) / 2
    assert max(bounds(Relaxation(small))) == pytest.approx(whole, rel=2e-3)


def test_more_layers_are_no_more_kinds():
    assert len({len(lifted_problem(NodeKinds(chain(layers, 0))).node_times) for layers in (40, 80)}) == 1


@pytest.mark.parametrize("problem", [chain(30, 0), comb(0), row(0), stairs(40)])
def test_nothing_gets_lost(problem):
    alike = NodeKinds(problem)
    small = lifted_problem(alike)
    assert small.node_times.sum() == len(problem.costs)
    left = len(alike.ends) - int(small.edge_times.sum())
    kind, _ = alike.numbers(8, held=False)
    within = int((kind[alike.ends[:, 0]] == kind[alike.ends[:, 1]]).sum())
    assert left >= within  # those of one role with them are left out, too
    assert (left > 0) == (within > 0)


def test_edges_that_are_left_out_count_too():
    costs, table = np.array([1.0, 2.0]), np.array([[3.0, 1.0], [1.0, 3.0]])
    problem = Problem((costs,) * 40, tuple(Edge(i, i + 1, table) for i in range(39)), (), None)
    small = lifted_problem(NodeKinds(problem))
    assert small.rest == 40 - len(small.node_times) + 2  # all but the ends' nodes are one kind
    assert 40 + 39 <= max(bounds(Relaxation(small))) <= solve(problem).cost
