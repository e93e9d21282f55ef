"""A `Problem` in, a verified `Solution` out: simplify; per part, bounds, moves and an integer program; the way back.

Of a problem that repeats itself, what is alike is solved as one first. Small parts are left to the integer program,
larger ones to what bounds say of single options first, and the largest to compiled code on several cores, which takes
seconds to load and the first time more to compile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from autoshard.errors import SolverError
from autoshard.solver.bounds.message_passing import Prices, Relaxation, finite
from autoshard.solver.exact.elimination import (
    MOST_ENTRIES,
    SECONDS_PER_ENTRY,
    SECONDS_PER_NODE,
    Order,
    cheapest,
    order_of,
)
from autoshard.solver.presolve.simplify import Simplified, simplify
from autoshard.solver.problem import ForbiddenError, InfeasibleError, Problem, Solution, relative_gap
from autoshard.solver.progress import Progress
from autoshard.solver.runtime.background import aside
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.search.forest_moves import FEW, Moves, good_choices, move_seconds
from autoshard.solver.search.reduce_memory import leaner
from autoshard.solver.symmetry.layers import Tied, tied
from autoshard.solver.symmetry.lifted import lifted
from autoshard.solver.symmetry.node_kinds import Alike
from autoshard.solver.verify import OPTIMAL_GAP, check, fits, verify

if TYPE_CHECKING:
    from autoshard.solver.large import Found

ENOUGH = OPTIMAL_GAP / 10  # the gap at which a part counts as solved; finer, to leave room for rounding
SECONDS = 60.0  # to spend, if nothing else is asked for
GRACE = 3.0  # s, or iterations, past the limit to find a first choice
FINISH = 3.0  # times what it takes to verify a choice: what is left for the end, ...
FINISH_SHARE = 0.2  # ... but no more than this of the time limit
FEW_OPTIONS = 4000  # that the integer program takes at once
NARROW = 5  # times as many, if that is possible, are eliminated first
PRICED_TURNS, PRICED_SECONDS = 20, 0.03  # of elimination at prices of memory, and what each may take
MANY_ENTRIES = 2**30  # of elimination, instead of an integer program
MANY_OPTIONS = 60_000  # more than the integer program can find the leanest choice of
MUCH = 200_000  # options, and bytes that they hold in all their lives, from which on compiled code pays, ...
LESS = 20_000  # ... and from which on once it is loaded
PLAIN_SHARE = 0.5  # of the time left: what goes by before compiled code has to help with a smaller problem
BOUNDS_SHARE = 0.5  # of that: what goes by before choices are looked for in other ways
PROGRAM_SHARE = 0.3  # of the time left: what the integer program gets in turn with searches
COMPILES = 3.0  # s: what takes longer than this to load is being compiled
VISIT = 1e-4  # s of a quiet core: one step of simplifying, ...
LOOK_ALIKE = 2e-5  # ... what it takes to compare a node or an edge with others, ...
BUILD = 10  # ... and a relaxation, in sweeps
EVERY = 0.4  # s between two reports of progress, if nothing changes
SHARES = (0.001, 0.03, 0.2, 1.0)  # of what is between bound and best choice: how dear options may be, in turn
FEWER = 0.5  # of the options: if more are left, bounds are not worth looking for again
REPEATED = 20_000  # options from which on what repeats itself is solved as one ...
KINDS = 0.6  # ... if no more than this share of the nodes are different,
FEW_KINDS = 0.25  # ... or, if memory binds, than this
FEW_LIFTED = 0.5  # of the nodes: with more kinds in a lifted bound, that of the whole costs no more
CLOSE = 0.01  # the gap that is small enough for a problem of the planner, ...
CLOSE_IF_BINDING = 0.005  # ... and for one of no more than REPEATED options once memory has prices
QUICK = 10.0  # s of a quiet core: bounds without prices that take longer are left alone, too, when they are as close
POLISH_SHARE = 0.05  # of the work left: what is done beyond bounds once they are
CLOSER = 0.3  # of that: with a smaller gap, or when ten sweeps bring less of it than STALLED, bounds are left alone
STALLED = 0.2
HOPELESS = 0.02  # the same of lifted bounds, which are quick, and while the gap is too large: what follows is not
NEAR = 0.05  # of the bound: what a choice may cost more to be worth moves
CHOOSING = 10  # sweeps between two choices in which layers may differ
LEAN_SHARE = 0.5  # of the time left: what is given to how much memory would do, where nothing fits
LAYERS_SHARE = 0.25  # of the time left: what solving it as one gets
ROUGH = 0.05  # the gap that is small enough while the best choice is not accepted, ...
ROUGH_SHARE = 0.5  # ... and how much of the time such choices get


def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    threads: int | None = None,
    layered: bool = False,
    gap: float = 0.0,
    accepts: Callable[[Sequence[int]], bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
    budget: Budget | None = None,
) -> Solution:
    """The cheapest choice within the memory limit, and how far from it any other could be.

    When time runs out, or the user presses Ctrl-C, the best choice so far is returned with the bound proven so far.
    It costs no more than the first option of every node, if that one fits.

    >>> from autoshard.solver.problem import Edge
    >>> edge = Edge(0, 1, np.array([[5.0, 0.0], [0.0, 5.0]]))
    >>> solve(Problem((np.array([0.0, 1.0]), np.array([0.0, 3.0])), (edge,), (), None))
    Solution(choice=(1, 0), cost=1.0, bound=1.0, status='optimal')

    Args:
        time_limit: seconds to spend, what follows the search included; None: 60, or as long as the iterations take. The
            search ends by the work in it, before that unless the machine is busy: the same problem and time limit give
            the same solution. Only a problem for compiled code that is not `layered` is searched until time is up.
        iterations: how much to search: rounds of a large problem, each of which takes about half a second of every
            core, and looks of HiGHS at whether to stop. The same problem, seed and iterations give the same solution,
            however busy the machine is and with however many threads, unless a time limit ends the search.
        seed: of the random numbers inside. The same problem and seed give the same optimal solution in any process.
        threads: that search side by side where a problem is large; None: one per core.
        layered: whether to solve what repeats itself as one first, as layers of a model that memory binds little, and
            to leave a problem of thousands of options alone within one percent, or half of that where memory binds it.
        gap: the relative gap with which any problem is left alone, however few options it has, as far as the bound
            shows by then: an integer program is held to the one known when it starts.
        accepts: whether a choice is of use, where that takes more than the problem says. While the best one is not, it
            is left alone within five percent, or after half of the time: what is of use comes of another problem.
        progress: told what is known when that changes, when the solver turns to something else, and twice a second.
        budget: what may be spent, instead of a time limit, by this search and others.

    Raises:
        InfeasibleError: nothing fits in memory; it carries the smallest limit that would do.
        SolverError: every choice is forbidden, or none was found in time.
        KeyboardInterrupt: Ctrl-C, before any choice was found.
    """
    if time_limit is None:
        time_limit = usual_limit(iterations)
    paced = budget is not None or layered
    budget = budget or Budget.of(time_limit)
    search = _Search(problem, seed, budget, iterations, threads or _cores(), progress)
    search.timed = iterations is None and not paced and search.is_large(problem)
    known = search.known
    search.accepts = accepts and functools.lru_cache(maxsize=1)(accepts)
    search.early = gap > 0
    if layered:
        search.enough = CLOSE, CLOSE_IF_BINDING if _options(problem) <= REPEATED else CLOSE
    if gap:
        search.enough = gap, gap
    try:
        known.prove(_least_sum(problem))
        search.begin()
        search.check_time()
        if not (layered and search.solve_repeated(known)):
            search.solve(known, relax=True)
            if layered and known.choice is not None:
                lean = leaner(problem, known.choice, seed)
                if not accepts or search.rough or accepts(lean):
                    known.settle(lean)
    except _TimeUp:
        pass
    except KeyboardInterrupt:
        budget.interrupt()
        if known.choice is None:
            raise
    except _Nothing:
        raise _infeasible(problem, search) from None
    if known.choice is None:
        raise _unknown(problem, f"{time_limit:g} s" if iterations is None else f"{iterations} iterations")
    seconds = search.report.finish()
    solution = Solution(known.choice, known.cost, 0.0, "feasible", seconds)
    solution = with_bound(solution, known.bound)
    check(problem, solution)
    return solution


def usual_limit(iterations: int | None) -> float:
    """Seconds to spend where nobody says how many: as long as it takes, if iterations are counted."""
    return SECONDS if iterations is None else math.inf


def with_bound(solution: Solution, bound: float) -> Solution:
    """The solution with this proven bound, which says no more than what it costs, and the status that follows."""
    bounded = replace(solution, bound=min(bound, solution.cost))
    return replace(bounded, status="optimal" if bounded.gap <= OPTIMAL_GAP else "feasible")


class _TimeUp(Exception):
    """The time limit has passed."""


class _Nothing(Exception):
    """No choice is allowed and fits."""


class _Known:
    """The best choice and bound of a problem by now. Whatever is learnt goes on to the problem it is a part of."""

    def __init__(self, problem: Problem, tell: Callable[[], None] = lambda: None):
        self.problem = problem
        self.best: tuple[tuple[int, ...], float] | None = None  # one value, so that Ctrl-C finds both or neither
        self.bound = -math.inf
        self.tell = tell
        self.tolerance: Callable[[], float] = lambda: 0.0  # how far from the best a choice of many options may be
        self.hasty = False  # whether one so close ends the search even while memory costs nothing, which is quick

    @property
    def choice(self) -> tuple[int, ...] | None:
        return self.best[0] if self.best else None

    @property
    def cost(self) -> float:
        return self.best[1] if self.best else math.inf

    @property
    def target(self) -> float:
        """What a choice must cost less than to be called better."""
        return self.cost - ENOUGH * abs(self.cost) if self.best else math.inf

    @property
    def solved(self) -> bool:
        return self.bound >= self.target

    @property
    def gap(self) -> float:
        return relative_gap(self.cost, self.bound) if self.best else math.inf

    @property
    def close(self) -> bool:
        """Whether the best choice is good enough where more options are left than are solved at once."""
        return self.solved or self.cost - self.bound <= self.tolerance()

    def offer(self, choice: Sequence[int]) -> None:
        """Takes the choice if it is the best that fits."""
        cost, peak = verify(self.problem, choice)
        if cost < self.cost and fits(peak, self.problem.limit):
            self.best = tuple(map(int, choice)), cost
            self.tell()

    def settle(self, choice: Sequence[int]) -> None:
        """Takes a choice that is as good as the best."""
        self.best = tuple(choice), verify(self.problem, choice)[0]

    def prove(self, bound: float) -> None:
        """Takes the bound if it is the highest."""
        if bound > self.bound:
            self.bound = bound
            self.tell()


class _Report:
    """Tells what is known, and keeps where the time went."""

    def __init__(self, progress: Callable[[Progress], None] | None):
        self.progress = progress
        self.start = self.entered = time.monotonic()
        self.last = -math.inf  # when it told the last time
        self.stage = "start"
        self.seconds: dict[str, float] = {}
        self.cost, self.bound = math.inf, -math.inf

    @contextlib.contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Time from here on goes to this stage."""
        outer = self.enter(stage)
        try:
            yield
        finally:
            self.enter(outer)

    def enter(self, stage: str) -> str:
        """Leaves the present stage, and says which it was."""
        now = time.monotonic()
        self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + now - self.entered
        outer, self.stage, self.entered = self.stage, stage, now
        self.tell()
        return outer

    def finish(self) -> dict[str, float]:
        self.enter("end")
        return self.seconds

    def know(self, cost: float, bound: float) -> None:
        self.cost, self.bound = cost, bound
        self.tell()

    def tick(self) -> None:
        """Tells again after a while."""
        if self.progress and time.monotonic() - self.last > EVERY:
            self.tell()

    def tell(self) -> None:
        if self.progress:
            self.last = time.monotonic()
            self.progress(Progress(self.stage, self.cost, self.bound, self.last - self.start))


