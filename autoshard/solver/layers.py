"""A `Problem` that repeats itself in, a small one out in which nodes that look alike take one option.

Layers of a model come out as nodes with the same costs, tied to neighbours alike by the same tables. Nodes are told
apart by what is around them, a few edges far (colour refinement), so that all but the first and last layers are one.
Any choice of the small problem is one of the whole at the same cost and memory. The reverse does not hold: nodes alike
may do better apart. So nothing that is proven of the small problem holds for the whole but what `Tied.expand` shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import Edge, Live, Problem
from autoshard.solver.verify import fits, verify

ROUNDS = 1  # how many edges far nodes look; with more, more of the first and last layers differ from the others


@dataclass(frozen=True, eq=False)
class Tied:
    """The small problem, and the way back."""

    problem: Problem
    kind: np.ndarray  # node of the whole problem -> node of the small one

    def expand(self, choice: Sequence[int]) -> list[int]:
        """The choice of the whole problem in which nodes alike take what `choice` has for their kind."""
        return np.asarray(choice)[self.kind].tolist()

    def fits(self, choice: Sequence[int] | None) -> bool:
        """Whether this choice of the small problem is within the limit."""
        return choice is not None and fits(verify(self.problem, choice)[1], self.problem.limit)


def tied(problem: Problem) -> Tied:
    """The problem with one option for all nodes alike.

    >>> costs, edge = np.array([0.0, 1.0]), np.array([[0.0, 2.0], [2.0, 0.0]])
    >>> chain = Problem((costs,) * 9, tuple(Edge(i, i + 1, edge) for i in range(8)), (), None)
    >>> small = tied(chain)
    >>> len(small.problem.costs), small.expand([0, 1, 0])
    (3, [0, 1, 1, 1, 1, 1, 1, 1, 0])
    """
    kind = _kinds(problem)
    count = int(kind.max(initial=-1)) + 1
    costs: list[np.ndarray] = [np.zeros(0)] * count
    for node, sort in enumerate(kind.tolist()):
        costs[sort] = problem.costs[node] if not len(costs[sort]) else costs[sort] + problem.costs[node]
    times: dict[tuple[int, int, int], int] = defaultdict(int)
    tables: dict[int, np.ndarray] = {}
    for edge in problem.edges:
        i, j = int(kind[edge.i]), int(kind[edge.j])
        times[i, j, id(edge.costs)] += 1
        tables[id(edge.costs)] = edge.costs
    sums: dict[tuple[int, int], np.ndarray] = {}
    for (i, j, table), n in times.items():
        if i == j:
            costs[i] = costs[i] + np.diagonal(tables[table]) * n
            continue
        part = tables[table] if i < j else tables[table].T
        pair = min(i, j), max(i, j)
        sums[pair] = sums[pair] + part * n if pair in sums else part * n
    lives: dict[tuple[int, int, int], np.ndarray] = {}
    for live in problem.lives:
        place = int(kind[live.node]), live.start, live.end
        lives[place] = lives[place] + live.usage if place in lives else live.usage
    names = tuple(problem.names[node] for node in np.unique(kind, return_index=True)[1]) if problem.names else ()
    small = Problem(
        costs=tuple(costs),
        edges=tuple(Edge(i, j, table) for (i, j), table in sums.items()),
        lives=tuple(Live(*place, usage) for place, usage in lives.items()),
        limit=problem.limit,
        names=names,
        checked=True,
    )
    return Tied(small, kind)


def _kinds(problem: Problem) -> np.ndarray:
    """Node -> number of its kind, in order of appearance."""
    numbers: dict[object, int] = {}
    known: dict[int, int] = {}

    def number(array: np.ndarray) -> int:
        """Equal for equal arrays; many are one object."""
        if id(array) not in known:
            content = array.shape, array.dtype.str, np.ascontiguousarray(array).tobytes()
            known[id(array)] = numbers.setdefault(content, len(numbers))
        return known[id(array)]

    held: list[list[tuple]] = [[] for _ in problem.costs]
    for live in problem.lives:
        held[live.node].append((number(live.usage), live.start == 0))
    beside: list[list[tuple[int, int]]] = [[] for _ in problem.costs]
    for edge in problem.edges:
        table = 2 * number(edge.costs)
        beside[edge.i].append((table, edge.j))
        beside[edge.j].append((table + 1, edge.i))
    kinds: dict[object, int] = {}
    alone = ((number(costs), *sorted(own)) for costs, own in zip(problem.costs, held, strict=True))
    kind = [kinds.setdefault(one, len(kinds)) for one in alone]
    for _ in range(ROUNDS):
        kinds = {}
        kind = [
            kinds.setdefault((own, *sorted((table, kind[other]) for table, other in ends)), len(kinds))
            for own, ends in zip(kind, beside, strict=True)
        ]
    return np.array(kind, dtype=np.int64)
