"""The combinatorial problem as plain arrays, and its solution. A solver sees nothing else.

One node per decision, one option per node to choose. With ``o`` the choice, minimise

    sum_n costs[n][o_n]  +  sum_(i,j) edge[o_i, o_j]

such that at every program point the bytes of the lives that cover it sum to at most `limit`. It is the problem of the
ASPLOS/EuroSys 2025 contest on intra-operator parallelism, whose instances `Problem.read` takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from autoshard.errors import SolverError
from autoshard.errors.kinds import check_fields, checks_kinds
from autoshard.solver import contest
from autoshard.solver.runtime.garbage_collection import uncollected


class ForbiddenError(SolverError):
    """Every choice is forbidden."""


class UndecidedError(SolverError):
    """Time ended before a choice was found or proven not to exist."""

    def __init__(self, message: str, *, bound: float = 0.0):
        super().__init__(message)
        self.bound = bound  # proven: no choice costs less


@dataclass(frozen=True)
class LeastNeed:
    """How much memory would do where nothing fits, as far as it was found."""

    message: str
    needed: float  # bytes: the smallest limit found that some choice meets; inf if none was found in time
    choice: tuple[int, ...] | None = None  # that meets it, if it is known
    least: float = 0.0  # bytes: every smaller limit is proven to be infeasible


class InfeasibleError(SolverError):
    """No choice stays within the memory limit. Carries the smallest limit found that some choice meets, in bytes.

    That nothing fits is mostly known long before the limit that would do. It is sought once it, or the message, is
    asked for.
    """

    def __init__(
        self,
        limit: float,
        found: LeastNeed | Callable[[], LeastNeed],
        least: Callable[[], float] | None = None,
    ):
        """
        Args:
            limit: bytes, within which nothing fits.
            found: how much would do, or a function that searches for it.
            least: finds what is proven of that without this search; None: nothing does.
        """
        super().__init__()
        self.limit, self._found, self._least = limit, found, least

    @property
    def found(self) -> LeastNeed:
        """How much memory would do."""
        if callable(self._found):
            self._found = self._found()
            self.args = (self._found.message,)
        return self._found

    @property
    def needed(self) -> float:
        """The smallest limit found that some choice meets, in bytes; inf if none was found in time."""
        return self.found.needed

    @property
    def choice(self) -> tuple[int, ...] | None:
        """A choice that meets the limit `needed`, if it is known."""
        return self.found.choice

    @property
    def least(self) -> float:
        """Bytes: every smaller limit is proven to be infeasible."""
        return self.found.least if self._least is None else self._least()

    def __str__(self) -> str:
        return self.found.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.limit, replace(self.found, least=self.least))


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost that two nodes pay together. Parallel edges are allowed; they add up."""

    i: int
    j: int
    costs: np.ndarray  # [options of i, options of j]; inf: the two may not stand together