class _Search:
    """One run of `solve`. Time that is up and Ctrl-C leave it as exceptions; what it learnt by then is in `known`."""

    def __init__(
        self,
        problem: Problem,
        seed: int,
        budget: Budget,
        iterations: int | None,
        threads: int,
        progress: Callable[[Progress], None] | None,
    ):
        self.seed, self.threads, self.budget = seed, threads, budget
        self.loaded = False  # compiled code
        self.early = False  # whether integer programs, too, end when a choice is close
        self.enough = 0.0, 0.0  # the gap with which a choice is, and with which where memory binds
        self.binds = False  # whether it does
        self.accepts: Callable[[Sequence[int]], bool] | None = None
        self.grace = GRACE
        self.report = _Report(progress)
        self.done: float | None = None if iterations is None else 0.0  # iterations; None: work is counted
        self.timed = False  # whether the clock decides, instead of work
        self.latest = budget.until
        self.deadline = budget.work if iterations is None else float(iterations)
        self.rough_until = math.inf
        self.known = _Known(problem, lambda: self.report.know(self.known.cost, self.known.bound))  # of the whole
        self.known.tolerance = self.tolerance

    def begin(self) -> None:
        """Tries the first option of every node, and sets time aside for what comes when time is up."""
        start = time.monotonic()
        self.known.offer([0] * len(self.known.problem.costs))
        if self.done is None:
            left = max(0.0, self.latest - time.monotonic())
            self.latest -= min(FINISH * (time.monotonic() - start), FINISH_SHARE * left)
        if self.timed:
            self.deadline = self.latest
        self.rough_until = self.now() + ROUGH_SHARE * self.left()

    def now(self) -> float:
        """Iterations that are done, or work, or seconds."""
        if self.done is not None:
            return self.done
        return time.monotonic() if self.timed else self.budget.done

    def left(self) -> float:
        """Iterations, work or seconds until time is up, for a choice like the best one."""
        return max(0.0, min(self.deadline, self.rough_until if self.rough else math.inf) - self.now())

    @property
    def rough(self) -> bool:
        """Whether the best choice is one that is not accepted."""
        choice = self.known.choice
        return self.accepts is not None and choice is not None and not self.accepts(choice)

    def tolerance(self) -> float:
        """How far from the best a choice of many options may be."""
        if not self.rough:
            return self.enough[self.binds] * max(0.0, self.known.bound)
        return ROUGH * max(0.0, self.known.bound) if self.left() else math.inf

    def check_time(self) -> None:
        self.report.tick()
        grace = 0.0 if self.known.best else self.grace
        if self.now() - self.deadline > grace or time.monotonic() - self.latest > grace:
            raise _TimeUp

    def count(self, iterations: float) -> None:
        if self.done is not None:
            self.done += iterations

    def spend(self, seconds: float) -> None:
        """Counts work; what takes long ends with this."""
        self.budget.spend(seconds)
        self.check_time()

    def look(self) -> bool:
        """Counts a look of HiGHS as an iteration: whether that was the last one."""
        self.count(1)
        return self.left() == 0

    def look_at_work(self, seconds: float) -> bool:
        """Counts the work of HiGHS: whether that was the last."""
        self.budget.spend(seconds)
        return self.left() == 0

    def solve(self, known: _Known, *, relax: bool) -> None:
        """Simplifies a problem and solves it by its parts.

        Raises:
            _Nothing: no choice is allowed and fits.
        """
        small = self.simplified(known.problem)
        if not fits(small.rest, known.problem.limit):
            raise _Nothing
        parts: list[_Known] = []
        offered: list[tuple[tuple[int, ...], ...]] = []  # the last one

        def tell() -> None:
            chosen = tuple(part.choice for part in parts if part.choice is not None)
            if len(chosen) == len(parts) and [chosen] != offered:
                offered[:] = [chosen]
                known.offer(small.invert(chosen))
            known.prove(small.constant + math.fsum(part.bound for part in parts))

        for problem in small.parts:
            parts.append(_Known(problem, tell))
            parts[-1].bound = _least_sum(problem)
            parts[-1].tolerance = lambda: known.tolerance() / len(small.parts)
            parts[-1].hasty = known.hasty
        tell()
        large = sum(self.is_large(part.problem) for part in parts)
        for part in sorted(parts, key=lambda part: len(part.problem.costs)):
            options = _options(part.problem)
            if self.eliminated(part):
                continue
            if relax and self.is_large(part.problem):
                with self.hurry(1 / large):
                    self.search(part)
                large -= 1
            elif relax and (options > FEW_OPTIONS or part.hasty):
                whole = known is self.known
                with self.report.during("bounds"), self.hurry(PLAIN_SHARE if whole else 1.0):
                    self.relax(part)
                    continue
                self.search(part)  # there was too little time, and some is left
            else:
                self.move(part)
                self.program(part)

    def eliminated(self, known: _Known, most: float = MOST_ENTRIES) -> bool:
        """Solves a problem by bucket elimination, memory aside, where that is quick: whether this settles it.

        Args:
            most: entries of all tables together.

        Raises:
            _Nothing: every choice is forbidden.
        """
        if self.is_large(known.problem) or _options(known.problem) > NARROW * FEW_OPTIONS:
            return False
        if self.done is None:
            most = min(most, self.left() / SECONDS_PER_ENTRY)
        order = order_of(known.problem, int(most))
        self.spend(SECONDS_PER_NODE * len(known.problem.costs))
        if order is None:
            return False
        with self.report.during("elimination"):
            choice = cheapest(known.problem, order)
            self.budget.spend(order.seconds)
        if choice is None:
            raise _Nothing
        known.offer(choice)
        known.prove(verify(known.problem, choice)[0])
        if not known.solved and order.seconds < PRICED_SECONDS:
            self.eliminate_priced(known, order)
        return known.solved

    def eliminate_priced(self, known: _Known, order: Order) -> None:
        """Looks for choices that fit: the cheapest at prices of memory that rise until one does, and fall again."""
        moves = Moves(known.problem, np.random.default_rng(self.seed))
        prices = Prices(known.problem)
        ends = np.cumsum(list(map(len, known.problem.costs)))[:-1]
        with self.report.during("elimination"):
            for _ in range(PRICED_TURNS):
                prices.set(moves.prices)
                costs = tuple(np.split(prices.costs, ends))
                choice = cheapest(replace(known.problem, costs=costs, checked=True), order)
                self.spend(order.seconds + move_seconds(known.problem))
                moves.choice = np.array(choice)
                if moves.adjust_prices():
                    moves.descend()
                    known.offer(moves.choice.tolist())

    def simplified(self, problem: Problem) -> Simplified:
        """A problem in its smallest equal parts.

        Raises:
            _Nothing: every choice is forbidden.
        """
        reduce = self.compiled().reduce if self.is_large(problem) else None
        try:
            with self.report.during("simplify"):
                return simplify(problem, tick=lambda: self.spend(VISIT), reduce=reduce)
        except SolverError as error:
            raise _Nothing(str(error)) from None

    def least_at(self, point: int) -> float:
        """A bound on the bytes that any choice holds at one point."""
        problem = self.known.problem
        held = [np.zeros(len(costs)) for costs in problem.costs]
        for live in problem.lives:
            if live.start <= point < live.end:
                held[live.node] += live.usage
        there = _Known(_at_no_cost(problem, held))
        with contextlib.suppress(_TimeUp):
            self.solve(there, relax=True)
        return there.bound

    def solve_repeated(self, known: _Known) -> bool:
        """Solves a large problem with one option for all nodes alike, first as if there were no memory limit.

        What that costs is held against a bound for the problem itself, in which they may differ; returns whether the
        two are close enough.
        """
        if _options(known.problem) <= REPEATED:
            return False
        with self.report.during("layers"):
            self.spend(LOOK_ALIKE * (len(known.problem.costs) + len(known.problem.edges)))
            alike = Alike(known.problem)
            one = tied(alike)
        share = len(one.problem.costs) / len(known.problem.costs)
        if share > KINDS:
            return False
        for limit in dict.fromkeys([None, known.problem.limit if share <= FEW_KINDS else None]):
            small = _Known(replace(one.problem, limit=limit, checked=True))
            small.prove(_least_sum(small.problem))
            fit = functools.lru_cache(maxsize=1)(one.fits)
            small.hasty = True
            small.tolerance = functools.partial(_tolerance, small, fit)
            try:
                with self.hurry(LAYERS_SHARE):
                    self.solve(small, relax=True)
            except _Nothing:
                return False
            finally:
                if small.choice is not None:
                    known.offer(one.expand(leaner(one.problem, small.choice, self.seed)))
            if one.fits(small.choice):
                break
        else:
            return False
        with self.report.during("bounds"):
            self.prove_apart(known, alike, one if limit is not None else None)
        return known.gap <= CLOSE

    def prove_apart(self, known: _Known, alike: Alike, priced: Tied | None) -> None:
        """Looks for a bound of a problem that was solved as one, and for choices in which nodes alike differ.

        Args:
            priced: the small problem if memory binds: it has the same points, and prices are found there.
        """
        dear = 2 * abs(known.cost)
        few = None if priced else lifted(alike, FEW_LIFTED * len(known.problem.costs))
        if few:
            self.raise_bound(known, Relaxation(replace(few, problem=finite(few.problem, dear))), choose=False)
            if known.gap <= CLOSE:
                return
        relaxation = Relaxation(finite(known.problem, dear))
        if priced:
            small = Relaxation(finite(priced.problem, dear))
            for _ in small.rounds(lambda: known.cost):
                self.spend(small.seconds)
            relaxation.prices.set(small.prices.values)
        self.raise_bound(known, relaxation, choose=True)

    def raise_bound(self, known: _Known, relaxation: Relaxation, *, choose: bool) -> None:
        """Raises the bound as long as that pays.

        Args:
            choose: whether the relaxation is of the problem itself: it then has choices, in which nodes alike differ.
        """
        before = known.bound
        for count in itertools.count(1):
            turn = count % CHOOSING == 0
            self.spend(relaxation.seconds)
            known.prove(relaxation.sweep(forward=count % 2 == 1, choose=choose and turn))
            better = relaxation.better(known.cost)
            if better is not None:
                known.offer(better)
            if known.gap <= CLOSER * CLOSE:
                return
            if turn:
                little = STALLED if choose and known.gap <= CLOSE else HOPELESS
                if known.bound - before < little * known.gap * abs(known.cost):
                    return
                before = known.bound

    def search(self, known: _Known) -> None:
        """Solves a problem as far as time allows with compiled code."""
        large = self.compiled()
        search = large.LargeSearch(known.problem, seed=self.seed, threads=self.threads, counted=not self.timed)
        most = _most_sum(known.problem)
        programmed = False
        with self.report.during("search"):
            try:
                for found in search.rounds(lambda: known.choice, self.left, self.check_time):
                    self.learn(known, found)
                    self.count(found.iterations)
                    self.budget.spend(large.SECONDS_PER_ROUND * found.iterations)
                    if known.bound > most + ENOUGH * abs(most):
                        raise _Nothing
                    if found.settled and not programmed and not known.solved:
                        programmed = True
                        self.fix(known, search.ascent.least())
                    if known.close:
                        return
            finally:  # time that is up and Ctrl-C come in the midst of a round
                self.learn(known, search.found(None))

    def learn(self, known: _Known, found: Found) -> None:
        if found.choice is not None:
            known.offer(found.choice)
        known.prove(found.bound)

    def fix(self, known: _Known, least: np.ndarray) -> None:
        """Solves a problem with the options that a better choice can have, if these are few."""
        sizes = [len(costs) for costs in known.problem.costs]
        per_node = np.split(least, np.cumsum(sizes)[:-1])
        for share in SHARES if known.best else ():
            ceiling = min(known.bound + share * (known.cost - known.bound), known.target)
            if known.close or (least < ceiling).sum() > FEW_OPTIONS:
                return
            with self.hurry(PROGRAM_SHARE):
                self.solve_below(known, ceiling, per_node)
        if not known.close and len(least) <= FEW_OPTIONS:
            with self.hurry(PROGRAM_SHARE):
                self.program(known)

    @contextlib.contextmanager
    def hurry(self, share: float) -> Iterator[None]:
        """Gives what follows a share of the time that is left, and goes on when that is up."""
        deadline = self.deadline
        self.deadline = self.now() + share * self.left()
        try:
            yield
        except _TimeUp:
            if self.now() >= deadline or time.monotonic() >= self.latest:
                raise
        finally:
            self.deadline = deadline

    def is_large(self, problem: Problem) -> bool:
        """Whether compiled code pays."""
        much = min(LESS, MUCH) if self.loaded else MUCH
        lives = problem.lives if problem.limit is not None else ()
        return _options(problem) + sum(len(live.usage) for live in lives) > much

    def compiled(self) -> ModuleType:
        """The code for large problems, ready to run."""

        def tick() -> None:
            if time.monotonic() - self.report.entered > COMPILES:
                self.report.stage = "compile, the first time only"
            self.check_time()

        with self.report.during("load compiled code"):
            large = aside(_load, tick)
        self.loaded = True
        return large

    def programs(self) -> ModuleType:
        """The integer programs; what they import takes a second, in which it can lose a Ctrl-C."""
        with self.report.during("load the integer program"):
            return aside(lambda: importlib.import_module("autoshard.solver.exact.integer_program"), self.check_time)

    def limits(self) -> dict[str, Any]:
        """What an integer program may spend."""
        if self.timed:
            return {"time_limit": self.left()}
        time_limit = max(0.0, self.latest - time.monotonic())
        if self.done is not None:
            return {"time_limit": time_limit, "look": self.look, "spend": self.look_at_work}
        return {"time_limit": time_limit, "spend": self.look_at_work}

    def relax(self, known: _Known) -> None:
        """Solves a problem by what its bound says of single options.

        Options that are too dear to be in a better choice are forbidden. If options are forbidden that are too dear for
        a choice much better than the best one known, the rest is small, and often has an optimum that is as good as any
        choice with the others could be.
        """
        most = _most_sum(known.problem)
        start = self.budget.done
        relaxation = Relaxation(known.problem)
        self.spend(BUILD * relaxation.seconds)
        moves = functools.cache(lambda: Moves(known.problem, np.random.default_rng(self.seed)))
        with self.hurry(BOUNDS_SHARE):
            for choice, bound in relaxation.rounds(lambda: known.cost):
                self.budget.spend(relaxation.seconds)
                if choice is not None:
                    known.offer(choice)
                    if relaxation.cost - bound <= NEAR * abs(bound):
                        self.improve(known, moves(), choice, relaxation.prices.values)
                known.prove(bound)
                if known.bound > most + ENOUGH * abs(most):
                    raise _Nothing
                priced = relaxation.prices.values.any()
                self.binds |= bool(priced)
                slow = self.budget.done - start > QUICK
                if known.solved or ((priced or known.hasty or slow) and known.close):
                    return
                self.check_time()
        near = any(self.enough) and known.gap <= CLOSE
        with self.hurry(POLISH_SHARE) if near else contextlib.nullcontext():
            self.solve_with_few(known, relaxation)

    def solve_with_few(self, known: _Known, relaxation: Relaxation) -> None:
        """Solves a problem with more and more of its options, cheap ones first."""
        moved = False
        if not known.best:
            self.move(known)
            moved = True
        backward, forward = relaxation.least(forward=False), relaxation.least(forward=True)
        least = [np.maximum(a, b) for a, b in zip(backward, forward, strict=True)]
        dearest = max(map(np.max, least)) + ENOUGH
        for share in SHARES:
            if known.solved:
                return
            ceiling = min(known.bound + share * (min(known.cost, dearest) - known.bound), known.target)
            self.solve_below(known, ceiling, least)
            if not moved and not known.close:
                self.move(known)
                moved = True
            if known.close:
                return
        if not known.close:
            self.program(known)

    def solve_below(self, known: _Known, ceiling: float, least: Sequence[np.ndarray]) -> None:
        """Solves a problem with only those options that choices below the ceiling may have."""
        allowed = {node: np.flatnonzero(costs < ceiling) for node, costs in enumerate(least)}
        left = sum(map(len, allowed.values())) / sum(map(len, least))
        if left == 1:
            return
        fewer = _Known(known.problem.restrict(allowed))
        fewer.tolerance, fewer.hasty = known.tolerance, known.hasty

        def tell() -> None:
            if fewer.choice is not None:
                known.offer(fewer.choice)
            known.prove(min(ceiling, fewer.bound))

        fewer.tell = tell
        try:
            self.solve(fewer, relax=left < FEWER)
        except _Nothing:
            known.prove(ceiling)

    def improve(self, known: _Known, moves: Moves, choice: Sequence[int], prices: np.ndarray) -> None:
        """Offers what moves make of a choice, again as long as that is better than all before."""
        cost = math.inf
        while known.cost < cost:
            cost, better = known.cost, moves.improved(choice, prices)
            self.budget.spend(FEW * move_seconds(known.problem))
            if better is None:
                return
            known.offer(better)
            choice = better

    def move(self, known: _Known) -> None:
        """Looks for good choices."""
        with self.report.during("moves"):
            seconds = move_seconds(known.problem)
            for choice in good_choices(known.problem, self.seed):
                if choice is not None:
                    known.offer(choice)
                if known.solved:
                    return
                self.spend(seconds)

    def program(self, known: _Known) -> None:
        """Solves a problem as an integer program."""
        if known.solved or self.eliminated(known, MANY_ENTRIES):
            return
        ilp = self.programs()
        with self.report.during("integer program"):
            rough = self.rough
            gap = known.tolerance() if self.early or rough else 0.0
            outcome = ilp.cheapest(known.problem, known.choice, seed=self.seed, gap=gap, **self.limits())
        if outcome.bound == math.inf:
            raise _Nothing
        known.prove(outcome.bound)
        if outcome.choice is not None:
            known.offer(outcome.choice)
        if outcome.interrupted:
            raise KeyboardInterrupt
        self.check_time()
        if rough and not self.rough:
            self.program(known)  # on from a choice that is accepted


