"""Edges of a relaxation, put side by side so that one operation of NumPy serves many of them.

Options with equal costs over an edge are one class: its table has a row per class of the one end, a column per class of
the other. An operation on a few small tables takes as long as one on many, so tables are padded to one shape.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.bounds.settings import BlockSettings
from autoshard.solver.symmetry.lifted_problem import LiftedProblem
from autoshard.solver.tables import classes


@dataclass(frozen=True, eq=False)
class ClassedEdge:
    """An edge from a node of a lower colour to one of a higher."""

    nodes: tuple[int, int]
    classes: tuple[np.ndarray, np.ndarray]  # per end: option -> class
    table: np.ndarray  # [class, class]; equal ones are the same object
    times: float  # how many edges it stands for
    roles: tuple[int, int]  # per end: edges of one role have one message; ALONE: a message of its own


class EdgeBlock:
    """Edges between two colours, their tables side by side, so that one operation serves all of them.

    Options with equal costs over an edge are one class. A message is a number per class and edge, [class, edge]. Where
    an edge has fewer classes than others, its last one stands for those that are missing, too.
    """

    def __init__(self, edges: Sequence[ClassedEdge], table: np.ndarray):
        self.edges = edges
        self.times = np.array([edge.times for edge in edges])
        self.roles = tuple(np.array([edge.roles[end] for edge in edges]) for end in (0, 1))
        self.tables = table, np.ascontiguousarray(table.swapaxes(0, 1))  # [class, class at the other end, edge or 1]
        self.nodes = tuple(np.array([edge.nodes[end] for edge in edges]) for end in (0, 1))
        self.slots = [slice(0), slice(0)]  # where its messages to each end stand among all
        self.first = [np.zeros(0, dtype=np.int64)] * 2  # per end and edge: where the classes of its options stand

    def paid(self, end: int, chosen: np.ndarray) -> np.ndarray:
        """What the classes at one end pay, [class, edge], where the edges' other ends chose these classes."""
        table = self.tables[1 - end]
        return table[chosen, :, np.arange(len(chosen)) if table.shape[2] > 1 else 0].T


def edges_of(lifted: LiftedProblem, colour_of: np.ndarray) -> list[ClassedEdge]:
    """The edges with their options in classes."""
    known: dict[tuple[int, bool], tuple] = {}  # tables that are one object, as they are or turned -> classes, small
    equal: dict[tuple, np.ndarray] = {}

    def small(table: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        rows, columns = classes(table), classes(table.T)
        table = np.ascontiguousarray(table[_firsts(rows)][:, _firsts(columns)])
        return (rows, columns), equal.setdefault((table.shape, table.tobytes()), table)

    edges = []
    for edge, times, roles in zip(lifted.problem.edges, lifted.edge_times.tolist(), lifted.roles.tolist(), strict=True):
        turned = bool(colour_of[edge.i] > colour_of[edge.j])
        key = id(edge.costs), turned
        if key not in known:
            known[key] = small(edge.costs.T if turned else edge.costs)
        step = -1 if turned else 1
        (i, j), (role, other) = (edge.i, edge.j)[::step], roles[::step]
        of_ends, table = known[key]
        edges.append(ClassedEdge((i, j), of_ends, table, times, (role, other)))
    return edges


def blocks_of(edges: Sequence[ClassedEdge], colour_of: np.ndarray, settings: BlockSettings) -> list[EdgeBlock]:
    """Edges between the same colours together: those of one table, if they are many, and others of about one shape."""
    same: dict[tuple[int, int, int], list[ClassedEdge]] = defaultdict(list)
    for edge in edges:
        i, j = edge.nodes
        same[int(colour_of[i]), int(colour_of[j]), id(edge.table)].append(edge)
    alike: dict[tuple[int, int], dict[tuple[int, int], list[ClassedEdge]]] = defaultdict(lambda: defaultdict(list))
    blocks = []
    for (i, j, _), found in same.items():
        entries = len(found) * found[0].table.size
        if len(found) >= settings.same_table_edges and entries >= settings.same_table_entries:
            blocks.append(EdgeBlock(found, found[0].table[:, :, None]))
        else:
            alike[i, j][found[0].table.shape] += found
    for by_shape in alike.values():
        for (rows, columns), found in _merged(by_shape, settings.padded_entries).items():
            table = np.empty((rows, columns, len(found)))
            for place, edge in enumerate(found):
                own_rows, own_columns = edge.table.shape
                table[:own_rows, :own_columns, place] = edge.table
                table[own_rows:, :own_columns, place] = edge.table[-1]
                table[:, own_columns:, place] = table[:, own_columns - 1, None, place]
            blocks.append(EdgeBlock(found, table))
    return blocks


def _merged(
    by_shape: Mapping[tuple[int, int], list[ClassedEdge]], most: int
) -> dict[tuple[int, int], list[ClassedEdge]]:
    """Edges by the shape that their tables are padded to: an operation on few of them takes as long as on many.

    Args:
        most: entries that it may add to put a shape beside another.
    """
    merged: dict[tuple[int, int], list[ClassedEdge]] = {}
    for shape in sorted(by_shape, key=math.prod, reverse=True):
        edges = by_shape[shape]
        padded = {}  # shape of those before -> the shape that both would have, and how many entries that adds
        for other, found in merged.items():
            both = max(shape[0], other[0]), max(shape[1], other[1])
            entries = math.prod(both) * (len(edges) + len(found))
            padded[other] = entries - math.prod(shape) * len(edges) - math.prod(other) * len(found), both
        nearest = min(padded, key=padded.__getitem__, default=None)
        if nearest is None or padded[nearest][0] > most:
            merged[shape] = edges
        else:
            edges = merged.pop(nearest) + edges
            merged.setdefault(padded[nearest][1], []).extend(edges)
    return merged


def _firsts(classes: np.ndarray) -> list[int]:
    """The first of each class, of classes numbered in order of appearance."""
    found: dict[int, int] = {}
    for place, number in enumerate(classes.tolist()):
        found.setdefault(number, place)
    return list(found.values())
