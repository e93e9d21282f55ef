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

The relaxation is the local polytope, which is tight on trees. Where pressure points are many, few of them bind: their
rows are added as solutions violate them, first those of the relaxation. cvxpy takes no first solution, gives no bound
back and does not hear Ctrl-C, so what it compiles goes to highspy from here.
"""

from __future__ import annotations

import atexit
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import cvxpy as cp
import highspy
import numpy as np
from scipy import sparse

from autoshard.solver.problem import Problem
from autoshard.solver.tables import classes, split
from autoshard.solver.verify import ROUNDING, verify

MAGNITUDE = 1e3  # what the cost still to be decided is scaled to; HiGHS works to absolute tolerances of 1e-7
TARGET_GAP = 1e-7  # of the whole cost; finer than what counts as optimal, to leave room for rounding
FEW_ENTRIES = 1_000_000  # in the rows of all pressure points; if they have more, rows are added as needed
ROWS_ADDED = 50  # at a time
LAST_WORDS = 1.0  # s that HiGHS gets to finish after its time or Ctrl-C, before what it last reported is taken
LEFT_BEHIND = 15.0  # s that the end of the process waits for a HiGHS that did not finish by then
TINY = 300  # variables: HiGHS's presolve, which in release 1.15.1 does not end on some such programs, is left out, ...
_DOUBLETON_EQUATIONS = 512  # ... and on larger ones this rule of it, for which it was so
STEPS = 1000  # of the simplex method, between two looks
HEAVY = 1e6  # largest entry of a memory row, far beyond what fits; HiGHS refuses a model with entries over 1e15
FIRST_LOOKS = 15  # of HiGHS, about those at the root of its tree, which take longer
FIRST_LOOKING, LOOKING = 5e-6, 1e-6  # s of a quiet core per entry of the matrix between two of these, and of later ones
SETTING_UP = 0.03  # s of a quiet core to start cvxpy and HiGHS, on top of
COMPILING = 8e-6  # s per flow that cvxpy and HiGHS take before the first look at the clock, on a slow machine


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
    stop: threading.Event | None = None,
    look: Callable[[], bool] = lambda: False,
    spend: Callable[[float], bool] = lambda seconds: False,
) -> Outcome:
    """The cheapest choice, or the best one found in time; `first` is a feasible one, if known.

    Args:
        time_limit: seconds.
        gap: cost by which the choice may miss the cheapest one.
        stop: ends it as Ctrl-C does, where another thread than the main one, which does not hear that, is in here.
        look: called at moments that do not depend on the clock, a few times a second; ends it by returning True.
        spend: called then, too, with about the seconds of a quiet core that it took since; ends it by returning True.
    """
    start_time = time.monotonic()
    known = np.inf if first is None else verify(problem, first)[0]
    program = _encode(problem, known)
    time_limit -= time.monotonic() - start_time
    compiling = COMPILING * len(program.flow_costs)
    if spend(compiling + SETTING_UP) or time_limit < compiling:
        return Outcome(None, program.constant, interrupted=False)
    memory = _Memory(problem if problem.limit is not None else replace(problem, lives=()))
    room = memory.room(problem.limit)
    if (room < 0).any():
        return Outcome(None, np.inf, interrupted=False)
    scale = 1 / np.where(room > 0, room, 1.0)
    s, x = program.variables()
    unit = program.span / MAGNITUDE
    objective = cp.Minimize((program.costs / unit) @ s + (program.flow_costs / unit) @ x)
    constraints = program.constraints(s, x)
    if len(points := memory.first_points()):
        constraints.append(memory.usage(points, scale) @ s <= (room * scale)[points])
    gap = max(gap, TARGET_GAP * abs(program.constant if first is None else known)) / unit
    whole = cp.Problem(objective, constraints)
    highs = _Highs(whole, [s, x], time_limit=time_limit, seed=seed, gap=gap, stop=stop, look=look, spend=spend)
    start = None if first is None else program.point(first)
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


def leanest(
    problem: Problem,
    *,
    time_limit: float,
    seed: int,
    look: Callable[[], bool] = lambda: False,
    spend: Callable[[float], bool] = lambda seconds: False,
) -> Outcome:
    """The choice with the lowest peak of memory, or the best one found in time; the bound is one on the peak."""
    program, memory = _encode(problem, np.inf), _Memory(problem)
    unit = (memory.most.max(initial=0.0) or 1.0) / MAGNITUDE
    scale = np.full(len(memory.least), 1 / unit)
    s, x = program.variables()
    peak = cp.Variable(nonneg=True)
    constraints = [*program.constraints(s, x), peak >= memory.least.max(initial=0.0) / unit]
    if len(points := memory.first_points()):
        constraints.append(memory.usage(points, scale) @ s + (memory.least * scale)[points] <= peak)
    whole = cp.Problem(cp.Minimize(peak), constraints)
    highs = _Highs(whole, [s, x, peak], time_limit=time_limit, seed=seed, gap=1e-6, look=look, spend=spend)
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
class _Program:
    """The rows that have nothing to do with memory, over stacked options s and flows x; and the way there and back."""

    offsets: np.ndarray  # node -> where its options start in s; one more at the end
    costs: np.ndarray  # of s; 0 where forbidden
    forbidden: np.ndarray  # of s
    flow_costs: np.ndarray  # of x
    constant: float  # paid on top, whatever is chosen
    span: float  # about what the choice decides on
    marginals: sparse.csr_array  # [row, option of s]: agree with ...
    flows: sparse.csr_array  # [row, flow of x]
    blocks: sparse.csr_array  # [row, option of s]: sum to zero
    cells: tuple[tuple[int, int, np.ndarray], ...]  # edges with flows: i, j, [option of i, option of j] -> flow or -1

    def variables(self) -> tuple[cp.Variable, cp.Variable]:
        return cp.Variable(len(self.costs), boolean=True), cp.Variable(len(self.flow_costs), nonneg=True)

    def constraints(self, s: cp.Variable, x: cp.Variable) -> list[cp.Constraint]:
        one = sparse.csr_array((np.ones(len(self.costs)), np.arange(len(self.costs)), self.offsets))
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
        s = np.zeros(len(self.costs))
        s[self.offsets[:-1] + np.asarray(choice, dtype=np.int64)] = 1
        return s

    def point(self, choice: Sequence[int]) -> np.ndarray:
        """s and x of a choice."""
        x = np.zeros(len(self.flow_costs))
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


def _encode(problem: Problem, known: float) -> _Program:
    """The program of a problem with a choice of cost `known`; options and pairs that alone cost more are left out."""
    offsets = _offsets(problem)
    costs, rests = np.concatenate(problem.costs), []
    for edge in problem.edges:
        rows, columns, rest = split(edge.costs)
        costs[offsets[edge.i] : offsets[edge.i + 1]] += rows
        costs[offsets[edge.j] : offsets[edge.j + 1]] += columns
        rests.append(rest)
    least = np.minimum.reduceat(costs, offsets[:-1])
    least[np.isinf(least)] = 0.0
    costs -= np.repeat(least, np.diff(offsets))
    constant = math.fsum(least)
    ceiling = max(known - constant, 0.0) + ROUNDING * abs(known)
    forbidden = np.isinf(costs) | (costs > ceiling)
    marginals, flows, blocks, cells = _Rows(), _Rows(), _Rows(), []
    flow_costs = [0.0]  # a flow of no edge, since x may not be empty
    for edge, rest in zip(problem.edges, rests, strict=True):
        rest[rest > ceiling] = np.inf
        row, column = classes(rest), classes(rest.T)
        table = np.empty((row.max() + 1, column.max() + 1))
        table[row[:, None], column[None, :]] = rest
        finite = np.isfinite(table)
        in_row = [offsets[edge.i] + np.flatnonzero(row == r) for r in range(len(table))]
        in_column = [offsets[edge.j] + np.flatnonzero(column == q) for q in range(len(table.T))]
        for r in np.flatnonzero(~finite.any(axis=1)):
            forbidden[in_row[r]] = True
        for q in np.flatnonzero(~finite.any(axis=0)):
            forbidden[in_column[q]] = True
        if (finite.sum(axis=0) <= 1).all() and (finite.sum(axis=1) <= 1).all():
            if table.size > 1:
                for r, q in zip(*np.nonzero(finite), strict=True):
                    blocks.add((in_row[r], 1.0), (in_column[q], -1.0))
            continue
        cell = np.full(table.shape, -1)
        cell[finite] = len(flow_costs) + np.arange(finite.sum())
        flow_costs.extend(table[finite])
        cells.append((edge.i, edge.j, cell[row[:, None], column[None, :]]))
        for options, flow in [*zip(in_row, cell, strict=True), *zip(in_column, cell.T, strict=True)]:
            marginals.add((options, 1.0))
            flows.add((flow[flow >= 0], 1.0))
    costs[forbidden] = 0.0
    dearest = max(costs.max(initial=0.0), max(flow_costs))
    return _Program(
        offsets=offsets,
        costs=costs,
        forbidden=forbidden,
        flow_costs=np.array(flow_costs),
        constant=constant,
        span=(ceiling if np.isfinite(ceiling) and ceiling > 0 else dearest) or 1.0,
        marginals=marginals.matrix(len(costs)),
        flows=flows.matrix(len(flow_costs)),
        blocks=blocks.matrix(len(costs)),
        cells=tuple(cells),
    )


class _Memory:
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
        rows.data = np.minimum(rows.data, HEAVY)
        return rows

    def first_points(self) -> np.ndarray:
        """The points to start with: all of them, if that is a small matrix."""
        self._rows[:] = len(self._rows) * self._changes.shape[1] <= FEW_ENTRIES
        return np.flatnonzero(self._rows)

    def next_points(self, over: np.ndarray) -> np.ndarray:
        """The points most over what is allowed that have no row yet; from now on they have."""
        over = np.where(self._rows, 0.0, over)
        worst = np.argsort(-over, kind="stable")[:ROWS_ADDED]
        worst = np.sort(worst[over[worst] > 0])
        self._rows[worst] = True
        return worst


class _Rows:
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


class _SilentHighs(highspy.Highs):
    """HiGHS that prints nothing. As it is made it enables its callbacks, where release 1.16.0 prints its name."""

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()


class _Highs:
    """A compiled cvxpy problem in HiGHS, set up so that two runs agree bit for bit unless time ends them."""

    def __init__(
        self,
        problem: cp.Problem,
        variables: list[cp.Variable],
        *,
        time_limit: float,
        seed: int,
        gap: float,
        stop: threading.Event | None = None,
        look: Callable[[], bool],
        spend: Callable[[float], bool],
    ):
        self._stop = stop or threading.Event()
        self._look, self._spend, self._steps = look, spend, 0
        self._deadline = time.monotonic() + time_limit
        data, _, _ = problem.get_problem_data("HIGHS")
        first_column = data["param_prob"].var_id_to_col
        self._columns = np.concatenate([first_column[v.id] + np.arange(v.size) for v in variables])
        count = data["A"].shape[1]
        binary = np.isin(np.arange(count), data["bool_vars_idx"])
        model = highspy.HighsModel()
        lp = model.lp_
        lp.num_col_, lp.num_row_ = count, data["A"].shape[0]
        lp.col_cost_ = data["c"]
        lp.col_lower_, lp.col_upper_ = np.zeros(count), np.where(binary, 1.0, np.inf)
        lp.integrality_ = [highspy.HighsVarType.kInteger if b else highspy.HighsVarType.kContinuous for b in binary]
        equal = np.arange(lp.num_row_) < data["dims"].zero
        lp.row_lower_, lp.row_upper_ = np.where(equal, data["b"], -np.inf), data["b"]
        matrix = data["A"].tocsc()
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
        self._highs = _SilentHighs()
        self._highs.cbMipInterrupt += self._on_progress
        self._highs.cbMipImprovingSolution += self._on_solution
        self._highs.cbSimplexInterrupt += self._on_step
        options: dict[str, str | int | float] = {
            "parallel": "off", "random_seed": seed,
            "mip_rel_gap": 0.0, "mip_abs_gap": gap, "mip_feasibility_tolerance": 1e-9,
            "presolve": "off" if count <= TINY else "choose", "presolve_rule_off": _DOUBLETON_EQUATIONS,
        }  # fmt: skip
        for name, value in options.items():
            self._highs.setOptionValue(name, value)
        self._highs.passModel(model)
        self._entries, self._looks = matrix.nnz, 0
        self.values: np.ndarray | None = None  # of the variables, stacked; None: no solution is known
        self.bound = -np.inf  # no solution has a lower objective
        self.stopped = False  # by the clock, or
        self.interrupted = False  # by Ctrl-C

    def add(self, rows: sparse.csr_array, upper: Sequence[float] | np.ndarray) -> None:
        """Adds ``rows @ values <= upper``."""
        for start, end, top in zip(rows.indptr[:-1], rows.indptr[1:], upper, strict=True):
            columns = self._columns[rows.indices[start:end]]
            self._highs.addRow(-np.inf, top, len(columns), columns, rows.data[start:end])

    def run(self, start: np.ndarray | None, *, relaxed: bool) -> None:
        """Solves on from `start`, or only the relaxation. The time limit is on all runs together."""
        self._highs.setOptionValue("solve_relaxation", relaxed)
        # HiGHS counts the time of all its runs, but not what passes between them.
        left = max(0.0, self._deadline - time.monotonic())
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + left)
        if start is not None and not relaxed:
            solution = highspy.HighsSolution()
            solution.col_value = list(start[np.argsort(self._columns)])
            self._highs.setSolution(solution)
        self.values, self.bound = None, -np.inf
        if not self._finish():
            return
        status, info = self._highs.getModelStatus(), self._highs.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            self.values, self.bound = None, np.inf
            return
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        self.values = np.array(self._highs.getSolution().col_value)[self._columns] if found else None
        if not relaxed:
            self.bound = info.mip_dual_bound
        elif status == highspy.HighsModelStatus.kOptimal:
            self.bound = info.objective_function_value

    def _finish(self) -> bool:
        """Runs HiGHS to its end; False where it did not stop when it had to: then leave it alone.

        There are programs on which it never stops. The process has to end all the same, but not while one that does
        calls back: Python would abort.
        """
        ended = threading.Event()

        def run() -> None:
            try:
                self._highs.run()
            finally:
                ended.set()
                atexit.unregister(at_exit)

        def at_exit() -> None:
            ended.wait(LEFT_BEHIND)

        # In a thread, since Python hears Ctrl-C only between two of its own instructions; it may hear one while that
        # starts. Waiting is for the event, since an interrupted Thread.join takes the thread for ended.
        try:
            atexit.register(at_exit)
            threading.Thread(target=run, daemon=True).start()
            while not ended.wait(0.1):
                if time.monotonic() > self._deadline + LAST_WORDS or self._stop.is_set():
                    self.stopped = True
                    return ended.wait(LAST_WORDS)
        except KeyboardInterrupt:
            self.stopped = self.interrupted = True
            return ended.wait(LAST_WORDS)
        return True

    def _on_progress(self, event: highspy.highs.HighsCallbackEvent) -> None:
        self.bound = max(self.bound, event.data_out.mip_dual_bound)
        self._on_look(event)

    def _on_solution(self, event: highspy.highs.HighsCallbackEvent) -> None:
        self.values = np.array(event.data_out.mip_solution)[self._columns]

    def _on_step(self, event: highspy.highs.HighsCallbackEvent) -> None:
        self._steps += 1
        if self._steps % STEPS == 0:
            self._on_look(event)

    def _on_look(self, event: highspy.highs.HighsCallbackEvent) -> None:
        self._looks += 1
        seconds = self._entries * (FIRST_LOOKING if self._looks <= FIRST_LOOKS else LOOKING)
        self.stopped |= self._look() | self._spend(seconds)
        if self.stopped:
            event.interrupt()
