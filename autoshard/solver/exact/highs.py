"""HiGHS, which solves what cvxpy has compiled.

cvxpy takes no first solution, gives no bound back and does not hear Ctrl-C, so its matrices go to highspy from here.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cvxpy as cp
import highspy
import numpy as np
from scipy import sparse

_DOUBLETON_EQUATIONS = 512  # the rule of HiGHS's presolve that does not end on some programs, in release 1.15.1


@dataclass(frozen=True)
class HighsSettings:
    """How HiGHS is run, and what it takes. A look is one at whether to stop, which it takes now and then."""

    ending_seconds: float = 1.0  # to finish after its time or Ctrl-C, before what it last reported is taken
    abandoned_seconds: float = 15.0  # that the end of the process waits for a HiGHS that did not finish by then
    presolved_variables: int = 300  # programs of no more go without presolve, which does not end on some of them
    simplex_steps: int = 1000  # between two looks
    root_looks: int = 15  # the first ones, about those at the root of its tree, which take longer
    root_seconds_per_entry: float = 5e-6  # of a quiet core, per entry of the matrix, between two root looks
    seconds_per_entry: float = 1e-6  # of a quiet core, per entry of the matrix, between two later looks


HIGHS = HighsSettings()


class _SilentHighs(highspy.Highs):
    """HiGHS that prints nothing. As it is made it enables its callbacks, where release 1.16.0 prints its name."""

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()


class Highs:
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
            "presolve": "off" if count <= HIGHS.presolved_variables else "choose",
            "presolve_rule_off": _DOUBLETON_EQUATIONS,
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
            ended.wait(HIGHS.abandoned_seconds)

        # In a thread, since Python hears Ctrl-C only between two of its own instructions; it may hear one while that
        # starts. Waiting is for the event, since an interrupted Thread.join takes the thread for ended.
        try:
            atexit.register(at_exit)
            threading.Thread(target=run, daemon=True).start()
            while not ended.wait(0.1):
                if time.monotonic() > self._deadline + HIGHS.ending_seconds or self._stop.is_set():
                    self.stopped = True
                    return ended.wait(HIGHS.ending_seconds)
        except KeyboardInterrupt:
            self.stopped = self.interrupted = True
            return ended.wait(HIGHS.ending_seconds)
        return True

    def _on_progress(self, event: highspy.highs.HighsCallbackEvent) -> None:
        self.bound = max(self.bound, event.data_out.mip_dual_bound)
        self._on_look(event)

    def _on_solution(self, event: highspy.highs.HighsCallbackEvent) -> None:
        self.values = np.array(event.data_out.mip_solution)[self._columns]

    def _on_step(self, event: highspy.highs.HighsCallbackEvent) -> None:
        self._steps += 1
        if self._steps % HIGHS.simplex_steps == 0:
            self._on_look(event)

    def _on_look(self, event: highspy.highs.HighsCallbackEvent) -> None:
        self._looks += 1
        seconds = self._entries * (
            HIGHS.root_seconds_per_entry if self._looks <= HIGHS.root_looks else HIGHS.seconds_per_entry
        )
        self.stopped |= self._look() | self._spend(seconds)
        if self.stopped:
            event.interrupt()
