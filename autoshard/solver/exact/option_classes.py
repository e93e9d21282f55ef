"""A `Problem` in, one of smaller tables out, and the way back: options that an edge cannot tell apart are one to it.

A value that several operations read has an option per layout in which it is made and layout in which it is read. Who
makes it sees only the one, who reads it only the other. So nodes of *classes* come between: what an edge cannot tell
apart is one class, and a node of classes stands between the node and all edges that tell its options apart in the same
way. Tables of edges, and what elimination makes of them, are then over classes. Memory is left aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import Edge, Problem
from autoshard.solver.tables import ArrayMemo, classes, split, summed


@dataclass(frozen=True, eq=False)
class ClassedProblem:
    """The problem with nodes of classes behind its own nodes, which keep their numbers and options."""

    problem: Problem
    own: int  # how many nodes are those of the problem it was made of

    def invert(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice of the problem that it was made of."""
        return tuple(choice[: self.own])


def with_classes(problem: Problem) -> ClassedProblem:
    """The problem with a node of classes wherever an edge, or several in the same way, tell few options apart.

    >>> table = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [2.0, 0.0]])
    >>> chain = Problem((np.zeros(4), np.zeros(2), np.zeros(2)), (Edge(0, 1, table), Edge(0, 2, table)), (), None)
    >>> [len(costs) for costs in with_classes(chain).problem.costs]
    [4, 2, 2, 2]
    """
    memo = ArrayMemo()
    costs = [own.copy() for own in problem.costs]
    nodes: dict[tuple[int, bytes], int] = {}  # node, and the class of each of its options -> node of these classes
    edges: list[Edge] = []

    def end(node: int, labels: np.ndarray) -> tuple[int, np.ndarray]:
        """What an edge is joined to in place of this node, and the option that stands for each option there."""
        count = int(labels.max()) + 1
        if count == len(labels):
            return node, np.arange(count)
        key = node, labels.tobytes()
        firsts = np.unique(labels, return_index=True)[1]
        if key not in nodes:
            nodes[key] = len(costs)
            costs.append(np.zeros(count))
            edges.append(Edge(node, nodes[key], np.where(labels[:, None] == np.arange(count), 0.0, np.inf)))
        return nodes[key], firsts

    for (i, j), table in summed(problem.edges).items():
        rows, columns, rest, row, column = memo.once(_split_with_classes, table)
        costs[i] += rows
        costs[j] += columns
        (first, of_first), (second, of_second) = end(i, row), end(j, column)
        edges.append(Edge(first, second, rest[np.ix_(of_first, of_second)]))
    made = Problem(tuple(costs), tuple(edges), (), None, checked=True)
    return ClassedProblem(made, len(problem.costs))


def _split_with_classes(table: np.ndarray) -> tuple[np.ndarray, ...]:
    """What `split` makes of a table, and the classes of equal rows and of equal columns of its rest."""
    rows, columns, rest = split(table)
    return rows, columns, rest, classes(rest), classes(rest.T)
