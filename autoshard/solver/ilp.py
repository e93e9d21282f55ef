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

The relaxation is the local polytope, which is tight on trees. cvxpy takes no first solution, gives no bound back and
does not hear Ctrl-C, so what it compiles goes to highspy from here.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import cvxpy as cp
import highspy
import numpy as np
from scipy import sparse

from autoshard.solver.problem import Problem
from autoshard.solver.tables import classes, split
from autoshard.solver.verify import ROUNDING, verify

MAGNITUDE = 1e3  # what the cost still to be decided is scaled to; HiGHS works to absolute tolerances of 1e-7
TARGET_GAP = 1e-7  # of the whole cost; finer than what counts as optimal, to leave room for rounding


@dataclass(frozen=True)
class Outcome:
    """What the integer program knew when it ended."""

    choice: tuple[int, ...] | None  # the best known
    bound: float  # no feasible choice costs less; inf: none is feasible
    interrupted: bool  # by Ctrl-C


def cheapest(problem: Problem, first: Sequence[int] | None, *, time_limit: float, seed: int) -> Outcome:
    """The cheapest choice, or the best one found in time; `first` is a feasible one, if known."""
    known = np.inf if first is None else verify(problem, first)[0]
    program = _encode(problem, known)
    usage, least = _usage(problem, program)
    room = np.inf if problem.limit is None else problem.limit * (1 + ROUNDING) - least
    if np.any(room < 0):
        return Outcome(None, np.inf, interrupted=False)
    s, x = program.variables()
    constraints = program.constraints(s, x)
    if problem.limit is not None and len(least):
        scale = sparse.diags_array(1 / np.where(room > 0, room, 1.0))
        constraints.append(scale @ usage @ s <= scale @ room)
    unit = program.span / MAGNITUDE
    objective = cp.Minimize((program.costs / unit) @ s + (program.flow_costs / unit) @ x)
    gap = TARGET_GAP * abs(program.constant if first is None else known) / unit
    highs = _Highs(cp.Problem(objective, constraints), [s, x], time_limit=time_limit, seed=seed, gap=gap)
    if first is not None:
        highs.start_from(program.point(first))
    while True:
        highs.run()
        bound = program.constant + unit * highs.bound
        if highs.values is None:
            return Outcome(None, bound, highs.interrupted)
        choice = program.choice(highs.values)
        over = np.flatnonzero(usage @ program.chosen(choice) > room)
        if not len(over) or highs.interrupted:
            return Outcome(None if len(over) else choice, bound, highs.interrupted)
        # HiGHS lets a row exceed its limit by its tolerance. What holds as much on every node does not fit either.
        for point in over:
            highs.exclude(program.at_least(choice, usage[[point]].toarray().ravel()), len(problem.costs))


def trivial_bound(problem: Problem) -> float:
    """No choice costs less than the cheapest option of every node and the cheapest pair of every edge."""
    return _encode(problem, np.inf).constant


def leanest(problem: Problem, *, time_limit: float, seed: int) -> Outcome:
    """The choice with the lowest peak of memory, or the best one found in time; the bound is one on the peak."""
    program = _encode(problem, np.inf)
    usage, least = _usage(problem, program)
    unit = (least + usage.max(axis=1).toarray().ravel()).max(initial=1.0) / MAGNITUDE
    s, x = program.variables()
    peak = cp.Variable(nonneg=True)
    constraints = [*program.constraints(s, x), (usage / unit) @ s + least / unit <= peak]
    highs = _Highs(cp.Problem(cp.Minimize(peak), constraints), [s, x], time_limit=time_limit, seed=seed, gap=1e-9)
    highs.run()
    return Outcome(
        None if highs.values is None else program.choice(highs.values), unit * highs.bound, highs.interrupted
    )


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
        """The options of s that hold at least what the chosen one of their node holds."""
        chosen = usage[self.offsets[:-1] + np.asarray(choice, dtype=np.int64)]
        return np.flatnonzero(usage >= np.repeat(chosen, np.diff(self.offsets)))


def _encode(problem: Problem, known: float) -> _Program:
    """The program of a problem with a choice of cost `known`; options and pairs that alone cost more are left out."""
    offsets = np.concatenate([[0], np.cumsum([len(costs) for costs in problem.costs])]).astype(np.int64)
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


def _usage(problem: Problem, program: _Program) -> tuple[sparse.csr_array, np.ndarray]:
    """Bytes per [pressure point, option of s] beyond the node's leanest option; bytes of all the leanest per point."""
    points = problem.pressure_points()
    least = np.zeros(len(points))
    rows, columns, values = [np.zeros(0, int)], [np.zeros(0, int)], [np.zeros(0)]
    for live in problem.lives:
        covered = np.arange(*np.searchsorted(points, (live.start, live.end)))
        extra = live.usage - live.usage.min()
        options = np.flatnonzero(extra)
        least[covered] += live.usage.min()
        rows.append(np.repeat(covered, len(options)))
        columns.append(np.tile(program.offsets[live.node] + options, len(covered)))
        values.append(np.tile(extra[options].astype(np.float64), len(covered)))
    entries = np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))
    return sparse.csr_array(entries, shape=(len(points), len(program.costs))), least


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


class _Highs:
    """A compiled cvxpy problem in HiGHS, set up so that two runs agree bit for bit unless time ends them."""

    def __init__(self, problem: cp.Problem, variables: list[cp.Variable], *, time_limit: float, seed: int, gap: float):
        data, _, _ = problem.get_problem_data(cp.HIGHS)
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
        self._highs = highspy.Highs()
        self._highs.HandleUserInterrupt = True
        options = {
            "output_flag": False, "parallel": "off", "random_seed": seed, "time_limit": float(time_limit),
            "mip_rel_gap": 0.0, "mip_abs_gap": gap, "mip_feasibility_tolerance": 1e-9,
        }  # fmt: skip
        for name, value in options.items():
            self._highs.setOptionValue(name, value)
        self._highs.passModel(model)
        self.values: np.ndarray | None = None  # of the variables, stacked; None: no solution is known
        self.bound = 0.0  # no solution has a lower objective
        self.interrupted = False

    def start_from(self, values: np.ndarray) -> None:
        start = highspy.HighsSolution()
        start.col_value = list(values[np.argsort(self._columns)])
        self._highs.setSolution(start)

    def exclude(self, columns: np.ndarray, count: int) -> None:
        """Of these binaries, fewer than `count` may be 1."""
        self._highs.addRow(-np.inf, count - 1.0, len(columns), self._columns[columns], np.ones(len(columns)))

    def run(self) -> None:
        # In a thread, since Python hears Ctrl-C only between two of its own instructions.
        thread = threading.Thread(target=self._highs.run, daemon=True)
        thread.start()
        while thread.is_alive():
            try:
                thread.join(0.1)
            except KeyboardInterrupt:
                self.interrupted = True
                self._highs.cancelSolve()
        status, info = self._highs.getModelStatus(), self._highs.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            self.values, self.bound = None, np.inf
            return
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        self.values = np.array(self._highs.getSolution().col_value)[self._columns] if found else None
        self.bound = info.mip_dual_bound
