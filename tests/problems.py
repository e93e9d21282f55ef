"""Random problems small enough for `exhaustive`, and what a solver says of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autoshard.errors import SolverError
from autoshard.solver.problem import Edge, InfeasibleError, Live, Problem, Solution
from autoshard.solver.verify import check


def random_problem(seed: int, nodes: int = 6, options: int = 4) -> Problem:
    """Coarse or fine costs, 1e-9 to 1e3; forbidden pairs, parallel edges; memory from none to more than fits."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(1, nodes + 1))
    sizes = rng.integers(1, options + 1, nodes)
    forbidden = rng.choice([0.0, 0.1, 0.4])
    coarse = rng.random() < 0.5
    scale = 10.0 ** rng.integers(-9, 4)
    free_nodes = rng.random() < 0.5

    def costs(*shape: int) -> np.ndarray:
        table = rng.integers(0, 4, shape) if coarse else rng.random(shape) * rng.choice([1.0, 0.01], shape)
        return np.where(rng.random(shape) < forbidden, np.inf, table * scale)

    edges = []
    for _ in range(int(rng.integers(0, 2 * nodes)) if nodes > 1 else 0):
        i, j = rng.choice(nodes, 2, replace=False)
        table = costs(sizes[i], sizes[j])
        kind = rng.random()
        if kind < 0.2:  # each option of i allows one of j
            table = np.where(rng.integers(0, sizes[j], sizes[i])[:, None] == np.arange(sizes[j]), table, np.inf)
        elif kind < 0.3:  # a cost of its own for either end
            table = np.add.outer(table[:, 0], table[0])
        edges.append(Edge(int(i), int(j), table))
    lives = []
    for _ in range(int(rng.integers(0, 2 * nodes))):
        node = int(rng.integers(nodes))
        start, end = np.sort(rng.integers(0, 8, 2))
        lives.append(Live(node, int(start), int(end), rng.integers(0, 20, sizes[node])))
    return Problem(
        costs=tuple(np.zeros(size) if free_nodes else costs(size) for size in sizes),
        edges=tuple(edges),
        lives=tuple(lives),
        limit=rng.choice([None, 10, 25, 40, 60]),
    )


