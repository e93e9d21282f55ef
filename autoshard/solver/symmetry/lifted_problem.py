"""A `Problem` that repeats itself in, a small one out whose relaxation proves bounds for the whole.

Nodes of one kind look alike, as far as `LIFTED_RADIUS` edges around them. If all of them get the same messages they add
the same to the bound: one per kind is dealt with, and counts as often as there are nodes of it (Kersting, Ahmadi and
Natarajan, "Counting belief propagation", UAI 2009; Mladenov, Ahmadi and Kersting, "Lifted linear programming", AISTATS
2012).
What lies further away does differ, towards the first and last layers: there, a node's neighbours in one *role*, the
same as far as it sees, are of different kinds. Their messages to it have to be one, the least of them, and what the
bound loses by that gets less with the distance. Edges within a kind have no messages, nor have others in their roles,
nor those in the roles of these: they count as what their cheapest pair costs.

Nothing is said of choices, unlike by `kind_problem`: the bound holds for those in which nodes alike differ, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from autoshard.solver.problem import Edge, Problem
from autoshard.solver.symmetry.node_kinds import NodeKinds
from autoshard.solver.tables import summed

LIFTED_RADIUS = 8  # edges: how far nodes look
# The same for colours: neighbours in one role then have one colour, and all come before a node or all after it.
COLOUR_RADIUS = 1
ALONE = -1  # the role of an edge that has messages of its own


@dataclass(frozen=True, eq=False)
class LiftedProblem:
    """One node per kind, and one edge per table between two kinds."""

    problem: Problem  # with the costs of a single node and of a single edge, without memory
    node_times: np.ndarray  # kind -> how many nodes it stands for
    edge_times: np.ndarray  # edge -> how many edges it stands for
    roles: np.ndarray  # [edge, end] -> number of its role for the node at that end, or ALONE
    colours: np.ndarray  # kind -> number of its colour: two kinds with an edge never have the same
    rest: float = 0.0  # what edges that are left out cost at least


def unlifted_problem(problem: Problem) -> LiftedProblem:
    """Every node for itself, and the edges between two as one; with its memory."""
    tables = summed(problem.edges)
    count = len(problem.costs)
    return LiftedProblem(
        problem=replace(problem, edges=tuple(Edge(*pair, table) for pair, table in tables.items()), checked=True),
        node_times=np.ones(count),
        edge_times=np.ones(len(tables)),
        roles=np.full((len(tables), 2), ALONE),
        colours=coloured(count, tables),
    )


def lifted_problem(kinds: NodeKinds, most: float = math.inf) -> LiftedProblem | None:
    """One node per kind; None where there are more kinds than `most`.

    >>> costs, edge = np.array([0.0, 1.0]), np.array([[0.0, 2.0], [2.0, 0.0]])
    >>> chain = Problem((costs, -costs) * 50, tuple(Edge(i, i + 1, edge) for i in range(99)), (), None)
    >>> small = lifted_problem(NodeKinds(chain))
    >>> len(small.problem.costs), int(small.node_times.sum())
    (18, 100)
    """
    kind, before = kinds.numbers(LIFTED_RADIUS, held=False)
    first, counts = np.unique(kind, return_index=True, return_counts=True)[1:]
    if len(first) > most:
        return None
    # an edge of the small problem: two kinds and a table
    rows, example, edge, times = np.unique(
        np.column_stack([kind[kinds.ends], kinds.table]),
        axis=0, return_index=True, return_inverse=True, return_counts=True,
    )  # fmt: skip
    roles = np.empty((len(rows), 2), dtype=np.int64)
    for end in (0, 1):
        # where all nodes of a kind have the same number of edges of one sort, these need no messages of others
        owned, number = np.unique(kinds.ends[:, end] * len(rows) + edge, return_counts=True)
        squares = np.bincount(owned % len(rows), number**2, minlength=len(rows))
        even = squares * counts[rows[:, end]] == times**2
        seen = np.column_stack([rows[:, end], rows[:, 2], before[kinds.ends[example, 1 - end]]])
        role = np.unique(seen, axis=0, return_inverse=True)[1]
        roles[:, end] = np.where(even, ALONE, 2 * role + end)
    out = rows[:, 0] == rows[:, 1]
    while (found := out | np.isin(roles, roles[out][roles[out] != ALONE]).any(axis=1)).sum() > out.sum():
        out = found  # what is left out at one end of an edge is so at the other, whose role may have more edges
    left = zip(rows[out, 2].tolist(), times[out].tolist(), strict=True)
    problem = Problem(
        costs=tuple(kinds.problem.costs[node] for node in first.tolist()),
        edges=tuple(Edge(i, j, kinds.tables[table]) for i, j, table in rows[~out].tolist()),
        lives=(),
        limit=None,
        checked=True,
    )
    return LiftedProblem(
        problem=problem,
        node_times=counts.astype(float),
        edge_times=times[~out].astype(float),
        roles=roles[~out],
        colours=_colours(kinds, kind, first),
        rest=sum(float(kinds.tables[table].min()) * count for table, count in left),
    )


def coloured(nodes: int, pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    """Node -> number of its colour: no two nodes with an edge have the same. Those with many edges choose first.

    >>> coloured(3, [(0, 1), (1, 2)])
    array([1, 0, 1])
    """
    beside: list[list[int]] = [[] for _ in range(nodes)]
    for i, j in pairs:
        beside[i].append(j)
        beside[j].append(i)
    colour = np.full(nodes, -1)
    for node in sorted(range(nodes), key=lambda node: -len(beside[node])):
        taken = set(colour[beside[node]].tolist())
        colour[node] = next(number for number in itertools.count() if number not in taken)
    return colour


def _colours(kinds: NodeKinds, kind: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Kind -> number of its colour: one for all that look alike nearby, unless there are edges among these."""
    near, _ = kinds.numbers(COLOUR_RADIUS, held=False)
    pairs = np.unique(near[kinds.ends], axis=0)
    if (pairs[:, 0] != pairs[:, 1]).all():
        return coloured(int(near.max()) + 1, pairs.tolist())[near[first]]
    pairs = np.unique(kind[kinds.ends], axis=0)
    return coloured(len(first), pairs[pairs[:, 0] != pairs[:, 1]].tolist())
