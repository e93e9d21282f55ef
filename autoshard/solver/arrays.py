"""A `Problem` in, the same in a few flat arrays out: what compiled code works on.

Options of all nodes stand one after the other, and so do the tables of all edges. A named tuple, since compiled code
takes one as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.verify import ROUNDING


class Graph(NamedTuple):
    """Nodes and edges of a problem; no two edges join the same nodes. Edges are sorted by their nodes."""

    offsets: np.ndarray  # int64[nodes + 1]: where the options of a node start among all
    costs: np.ndarray  # float64[options]
    left: np.ndarray  # int64[edges]: the end with the lower number
    right: np.ndarray  # int64[edges]
    table_offsets: np.ndarray  # int64[edges + 1]: where the table of an edge starts among all
    tables: np.ndarray  # float64[entries]: [option of left, option of right] of each edge, row by row
    earlier_starts: np.ndarray  # int64[nodes + 1]: where a node's edges to nodes with lower numbers start in `earlier`
    earlier: np.ndarray  # int64[edges]: edges by their right end
    later_starts: np.ndarray  # int64[nodes + 1]: where its edges to nodes with higher numbers start in `later`
    later: np.ndarray  # int64[edges]: edges by their left end
    left_offsets: np.ndarray  # int64[edges + 1]: where the options of the left end start among all left ends
    right_offsets: np.ndarray  # int64[edges + 1]
    widest: int  # options of a node, at most


class Memory(NamedTuple):
    """Bytes that options hold beyond the leanest option of their node, over stretches of pressure points."""

    node: np.ndarray  # int64[lives]
    start: np.ndarray  # int64[lives]: first pressure point
    end: np.ndarray  # int64[lives]: one past the last
    usage_offsets: np.ndarray  # int64[lives + 1]
    usage: np.ndarray  # float64: per option of the life's node
    room: np.ndarray  # float64[points]: bytes that the limit leaves beyond the leanest options
    unit: float  # bytes: the limit, to measure how far something is over it


def graph_of(problem: Problem) -> Graph:
    """The nodes and edges of a problem; parallel edges are added up."""
    sizes = np.array([len(costs) for costs in problem.costs], dtype=np.int64)
    summed = summed_edges(problem)
    pairs = sorted(summed)
    left, right = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
    tables = [np.ascontiguousarray(summed[pair], dtype=np.float64).ravel() for pair in pairs]
    return Graph(
        offsets=starts_of(sizes),
        costs=np.concatenate([np.zeros(0), *problem.costs]),
        left=left,
        right=right,
        table_offsets=starts_of(sizes[left] * sizes[right]),
        tables=np.concatenate([np.zeros(0), *tables]),
        earlier_starts=starts_of(np.bincount(right, minlength=len(sizes))),
        earlier=np.argsort(right, kind="stable"),
        later_starts=starts_of(np.bincount(left, minlength=len(sizes))),
        later=np.arange(len(left)),
        left_offsets=starts_of(sizes[left]),
        right_offsets=starts_of(sizes[right]),
        widest=int(sizes.max(initial=0)),
    )


def summed_edges(problem: Problem) -> dict[tuple[int, int], np.ndarray]:
    """Two nodes, the lower number first -> [option, option] cost of all edges that join them."""
    summed: dict[tuple[int, int], np.ndarray] = {}
    for edge in problem.edges:
        i, j, table = (edge.i, edge.j, edge.costs) if edge.i < edge.j else (edge.j, edge.i, edge.costs.T)
        summed[i, j] = summed[i, j] + table if (i, j) in summed else table
    return summed


def memory_of(problem: Problem) -> Memory:
    """The lives of a problem. Without a limit there are no pressure points."""
    points = problem.pressure_points() if problem.limit is not None else np.zeros(0, dtype=np.int64)
    limit = 0.0 if problem.limit is None else problem.limit * (1 + ROUNDING)
    lives = problem.lives if len(points) else ()
    start, end = (
        np.searchsorted(points, np.array([getattr(live, side) for live in lives], dtype=np.int64))
        for side in ("start", "end")
    )
    least = np.array([live.usage.min() for live in lives], dtype=np.float64)
    change = np.bincount(start, least, len(points) + 1) - np.bincount(end, least, len(points) + 1)
    more = [live.usage.astype(np.float64) - live.usage.min() for live in lives]
    kept = np.array([k for k, usage in enumerate(more) if usage.any() and start[k] < end[k]], dtype=np.int64)
    more = [more[k] for k in kept]
    return Memory(
        node=np.array([lives[k].node for k in kept], dtype=np.int64),
        start=start[kept],
        end=end[kept],
        usage_offsets=starts_of(np.array([len(usage) for usage in more], dtype=np.int64)),
        usage=np.concatenate([np.zeros(0), *more]),
        room=limit - change.cumsum()[: len(points)],
        unit=max(limit, 1.0),
    )


def starts_of(sizes: np.ndarray) -> np.ndarray:
    """Where each of some things begins if they stand one after the other; one more at the end."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])
