"""A large `Problem` in, a proven bound and ever better choices out, from compiled code on several cores.

An ascent of the bound and searches for choices run side by side, in rounds of about the same amount of work. Between
two rounds they tell each other what they found. Once the bound has settled, integer programs over neighbourhoods of the
best choice run beside the searches. The same seed and number of searches find the same, however fast the machine is, up
to the round that time allows and up to the integer programs, which stop by the clock unless rounds are counted.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.solver.arrays import graph_of, memory_of
from autoshard.solver.bounds import message_passing_compiled as kernels
from autoshard.solver.bounds.ascent import Ascent
from autoshard.solver.local_search.block_moves import BlockSearch
from autoshard.solver.local_search.neighbourhoods import Neighbourhoods
from autoshard.solver.local_search.settings import ROUNDS, RoundSettings
from autoshard.solver.presolve.simplify_large import reduce
from autoshard.solver.problem import Edge, Live, Problem
from autoshard.solver.runtime.background import TICK_SECONDS
from autoshard.solver.runtime.turns import turn


@dataclass(frozen=True, eq=False)
class RoundResult:
    """What is known after a round."""

    choice: tuple[int, ...] | None  # the best choice so far
    bound: float  # proven so far
    settled: bool  # the bound will hardly rise further
    iterations: float  # rounds that this one counts as


class LargeSearch:
    """Ascent of the bound and searches for choices, side by side."""

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int,
        threads: int,
        counted: bool = False,
        settings: RoundSettings = ROUNDS,
    ):
        """
        Args:
            counted: whether what is found may depend on nothing but the seed and the number of rounds.
        """
        self.settings = settings
        searches = settings.counted_searches if counted else max(1, threads - 1)
        self.graph, self.memory = graph_of(problem), memory_of(problem)
        self.stop = threading.Event()
        self.ascent = Ascent(self.graph, self.memory)
        self.searches = [BlockSearch(self.graph, self.memory, (seed, k)) for k in range(searches)]
        rng = np.random.default_rng([seed, searches])
        self.neighbourhoods = Neighbourhoods(problem, self.graph, rng, counted=counted)
        self.threads = threads

    def rounds(
        self, known: Callable[[], Sequence[int] | None], left: Callable[[], float], tick: Callable[[], None]
    ) -> Iterator[RoundResult]:
        """Searches without end; what is known after each round.

        Args:
            known: the best choice by now, from whichever source.
            left: seconds until time is up.
            tick: called again and again; what it raises ends the search.
        """
        least: np.ndarray | None = None  # per option, what a choice with it costs at least
        with ThreadPoolExecutor(self.threads) as pool, self.stopping():
            while True:
                first = known()
                cost = math.inf if first is None else self.cost(first)
                for search in self.searches:
                    search.begin(first, cost, self.ascent)
                other: Future[Any] | None = None
                tasks: list[Future[Any]] = []
                if not self.ascent.settled:
                    tasks = [pool.submit(self.ascent.round, cost, self.stop, self.settings.entries)]
                elif least is None:
                    tasks = [other := pool.submit(self.ascent.least)]
                elif first is not None:
                    improve = self.neighbourhoods.improve
                    tasks = [other := pool.submit(improve, first, least < cost, left(), self.stop)]
                long = least is not None and first is not None
                work = self.settings.long_entries if long else self.settings.entries
                tasks += [pool.submit(search.round, self.stop, work) for search in self.searches]
                _wait_for(tasks, tick)
                yield self.found(other.result() if long and other else None, work / self.settings.entries)
                tick()
                if self.ascent.settled and least is None and other:
                    least = other.result()

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Ends what still runs after the step that it is at, however this is left."""
        try:
            yield
        finally:
            self.stop.set()

    def found(self, choice: tuple[int, ...] | None, iterations: float = 0.0) -> RoundResult:
        """The best of this choice and those of the searches."""
        best = min(self.searches, key=lambda search: search.cost)
        if choice is None or best.cost <= self.cost(choice):
            choice = None if best.best is None else tuple(best.best.tolist())
        return RoundResult(choice, self.ascent.best, self.ascent.settled, iterations)

    def cost(self, choice: Sequence[int]) -> float:
        return kernels.cost_of(self.graph, self.graph.costs, np.asarray(choice, dtype=np.int64))


def _wait_for(tasks: Sequence[Future], tick: Callable[[], None]) -> None:
    """Returns when all tasks are done; raises what one of them raised."""
    while wait(tasks, timeout=TICK_SECONDS).not_done:
        tick()
    for task in tasks:
        task.result()


def warm_up() -> None:
    """Loads all of it. What has never been compiled is compiled by processes beside this one, and left on disk.

    Of several processes that want it at a time one has it compiled. Should that process end before, those that it has
    started go on, and the others still wait for them.
    """
    graph = graph_of(_smallest())
    with turn("compile") as held:
        kernels.cost_of(graph, graph.costs, np.zeros(2, dtype=np.int64))
        beside = []
        if any(kernels.cost_of.stats.cache_misses.values()):
            for name in (warm_up_reductions.__name__, warm_up_searches.__name__):
                code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import {name} as run; run()"
                command = [sys.executable, "-c", code]
                silent = subprocess.DEVNULL
                beside.append(subprocess.Popen(command, stdout=silent, stderr=silent, pass_fds=held))
        for process in beside:
            process.wait()  # what it could not leave on disk is compiled here
    warm_up_searches()
    warm_up_reductions()


def warm_up_reductions() -> None:
    reduce(_smallest(), lambda: None)


def _smallest() -> Problem:
    """Two nodes with memory between them."""
    edge = Edge(0, 1, np.array([[0.0, np.inf], [1.0, 0.0]]))
    lives = Live(0, 0, 1, np.array([1, 0])), Live(1, 0, 1, np.array([0, 1]))
    return Problem((np.array([0.0, 1.0]),) * 2, (edge,), lives, limit=1)


def warm_up_searches() -> None:
    search = LargeSearch(_smallest(), seed=0, threads=1)
    search.ascent.round(2.0, search.stop, 1.0)
    search.ascent.least()
    for choice in ([0, 0], [1, 0]):
        search.searches[0].begin(choice, math.inf, search.ascent)
        search.searches[0].step()
