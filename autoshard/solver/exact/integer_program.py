"""A `Problem` as an integer program, written in cvxpy and solved by HiGHS to proven optimality.

With ``s[n, a]`` = 1 where node n takes option a, and ``x[e, r, q]`` the flow of edge e between a class r of its first
node's options and a class q of its second's (options whose rows or columns in the edge's table differ by a constant
only are one class):

    minimise    c s + w x
    subject to  sum_a s[n, a] = 1                           one option per node
                sum_q x[e, r, q] = sum_(a in r) s[i, a]     the flow leaves the chosen class of i ...
                sum_r x[e, r, q] = sum_(b in q) s[j, b]     ... and reaches the chosen class of j
                sum_(a in r) s[i, a] = sum_(b in q) s[j, b] where r and q only go with each other (needs no flow)
                sum_n usage[t, n, a] s[n, a] <= limit       at every pressure point t
                s binary, x >= 0

A second problem of the same nodes and options may stand beside the first. Then a choice costs the larger of what the
two say, ``t >= c1 s + w1 x`` and ``t >= c2 s + w2 x``, and options of one class are alike in the tables of both.

The relaxation is the local polytope, which is tight on trees. Where pressure points are many, few of them bind: their
rows are added as solutions violate them, first those of the relaxation.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import cvxpy as cp
import numpy as np
from scipy import sparse

from autoshard.solver.exact.highs import Highs
from autoshard.solver.problem import Problem
from autoshard.solver.tables import classes, split, summed
from autoshard.solver.verify import ROUNDING, verify


@dataclass(frozen=True)
class ProgramSettings:
    """How a problem is written for HiGHS, and what that takes."""

    magnitude: float = 1e3  # what the cost still to be decided is scaled to; HiGHS's absolute tolerances are 1e-7
    gap: float = 1e-7  # of the whole cost; finer than what counts as optimal, to leave room for rounding
    few_entries: int = 1_000_000  # in the rows of all pressure points; if they have more, rows are added as needed
    added_rows: int = 50  # at a time
    heavy: float = 1e6  # largest entry of a memory row, far beyond what fits; HiGHS refuses entries over 1e15
    setup_seconds: float = 0.03  # of a quiet core to start cvxpy and HiGHS, on top of
    seconds_per_flow: float = 8e-6  # that cvxpy and HiGHS take before the first check of the time, on a slow machine


PROGRAM = ProgramSettings()


@dataclass(frozen=True)
class Outcome:
    """What the integer program knew when it ended."""

    choice: tuple[int, ...] | None  # the best known
    bound: float  # no feasible choice costs less; inf: none is feasible
    interrupted: bool  # by Ctrl-C


def cheapest(
    problem: Problem,
    first: Sequence[int] | None,
    *,
    time_limit: float,
    seed: int,
    gap: float = 0.0,
    beside: Problem | None = None,
    stop: threading.Event | None = None,
    look: Callable[[], bool] = lambda: False,
    spend: Callable[[float], bool] = lambda seconds: False,
) -> Outcome:
    """The cheapest choice, or the best one found in time; `first` is a feasible one, if known.

    Args:
        beside: a problem of the same nodes and options: a choice costs what the one says that makes it dearer. The
            memory is that of `problem`.
        time_limit: seconds.
        gap: cost by which the choice may miss the cheapest one.
        stop: ends it as Ctrl-C does, where another thread than the main one, which does not hear that, is in here.
        look: called at moments that do not depend on the clock, a few times a second; ends it by returning True.
        spend: called then, too, with about the seconds of a quiet core that it took since; ends it by returning True.
    """
    start_time = time.monotonic()
    problems = (problem,) if beside is None else (problem, beside)
    known = np.inf if first is None else max(verify(one, first)[0] for one in problems)
    program = _encode(problems, known)
    time_limit -= time.monotonic() - start_time
    compiling = PROGRAM.seconds_per_flow * program.flow_costs.shape[1]
    if spend(compiling + PROGRAM.setup_seconds) or time_limit < compiling:
        return Outcome(None, program.constant, interrupted=False)
    memory = _MemoryRows(problem if problem.limit is not None else replace(problem, lives=()))
    room = memory.room(problem.limit)
    if (room < 0).any():
        return Outcome(None, np.inf, interrupted=False)
    scale = 1 / np.where(room > 0, room, 1.0)
    s, x = program.variables()
    unit = program.span / PROGRAM.magnitude
    cost, extra, constraints = _largest(program.totals(s, x, unit))
    variables, constraints = [s, x, *extra], [*program.constraints(s, x), *constraints]
    if len(points := memory.first_points()):
        constraints.append(memory.usage(points, scale) @ s <= (room * scale)[points])
    gap = max(gap, PROGRAM.gap * abs(program.constant if first is None else known)) / unit
    whole = cp.Problem(cp.Minimize(cost), constraints)
    highs = Highs(whole, variables, time_limit=time_limit, seed=seed, gap=gap, stop=stop, look=look, spend=spend)
    start = None if first is None else program.point(first)
    if start is not None and len(variables) > 2:
        start = np.append(start, (known - program.constant) / unit)
    bound, relaxed = program.constant, not memory.complete
    while True:
        highs.run(start, relaxed=relaxed)
        bound = max(bound, program.constant + unit * highs.bound)
        if highs.values is None:
            return Outcome(None, bound, highs.interrupted)
        choice = program.choice(highs.values)
        held = memory.held(highs.values[: s.size] if relaxed else program.chosen(choice))
        if highs.stopped:
            return Outcome(None if relaxed or (held > room).any() else choice, bound, highs.interrupted)
        if len(points := memory.next_points(held - room)):
            highs.add(memory.usage(points, scale), (room * scale)[points])
        elif relaxed:
            relaxed = False
        elif (held > room).any():
            # HiGHS lets a row exceed its limit by its tolerance. What holds as much on every node does not fit either.
            for usage in memory.usage(np.flatnonzero(held > room), scale).toarray():
                cover = program.at_least(choice, usage)[None, :]
                highs.add(sparse.csr_array(cover.astype(np.float64)), [len(problem.costs) - 1.0])
        else:
            return Outcome(choice, bound, interrupted=False)


def _largest(
    totals: Sequence[cp.Expression],
) -> tuple[cp.Expression, list[cp.Variable], list[cp.Constraint]]:
    """What the largest of several totals costs where that is minimised, and the variables and rows that say so."""
    if len(totals) == 1:
        return totals[0], [], []
    cost = cp.Variable(nonneg=True)
    return cost, [cost], [total <= cost for total in totals]


def leanest(
    problem: Problem,
    *,
    time_limit: float,
    seed: int,
    look: Callable[[], bool] = lambda: False,
    spend: Callable[[float], bool] = lambda seconds: False,
) -> Outcome:
    """The choice with the lowest peak of memory, or the best one found in time; the bound is one on the peak."""
    program, memory = _encode((problem,), np.inf), _MemoryRows(problem)
    unit = (memory.most.max(initial=0.0) or 1.0) / PROGRAM.magnitude
    scale = np.full(len(memory.least), 1 / unit)
    s, x = program.variables()
    peak = cp.Variable(nonneg=True)
    constraints = [*program.constraints(s, x), peak >= memory.least.max(initial=0.0) / unit]
    if len(points := memory.first_points()):
        constraints.append(memory.usage(points, scale) @ s + (memory.least * scale)[points] <= peak)
    whole = cp.Problem(cp.Minimize(peak), constraints)
    highs = Highs(whole, [s, x, peak], time_limit=time_limit, seed=seed, gap=1e-6, look=look, spend=spend)
    best, lowest, bound, relaxed = None, np.inf, 0.0, not memory.complete
    while True:
        highs.run(None, relaxed=relaxed)
        bound = max(bound, unit * highs.bound)
        if highs.values is None:
            return Outcome(best, bound, highs.interrupted)
        choice = program.choice(highs.values)
        held = memory.held(highs.values[: s.size] if relaxed else program.chosen(choice)) + memory.least
        if not relaxed and held.max(initial=0.0) < lowest:
            best, lowest = choice, held.max(initial=0.0)
        if highs.stopped:
            return Outcome(best, bound, highs.interrupted)
        if len(points := memory.next_points(held - unit * highs.values[-1])):
            flows, peaks = sparse.csr_array((len(points), x.size)), np.ones((len(points), 1))
            rows = sparse.hstack([memory.usage(points, scale), flows, -peaks], format="csr")
            highs.add(rows, -(memory.least * scale)[points])
        elif relaxed:
            relaxed = False
        else:
            return Outcome(best, bound, interrupted=False)


@dataclass(frozen=True)
class _ChoiceProgram:
    """The rows that have nothing to do with memory, over stacked options s and flows x; and the way there and back."""

    offsets: np.ndarray  # node -> where its options start in s; one more at the end
    costs: np.ndarray  # [problem, option of s]; 0 where forbidden
    forbidden: np.ndarray  # of s
    flow_costs: np.ndarray  # [problem, flow of x]
    constants: np.ndarray  # problem -> paid on top, whatever is chosen
    span: float  # about what the choice decides on
    marginals: sparse.csr_array  # [row, option of s]: row by row, these sums agree with those of `flows`
    flows: sparse.csr_array  # [row, flow of x]
    blocks: sparse.csr_array  # [row, option of s]: sum to zero
    cells: tuple[tuple[int, int, np.ndarray], ...]  # edges with flows: i, j, [option of i, option of j] -> flow or -1

    def variables(self) -> tuple[cp.Variable, cp.Variable]:
        return cp.Variable(self.costs.shape[1], boolean=True), cp.Variable(self.flow_costs.shape[1], nonneg=True)

    @property
    def constant(self) -> float:
        """What any choice costs at least."""
        return float(self.constants.max())

    def totals(self, s: cp.Variable, x: cp.Variable, unit: float) -> list[cp.Expression]:
        """Per problem, what a choice costs more than `constant`, in units of so many seconds."""
        less = (self.constants - self.constant) / unit
        alone = [
            (costs / unit) @ s + (flows / unit) @ x for costs, flows in zip(self.costs, self.flow_costs, strict=True)
        ]
        return [total + rest if rest else total for total, rest in zip(alone, less.tolist(), strict=True)]

    def constraints(self, s: cp.Variable, x: cp.Variable) -> list[cp.Constraint]:
        count = self.costs.shape[1]
        one = sparse.csr_array((np.ones(count), np.arange(count), self.offsets))
        rows = [one @ s == 1, x[0] == 0]
        if self.marginals.shape[0]:
            rows.append(self.marginals @ s == self.flows @ x)
        if self.blocks.shape[0]:
            rows.append(self.blocks @ s == 0)
        if self.forbidden.any():
            rows.append(s[np.flatnonzero(self.forbidden)] == 0)
        return rows

    def chosen(self, choice: Sequence[int]) -> np.ndarray:
        """s of a choice."""
        s = np.zeros(self.costs.shape[1])
        s[self.offsets[:-1] + np.asarray(choice, dtype=np.int64)] = 1
        return s

    def point(self, choice: Sequence[int]) -> np.ndarray:
        """s and x of a choice."""
        x = np.zeros(self.flow_costs.shape[1])
        for i, j, cells in self.cells:
            x[cells[choice[i], choice[j]]] = 1
        return np.concatenate([self.chosen(choice), x])

    def choice(self, values: np.ndarray) -> tuple[int, ...]:
        """The choice that s stands for; s is whole but for rounding."""
        return tuple(int(values[start:end].argmax()) for start, end in itertools.pairwise(self.offsets))

    def at_least(self, choice: Sequence[int], usage: np.ndarray) -> np.ndarray:
        """Whether each option of s holds at least what the chosen one of its node holds."""
        chosen = usage[self.offsets[:-1] + np.asarray(choice, dtype=np.int64)]
        return usage >= np.repeat(chosen, np.diff(self.offsets))


def _offsets(problem: Problem) -> np.ndarray:
    """Node -> where its options start when all are stacked; one more at the end."""
    return np.cumsum([0, *(len(costs) for costs in problem.costs)])


def _tables(problems: Sequence[Problem]) -> list[tuple[int, int, list[np.ndarray]]]:
    """Edges, with a table per problem."""
    if len(problems) == 1:
        return [(edge.i, edge.j, [edge.costs]) for edge in problems[0].edges]
    sums = [summed(problem.edges) for problem in problems]
    sizes = list(map(len, problems[0].costs))
    pairs = sorted({pair for tables in sums for pair in tables})
    return [(i, j, [tables.get((i, j), np.zeros((sizes[i], sizes[j]))) for tables in sums]) for i, j in pairs]


def _encode(problems: Sequence[Problem], known: float) -> _ChoiceProgram:
    """The program of problems with a choice of cost `known`; options and pairs that alone cost more are left out."""
    offsets = _offsets(problems[0])
    costs = np.array([np.concatenate(problem.costs) for problem in problems])
    edges = [(i, j, [split(table) for table in tables]) for i, j, tables in _tables(problems)]
    for i, j, parts in edges:
        for own, (rows, columns, _) in zip(costs, parts, strict=True):
            own[offsets[i] : offsets[i + 1]] += rows
            own[offsets[j] : offsets[j + 1]] += columns
    least = np.minimum.reduceat(costs, offsets[:-1], axis=1)
    least[np.isinf(least)] = 0.0
    costs -= np.repeat(least, np.diff(offsets), axis=1)
    constants = np.array(list(map(math.fsum, least)))
    ceilings = np.maximum(known - constants, 0.0) + ROUNDING * abs(known)
    forbidden = (np.isinf(costs) | (costs > ceilings[:, None])).any(axis=0)
    edge_rows = _EdgeRows(offsets, len(problems))
    for i, j, parts in edges:
        rests = np.array([rest for _, _, rest in parts])
        rests[:, (np.isinf(rests) | (rests > ceilings[:, None, None])).any(axis=0)] = np.inf
        forbidden[edge_rows.add(i, j, rests)] = True
    costs[:, forbidden] = 0.0
    flow_costs = np.concatenate(edge_rows.flow_costs, axis=1)
    dearest = max(costs.max(initial=0.0), flow_costs.max())
    ceiling = float(ceilings.min())
    return _ChoiceProgram(
        offsets=offsets,
        costs=costs,
        forbidden=forbidden,
        flow_costs=flow_costs,
        constants=constants,
        span=(ceiling if np.isfinite(ceiling) and ceiling > 0 else dearest) or 1.0,
        marginals=edge_rows.marginals.matrix(costs.shape[1]),
        flows=edge_rows.flows.matrix(edge_rows.count),
        blocks=edge_rows.blocks.matrix(costs.shape[1]),
        cells=tuple(edge_rows.cells),
    )


class _EdgeRows:
    """The rows that tie options to the flows of edges, while they grow edge by edge."""

    def __init__(self, offsets: np.ndarray, problems: int):
        self.offsets = offsets
        self.marginals, self.flows, self.blocks = _SparseRows(), _SparseRows(), _SparseRows()
        self.cells: list[tuple[int, int, np.ndarray]] = []
        self.flow_costs = [np.zeros((problems, 1))]  # a flow of no edge, since x may not be empty
        self.count = 1  # of flows

    def add(self, i: int, j: int, rests: np.ndarray) -> np.ndarray:
        """Adds an edge: options that it cannot tell apart share flows. Returns the options of s without a partner.

        Args:
            rests: [problem, option of i, option of j]: costs; inf: forbidden.
        """
        row, column = classes(np.concatenate(rests, axis=1)), classes(np.concatenate(rests, axis=0).T)
        tables = np.empty((len(rests), row.max() + 1, column.max() + 1))
        tables[:, row[:, None], column[None, :]] = rests
        finite = np.isfinite(tables[0])
        in_row = [self.offsets[i] + np.flatnonzero(row == r) for r in range(finite.shape[0])]
        in_column = [self.offsets[j] + np.flatnonzero(column == q) for q in range(finite.shape[1])]
        goes_with_one = (finite.sum(axis=0) <= 1).all() and (finite.sum(axis=1) <= 1).all()
        if goes_with_one and not tables[:, finite].any():
            if finite.size > 1:
                for r, q in zip(*np.nonzero(finite), strict=True):
                    self.blocks.add((in_row[r], 1.0), (in_column[q], -1.0))
        else:
            cell = np.full(finite.shape, -1)
            cell[finite] = self.count + np.arange(finite.sum())
            self.flow_costs.append(tables[:, finite])
            self.count += int(finite.sum())
            self.cells.append((i, j, cell[row[:, None], column[None, :]]))
            for options, flow in [*zip(in_row, cell, strict=True), *zip(in_column, cell.T, strict=True)]:
                self.marginals.add((options, 1.0))
                self.flows.add((flow[flow >= 0], 1.0))
        alone_in_row = [in_row[r] for r in np.flatnonzero(~finite.any(axis=1))]
        alone_in_column = [in_column[q] for q in np.flatnonzero(~finite.any(axis=0))]
        return np.concatenate([np.zeros(0, int), *alone_in_row, *alone_in_column])


class _MemoryRows:
    """The bytes of a choice at the pressure points, of which only those that turn out to matter become rows."""

    def __init__(self, problem: Problem):
        points = problem.pressure_points()
        offsets = _offsets(problem)
        least, most = np.zeros(len(points) + 1), np.zeros(len(points) + 1)
        rows, columns, values = [np.zeros(0, int)], [np.zeros(0, int)], [np.zeros(0)]
        for live in problem.lives:
            start, end = np.searchsorted(points, (live.start, live.end))
            extra = (live.usage - live.usage.min()).astype(np.float64)
            for point, sign in ((start, 1.0), (end, -1.0)):
                least[point] += sign * live.usage.min()
                most[point] += sign * live.usage.max()
                rows.append(np.full(len(extra), point))
                columns.append(offsets[live.node] + np.arange(len(extra)))
                values.append(sign * extra)
        entries = np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))
        # [point, option of s]: bytes more than at the point before, beyond those of the node's leanest option
        self._changes = sparse.csr_array(entries, shape=(len(points) + 1, offsets[-1]))
        self.least = least.cumsum()[:-1]  # bytes per point if every node took its leanest option
        self.most = most.cumsum()[:-1]  # the same of its largest one
        self._rows = np.zeros(len(points), dtype=bool)  # points that have a row

    @property
    def complete(self) -> bool:
        """Whether every point has a row."""
        return bool(self._rows.all())

    def room(self, limit: float | None) -> np.ndarray:
        """Bytes per point that the limit leaves beyond the leanest options."""
        return (0.0 if limit is None else limit * (1 + ROUNDING)) - self.least

    def held(self, s: np.ndarray) -> np.ndarray:
        """Bytes per point beyond the leanest options."""
        return (self._changes @ s).cumsum()[:-1]

    def usage(self, points: np.ndarray, scale: np.ndarray) -> sparse.csr_array:
        """The rows of these points over s, scaled."""
        before = np.arange(self._changes.shape[0])[None, :] <= points[:, None]
        rows = sparse.csr_array(before * scale[points, None]) @ self._changes
        rows.data = np.minimum(rows.data, PROGRAM.heavy)
        return rows

    def first_points(self) -> np.ndarray:
        """The points to start with: all of them, if that is a small matrix."""
        self._rows[:] = len(self._rows) * self._changes.shape[1] <= PROGRAM.few_entries
        return np.flatnonzero(self._rows)

    def next_points(self, over: np.ndarray) -> np.ndarray:
        """The points most over what is allowed that have no row yet; from now on they have."""
        over = np.where(self._rows, 0.0, over)
        worst = np.argsort(-over, kind="stable")[: PROGRAM.added_rows]
        worst = np.sort(worst[over[worst] > 0])
        self._rows[worst] = True
        return worst


class _SparseRows:
    """A sparse matrix that grows by the row."""

    def __init__(self):
        self.columns, self.values, self.ends = [np.zeros(0, int)], [np.zeros(0)], [0]

    def add(self, *parts: tuple[np.ndarray, float]) -> None:
        for columns, value in parts:
            self.columns.append(columns)
            self.values.append(np.full(len(columns), value))
        self.ends.append(self.ends[-1] + sum(len(columns) for columns, _ in parts))

    def matrix(self, width: int) -> sparse.csr_array:
        entries = np.concatenate(self.values), np.concatenate(self.columns), self.ends
        return sparse.csr_array(entries, shape=(len(self.ends) - 1, width))
