"""Bounds from one node per kind, held against the best choice of the whole problem."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.solver.alike import Alike
from autoshard.solver.bounds import Relaxation
from autoshard.solver.lifted import ALONE, lifted
from autoshard.solver.problem import Edge, Problem
from autoshard.solver.solve import solve

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


def bounds(relaxation: Relaxation) -> list[float]:
    return [relaxation.sweep(forward=turn % 2 == 0, choose=False) for turn in range(SWEEPS)]


@pytest.mark.parametrize("far", [1, 2, 8])
@pytest.mark.parametrize("seed", range(20))
def test_no_choice_costs_less(seed, far, monkeypatch):
    monkeypatch.setattr("autoshard.solver.lifted.FAR", far)
    for problem in (chain(10, seed), comb(seed)):
        best = solve(problem)
        assert best.status == "optimal"
        assert max(bounds(Relaxation(lifted(Alike(problem))))) <= best.cost + ROUNDING


def test_messages_of_one_role_have_to_be_one(monkeypatch):
    """With messages of their own, all nodes of a kind are offered what only some of them get."""
    monkeypatch.setattr("autoshard.solver.lifted.FAR", 1)
    too_high = 0
    for seed in range(10):
        small = lifted(Alike(comb(seed)))
        apart = replace(small, roles=np.full_like(small.roles, ALONE))
        too_high += max(bounds(Relaxation(apart))) > solve(comb(seed)).cost + ROUNDING
    assert too_high


@pytest.mark.parametrize("seed", range(10))
def test_bounds_are_near_those_of_the_whole(seed):
    problem = chain(60, seed)
    small = lifted(Alike(problem))
    whole = max(bounds(Relaxation(problem)))
    assert len(small.problem.costs) < len(problem.costs) / 2
    assert max(bounds(Relaxation(small))) == pytest.approx(whole, rel=2e-3)


def test_more_layers_are_no_more_kinds():
    assert len({len(lifted(Alike(chain(layers, 0))).nodes) for layers in (40, 80)}) == 1


@pytest.mark.parametrize("seed", range(20))
def test_nothing_gets_lost(seed):
    problem = chain(30, seed) if seed % 2 else comb(seed)
    nodes = Alike(problem)
    small = lifted(nodes)
    assert small.nodes.sum() == len(problem.costs)
    kind, _ = nodes.kinds(8, held=False)
    within = [edge for edge, ends in enumerate(kind[nodes.ends]) if ends[0] == ends[1]]
    assert small.edges.sum() + len(within) == len(nodes.ends)
    assert small.rest == pytest.approx(sum(nodes.tables[nodes.table[edge]].min() for edge in within))


def test_edges_within_a_kind_count_too():
    costs, table = np.array([1.0, 2.0]), np.array([[3.0, 1.0], [1.0, 3.0]])
    problem = Problem((costs,) * 40, tuple(Edge(i, i + 1, table) for i in range(39)), (), None)
    small = lifted(Alike(problem))
    assert small.rest == 40 - len(small.nodes)  # all but the ends' nodes are one kind, with edges that cost 1 at least
    assert 40 + 39 <= max(bounds(Relaxation(small))) <= max(bounds(Relaxation(problem)))
