"""Orders of all devices as an integer program, solved by HiGHS.

With ``s[i]`` the start of task i, ``d[i]`` its seconds, and ``y[i, j]`` = 1 where i runs before j on their device:

    minimise    C
    subject to  s[i] + d[i] + tail[i] <= C
                s[i] + d[i] + lag <= s[j]                           where j waits for i
                s[i] + d[i] <= s[j] + M (1 - y[i, j])               one at a time on a device
                s[j] + d[j] <= s[i] + M y[i, j]
                sum_i change[i] y[i, j] + start change of j <= limit    for every F, over the tasks of its device

Where the tasks of a kind and a virtual stage differ by their microbatch alone, they keep the order of microbatches. The
order of two tasks is a variable only if neither that, nor waiting, nor the makespan of a known schedule decides it.
Zero bubble's own program (Qi et al., arXiv:2401.10241) is of this form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.pipeline.scheduling.problem import TOLERANCE, HeldLimit, OrderProblem, Rows

_MOST_CHOICES = 400  # pairs of tasks whose order is a variable, beyond which HiGHS finds little in seconds


@dataclass(frozen=True)
class ProgramOutcome:
    """What HiGHS found."""

    rows: Rows | None  # the best orders; None: none that are better than those known
    bound: float  # s, below which no order is


def solve_orders(problem: OrderProblem, known: float, *, time_limit: float) -> ProgramOutcome:
    """Orders whose makespan is at most `known`, that of a schedule that fits.

    Args:
        time_limit: seconds for HiGHS.
    """
    if not problem.are_microbatches_alike:
        return ProgramOutcome(None, 0.0)
    # No order of two tasks that is left open leads to more than the known makespan, so it bounds every M.
    before = _decided(problem, known * (1 + TOLERANCE))
    open_pairs = _open_pairs(problem, before)
    if len(open_pairs) > _MOST_CHOICES:
        return ProgramOutcome(None, 0.0)
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    program = _OrderProgram(problem, before, open_pairs, known)
    entries, upper = program.matrix()
    count = program.columns
    matrix = coo_array((entries[2], (entries[0], entries[1])), shape=(len(upper), count)).tocsr()
    objective = np.zeros(count)
    objective[program.makespan] = 1.0
    integrality = np.zeros(count)
    integrality[list(program.choice.values())] = 1
    lower, top = program.bounds()
    result = milp(
        objective,
        integrality=integrality,
        bounds=Bounds(lower, top),
        constraints=LinearConstraint(matrix, -np.inf, upper),
        options={"time_limit": time_limit, "mip_rel_gap": 0.0},
    )
    bound = result.mip_dual_bound
    bound = 0.0 if bound is None or not math.isfinite(bound) else float(bound)
    if result.x is None:
        return ProgramOutcome(None, min(bound, known))
    starts = result.x[: len(problem.tasks)]
    return ProgramOutcome(program.rows(starts, result.x), min(bound, known))


def _decided(problem: OrderProblem, known: float) -> np.ndarray:
    """Which task runs before which, by what tasks wait for, by the order of microbatches, and by the known makespan."""
    count = len(problem.tasks)
    direct = np.zeros((count, count), dtype=bool)
    for task, inputs in enumerate(problem.lags):
        direct[[other for other, _ in inputs], task] = True
    for line in problem.lines.values():
        direct[line[:-1], line[1:]] = True
    before = np.zeros((count, count), dtype=bool)
    for task in _sorted_by(direct):
        sources = np.flatnonzero(direct[:, task])
        before[:, task] = before[:, sources].any(axis=1)
        before[sources, task] = True
    heads, tails, seconds = np.array(problem.heads), np.array(problem.tails), np.array(problem.seconds)
    # i before j would take longer than the known makespan: j is before i.
    too_long = heads[:, None] + seconds[:, None] + seconds[None, :] + tails[None, :] > known
    same = np.equal.outer(problem.devices, problem.devices) & ~np.eye(count, dtype=bool)
    decided: np.ndarray = before | (too_long.T & same & ~before.T)
    return decided


def _sorted_by(direct: np.ndarray) -> list[int]:
    """All tasks, each after those that are directly before it."""
    waiting = direct.sum(axis=0)
    order = list(np.flatnonzero(waiting == 0))
    for task in order:
        waiting -= direct[task]
        order += [reader for reader in np.flatnonzero(direct[task]) if waiting[reader] == 0]
    return [int(task) for task in order]


def _open_pairs(problem: OrderProblem, before: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of tasks of one device whose order is not decided."""
    rows: dict[int, list[int]] = {}
    for task, device in enumerate(problem.devices):
        rows.setdefault(device, []).append(task)
    return [
        (i, j)
        for row in rows.values()
        for i, j in itertools.combinations(row, 2)
        if not before[i, j] and not before[j, i]
    ]


