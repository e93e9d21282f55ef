"""One run of `solve`: the interface of search algorithms, and the way from a problem to its parts and back.

A problem is simplified into independent parts. Each part goes through a table of algorithms, in order, until one of
them says that it is done with. What an algorithm finds it offers to the incumbent of the part, at any time: so Ctrl-C
and the clock, which end algorithms by an exception, lose nothing.
"""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

from autoshard.errors import SolverError
from autoshard.solver.incumbent import Incumbent, least_sum
from autoshard.solver.presolve.simplify import Simplification, simplify
from autoshard.solver.problem import Problem
from autoshard.solver.progress import Progress, Report
from autoshard.solver.runtime.background import begun, in_background, result_of
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.runtime.clock import Clock
from autoshard.solver.settings import Goal, Sizes
from autoshard.solver.verify import fits

COMPILING_SECONDS = 3.0  # code that takes longer than this to load is being compiled
SECONDS_PER_REDUCTION = 1e-4  # of a quiet core, for one reduction of presolve


class NoChoice(Exception):
    """No choice is allowed and fits."""


@dataclass(frozen=True)
class ProblemPart:
    """An independent part of a problem, as an algorithm gets it."""

    incumbent: Incumbent
    is_large: bool  # whether compiled code pays
    bounds_pay: bool  # whether bounds are likely to forbid options
    of_whole: bool  # whether it is a part of the problem given to `solve`, with all options
    share: float  # of the remaining time, for a large part
    options_left: int  # number of options of this part and all later parts

    @property
    def problem(self) -> Problem:
        return self.incumbent.problem

    @property
    def options(self) -> int:
        return count_options(self.problem)


class Algorithm(Protocol):
    """A search algorithm: a row of the table in `method.py`. Its fields are its settings."""

    def applies(self, part: ProblemPart, run: SolverRun) -> bool:
        """Whether the algorithm is worth a try on this part."""
        ...

    def improve(self, part: ProblemPart, run: SolverRun) -> bool:
        """Offers choices to `part.incumbent` and proves bounds; whether the part is finished.

        The algorithm counts its work by `run.clock.spend`, which raises when time is up.

        Raises:
            NoChoice: no choice of the part is allowed and fits.
            SearchTimeout: time is up.
        """
        ...


