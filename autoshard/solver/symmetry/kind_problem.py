"""A `Problem` that repeats itself in, a small one out in which nodes that look alike take one option.

Nodes are told apart by what is next to them, so that all but the first and last layers are one. Any choice of the
small problem is one of the whole at the same cost and memory. The reverse does not hold: nodes alike may do better
apart. So nothing that is proven of the small problem holds for the whole but what `KindProblem.expand` shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import Edge, Live, Problem
from autoshard.solver.symmetry.node_kinds import NodeKinds
from autoshard.solver.verify import fits, verify

KIND_RADIUS = 1  # edges: how far nodes look; if further, more of the first and last layers differ from the others


@dataclass(frozen=True, eq=False)
class KindProblem:
    """The small problem, and the way back."""

    problem: Problem
    kind: np.ndarray  # node of the whole problem -> node of the small one

    def expand(self, choice: Sequence[int]) -> list[int]:
        """The choice of the whole problem in which nodes alike take what `choice` has for their kind."""
        return np.asarray(choice)[self.kind].tolist()

    def fits(self, choice: Sequence[int] | None) -> bool:
        """Whether this choice of the small problem is within the limit."""
        return choice is not None and fits(verify(self.problem, choice)[1], self.problem.limit)


def kind_problem(kinds: NodeKinds) -> KindProblem:
    """The problem with one option for all nodes alike.

    >>> costs, edge = np.array([0.0, 1.0]), np.array([[0.0, 2.0], [2.0, 0.0]])
    >>> chain = Problem((costs,) * 9, tuple(Edge(i, i + 1, edge) for i in range(8)), (), None)
    >>> small = kind_problem(NodeKinds(chain))
    >>> len(small.problem.costs), small.expand([0, 1, 0])
    (3, [0, 1, 1, 1, 1, 1, 1, 1, 0])
    """
    problem, (kind, _) = kinds.problem, kinds.numbers(KIND_RADIUS, held=True)
    first, counts = np.unique(kind, return_index=True, return_counts=True)[1:]
    costs = [problem.costs[node] * n for node, n in zip(first.tolist(), counts.tolist(), strict=True)]
    sums: dict[tuple[int, int], np.ndarray] = {}
    rows, times = np.unique(np.column_stack([kind[kinds.ends], kinds.table]), axis=0, return_counts=True)
    for (i, j, number), n in zip(rows.tolist(), times.tolist(), strict=True):
        table = kinds.tables[number]
        if i == j:
            costs[i] = costs[i] + np.diagonal(table) * n
            continue
        part = (table if i < j else table.T) * n
        pair = min(i, j), max(i, j)
        sums[pair] = sums[pair] + part if pair in sums else part
    lives: dict[tuple[int, int, int], np.ndarray] = {}
    for live in problem.lives:
        place = int(kind[live.node]), live.start, live.end
        lives[place] = lives[place] + live.usage if place in lives else live.usage
    small = Problem(
        costs=tuple(costs),
        edges=tuple(Edge(i, j, table) for (i, j), table in sums.items()),
        lives=tuple(Live(*place, usage) for place, usage in lives.items()),
        limit=problem.limit,
        names=tuple(problem.names[node] for node in first) if problem.names else (),
        checked=True,
    )
    return KindProblem(small, kind)
