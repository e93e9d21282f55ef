"""PaSE's search: dynamic programming in an order of nodes that keeps tables small.

Elango, "PaSE: Parallelization strategies for efficient DNN training", IPDPS 2021, section 4.

Kept: the next node to be minimised out is the one with the fewest options on its side, so that sparse graphs of any
shape are solved exactly. Different: PaSE gives up where a table is too large, and knows no memory limit. Here large
buckets are split, and bytes have prices that follow the best choice at the last ones; both keep a proven bound
(`mini_buckets.py`). Where the first choice is not the optimum, others come in the order of their bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.solver.bounds.prices import Prices
from autoshard.solver.problem import Problem
from autoshard.solver.run import NoChoice
from autoshard.solver.searches.exact.mini_buckets import LeanRoom, MiniBuckets, smallest_tables_first
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.search_run import SearchRun


@dataclass(frozen=True)
class DynamicProgramSettings:
    """Rounds of dynamic programming, each with other tables and prices."""

    entries: int = 1 << 16  # of a table, in the first round; `growth` times as many in every further one, up to
    most_entries: int = 1 << 22  # of a table, in any round: 32 MiB
    size: float = 2.0  # of what is explored in the first round: options that are tried per node, or choices kept
    growth: float = 1.5  # factor of entries and size from one round to the next
    noise: float = 0.5  # of logarithms of tables, in the orders of further rounds


SETTINGS = DynamicProgramSettings()


def pase(problem: Problem, run: SearchRun) -> None:
    """Dynamic programming with tables that grow from round to round, until they need not be split."""
    search_by_tables(problem, run, SETTINGS, depth_first)


Explore = Callable[[MiniBuckets, Problem, Prices, int], bool]  # ..., size -> whether all that matters is seen


def depth_first(tables: MiniBuckets, problem: Problem, prices: Prices, size: int) -> bool:
    """Goes through choices one after the other, trying `size` options per node; whether it has seen all that matter."""
    return tables.choices(LeanRoom(problem, tables.run), prices.refund, size * len(problem.costs))


def search_by_tables(problem: Problem, run: SearchRun, settings: DynamicProgramSettings, explore: Explore) -> None:
    """Rounds of dynamic programming, at prices of memory that follow the choices of the last round.

    Args:
        explore: goes through the choices that the tables lead to, and offers those that fit.

    Raises:
        NoChoice: nothing fits.
    """
    at, prices = Position(problem, run), Prices(problem)
    ends = np.cumsum(at.sizes)[:-1]
    entries, size = settings.entries, settings.size
    for turn in run.rounds():
        prices.set(at.prices)
        noise = settings.noise * (run.rng.random(len(at.sizes)) if turn else np.zeros(len(at.sizes)))
        order = smallest_tables_first(problem, noise, entries)
        tables = MiniBuckets(problem, np.split(prices.costs, ends), order, entries, run)
        run.prove(tables.bound - prices.refund)
        if explore(tables, problem, prices, int(size)):
            run.take()
            if run.choice is None:
                raise NoChoice
            run.prove(run.cost)
            return
        at.start(tables.first_choice())
        at.adjust_prices()
        at.repair()
        at.settle()
        entries = min(settings.most_entries, int(settings.growth * entries))
        size *= settings.growth