def binding_problem(seed: int) -> Problem:
    """One where memory decides, or forbids all: the limit is what some choice holds, or a byte less than all do.

    Cheap options hold more; a share of them hold nothing. Up to six nodes with up to four options, several lives for a
    node, parallel edges, forbidden options and pairs.
    """
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(3, 7))
    sizes = rng.integers(2, 5, nodes)
    forbidden = rng.choice([0.0, 0.05, 0.2])
    scale = rng.choice([1.0, 1e-6, 1e6])

    def some(table: np.ndarray) -> np.ndarray:
        return np.where(rng.random(table.shape) < forbidden, np.inf, table * scale)

    usages = [rng.integers(0, 12, size) * (rng.random(size) < 0.8) for size in sizes]
    costs = [some(np.maximum(0, 12 - usage) + rng.integers(-3, 4, len(usage))) for usage in usages]
    edges = []
    for _ in range(int(rng.integers(nodes - 1, 2 * nodes + 2))):
        i, j = map(int, rng.choice(nodes, 2, replace=False))
        table = rng.integers(0, 10, (sizes[i], sizes[j])).astype(float)
        edges.append(Edge(i, j, some(np.minimum(table, 4) if rng.random() < 0.5 else table)))
    lives = []
    for node, usage in enumerate(usages):
        for _ in range(int(rng.choice([1, 1, 2, 3]))):
            start, end = map(int, np.sort(rng.integers(0, 6, 2)))
            lives.append(Live(node, start, end + 2, usage if rng.random() < 0.7 else rng.permutation(usage)))
    free = Problem(tuple(costs), tuple(edges), tuple(lives), None)
    cost, peak = every_choice(free)
    peaks = np.sort(peak[np.isfinite(cost)])
    if not len(peaks):
        return free
    places = (0, 0, len(peaks) // 50, len(peaks) // 10, len(peaks) // 3, -1)
    less = int(rng.random() < 0.2)
    limit = peaks[rng.choice(places) if not less else 0] - less
    return replace(free, limit=None if limit < 0 else limit)


def every_choice(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Cost and peak bytes of every choice, in the order of `itertools.product`; the fast way for few choices."""
    sizes = [len(costs) for costs in problem.costs]
    choices = np.indices(sizes).reshape(len(sizes), -1)  # [nodes, choices]
    cost = np.sum([costs[chosen] for costs, chosen in zip(problem.costs, choices, strict=True)], axis=0)
    for edge in problem.edges:
        cost = cost + edge.costs[choices[edge.i], choices[edge.j]]
    peak = np.zeros(choices.shape[1])
    for point in {live.start for live in problem.lives}:
        alive = (live for live in problem.lives if live.start <= point < live.end)
        peak = np.maximum(peak, sum(live.usage[choices[live.node]] for live in alive))
    return cost, peak


def answer_of_every_choice(problem: Problem) -> tuple[str, float]:
    """What `answer` says of `exhaustive`, by `every_choice`."""
    cost, peak = every_choice(problem)
    fit = cost if problem.limit is None else cost[peak <= problem.limit]
    if np.isfinite(fit).any():
        return "costs", float(fit.min())
    possible = peak[np.isfinite(cost)]
    return ("needs", float(possible.min())) if len(possible) else ("forbidden", np.inf)


def hard_problem(nodes: int = 100, options: int = 8) -> Problem:
    """One that no solver finishes in a few seconds; any choice of small options fits."""
    rng = np.random.default_rng(0)
    pairs = [(i, int(j)) for i in range(nodes) for j in rng.choice(nodes, 3, replace=False) if i != j]
    return Problem(
        costs=tuple(rng.integers(0, 100, options).astype(float) for _ in range(nodes)),
        edges=tuple(Edge(i, j, rng.integers(0, 100, (options, options)).astype(float)) for i, j in pairs),
        lives=tuple(Live(node, 0, 1, rng.integers(0, 100, options)) for node in range(nodes)),
        limit=30 * nodes,
    )


def answer(solver: Callable[[Problem], Solution], problem: Problem) -> tuple[str, float]:
    """What a solver says: the least cost, the least limit that would do, or that everything is forbidden."""
    try:
        solution = solver(problem)
    except InfeasibleError as error:
        return "needs", error.needed
    except SolverError as error:
        assert str(error).startswith("every choice is forbidden")
        return "forbidden", np.inf
    check(problem, solution)
    assert solution.status == "optimal"
    return "costs", solution.cost


def assert_same(got: tuple[str, float], expected: tuple[str, float]) -> None:
    """Two answers agree, but for the gap that counts as optimal."""
    assert got[0] == expected[0], (got, expected)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)


def large_problem(nodes: int = 20_000, options: int = 10) -> Problem:
    """One of the size of the contest's, that no solver finishes in a minute; the first options hold nothing."""
    rng = np.random.default_rng(0)
    tables = [rng.integers(0, 1000, (options, options)).astype(float) for _ in range(40)]
    pairs = [(k, k + step) for step in (1, 7, 90) for k in range(nodes - step)]
    kinds = rng.integers(len(tables), size=len(pairs))
    costs = [rng.integers(0, 1000, options).astype(float) + 500 * (np.arange(options) == 0) for _ in range(40)]
    usages = [rng.integers(1, 1000, options) * (np.arange(options) > 0) for _ in range(40)]
    return Problem(
        costs=tuple(costs[k] for k in rng.integers(40, size=nodes)),
        edges=tuple(Edge(i, j, tables[kind]) for (i, j), kind in zip(pairs, kinds, strict=True)),
        lives=tuple(Live(node, node, node + 50, usages[k]) for node, k in enumerate(rng.integers(40, size=nodes))),
        limit=10_000,
    )


def some_of(seeds: range, few: int) -> list:
    """Parameters of a test: the first few seeds, and behind the marker `slow` the rest."""
    return [pytest.param(seeds[:few], id="some"), pytest.param(seeds[few:], id="rest", marks=pytest.mark.slow)]
