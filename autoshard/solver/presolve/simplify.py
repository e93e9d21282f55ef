"""A `Problem` in, smaller independent ones out, with the same optimum and the way back; nothing here is heuristic.

A node's options shrink while some have no finite partner over an edge, or cost and hold no less than another whatever
the neighbours choose (Goldstein's dominance). A node goes away when

- one option is left: its row goes to the neighbours' costs;
- its option follows from a neighbour's, each option of which goes with one option of it: the two become one;
- it holds no memory that matters, and it has at most two neighbours: minimise over it into them.

Memory stops mattering at points where even the largest options fit, or where no more is alive than at a neighbour
point. As each reduction makes others possible, they take turns until none applies.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.errors import SolverError
from autoshard.solver.presolve.settings import PRESOLVE
from autoshard.solver.problem import Edge, Live, Problem
from autoshard.solver.tables import ArrayMemo, min_plus, split
from autoshard.solver.verify import ROUNDING

LOWEST = -1e300  # stands for minus infinity where that may meet infinity


@dataclass(frozen=True, eq=False)
class NodeRemoval:
    """A node that takes its cheapest option, given those of its neighbours at the time."""

    node: int
    labels: np.ndarray  # of its options: their numbers in the original problem
    costs: np.ndarray
    neighbours: tuple[tuple[int, np.ndarray, np.ndarray], ...]  # node, its labels, [own option, its option] -> cost

    def option(self, chosen: Mapping[int, int]) -> int:
        costs = self.costs
        for node, labels, table in self.neighbours:
            costs = costs + table[:, np.searchsorted(labels, chosen[node])]
        return int(self.labels[costs.argmin()])


@dataclass(frozen=True, eq=False)
class NodeMerge:
    """A node whose option followed from another one's, or from nothing."""

    node: int
    of: int  # the other node; -1: none
    labels: np.ndarray  # [option of the other, own option] of each pair, numbers in the original problem

    def option(self, chosen: Mapping[int, int]) -> int:
        if self.of < 0:
            return int(self.labels[0, 1])
        return int(self.labels[np.searchsorted(self.labels[:, 0], chosen[self.of]), 1])


