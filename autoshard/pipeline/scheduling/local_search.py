"""Local search: small changes of orders along the critical path, each kept unless it makes the schedule much worse."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from autoshard.pipeline.operations import start_times
from autoshard.pipeline.scheduling.problem import TOLERANCE, OrderProblem, Rows

_REACH = 12  # places that a task is moved by at most
_FIRST_TEMPERATURE = 0.01  # share of the makespan; an increase by so much is taken in one of e cases at first


def local_search(problem: OrderProblem, rows: Rows, *, moves: int, seed: int, bound: float) -> Rows:
    """The best orders found by simulated annealing from `rows`, which must fit.

    A move takes two tasks that follow each other on the critical path and on one device, where the second waits for the
    first only because it stands behind it. It brings the second before the first, or moves one of them further.

    Args:
        moves: that are tried.
        bound: seconds below which nothing can be; the search ends there.
    """
    rng = random.Random(seed)
    line = {task: key for key, tasks in problem.lines.items() for task in tasks}
    rows = [list(row) for row in rows]
    starts, blocked = start_times(rows, problem.lags, problem.seconds)
    assert not blocked
    cost = _makespan(problem, starts)
    best, best_cost = [list(row) for row in rows], cost
    for step in range(moves):
        if best_cost <= bound * (1 + TOLERANCE):
            break
        pair = _pair(problem, rows, starts, rng)
        if pair is None:
            break
        device, position = pair
        row = _moved(rows[device], position, line, rng)
        if row is None or not problem.fits(row):
            continue
        old, rows[device] = rows[device], row
        new_starts, blocked = start_times(rows, problem.lags, problem.seconds)
        new_cost = math.inf if blocked else _makespan(problem, new_starts)
        temperature = _FIRST_TEMPERATURE * best_cost * (1 - step / moves) ** 2
        increase = new_cost - cost
        if increase <= 0 or (temperature > 0 and rng.random() < math.exp(-increase / temperature)):
            cost, starts = new_cost, new_starts
            if cost < best_cost * (1 - TOLERANCE):
                best, best_cost = [list(row) for row in rows], cost
        else:
            rows[device] = old
    return best


def _makespan(problem: OrderProblem, starts: Sequence[float]) -> float:
    return max(start + seconds for start, seconds in zip(starts, problem.seconds, strict=True))


def _pair(problem: OrderProblem, rows: Rows, starts: Sequence[float], rng: random.Random) -> tuple[int, int] | None:
    """A device and the place of a task that could start earlier if the one before it did not stand there.

    Both are on a critical path, which is followed from its end.
    """
    ends = [start + seconds for start, seconds in zip(starts, problem.seconds, strict=True)]
    place = {task: (device, i) for device, row in enumerate(rows) for i, task in enumerate(row)}
    latest = max(ends)
    task = rng.choice([task for task, end in enumerate(ends) if end >= latest - TOLERANCE * latest])
    found = []
    slack = TOLERANCE * latest
    while True:
        start = starts[task]
        device, i = place[task]
        previous = rows[device][i - 1] if i else None
        inputs = [other for other, lag in problem.lags[task] if ends[other] + lag >= start - slack]
        if previous is not None and ends[previous] >= start - slack:
            if all(other != previous for other, _ in problem.lags[task]):
                found.append((device, i))
            inputs = inputs if previous in inputs else [*inputs, previous]
        if not inputs:
            break
        task = rng.choice(inputs)
    return rng.choice(found) if found else None


def _moved(row: list[int], position: int, line: dict[int, tuple[str, int]], rng: random.Random) -> list[int] | None:
    """The row with the task at `position` further to the front, or the one before it further to the back.

    Tasks of one line keep their order; None where the two are of one line.
    """
    second, first = row[position], row[position - 1]
    if line[second] == line[first]:
        return None
    reach = 1 if rng.random() < 0.5 else rng.randint(1, _REACH)
    new = list(row)
    if rng.random() < 0.5:
        to = position
        while to > max(0, position - reach) and line[row[to - 1]] != line[second]:
            to -= 1
        new.insert(to, new.pop(position))
    else:
        to = position - 1
        while to < min(len(row) - 1, position - 1 + reach) and line[row[to + 1]] != line[first]:
            to += 1
        new.insert(to, new.pop(position - 1))
    return new