def _tolerance(known: _Known, fit: Callable[[Sequence[int] | None], bool]) -> float:
    """How far from the best the choice of a problem with one option for all nodes alike may be, if it fits."""
    near = CLOSER * CLOSE * max(0.0, known.bound)
    return near if known.cost - known.bound <= near and fit(known.choice) else 0.0


def _options(problem: Problem) -> int:
    return sum(map(len, problem.costs))


@functools.cache  # asked again, a process that has compiled would start another one to compile
def _load() -> ModuleType:
    from autoshard.solver import large  # needs numba, which takes its time

    large.warm_up()
    return large


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _least_sum(problem: Problem) -> float:
    """No choice costs less than the cheapest option of every node with the cheapest pair of every edge."""
    return math.fsum(costs.min() for costs in [*problem.costs, *(edge.costs for edge in problem.edges)])


def _most_sum(problem: Problem) -> float:
    """Every allowed choice costs at most the dearest option of every node with the dearest pair of every edge."""
    tables = [*problem.costs, *(edge.costs for edge in problem.edges)]
    return math.fsum(table[np.isfinite(table)].max(initial=-np.inf) for table in tables)


def _unknown(problem: Problem, spent: str) -> SolverError:
    """The error that says that time was too short."""
    message = f"no choice was found in {spent}, nor was it proven that there is none; raise time_limit"
    if problem.limit is None or not problem.lives:
        return SolverError(message)
    point, held = _floor(problem)
    limit = f"the limit is {problem.limit:.0f} bytes; point {point} needs {held:.0f} at least"
    return SolverError(f"{message} or the memory limit ({limit})")


