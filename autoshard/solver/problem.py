"""The combinatorial problem as plain arrays, and its solution. A solver sees nothing else.

One node per decision, one option per node to choose. With ``o`` the choice, minimise

    sum_n costs[n][o_n]  +  sum_(i,j) edge[o_i, o_j]

such that at every program point the bytes of the lives that cover it sum to at most `limit`. It is the problem of the
ASPLOS/EuroSys 2025 contest on intra-operator parallelism, whose instances `Problem.read` takes.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from autoshard.errors import SolverError

FORBIDDEN = 1e18  # how a contest file writes an infinite cost


class InfeasibleError(SolverError):
    """No choice stays within the memory limit. Carries the smallest limit found that some choice meets, in bytes."""

    def __init__(self, message: str, *, limit: float, needed: float, choice: tuple[int, ...] | None = None):
        super().__init__(message)
        self.limit = limit
        self.needed = needed
        self.choice = choice  # the one that needs so little, where it is known


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost that two nodes pay together. Parallel edges are allowed; they add up."""

    i: int
    j: int
    costs: np.ndarray  # [options of i, options of j]; inf: the two may not stand together


@dataclass(frozen=True, eq=False)
class Live:
    """Memory that a node holds over a stretch of the program. One node may have several; they add up."""

    node: int
    start: int  # first program point that holds it
    end: int  # first program point that no longer does
    usage: np.ndarray  # [options of node], bytes


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one option per node: minimise node + edge costs with the sum of live bytes <= limit at every point.

    >>> problem = Problem(
    ...     costs=(np.array([0.0, 1.0]), np.array([0.0, 3.0])),
    ...     edges=(Edge(0, 1, np.array([[np.inf, 0.0], [2.0, 0.0]])),),
    ...     lives=(Live(0, 0, 2, np.array([8, 4])), Live(1, 1, 2, np.array([4, 8]))),
    ...     limit=8,
    ... )
    >>> problem
    Problem(2 nodes, 4 options, 1 edges, 2 lives, limit 8)

    Raises:
        SolverError: the arrays contradict each other, or hold NaN or negative bytes.
    """

    costs: tuple[np.ndarray, ...]  # node -> option -> cost; inf: forbidden
    edges: tuple[Edge, ...]
    lives: tuple[Live, ...]
    limit: float | None  # bytes; None: as much as it takes
    names: tuple[str, ...] = ()  # one per node, or none at all; for messages

    def __post_init__(self):
        _validate(self)

    def __repr__(self) -> str:
        options = sum(map(len, self.costs))
        sizes = f"{len(self.costs)} nodes, {options} options, {len(self.edges)} edges, {len(self.lives)} lives"
        return f"Problem({sizes}, limit {self.limit})"

    def name(self, node: int) -> str:
        """What messages call the node."""
        return f"node {node} ({self.names[node]})" if self.names else f"node {node}"

    def pressure_points(self) -> np.ndarray:
        """The program points that decide whether a choice fits: what lives at any other point lives at one of these.

        A point where something starts to live is one of them unless nothing ends before the next start.

        >>> lives = Live(0, 0, 9, np.array([1])), Live(0, 2, 5, np.array([1])), Live(0, 4, 6, np.array([1]))
        >>> Problem((np.array([0.0]),), (), lives, None).pressure_points()
        array([4])
        """
        held = [live for live in self.lives if live.start < live.end and live.usage.any()]
        starts = np.unique(np.array([live.start for live in held], dtype=np.int64))
        ends = np.unique(np.array([live.end for live in held], dtype=np.int64))
        ended = np.searchsorted(ends, starts, side="right")  # how many had ended when this one starts
        return starts[np.append(ended[1:] > ended[:-1], True)] if len(starts) else starts

    def restrict(self, allowed: Mapping[int, Iterable[int]]) -> Problem:
        """The same problem with every other option of these nodes forbidden; options keep their numbers.

        >>> Problem((np.array([1.0, 2.0]),), (), (), None).restrict({0: [1]}).costs
        (array([inf,  2.]),)
        """
        costs = list(self.costs)
        for node, options in allowed.items():
            kept = np.full(len(costs[node]), np.inf)
            options = list(options)
            kept[options] = costs[node][options]
            costs[node] = kept
        return replace(self, costs=tuple(costs))

    @classmethod
    def read(cls, path: str | Path) -> Problem:
        """Reads a contest file, .json or .json.gz.

        Raises:
            SolverError: the file is not such JSON, or its tables contradict each other.
        """
        path = Path(path)
        data = path.read_bytes()
        try:
            content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["problem"]
            nodes, edges = content["nodes"], content["edges"]
            costs = tuple(_costs(row) for row in nodes["costs"])
            intervals, usages = nodes["intervals"], nodes["usages"]
            pairs, tables, limit = edges["nodes"], edges["costs"], content.get("usage_limit")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SolverError(f"{path} is not a contest problem: {error!r}") from error
        if not len(costs) == len(intervals) == len(usages):
            counts = f"{len(costs)} cost rows, {len(intervals)} intervals, {len(usages)} usage rows"
            raise SolverError(f"{path}: {counts}; a node needs one of each")
        if len(pairs) != len(tables):
            raise SolverError(f"{path}: {len(pairs)} edges with {len(tables)} cost tables")
        lives = (
            Live(node, int(start), int(end), np.asarray(usage, dtype=np.int64))
            for node, ((start, end), usage) in enumerate(zip(intervals, usages, strict=True))
        )
        return cls(
            costs=costs,
            edges=tuple(_edge(path, costs, pair, table) for pair, table in zip(pairs, tables, strict=True)),
            lives=tuple(live for live in lives if live.start < live.end),
            limit=limit,
        )


@dataclass(frozen=True)
class Solution:
    """One option per node, what they cost, and how much cheaper any other choice could be."""

    choice: tuple[int, ...]  # node -> option
    cost: float
    bound: float  # proven: no feasible choice costs less
    status: Literal["optimal", "feasible"]

    @property
    def gap(self) -> float:
        """How far the cost may be from the best, as a share of it."""
        return relative_gap(self.cost, self.bound)


def relative_gap(cost: float, bound: float) -> float:
    """How far a cost may be from the best, as a share of it; of the bound, where that is larger. inf: not known.

    >>> relative_gap(4.0, 3.0), relative_gap(0.0, -2.0), relative_gap(0.0, 0.0), relative_gap(math.inf, 3.0)
    (0.25, 1.0, 0.0, inf)
    """
    if cost == bound:
        return 0.0
    largest = max(abs(cost), abs(bound))
    return (cost - bound) / largest if math.isfinite(largest) else math.inf


def _costs(row: list[float]) -> np.ndarray:
    costs = np.asarray(row, dtype=np.float64)
    return np.where(costs >= FORBIDDEN, np.inf, costs)


def _edge(path: Path, costs: tuple[np.ndarray, ...], pair: list[int], table: list[float]) -> Edge:
    i, j = map(int, pair)
    if not (0 <= i < len(costs) and 0 <= j < len(costs)):
        raise SolverError(f"{path}: edge ({i}, {j}) joins a node that does not exist; there are {len(costs)}")
    shape = len(costs[i]), len(costs[j])
    if len(table) != shape[0] * shape[1]:
        raise SolverError(f"{path}: edge ({i}, {j}) has {len(table)} costs; its nodes have {shape} options")
    return Edge(i, j, _costs(table).reshape(shape))


def _validate(problem: Problem) -> None:
    nodes = len(problem.costs)
    if problem.names and len(problem.names) != nodes:
        raise SolverError(f"{len(problem.names)} names for {nodes} nodes")
    if problem.limit is not None and not problem.limit >= 0:
        raise SolverError(f"the memory limit is {problem.limit} bytes; it must be 0 or more")
    for node, costs in enumerate(problem.costs):
        if costs.ndim != 1 or not len(costs):
            raise SolverError(f"{problem.name(node)}: costs of shape {costs.shape}; a node has one per option")
        _check_costs(costs, problem.name(node))
    for edge in problem.edges:
        where = f"edge ({edge.i}, {edge.j})"
        if not (0 <= edge.i < nodes and 0 <= edge.j < nodes) or edge.i == edge.j:
            raise SolverError(f"{where} must join two different nodes of the {nodes} there are")
        shape = len(problem.costs[edge.i]), len(problem.costs[edge.j])
        if edge.costs.shape != shape:
            raise SolverError(f"{where}: costs of shape {edge.costs.shape}; its nodes have {shape} options")
        _check_costs(edge.costs, where)
    for live in problem.lives:
        if not 0 <= live.node < nodes:
            raise SolverError(f"a live of node {live.node}; there are {nodes} nodes")
        if live.usage.shape != problem.costs[live.node].shape:
            options = len(problem.costs[live.node])
            raise SolverError(f"{problem.name(live.node)}: usage of shape {live.usage.shape}; it has {options} options")
        if live.start > live.end:
            raise SolverError(f"{problem.name(live.node)}: live from {live.start} to {live.end}, which is earlier")
        if not (live.usage >= 0).all() or np.isinf(live.usage).any():
            raise SolverError(f"{problem.name(live.node)}: usage {live.usage} bytes; finite, 0 or more is needed")


def _check_costs(costs: np.ndarray, where: str) -> None:
    if not costs.min() > -np.inf:  # NaN compares false
        raise SolverError(f"{where}: a cost is {costs.min()}; costs are numbers or +inf")
