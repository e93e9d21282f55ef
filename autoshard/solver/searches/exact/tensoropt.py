"""TensorOpt's search: a frontier of cost and memory, extended node by node.

Cai et al., "TensorOpt: Exploring the tradeoffs in distributed DNN training with auto-parallelism", TPDS 2022,
section 4.

Kept: partial choices that agree on all nodes with neighbours still open are compared, and one that costs and holds no
less than another is dropped, so that what remains is the frontier. Different: memory is held against the limit at every
pressure point, not summed; partial choices are ranked by the bounds of a dynamic program at prices of memory; and a
frontier is cut to so many partial choices, more in every round. Where nothing was cut, the best choice is proven.
"""

from __future__ import annotations

import math

import numpy as np

from autoshard.solver.bounds.prices import Prices
from autoshard.solver.problem import Problem
from autoshard.solver.searches.exact.mini_buckets import LeanRoom, MiniBuckets
from autoshard.solver.searches.exact.pase import DynamicProgramSettings, search_by_tables
from autoshard.solver.searches.position import CHANGE_ROUNDING
from autoshard.solver.searches.search_run import SearchRun

SETTINGS = DynamicProgramSettings(entries=1 << 14, size=32.0, growth=2.0)
CHECKED_TIMES = 4  # as many partial choices as are kept are held against the limit, cheapest first
SECONDS_PER_HELD = 3e-9  # of a quiet core: the bytes of a partial choice at a point


def tensoropt(problem: Problem, run: SearchRun) -> None:
    """Frontiers that grow from round to round."""
    search_by_tables(problem, run, SETTINGS, frontier)


def frontier(tables: MiniBuckets, problem: Problem, prices: Prices, size: int) -> bool:
    """Extends a frontier of at most `size` partial choices; whether nothing that matters was cut."""
    run, room = tables.run, LeanRoom(problem, tables.run)
    chosen = np.zeros((len(problem.costs), 1), dtype=np.int64)  # [nodes, states]
    bounds, free = np.array([tables.bound]), room.free[None, :]  # [states], [states, points]
    is_whole = True
    for depth, bucket in enumerate(tables.buckets):
        after = tables.states_options(depth, chosen, bounds)
        best = run.cost + prices.refund
        kept = after < (best - CHANGE_ROUNDING * abs(best) if best < math.inf else math.inf)
        state, option = np.nonzero(kept)
        cheapest = np.argsort(after[state, option], kind="stable")[: CHECKED_TIMES * size]
        is_whole &= len(cheapest) == len(state)
        state, option = state[cheapest], option[cheapest]
        held = free[state]
        for start, end, usage in room.lives[bucket.node]:
            held[:, start:end] -= usage[option][:, None]
        run.spend(SECONDS_PER_HELD * held.size)
        fits = (held >= -room.rounding).all(axis=1)
        state, option, held = state[fits], option[fits], held[fits]
        if not len(state):
            return is_whole
        bounds, chosen = after[state, option], chosen[:, state]
        chosen[bucket.node] = option
        paid = bounds - (room.free - held) @ prices.values  # without prices, but for what is still to come
        undominated = _frontier(chosen[tables.open_after(depth)], paid, held, run)
        is_whole &= len(undominated) <= size
        undominated = undominated[:size]
        bounds, chosen, free = bounds[undominated], chosen[:, undominated], held[undominated]
    for choice in chosen.T.tolist():
        run.offer(choice, room.cost_of(choice))
    return is_whole


def _frontier(opened: np.ndarray, paid: np.ndarray, free: np.ndarray, run: SearchRun) -> np.ndarray:
    """The states that no cheaper one with the same options at all open nodes leaves as much memory as.

    Args:
        opened: the options at the open nodes: int64[nodes, states], cheapest state first.
        paid: costs, apart from what states with the same open options have in common: [states].
        free: bytes: [states, points].
    """
    groups: dict[bytes, list[int]] = {}
    kept = []
    for state, key in enumerate(np.ascontiguousarray(opened.T)):
        group = groups.setdefault(key.tobytes(), [])
        run.spend(SECONDS_PER_HELD * len(group) * free.shape[1] + 2e-6)
        if group and ((free[group] >= free[state]).all(axis=1) & (paid[group] <= paid[state])).any():
            continue
        group.append(state)
        kept.append(state)
    return np.array(kept)