def _infeasible(problem: Problem, search: _Search) -> SolverError:
    """The error that says how much memory would do. The search for it is a problem of its own: cost is no object."""
    search.grace = 0.0
    search.deadline = max(search.deadline, search.now() + 1)
    search.latest = max(search.latest, time.monotonic() + 1)
    try:
        with search.hurry(LEAN_SHARE):
            return _leanest(problem, search)
    except _TimeUp:
        pass
    except _Nothing as nothing:
        return ForbiddenError(str(nothing) or "every choice is forbidden")
    point, held = _floor(problem)
    with contextlib.suppress(_TimeUp):
        held = max(held, search.least_at(point))
    return SolverError(
        f"no choice fits in {problem.limit:.0f} bytes; point {point} needs {held:.0f} at least; "
        "how much memory would do was not found in time"
    )


def _leanest(problem: Problem, search: _Search) -> InfeasibleError:
    """The error that carries the least that a choice holds.

    Raises:
        _TimeUp: it was not found in time.
        _Nothing: every choice is forbidden.
    """
    free = _at_no_cost(problem, [np.zeros(len(costs)) for costs in problem.costs])
    small = search.simplified(replace(free, lives=problem.lives, limit=0.0))  # every point matters
    if max(map(_options, small.parts), default=0) > MANY_OPTIONS:
        raise _TimeUp
    ilp = search.programs() if small.parts else None
    outcomes = [ilp.leanest(part, seed=search.seed, **search.limits()) for part in small.parts] if ilp else []
    if any(outcome.interrupted for outcome in outcomes):
        raise KeyboardInterrupt
    if any(outcome.bound == math.inf for outcome in outcomes):
        raise _Nothing
    choices = [outcome.choice for outcome in outcomes]
    if None in choices:
        raise _TimeUp
    choice = small.invert(choices)
    _, needed = verify(problem, choice)
    point, _ = _fullest(problem, [live.usage[choice[live.node]] for live in problem.lives])
    held = f"the least that one holds is {needed:.0f}, at point {point}"
    assert problem.limit is not None, "without one every choice fits"
    message = f"no choice fits in {problem.limit:.0f} bytes; {held}"
    return InfeasibleError(message, limit=problem.limit, needed=needed, choice=choice)


