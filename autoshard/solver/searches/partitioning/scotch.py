"""Scotch's way, as device placement takes it for its baseline: multilevel partitioning of the graph.

Pellegrini, "Distillating knowledge about Scotch", 2009, and Karypis and Kumar, "A fast and high quality multilevel
scheme for partitioning irregular graphs", SIAM 1998; used as a baseline by Mirhoseini et al., 2017, and with min-cut in
dist-baselines.

Kept: heavy edges are contracted level by level, the smallest graph is solved, and each level on the way back is refined
node by node. Different: parts are not devices of the same load. A cluster has options of its own: for each option of
either node the partner's option that goes with it best. Memory takes the place of balance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import Edge, Live, Problem
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.search_run import SearchRun
from autoshard.solver.tables import summed

SECONDS_PER_CONTRACTED = 1e-8  # of a quiet core: of a table that is contracted
SECONDS_PER_NODE = 5e-5  # of the same: of a node that is contracted, whatever its tables


@dataclass(frozen=True)
class ScotchSettings:
    """Levels of contraction."""

    fewest_nodes: int = 8  # of the smallest graph
    shrinkage: float = 0.9  # a level has at most this share of the nodes of the one before
    most_options: int = 128  # of a cluster
    starts: int = 4  # from which the smallest graph is solved
    noise: float = 0.5  # of the logarithm of how heavy an edge is, in further rounds


SETTINGS = ScotchSettings()


@dataclass(frozen=True, eq=False)
class ContractionLevel:
    """A contracted problem and the way back from its choices to those of the level below."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]  # cluster -> its one or two nodes
    options: tuple[np.ndarray, ...]  # cluster -> [options, members] options of its nodes

    def invert(self, choice: Sequence[int]) -> list[int]:
        """The choice of the level below."""
        below: dict[int, int] = {}
        for option, nodes, options in zip(choice, self.members, self.options, strict=True):
            below |= dict(zip(nodes, options[option].tolist(), strict=True))
        return [below[node] for node in range(len(below))]


def scotch(problem: Problem, run: SearchRun) -> None:
    """Rounds of contraction and refinement, each with other matchings."""
    at = Position(problem, run)
    at.repair()
    at.settle()
    for turn in run.rounds():
        levels: list[ContractionLevel] = []
        small = problem
        while len(small.costs) > SETTINGS.fewest_nodes:
            level = _contracted(small, SETTINGS.noise if turn else 0.0, run)
            if len(level.problem.costs) > SETTINGS.shrinkage * len(small.costs):
                break
            levels.append(level)
            small = level.problem
        for start in range(SETTINGS.starts):
            _refine(problem, levels, small, at, is_random=bool(turn or start))


def _refine(
    problem: Problem, levels: Sequence[ContractionLevel], small: Problem, at: Position, *, is_random: bool
) -> None:
    """Solves the smallest problem by descent and refines it level by level, down to `at`, which is of the whole."""
    position = at if small is problem else Position(small, at.run, offers=False)
    if is_random:
        position.start(position.random_choice())
    position.repair()
    position.settle()
    for level in reversed(levels):
        choice = level.invert(position.choice.tolist())
        is_last = level is levels[0]
        position = at if is_last else Position(_below(level, levels), at.run, offers=False)
        position.start(choice)
        if is_last:
            position.repair()
        position.settle()


def _below(level: ContractionLevel, levels: Sequence[ContractionLevel]) -> Problem:
    """The problem that a level contracts."""
    return levels[levels.index(level) - 1].problem


def _contracted(problem: Problem, noise: float, run: SearchRun) -> ContractionLevel:
    """The problem with its heaviest edges contracted, no two of which share a node."""
    tables = summed(problem.edges)
    heavy = [
        (float(_weight(table) * np.exp(noise * run.rng.standard_normal())), pair) for pair, table in tables.items()
    ]
    mate: dict[int, int] = {}
    for _, (i, j) in sorted(heavy, reverse=True):
        if i not in mate and j not in mate:
            mate[i], mate[j] = j, i
    members = tuple(
        (node, mate[node]) if node in mate else (node,)
        for node in range(len(problem.costs))
        if node <= mate.get(node, node)
    )
    options = tuple(
        np.arange(len(problem.costs[nodes[0]]))[:, None] if len(nodes) == 1 else _pairs(problem, nodes, tables[nodes])
        for nodes in members
    )
    place = {node: (cluster, k) for cluster, nodes in enumerate(members) for k, node in enumerate(nodes)}
    costs = [
        np.sum([problem.costs[node][rows[:, k]] for k, node in enumerate(nodes)], axis=0)
        for nodes, rows in zip(members, options, strict=True)
    ]
    edges = []
    for (i, j), table in tables.items():
        (a, k), (b, m) = place[i], place[j]
        rows, columns = options[a][:, k], options[b][:, m]
        run.spend(SECONDS_PER_NODE + SECONDS_PER_CONTRACTED * len(rows) * len(columns))
        if a == b:
            costs[a] = costs[a] + table[rows, columns]
        else:
            edges.append(Edge(a, b, table[rows[:, None], columns]))
    lives = []
    for live in problem.lives:
        cluster, k = place[live.node]
        lives.append(Live(cluster, live.start, live.end, live.usage[options[cluster][:, k]]))
    return ContractionLevel(
        Problem(tuple(costs), tuple(edges), tuple(lives), problem.limit, checked=True), members, options
    )


def _weight(table: np.ndarray) -> float:
    """What it costs on average if the ends of an edge do not agree; a forbidden pair costs as much as the dearest."""
    finite = np.where(np.isfinite(table), table, table.max(initial=0.0, where=np.isfinite(table)))
    return float(finite.mean() - finite.min()) * (1.0 + float(np.isinf(table).mean()))


def _pairs(problem: Problem, nodes: tuple[int, ...], table: np.ndarray) -> np.ndarray:
    """The options of a cluster of two nodes: for each option of either, the other's that goes with it best."""
    i, j = nodes
    both = problem.costs[i][:, None] + problem.costs[j] + table
    rows, columns = np.arange(len(both)), np.arange(len(both.T))
    pairs = np.concatenate([np.stack([rows, both.argmin(axis=1)], 1), np.stack([both.argmin(axis=0), columns], 1)])
    pairs = np.unique(pairs, axis=0)
    order = np.argsort(both[pairs[:, 0], pairs[:, 1]], kind="stable")[: SETTINGS.most_options]
    return np.asarray(pairs[np.sort(order)])
