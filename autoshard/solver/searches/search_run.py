"""What a search is: a function of a `Problem` and a `SearchRun`, which takes what it finds and ends it in time.

All searches start from what presolve leaves of a problem. Presolve keeps the optimum and gives every search the same
nodes to decide: those that follow from others are gone, as they are in the graphs of operators of the papers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.arrays import memory_of
from autoshard.solver.least_memory import leanest
from autoshard.solver.problem import Problem
from autoshard.solver.run import NoChoice, ProblemPart, SolverRun
from autoshard.solver.runtime.clock import SearchTimeout
from autoshard.solver.verify import fits


@dataclass(frozen=True)
class PatienceSettings:
    """When a search that goes on for ever has found what it will find, in work since its last improvement."""

    seconds: float = 0.2  # of a quiet core
    seconds_per_node: float = 0.05  # on top of that
    times: float = 2.0  # as much work as all that led to the last improvement
    times_if_none: float = 3.0  # as much, while there is no choice
    rounding: float = 1e-9  # relative: cheaper by no more than this is no improvement
    quantum: float = 1e-3  # s: how much work is counted at once
    # Work, in times of what it takes to verify a choice, after which the best choice is verified.
    verifying_times: float = 10.0
    seconds_per_term: float = 3e-7  # to verify a choice, per node, edge and life


PATIENCE = PatienceSettings()


class SearchEnd(Exception):
    """The best choice is proven to be optimal."""


class SearchRun:
    """One run of one search: its random numbers, its time, and the place for what it finds.

    Attributes:
        seed: of the run.
        rng: random numbers that follow from the seed.
        part: what is searched, with the best choice so far.
        run: the whole run of `solve`, for searches that use parts of the solver.
    """

    def __init__(self, part: ProblemPart, run: SolverRun):
        problem = part.problem
        self.part, self.run, self.seed = part, run, run.seed
        self.rng = np.random.default_rng(run.seed)
        terms = len(problem.costs) + len(problem.edges) + len(problem.lives)
        self._patience = PATIENCE.seconds + PATIENCE.seconds_per_node * len(problem.costs)
        self._verifying = PATIENCE.seconds_per_term * terms
        self._spent = self._owed = self._improved_at = 0.0  # seconds of a quiet core
        self._offered: tuple[tuple[int, ...], float] | None = None  # what waits to be verified, and what it costs
        self._until_verified = 0.0

    @property
    def cost(self) -> float:
        """Of the best choice offered; inf while there is none."""
        return min(self.part.incumbent.cost, self._offered[1] if self._offered else np.inf)

    @property
    def choice(self) -> tuple[int, ...] | None:
        """The best choice that was verified."""
        return self.part.incumbent.choice

    def offer(self, choice: Sequence[int], cost: float) -> None:
        """Takes a choice that fits, if it is the cheapest so far. It is verified before it counts.

        Args:
            cost: what the search knows it to cost.
        """
        best = self.cost
        if cost < np.inf == best or cost < best - PATIENCE.rounding * abs(best):
            self._offered = tuple(map(int, choice)), cost
            self._improved_at = self._spent + self._owed

    def prove(self, bound: float) -> None:
        """Takes the bound: no choice that fits costs less."""
        self.part.incumbent.prove(bound)

    def spend(self, seconds: float) -> None:
        """Counts work, in seconds of a quiet core.

        Raises:
            SearchTimeout: all of the time is spent.
            SearchEnd: the best choice is proven.
        """
        self._owed += seconds
        if self._owed < PATIENCE.quantum:
            return
        self._spent += self._owed
        self._until_verified -= self._owed
        owed, self._owed = self._owed, 0.0
        if self._until_verified <= 0:
            self.verify()
        self.run.clock.spend(owed)

    def verify(self) -> None:
        """Verifies the best choice that was offered.

        Raises:
            SearchEnd: it is proven to be optimal.
        """
        self.take()
        self._until_verified = PATIENCE.verifying_times * self._verifying
        if self.part.incumbent.is_solved:
            raise SearchEnd

    def take(self) -> None:
        """Hands the best choice that was offered to the incumbent."""
        if self._offered is not None:
            choice, self._offered = self._offered[0], None
            self.part.incumbent.offer(choice)
            self._owed += self._verifying

    def rounds(self) -> Iterator[int]:
        """Numbers of rounds, as long as it pays to go on: until nothing better has been found for a while."""
        turn = 0
        while True:
            idle = self._spent + self._owed - self._improved_at
            patience = self._patience * (PATIENCE.times_if_none if self.cost == np.inf else 1.0)
            if turn and idle > max(patience, PATIENCE.times * self._improved_at):
                return
            yield turn
            self.spend(PATIENCE.quantum)  # a round that counts nothing ends, too
            turn += 1


Search = Callable[[Problem, SearchRun], None]


@dataclass(frozen=True)
class PartSearch:
    """A search as the one algorithm of a `Method`: it gets each part of a problem in turn."""

    search: Search
    name: str

    def applies(self, part: ProblemPart, run: SolverRun) -> bool:
        return True

    def improve(self, part: ProblemPart, run: SolverRun) -> bool:
        """Searches a part for its share of the time.

        Raises:
            NoChoice: it is proven that nothing fits.
        """
        if (memory_of(part.problem).room < 0).any():  # the leanest options do not fit
            raise NoChoice
        searching = SearchRun(part, run)
        run.clock.grace = 0.0  # a part without a choice gets one below
        with run.report.during(self.name), contextlib.suppress(SearchEnd, SearchTimeout):
            try:
                with run.clock.hurry(part.options / part.options_left):
                    self.search(part.problem, searching)
            finally:
                searching.take()
        if part.incumbent.choice is None:
            _offer_leanest(part, run)
        return True


def _offer_leanest(part: ProblemPart, run: SolverRun) -> None:
    """Offers the choice that holds the least, for a part of which a search found nothing that fits.

    Raises:
        NoChoice: that does not fit either.
    """
    run.clock.extend()
    with contextlib.suppress(SearchTimeout):
        found = leanest(part.problem, run)
        part.incumbent.offer(found.choice)
        if not fits(found.bound, part.problem.limit):
            raise NoChoice