@dataclass(frozen=True, eq=False)
class Simplification:
    """Independent problems that together are one problem, and the way back from their choices to its own."""

    parts: tuple[Problem, ...]  # none is empty
    constant: float  # what a choice costs on top of its parts
    rest: float  # bytes, the peak of what is held whatever is chosen
    _labels: tuple[tuple[tuple[int, np.ndarray], ...], ...]  # part -> node -> node and options of the original
    _removed: tuple[NodeRemoval | NodeMerge, ...]  # in the order in which they went

    def invert(self, choices: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The choice of the whole problem from one choice per part."""
        chosen: dict[int, int] = {}
        for choice, nodes in zip(choices, self._labels, strict=True):
            for option, (node, labels) in zip(choice, nodes, strict=True):
                chosen[node] = int(labels[option])
        for removed in reversed(self._removed):
            chosen[removed.node] = removed.option(chosen)
        return tuple(chosen[node] for node in range(len(chosen)))

    def starts(self, choice: Sequence[int]) -> list[tuple[int, ...]]:
        """A choice per part that is like one of the whole problem: the first option where that one's was dropped."""
        return [tuple(int((labels == choice[node]).argmax()) for node, labels in nodes) for nodes in self._labels]


@dataclass(frozen=True, eq=False)
class ReducedProblem:
    """What another one's reductions left of a problem. Removed nodes have no options."""

    labels: list[np.ndarray]  # node -> option left -> its number in the problem
    costs: list[np.ndarray]
    tables: dict[tuple[int, int], np.ndarray]  # edges left, between different pairs of nodes
    lives: list[list[tuple[int, int, np.ndarray]]]  # node -> first pressure point, one past the last, bytes
    fixed: np.ndarray  # bytes per pressure point held whatever is chosen
    constants: list[float]
    followed: list[NodeMerge]  # in the order in which they went


def simplify(
    problem: Problem,
    *,
    tick: Callable[[], None] = lambda: None,
    reduce: Callable[[Problem, Callable[[], None]], ReducedProblem] | None = None,
) -> Simplification:
    """The problem in its smallest equal parts that these reductions reach.

    >>> chain = Edge(0, 1, np.array([[0.0, 4.0], [4.0, 0.0]]))
    >>> small = simplify(Problem((np.array([1.0, 0.0]), np.array([0.0, 2.0])), (chain,), (), None))
    >>> small.parts, small.constant, small.invert([])
    ((), 1.0, (0, 0))

    Args:
        tick: called before each reduction; what it raises ends the work.
        reduce: does the bulk of the work on a large problem: `autoshard.solver.presolve.simplify_large.reduce`.

    Raises:
        SolverError: every choice is forbidden.
    """
    graph = _Graph(problem, reduce(problem, tick)) if reduce else _Graph(problem)
    graph.reduce(tick)
    return graph.result()


class _Graph:
    """A problem on its way to being smaller. Node numbers stay; a removed node has no options."""

    def __init__(self, problem: Problem, reduced: ReducedProblem | None = None):
        self.problem = problem
        self.known = ArrayMemo()
        self.tables: list[dict[int, np.ndarray]] = [{} for _ in problem.costs]  # node -> neighbour -> [own, its] cost
        self.lives: list[dict[tuple[int, int], np.ndarray]] = [{} for _ in problem.costs]  # node -> points -> bytes
        self.fixed = np.zeros(0)  # bytes per point that are held whatever is chosen
        self.removed: list[NodeRemoval | NodeMerge] = []
        self.constant: list[float] = []
        self.firm: set[tuple[int, int]] = set()  # edges that neither come apart nor let one end decide the other
        if reduced:
            self.costs, self.labels = reduced.costs, reduced.labels
            self.removed, self.constant, self.fixed = [*reduced.followed], [*reduced.constants], reduced.fixed
        else:
            self.costs = list(problem.costs)
            self.labels = [np.arange(len(costs)) for costs in problem.costs]
        left = [node for node, costs in enumerate(self.costs) if len(costs)]
        self.changed = _Queue(left)  # nodes to look at again
        self.uncompared = _Queue(left)  # nodes whose options to compare again
        if reduced:
            for (i, j), table in reduced.tables.items():
                self.join(i, j, table)
            for node, lives in enumerate(reduced.lives):
                for life in lives:
                    self.hold(node, *life)
            self.changed = _Queue(node for node in left if not self.lives[node] and len(self.tables[node]) <= 2)
            self.uncompared = _Queue(())
            return
        for edge in problem.edges:
            self.join(edge.i, edge.j, edge.costs)
        if problem.limit is not None:
            points = problem.pressure_points()
            self.fixed = np.zeros(len(points))
            for live in problem.lives:
                start, end = np.searchsorted(points, (live.start, live.end))
                self.hold(live.node, int(start), int(end), live.usage.astype(np.float64))

    def touch(self, *nodes: int) -> None:
        for node in nodes:
            self.changed.push(node)
            self.uncompared.push(node)

    def join(self, i: int, j: int, table: np.ndarray) -> None:
        """Adds costs to the edge of i and j."""
        if j in self.tables[i]:
            table = self.tables[i][j] + table
        self.tables[i][j], self.tables[j][i] = table, table.T
        self.firm.discard(_pair(i, j))
        self.touch(i, j)

    def part(self, i: int, j: int) -> None:
        """Takes the edge of i and j away."""
        del self.tables[i][j], self.tables[j][i]
        self.touch(i, j)

    def hold(self, node: int, start: int, end: int, usage: np.ndarray) -> None:
        """Gives a node bytes to hold; what all its options hold is fixed."""
        least = usage.min()
        self.fixed[start:end] += least
        if start < end and (usage > least).any():
            more = usage - least + self.lives[node].pop((start, end), 0.0)
            least = more.min()
            self.fixed[start:end] += least
            if (more > least).any():
                self.lives[node][start, end] = more - least

    def keep(self, node: int, options: np.ndarray) -> None:
        """Forbids all other options of a node."""
        self.costs[node], self.labels[node] = self.costs[node][options], self.labels[node][options]
        if not len(self.costs[node]):
            raise SolverError(f"every choice is forbidden: {self.problem.name(node)} has no option left")
        for j, table in self.tables[node].items():
            self.tables[node][j] = table[options]
            self.tables[j][node] = self.tables[node][j].T
            self.firm.discard(_pair(node, j))
            self.touch(j)
        lives, self.lives[node] = self.lives[node], {}
        for (start, end), usage in lives.items():
            self.hold(node, start, end, usage[options])
        self.touch(node)

    def remove(self, node: int) -> None:
        """Takes a node away whose costs its neighbours have taken over."""
        neighbours = tuple((j, self.labels[j], table) for j, table in self.tables[node].items())
        self.removed.append(NodeRemoval(node, self.labels[node], self.costs[node], neighbours))
        for j in list(self.tables[node]):
            self.part(node, j)
        self.costs[node], self.lives[node] = self.costs[node][:0], {}

    def reduce(self, tick: Callable[[], None]) -> None:
        while True:
            if self.changed:
                node = self.changed.pop()
                if self.tables[node] or self.lives[node]:  # what is alone goes in no time
                    tick()
                self.visit(node)
            elif self.uncompared:
                node = self.uncompared.pop()
                if len(self.costs[node]):
                    tick()
                    self.compare(node)
            else:
                tick()
                if not self.relax():
                    return

    def visit(self, node: int) -> None:
        """Tries every reduction of one node but dominance; stops after one that removes it."""
        if not len(self.costs[node]):
            return
        tables = self.tables[node]
        possible = np.isfinite(self.costs[node])
        for table in tables.values():
            possible &= np.isfinite(table).any(axis=1)
        if not possible.all():
            self.keep(node, possible)
        if len(self.costs[node]) == 1:
            self.constant.append(float(self.costs[node][0]))
            for j, table in tables.items():
                self.costs[j] = self.costs[j] + table[0]
            return self.remove(node)
        unknown = [j for j in tables if _pair(node, j) not in self.firm]
        for j in unknown:
            if (parts := self.known.once(_parts_of_sum, tables[j])) is not None:
                rows, columns = parts
                self.costs[node], self.costs[j] = self.costs[node] + rows, self.costs[j] + columns
                self.part(node, j)
        for j in filter(tables.__contains__, unknown):
            follows, leads = self.known.once(_partners, tables[j])
            if follows is not None and (leads is None or self.size(node) <= self.size(j)):  # the smaller of two moves
                return self.merge(node, j, follows)
            if leads is not None:
                self.merge(j, node, leads)
                return self.touch(node)
            self.firm.add(_pair(node, j))
        if not self.lives[node]:
            self.eliminate(node)

    def size(self, node: int) -> int:
        """How much hangs on a node."""
        return len(self.tables[node]) + len(self.lives[node])

    def merge(self, node: int, into: int, option: np.ndarray) -> None:
        """Merges a node into one that decides it: option of `into` -> option of the node."""
        table = self.tables[into][node]
        self.costs[into] = self.costs[into] + table[np.arange(len(option)), option] + self.costs[node][option]
        for (start, end), usage in self.lives[node].items():
            self.hold(into, start, end, usage[option])
        for j, other in list(self.tables[node].items()):
            if j != into:
                self.join(into, j, other[option])
        self.remove(node)

    def eliminate(self, node: int) -> None:
        """Minimises over a node without memory into its neighbours, unless that makes a larger table."""
        costs, neighbours = self.costs[node], list(self.tables[node].items())
        if not neighbours:
            self.constant.append(float(costs.min()))
        elif len(neighbours) == 1:
            ((j, table),) = neighbours
            self.costs[j] = self.costs[j] + (table + costs[:, None]).min(axis=0)
        elif len(neighbours) == 2:
            (j, left), (k, right) = neighbours
            size = left.shape[1] * right.shape[1]
            if k not in self.tables[j] and size > max(PRESOLVE.largest_fill, left.size + right.size):
                return
            self.join(j, k, self.known.once(_least_between, costs, left, right))
        else:
            return
        self.remove(node)

    def compare(self, node: int) -> None:
        """Forbids each option that another one beats whatever the neighbours choose."""
        costs, tables = self.costs[node], self.tables[node]
        count = len(costs)
        if (
            count < 2
            or count**2 * max((table.shape[1] for table in tables.values()), default=1) > PRESOLVE.largest_comparison
        ):
            return
        held = self.moments(node) if self.lives[node] else np.zeros((0, count))
        kept = self.known.once(_unbeaten, costs, held, *tables.values())
        if not kept.all():
            self.keep(node, kept)

    def moments(self, node: int) -> np.ndarray:
        """[stretch of points over which they do not change, option]: the bytes that each option of the node holds."""
        spans = np.array(list(self.lives[node]), dtype=np.int64).reshape(-1, 2)
        times, at = np.unique(spans, return_inverse=True)
        change = np.zeros((len(times) + 1, len(self.costs[node])))
        for (start, end), usage in zip(at.reshape(-1, 2), self.lives[node].values(), strict=True):
            change[start] += usage
            change[end] -= usage
        return change.cumsum(axis=0)[:-2]

    def relax(self) -> bool:
        """Drops the points that stay within the limit whenever the others do; whether there were any."""
        if self.problem.limit is None:
            return False
        points = len(self.fixed)
        spans = np.array([span for lives in self.lives for span in lives], dtype=np.int64).reshape(-1, 2)
        largest = [usage.max() for lives in self.lives for usage in lives.values()]
        more, less = (np.bincount(at, largest, minlength=points + 1) for at in spans.T)
        most = self.fixed + (more - less).cumsum()[:-1]
        # how many lives had started, and ended, up to a point
        started, ended = (np.bincount(at, minlength=points + 1).cumsum() for at in spans.T)
        kept = np.flatnonzero(most > self.problem.limit * (1 + ROUNDING))
        # All that lives here still lives at the next point (lived at the last one), which has no more room.
        here, there = kept[:-1], kept[1:]
        kept = np.delete(kept, np.flatnonzero((ended[here] == ended[there]) & (self.fixed[here] <= self.fixed[there])))
        there, here = kept[:-1], kept[1:]
        same = (started[here] == started[there]) & (self.fixed[here] <= self.fixed[there])
        kept = np.delete(kept, 1 + np.flatnonzero(same))
        if len(kept) == points:
            return False
        self.fixed = self.fixed[kept]
        place = np.searchsorted(kept, np.arange(points + 1)).tolist()
        for node, lives in enumerate(self.lives):
            moved = self.lives[node] = {}
            for (start, end), usage in lives.items():
                span = place[start], place[end]
                if span in moved:
                    self.hold(node, *span, usage)
                elif span[0] < span[1]:
                    moved[span] = usage
            if len(moved) < len(lives):
                self.touch(node)
        return True

    def result(self) -> Simplification:
        parts = self.components()
        return Simplification(
            parts=tuple(self.part_problem(nodes) for nodes in parts),
            constant=math.fsum(self.constant),
            rest=self.fixed.max(initial=0.0),
            _labels=tuple(tuple((node, self.labels[node]) for node in nodes) for nodes in parts),
            _removed=tuple(self.removed),
        )

    def components(self) -> list[list[int]]:
        """The nodes left, apart where neither edges nor a program point tie them together."""
        tied: list[list[int]] = [list(tables) for tables in self.tables]
        last, until = -1, 0  # the node that holds memory longest so far, and until when
        for start, end, node in sorted((*span, node) for node, lives in enumerate(self.lives) for span in lives):
            if start < until and node != last:
                tied[node].append(last)
                tied[last].append(node)
            if end > until:
                last, until = node, end
        seen, parts = set(), []
        for root in range(len(tied)):
            if root in seen or not len(self.costs[root]):
                continue
            part, stack = [], [root]
            seen.add(root)
            while stack:
                node = stack.pop()
                part.append(node)
                new = [other for other in tied[node] if other not in seen]
                seen.update(new)
                stack.extend(dict.fromkeys(new))
            parts.append(sorted(part))
        return parts

    def part_problem(self, nodes: list[int]) -> Problem:
        """These nodes as a Problem. What is fixed where they hold memory is put on the first of them."""
        number = {node: k for k, node in enumerate(nodes)}
        lives = [Live(number[node], *span, usage) for node in nodes for span, usage in self.lives[node].items()]
        covered = np.zeros(len(self.fixed), dtype=bool)
        for live in lives:
            covered[live.start : live.end] = True
        fixed = np.where(covered, self.fixed, 0.0)
        ends = np.append(np.flatnonzero(np.diff(fixed)) + 1, len(fixed))
        for start, end in zip(np.append(0, ends[:-1]), ends, strict=True):
            if len(fixed) and fixed[start] > 0:
                lives.append(Live(0, int(start), int(end), np.full(len(self.costs[nodes[0]]), fixed[start])))
        return Problem(
            costs=tuple(self.costs[node] for node in nodes),
            edges=tuple(
                Edge(number[i], number[j], table) for i in nodes for j, table in self.tables[i].items() if i < j
            ),
            lives=tuple(lives),
            limit=self.problem.limit,
            names=tuple(self.problem.names[node] for node in nodes) if self.problem.names else (),
            checked=True,
        )


def _parts_of_sum(table: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Costs of rows and of columns of which a table is the sum; None if it is no such sum."""
    rows, columns, rest = split(table)
    return None if rest.any() else (rows, columns)


def _partners(table: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Column -> the one row that it allows, and row -> the one column; None where some allow more than one."""
    finite = np.isfinite(table)
    follows, leads = (bool((finite.sum(axis=axis) == 1).all()) for axis in (0, 1))
    return finite.argmax(axis=0) if follows else None, finite.argmax(axis=1) if leads else None


def _least_between(costs: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[option of one neighbour, of the other] -> the least that a node between them costs."""
    return min_plus((left + costs[:, None]).T, right)


def _unbeaten(costs: np.ndarray, held: np.ndarray, *tables: np.ndarray) -> np.ndarray:
    """Option -> whether no other one beats it whatever the neighbours choose.

    Args:
        held: [stretch of points, option] -> bytes.
        *tables: [own option, neighbour's option] -> cost, of each neighbour.
    """
    count = len(costs)
    worse = costs[None, :] - costs[:, None]  # [a, b]: by how much b may cost more than a, at least
    np.fill_diagonal(worse, np.inf)
    for usage in held:
        worse[usage[None, :] > usage[:, None]] = np.inf
    glances = [_glance(table) for table in tables]
    ahead = [*itertools.accumulate(reversed(glances), initial=np.zeros_like(worse))][::-1]  # of tables to come
    a, b = np.nonzero(worse + ahead[0] <= 0)
    for table, rest in zip(tables, ahead[1:], strict=True):
        if not len(a):
            break
        worse[a, b] += _more(table[a], table[b]).max(axis=1)
        left = worse[a, b] + rest[a, b] <= 0
        a, b = a[left], b[left]
    beaten = np.zeros((count, count), dtype=bool)
    beaten[a, b] = True
    kept = np.ones(count, dtype=bool)
    for option in np.flatnonzero(beaten.any(axis=1))[::-1]:  # of options that beat each other, the first stays
        kept[option] = not (beaten[option] & kept).any()
    return kept


def _pair(i: int, j: int) -> tuple[int, int]:
    return (i, j) if i < j else (j, i)


def _glance(table: np.ndarray) -> np.ndarray:
    """[a, b]: by how much row b is more than row a in some columns, at most."""
    columns = table.T[:: -(-table.shape[1] // PRESOLVE.glances)]
    return _more(columns[:, :, None], columns[:, None, :]).max(axis=0)


def _more(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By how much b is more than a; nothing is more than what is forbidden."""
    return np.subtract(b, a, where=np.isfinite(a), out=np.full(np.broadcast(a, b).shape, LOWEST))


class _Queue:
    """First in, first out, each at most once at a time."""

    def __init__(self, items: Iterable[int]):
        self._items = deque(items)
        self._waiting = set(self._items)

    def __bool__(self) -> bool:
        return bool(self._items)

    def push(self, item: int) -> None:
        if item not in self._waiting:
            self._waiting.add(item)
            self._items.append(item)

    def pop(self) -> int:
        item = self._items.popleft()
        self._waiting.discard(item)
        return item