def _at_no_cost(problem: Problem, costs: Sequence[np.ndarray]) -> Problem:
    """The problem with these costs, but for what is forbidden, and without memory."""
    return Problem(
        costs=tuple(np.where(np.isfinite(old), new, np.inf) for old, new in zip(problem.costs, costs, strict=True)),
        edges=tuple(replace(edge, costs=np.where(np.isfinite(edge.costs), 0.0, np.inf)) for edge in problem.edges),
        lives=(),
        limit=None,
    )


def _floor(problem: Problem) -> tuple[int, float]:
    """A program point, and the bytes that the leanest options of all nodes hold there: where that is most."""
    least = []
    for live in problem.lives:
        allowed = np.isfinite(problem.costs[live.node])
        least.append((live.usage[allowed] if allowed.any() else live.usage).min())
    return _fullest(problem, least)


def _fullest(problem: Problem, usages: Sequence[float]) -> tuple[int, float]:
    """The program point at which most is held, and how many bytes, when the lives hold this much."""
    ends = [[live.start for live in problem.lives], [live.end for live in problem.lives]]
    points, at = np.unique(np.array(ends, dtype=np.int64).ravel(), return_inverse=True)
    held_by = np.asarray(usages, dtype=np.float64)
    held = np.bincount(at, np.concatenate([held_by, -held_by])).cumsum()
    return int(points[held.argmax()]), float(held.max())