@dataclass(frozen=True, eq=False)
class Live:
    """Memory that a node holds over a stretch of the program. One node may have several lives; their bytes add up."""

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
    limit: float | None  # bytes; None: no limit
    names: tuple[str, ...] = ()  # one per node, or none at all; for messages
    checked: InitVar[bool] = False  # whether its arrays come from a checked problem

    def __post_init__(self, checked: bool) -> None:
        if not checked:
            try:
                _validate(self)
            except (AttributeError, TypeError, ValueError):
                check_fields(self)
                for part in (*self.edges, *self.lives):
                    check_fields(part)
                raise

    def __repr__(self) -> str:
        options = sum(map(len, self.costs))
        sizes = f"{len(self.costs)} nodes, {options} options, {len(self.edges)} edges, {len(self.lives)} lives"
        return f"Problem({sizes}, limit {self.limit})"

    def name(self, node: int) -> str:
        """The name of the node in messages."""
        return f"node {node} ({self.names[node]})" if self.names else f"node {node}"

    def pressure_points(self) -> np.ndarray:
        """The program points that decide whether a choice fits: lives at any other point are alive at one of these.

        The start of a life is one of them unless no life ends before the next start.

        >>> lives = Live(0, 0, 9, np.array([1])), Live(0, 2, 5, np.array([1])), Live(0, 4, 6, np.array([1]))
        >>> Problem((np.array([0.0]),), (), lives, None).pressure_points()
        array([4])
        """
        held = [live for live in self.lives if live.start < live.end and live.usage.any()]
        starts = np.unique(np.array([live.start for live in held], dtype=np.int64))
        ends = np.unique(np.array([live.end for live in held], dtype=np.int64))
        ended = np.searchsorted(ends, starts, side="right")  # number of lives that have ended when this one starts
        return starts[np.append(ended[1:] > ended[:-1], True)] if len(starts) else starts

    @property
    def can_memory_bind(self) -> bool:
        """Whether the lives exceed the limit at some point if every node takes the option that holds the most.

        If they do not, no choice exceeds it.

        >>> life = Live(0, 0, 1, np.array([1, 4]))
        >>> Problem((np.zeros(2),), (), (life,), 3).can_memory_bind
        True
        >>> Problem((np.zeros(2),), (), (life,), 4).can_memory_bind
        False
        """
        if self.limit is None or not self.lives:
            return False
        points = self.pressure_points()
        change = np.zeros(len(points) + 1)
        for live in self.lives:
            start, end = np.searchsorted(points, (live.start, live.end))
            change[start] += live.usage.max()
            change[end] -= live.usage.max()
        return bool((change.cumsum() > self.limit).any())

    @checks_kinds()
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
        return replace(self, costs=tuple(costs), checked=True)

    @classmethod
    @checks_kinds()
    def read(cls, path: str | Path) -> Problem:
        """Reads a contest file, .json or .json.gz.

        Raises:
            SolverError: the file is not such JSON, or its tables contradict each other.
        """
        path = Path(path)
        try:
            with uncollected():
                return cls._of(contest.read(path))
        except SolverError as error:
            raise SolverError(f"{path}: {error}") from error

    @classmethod
    def _of(cls, found: contest.ContestProblem) -> Problem:
        costs = found.costs.split()
        counts = found.costs.lengths.tolist()
        edges = tuple(
            Edge(i, j, table.reshape(counts[i], counts[j]))
            for (i, j), table in zip(found.pairs.tolist(), found.tables.split(), strict=True)
        )
        lives = (
            Live(node, start, end, usage)
            for node, ((start, end), usage) in enumerate(
                zip(found.intervals.tolist(), found.usages.split(), strict=True)
            )
            if start != end
        )
        return cls(tuple(costs), edges, tuple(lives), found.limit, found.names)

    @checks_kinds()
    def write(self, path: str | Path) -> None:
        """Writes a contest file, .json or .json.gz, that `read` takes; numbers stand there as they are here.

        A contest node holds memory over one interval. A node that has several lives is followed, after all others, by
        one node for each further life, which has to take the same option. So the first options of a choice for the file
        are a choice here, and costs and optimum are the same. Lives that are empty are left out.

        Raises:
            SolverError: a finite cost is 1e18 or more, or the file cannot be written.
        """
        path = Path(path)
        single = self._with_single_lives()
        of = {live.node: live for live in single.lives}
        lives = [of.get(node, Live(node, 0, 0, np.zeros(len(row), np.int64))) for node, row in enumerate(single.costs)]
        whole = all(np.issubdtype(live.usage.dtype, np.integer) for live in lives)
        content = contest.ContestProblem(
            costs=contest.rows_of(single.costs, np.float64),
            usages=contest.rows_of([live.usage for live in lives], np.int64 if whole else np.float64),
            intervals=np.array([(live.start, live.end) for live in lives], np.int64).reshape(-1, 2),
            pairs=np.array([(edge.i, edge.j) for edge in single.edges], np.int64).reshape(-1, 2),
            tables=contest.rows_of([edge.costs for edge in single.edges], np.float64),
            limit=None if self.limit is None or math.isinf(self.limit) else float(self.limit),
            names=single.names,
        )
        try:
            contest.write(path, content)
        except SolverError as error:
            raise SolverError(f"{path}: {error}") from error

    def _with_single_lives(self) -> Problem:
        """The problem with one life per node: each further life of a node gets a new node that is tied to it."""
        costs, names, edges, lives = list(self.costs), list(self.names), list(self.edges), {}
        for live in self.lives:
            if live.start == live.end:
                continue
            node = live.node
            if node in lives:
                node, options = len(costs), len(live.usage)
                costs.append(np.zeros(options))
                names += [f"{self.names[live.node]} ({live.start} to {live.end})"] if names else []
                edges.append(Edge(live.node, node, np.where(np.eye(options, dtype=bool), 0.0, np.inf)))
            lives[node] = replace(live, node=node)
        return Problem(tuple(costs), tuple(edges), tuple(lives.values()), self.limit, tuple(names))


@dataclass(frozen=True)
class Solution:
    """One option per node, with its cost and a bound on the cost of any other choice."""

    choice: tuple[int, ...]  # node -> option
    cost: float
    bound: float  # proven: no feasible choice costs less
    status: Literal["optimal", "feasible"]
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)  # stage -> time spent there

    @property
    def gap(self) -> float:
        """How far the cost may be from the best, as a share of it."""
        return relative_gap(self.cost, self.bound)