class _OrderProgram:
    """Columns and rows of the program."""

    def __init__(self, problem: OrderProblem, before: np.ndarray, open_pairs: list[tuple[int, int]], known: float):
        self.problem, self.before, self.known = problem, before, known
        self.makespan = len(problem.tasks)
        self.choice = {pair: self.makespan + 1 + i for i, pair in enumerate(open_pairs)}
        self.columns = self.makespan + 1 + len(open_pairs)

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The least and the most of each column."""
        problem = self.problem
        choices = len(self.choice)
        latest = self.known * (1 + TOLERANCE) - np.array(problem.seconds) - np.array(problem.tails)
        lower = np.concatenate([problem.heads, [0.0], np.zeros(choices)])
        upper = np.concatenate([np.maximum(latest, problem.heads), [self.known * (1 + TOLERANCE)], np.ones(choices)])
        return lower, upper

    def matrix(self) -> tuple[tuple[list[int], list[int], list[float]], list[float]]:
        """Entries (row, column, value), and what each row is at most."""
        rows, columns, values, upper = [], [], [], []  # type: ignore[var-annotated]

        def add(most: float, *entries: tuple[int, float]) -> None:
            for column, value in entries:
                rows.append(len(upper))
                columns.append(column)
                values.append(value)
            upper.append(most)

        problem, seconds = self.problem, self.problem.seconds
        for task, tail in enumerate(problem.tails):
            add(-seconds[task] - tail, (task, 1.0), (self.makespan, -1.0))
            for other, lag in problem.lags[task]:
                add(-seconds[other] - lag, (other, 1.0), (task, -1.0))
        same = np.equal.outer(problem.devices, problem.devices)
        for i, j in zip(*np.nonzero(self.before & same), strict=True):
            if i != j:
                add(-seconds[i], (int(i), 1.0), (int(j), -1.0))
        for (i, j), choice in self.choice.items():
            for first, second, sign in ((i, j, 1.0), (j, i, -1.0)):
                big = max(0.0, self.known - problem.tails[first] - problem.heads[second])
                add(
                    big - seconds[first] if sign > 0 else -seconds[first],
                    (first, 1.0),
                    (second, -1.0),
                    (choice, sign * big),
                )
        for device in range(problem.schedule.stages):
            self._add_device(device, add)
        return (rows, columns, values), upper

    def _add_device(self, device: int, add: Callable[..., None]) -> None:
        """What a device works and holds."""
        problem = self.problem
        own = [task for task, home in enumerate(problem.devices) if home == device]
        if not own:
            return
        work = sum(problem.seconds[task] for task in own)
        add(-work - min(problem.heads[i] for i in own) - min(problem.tails[i] for i in own), (self.makespan, -1.0))
        for limit in problem.limits:
            for task in own:
                if limit.at_start[task]:
                    self._add_room(limit, task, own, add)

    def _add_room(self, limit: HeldLimit, task: int, own: Sequence[int], add: Callable[..., None]) -> None:
        """What a device may hold once a task of it has started, by which of its other tasks went before."""
        room = limit.most * (1 + TOLERANCE) - limit.at_start[task]
        entries = []
        for other in own:
            change = limit.at_start[other] + limit.at_end[other]
            if other == task or not change:
                continue
            if self.before[other, task]:
                room -= change
            elif (other, task) in self.choice:
                entries.append((self.choice[other, task], change))
            elif (task, other) in self.choice:  # before the other one: 1 - y
                room -= change
                entries.append((self.choice[task, other], -change))
        add(room, *entries)

    def rows(self, starts: np.ndarray, values: np.ndarray) -> Rows:
        """The orders that a solution says: by its choices, since starts are rounded."""
        problem = self.problem
        ahead = self.before.sum(axis=0, where=np.equal.outer(problem.devices, problem.devices)).astype(float)
        for (i, j), choice in self.choice.items():
            ahead[j if values[choice] > 0.5 else i] += 1
        found: Rows = [[] for _ in range(problem.schedule.stages)]
        for task in sorted(range(len(problem.tasks)), key=lambda task: (ahead[task], starts[task])):
            found[problem.devices[task]].append(task)
        return found
