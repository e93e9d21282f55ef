"""A large `Problem` in, what the compiled reductions leave of it out, in Python's own terms, with the way back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autoshard.errors import SolverError
from autoshard.solver.arrays import starts_of, summed_edges
from autoshard.solver.presolve import simplify_compiled, state_compiled
from autoshard.solver.presolve.settings import PRESOLVE
from autoshard.solver.presolve.simplify import NodeMerge, ReducedProblem
from autoshard.solver.presolve.simplify_compiled import FULL, MORE
from autoshard.solver.presolve.state_compiled import State
from autoshard.solver.problem import Problem


def reduce(problem: Problem, tick: Callable[[], None]) -> ReducedProblem:
    """Reduces a problem with compiled code.

    Raises:
        SolverError: every choice is forbidden.
    """
    state = _state(problem)
    while (status := simplify_compiled.reduce(state, PRESOLVE.steps)) in (FULL, MORE):
        tick()
        if status == FULL:
            state = _roomier(state)
    if status >= 0:
        raise SolverError(f"every choice is forbidden: {problem.name(status)} has no option left")
    return _result(state)


def _state(problem: Problem) -> State:
    nodes = len(problem.costs)
    count = np.array([len(costs) for costs in problem.costs], dtype=np.int64)
    edges = summed_edges(problem)
    points = problem.pressure_points() if problem.limit is not None else np.zeros(0, dtype=np.int64)
    lives = problem.lives if len(points) else ()
    tables = [np.ascontiguousarray(table, dtype=np.float64).ravel() for table in edges.values()]
    usages = [live.usage.astype(np.float64) for live in lives]
    filled = np.concatenate([np.zeros(0), *tables, *usages])
    at = starts_of(np.array([len(part) for part in [*tables, *usages]], dtype=np.int64))
    pool = np.empty(PRESOLVE.spare * len(filled) + PRESOLVE.least_spare)
    pool[: len(filled)] = filled
    start, stop = (
        np.searchsorted(points, np.array([getattr(live, side) for live in lives], dtype=np.int64)).astype(np.int64)
        for side in ("start", "end")
    )
    none = np.full(nodes, -1)
    state = State(
        first=starts_of(count)[:-1],
        count=count,
        label=np.concatenate([np.arange(size) for size in count]),
        cost=np.concatenate(problem.costs).astype(np.float64),
        end=np.full(2 * len(edges), -1),
        follower=np.full(2 * len(edges), -1),
        leader=np.full(2 * len(edges), -1),
        half=none.copy(),
        degree=np.zeros(nodes, dtype=np.int64),
        table=at[: len(edges)].copy(),
        life=none.copy(),
        lives=np.zeros(nodes, dtype=np.int64),
        later_life=np.full(len(lives), -1),
        start=start,
        stop=stop,
        usage=at[len(edges) : len(edges) + len(lives)].copy(),
        pool=pool,
        fixed=np.zeros(len(points) + 1),
        log=np.empty(PRESOLVE.spare * int(count.sum()) + PRESOLVE.least_spare, dtype=np.int64),
        constants=np.empty(nodes),
        queue=np.empty(nodes, dtype=np.int64),
        queued=np.zeros(nodes, dtype=bool),
        compared=np.empty(nodes, dtype=np.int64),
        to_compare=np.zeros(nodes, dtype=bool),
        top=np.zeros(7, dtype=np.int64),
    )
    state.top[state_compiled.POOL] = len(filled)
    pairs = np.array(list(edges), dtype=np.int64).reshape(-1, 2)
    owners = np.array([live.node for live in lives], dtype=np.int64)
    state_compiled.fill(state, pairs, owners)
    return state


def _roomier(state: State) -> State:
    """The same state with twice the room."""
    return state._replace(pool=np.append(state.pool, state.pool), log=np.append(state.log, state.log))


def _result(state: State) -> ReducedProblem:
    spans = [slice(first, first + count) for first, count in zip(state.first, state.count, strict=True)]
    tables = {}
    for edge in np.flatnonzero(state.end[::2] >= 0):
        i, j = map(int, state.end[2 * edge : 2 * edge + 2])
        shape = state.count[i], state.count[j]
        tables[i, j] = state.pool[state.table[edge] : state.table[edge] + shape[0] * shape[1]].reshape(shape).copy()
    lives: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in spans]
    for node in np.flatnonzero(state.count):
        life = state.life[node]
        while life >= 0:
            usage = state.pool[state.usage[life] : state.usage[life] + state.count[node]].copy()
            lives[node].append((int(state.start[life]), int(state.stop[life]), usage))
            life = state.later_life[life]
    followed: list[NodeMerge] = []
    at = 0
    while at < state.top[state_compiled.LOG]:
        moved, into, pairs = map(int, state.log[at : at + 3])
        followed.append(NodeMerge(moved, into, state.log[at + 3 : at + 3 + 2 * pairs].reshape(-1, 2).copy()))
        at += 3 + 2 * pairs
    return ReducedProblem(
        labels=[state.label[span].copy() for span in spans],
        costs=[state.cost[span].copy() for span in spans],
        tables=tables,
        lives=lives,
        fixed=state.fixed.cumsum()[:-1],
        constants=state.constants[: state.top[state_compiled.CONSTANTS]].tolist(),
        followed=followed,
    )