class SolverRun:
    """One run of `solve`. If an exception ends it, `incumbent` has the best choice and bound so far."""

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int,
        threads: int,
        budget: Budget,
        iterations: int | None,
        counts_work: bool,
        goal: Goal,
        sizes: Sizes,
        algorithms: Sequence[Algorithm],
        progress: Callable[[Progress], None] | None,
    ):
        """
        Args:
            counts_work: whether the search of a large problem, too, ends by work instead of time.
        """
        self.seed, self.threads, self.goal, self.sizes, self.algorithms = seed, threads, goal, sizes, algorithms
        self.has_compiled = False  # whether compiled code is loaded
        self.memory_binds = False  # whether some part has positive prices of memory
        self.report = Report(progress)
        self.incumbent = Incumbent(problem, lambda: self.report.know(self.incumbent.cost, self.incumbent.bound))
        self.incumbent.tolerance = self._tolerance
        is_timed = iterations is None and not counts_work and self.is_large(problem)
        self.clock = Clock(
            budget, iterations, is_timed=is_timed, incumbent=self.incumbent, goal=goal, tick=self.report.tick
        )

    def begin(self) -> None:
        """Tries the first option of every node."""
        self.clock.begin(lambda: self.incumbent.offer([0] * len(self.incumbent.problem.costs)))

    def _tolerance(self) -> float:
        """The gap that is accepted for problems of many options."""
        bound = max(0.0, self.incumbent.bound)
        if self.clock.is_rejected:
            return self.goal.rejected_gap * bound if self.clock.left() else math.inf
        return (self.goal.priced_gap if self.memory_binds else self.goal.gap) * bound

    def solve(self, incumbent: Incumbent, *, bounds_pay: bool) -> None:
        """Simplifies a problem and solves it by its parts, small ones first.

        Raises:
            NoChoice: no choice is allowed and fits.
            SearchTimeout: time is up.
        """
        small = self.simplified(incumbent.problem)
        if not fits(small.rest, incumbent.problem.limit):
            raise NoChoice
        incumbents = self._incumbents(incumbent, small)
        try:
            self._solve_parts(incumbents, bounds_pay=bounds_pay, of_whole=incumbent is self.incumbent)
        finally:
            for part in incumbents:
                part.disconnect()

    def _solve_parts(self, incumbents: list[Incumbent], *, bounds_pay: bool, of_whole: bool) -> None:
        is_large = [self.is_large(part.problem) for part in incumbents]
        large = sum(is_large)
        left = sum(count_options(part.problem) for part in incumbents)
        for part in sorted(incumbents, key=lambda part: len(part.problem.costs)):
            large_now = self.is_large(part.problem)
            share = 1 / max(1, large)
            self._improve(ProblemPart(part, large_now, bounds_pay, of_whole=of_whole, share=share, options_left=left))
            large -= large_now
            left -= count_options(part.problem)

    def _incumbents(self, whole: Incumbent, small: Simplification) -> list[Incumbent]:
        """The incumbents of the parts. They report choices and bounds to the incumbent of the whole."""
        parts: list[Incumbent] = []
        last: tuple[tuple[int, ...], ...] | None = None  # the choices of the last offer

        def tell() -> None:
            nonlocal last
            chosen = tuple(part.choice for part in parts if part.choice is not None)
            if len(chosen) == len(parts) and chosen != last:
                last = chosen
                whole.offer(small.invert(chosen))
            whole.prove(small.constant + math.fsum(part.bound for part in parts))

        for problem in small.parts:
            part = Incumbent(problem, tell)
            part.bound = least_sum(problem)
            part.tolerance = lambda: whole.tolerance() / len(small.parts)
            part.always_tolerant = whole.always_tolerant
            parts.append(part)
        if whole.choice is not None:
            for part, start in zip(parts, small.starts(whole.choice), strict=True):
                part.start = start
        tell()
        return parts

    def _improve(self, part: ProblemPart) -> None:
        for algorithm in self.algorithms:
            if algorithm.applies(part, self) and algorithm.improve(part, self):
                return

    def simplified(self, problem: Problem) -> Simplification:
        """A problem in its smallest equal parts.

        Raises:
            NoChoice: every choice is forbidden.
        """
        reduce = self.load_compiled().reduce if self.is_large(problem) else None
        try:
            with self.report.during("simplify"):
                return simplify(problem, tick=lambda: self.clock.spend(SECONDS_PER_REDUCTION), reduce=reduce)
        except SolverError as error:
            raise NoChoice(str(error)) from None

    def is_large(self, problem: Problem) -> bool:
        """Whether compiled code pays."""
        sizes = self.sizes
        least = min(sizes.loaded_options, sizes.compiled_options) if self.has_compiled else sizes.compiled_options
        if count_options(problem) > least:
            return True
        lives = problem.lives if problem.can_memory_bind else ()
        return count_options(problem) + sum(len(live.usage) for live in lives) > least

    def load_compiled(self) -> ModuleType:
        """The code for large problems, ready to run."""

        def tick() -> None:
            if time.monotonic() - self.report.entered > COMPILING_SECONDS:
                self.report.stage = "compile, the first time only"
            self.clock.check()

        with self.report.during("load compiled code"):
            large = result_of(begin_loading_compiled(), tick)
        self.has_compiled = True
        return large

    def load_programs(self) -> ModuleType:
        """The module of integer programs. It is imported late, since this takes a second and may lose a Ctrl-C."""
        with self.report.during("load the integer program"):
            return in_background(_load_programs, self.clock.check)


def count_options(problem: Problem) -> int:
    """The options of all nodes together."""
    return sum(map(len, problem.costs))


@functools.cache  # a second call in a process that has compiled would start others that compile
def begin_loading_compiled() -> Future[ModuleType]:
    """Starts to load the code for large problems. The first load on a machine compiles it, which takes a while."""
    return begun(_load_compiled)


def _load_compiled() -> ModuleType:
    large = importlib.import_module("autoshard.solver.local_search.large_search")  # needs numba, which takes its time
    large.warm_up()
    return large


def _load_programs() -> ModuleType:
    return importlib.import_module("autoshard.solver.exact.integer_program")