def relative_gap(cost: float, bound: float) -> float:
    """The distance of a cost to its bound, as a share of the larger of the two; inf if it is unknown.

    >>> relative_gap(4.0, 3.0), relative_gap(0.0, -2.0), relative_gap(0.0, 0.0), relative_gap(math.inf, 3.0)
    (0.25, 1.0, 0.0, inf)
    """
    if cost == bound:
        return 0.0
    largest = max(abs(cost), abs(bound))
    return (cost - bound) / largest if math.isfinite(largest) else math.inf


def _validate(problem: Problem) -> None:
    nodes = len(problem.costs)
    if problem.names and len(problem.names) != nodes:
        raise SolverError(f"{len(problem.names)} names for {nodes} nodes")
    if problem.limit is not None and not problem.limit >= 0:
        raise SolverError(f"the memory limit is {problem.limit} bytes; it must be 0 or more")
    for node, costs in enumerate(problem.costs):
        if costs.ndim != 1 or not len(costs):
            raise SolverError(f"{problem.name(node)}: costs of shape {costs.shape}; a node has one per option")
    for number, edge in enumerate(problem.edges):
        if not (0 <= edge.i < nodes and 0 <= edge.j < nodes) or edge.i == edge.j:
            where = _edge_name(problem, number)
            raise SolverError(f"{where} must join two different nodes of the {nodes} there are")
        shape = len(problem.costs[edge.i]), len(problem.costs[edge.j])
        if edge.costs.shape != shape:
            where = _edge_name(problem, number)
            raise SolverError(f"{where}: costs of shape {edge.costs.shape}; its nodes have {shape} options")
    for live in problem.lives:
        if not 0 <= live.node < nodes:
            raise SolverError(f"a live of node {live.node}; there are {nodes} nodes")
        if live.usage.shape != problem.costs[live.node].shape:
            options = len(problem.costs[live.node])
            raise SolverError(f"{problem.name(live.node)}: usage of shape {live.usage.shape}; it has {options} options")
        if not live.start <= live.end:  # NaN compares false
            raise SolverError(f"{problem.name(live.node)}: live from {live.start} to {live.end}, which is earlier")
    _validate_costs(problem)
    _validate_usages(problem)


def _validate_costs(problem: Problem) -> None:
    """Costs are numbers or inf, and so is their sum."""
    tables = [*problem.costs, *(edge.costs for edge in problem.edges)]
    times = Counter(map(id, tables))  # many tables are the same object
    distinct = list({id(table): table for table in tables}.values())
    flat = _flat(distinct)
    if not flat.min(initial=0.0) > -np.inf:  # NaN compares false
        place, least = next((k, table.min()) for k, table in enumerate(tables) if not (table > -np.inf).all())
        nodes = len(problem.costs)
        where = problem.name(place) if place < nodes else _edge_name(problem, place - nodes)
        raise SolverError(f"{where}: a cost is {least}; costs are numbers or +inf")
    with np.errstate(over="ignore"):
        most = np.abs(flat).max(initial=0.0, where=flat < np.inf)
        if np.isfinite(most * sum(table.size for table in tables)):
            return
        count = np.repeat([times[id(table)] for table in distinct], [table.size for table in distinct])
        total = (np.abs(np.where(flat < np.inf, flat, 0.0)) * count).sum()
    if not np.isfinite(total):
        raise SolverError("costs are so large that their sum is beyond 1e308")


def _validate_usages(problem: Problem) -> None:
    """Bytes are finite and no less than 0, and whatever is chosen, their sum is below 2**63."""
    flat = _flat([live.usage for live in problem.lives])
    if not ((flat >= 0) & (flat < np.inf)).all():
        live = next(live for live in problem.lives if not ((live.usage >= 0) & (live.usage < np.inf)).all())
        raise SolverError(f"{problem.name(live.node)}: usage {live.usage} bytes; finite, 0 or more is needed")
    starts = np.cumsum([0, *(len(live.usage) for live in problem.lives)])[:-1]
    if len(starts) and np.maximum.reduceat(flat, starts).sum() >= 2.0**63:
        raise SolverError("lives may hold 2**63 bytes or more together")


def _flat(tables: list[np.ndarray]) -> np.ndarray:
    """All numbers of the tables."""
    return np.concatenate([np.zeros(0), *(table.ravel() for table in tables)])


def _edge_name(problem: Problem, edge: int) -> str:
    return f"edge {edge} ({problem.edges[edge].i}, {problem.edges[edge].j})"
