"""A large `Problem` in, a proven bound and ever better choices out, from compiled code on several cores.

First prices on memory rise, one per byte and pressure point, along the slope of the bound that TRW-S proves under them:
Polyak's steps along a smoothed subgradient, that of all options mixed by how cheap they are, which varies less from
step to step than that of one choice. The price of a point moves in proportion to what it is already (as in
exponentiated gradients: Kivinen and Warmuth, 1997), since few points need one. Block moves go on under these prices,
and then let them follow the choice: up where it holds too much, down where it fits. When the bound has settled, moves
under prices that rise from low ones, and moves of few nodes take turns. Whatever a block move finds is made to fit, and
then improved node by node.

Searches run side by side, in rounds of about the same amount of work; between two rounds they tell each other what they
found. The same seed and number of searches find the same, however fast the machine is, up to the round that time allows
and up to the integer programs, which stop by the clock unless rounds are counted.
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

from autoshard.solver.arrays import Graph, Memory, graph_of, memory_of
from autoshard.solver.bounds import message_passing_compiled
from autoshard.solver.presolve.simplify_large import reduce
from autoshard.solver.problem import Edge, Live, Problem
from autoshard.solver.runtime.background import EVERY
from autoshard.solver.search import elimination_compiled, local_search_compiled
from autoshard.solver.search.neighbourhoods import Neighbourhoods, near

UNPRICED = 30  # pairs of sweeps before memory gets its first price
LENGTH = 0.5  # of Polyak's steps
REACH = 0.05  # of the bound: how far the first steps aim above the best one
FARTHER, NEARER, PATIENCE = 1.5, 0.7, 3  # factors of that: when a step gains much, and after so many that gain nothing
MUCH = 0.12  # of the reach
SETTLED, FINEST = 2e-4, 1e-6  # of the bound and of the first reach: a reach at which the bound will hardly rise further
AGAIN = 0.003  # of the bound: how far shorter steps aim, once it has settled under bold ones
SMOOTHING = 0.7  # of the slope of the bound that comes from earlier steps
NEW = 0.02  # of the largest price: how fast prices of points that have none yet rise, beside it
TEMPERATURE = 0.3  # of the gap per node, at which options are mixed
TINY = 1e-300  # instead of 0, to divide by
SWEEP = 2  # pairs of sweeps look at entries of tables, in those that block moves look at
GRID = 2.0**-52  # relative; prices are rounded so that their sums are exact
COUNTED = 3  # searches side by side, where their number may not depend on that of threads
ENTRIES = 1e4  # of a table in a block move, at most
PLANS = 24  # of block moves, per search
ROUND, LONG = 3e7, 2e8  # entries of tables looked at in a round: under half a second; beside an integer program
SECONDS_PER_ROUND = 1.6  # of a quiet core, of one search for every count of COUNTED and the ascent
OVERHEAD = 5e4  # what the calls of one step take, in such entries
REPAIRS = 100  # nodes that change to make a choice fit, at most
UP, DOWN = 1.03, 0.97  # of prices that follow a choice: where memory is over the limit, and where all fits
STEEP, TYPICAL = 1.5, 0.1  # while no choice is known: a factor, and of what a byte may cost on average what is added
MORE = 0.02  # of all prices together: what is spread over what is over the limit
FOLLOWING, RISING = 10, 12  # moves in a row: under prices that follow the choice, and under prices that rise before it
LOWEST = 0.1  # of the best prices: where they rise from
LOCAL = 40  # moves in a row near the best choice, of
SMALLEST, LARGEST = 0.02, 0.5  # of all nodes, under
LOW, HIGH = 0.3, 1.1  # of the best prices


@dataclass(frozen=True, eq=False)
class Found:
    """What is known after a round."""

    choice: tuple[int, ...] | None  # the best choice so far
    bound: float  # proven so far
    settled: bool  # the bound will hardly rise further
    iterations: float  # rounds that this one counts as


class LargeSearch:
    """Ascent of the bound and searches for choices, side by side."""

    def __init__(self, problem: Problem, *, seed: int, threads: int, counted: bool = False):
        """
        Args:
            counted: whether what is found may depend on nothing but the seed and the number of rounds.
        """
        searches = COUNTED if counted else max(1, threads - 1)
        self.graph, self.memory = graph_of(problem), memory_of(problem)
        self.stop = threading.Event()
        self.ascent = Ascent(self.graph, self.memory)
        self.searches = [Search(self.graph, self.memory, (seed, k)) for k in range(searches)]
        rng = np.random.default_rng([seed, searches])
        self.neighbourhoods = Neighbourhoods(problem, self.graph, rng, counted=counted)
        self.threads = threads

    def rounds(
        self, known: Callable[[], Sequence[int] | None], left: Callable[[], float], tick: Callable[[], None]
    ) -> Iterator[Found]:
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
                    tasks = [pool.submit(self.ascent.round, cost, self.stop, ROUND)]
                elif least is None:
                    tasks = [other := pool.submit(self.ascent.least)]
                elif first is not None:
                    improve = self.neighbourhoods.improve
                    tasks = [other := pool.submit(improve, first, least < cost, left(), self.stop)]
                long = least is not None and first is not None
                work = LONG if long else ROUND
                tasks += [pool.submit(search.round, self.stop, work) for search in self.searches]
                waited_for(tasks, tick)
                yield self.found(other.result() if long and other else None, work / ROUND)
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

    def found(self, choice: tuple[int, ...] | None, iterations: float = 0.0) -> Found:
        """The best of this choice and those of the searches."""
        best = min(self.searches, key=lambda search: search.cost)
        if choice is None or best.cost <= self.cost(choice):
            choice = None if best.best is None else tuple(best.best.tolist())
        return Found(choice, self.ascent.best, self.ascent.settled, iterations)

    def cost(self, choice: Sequence[int]) -> float:
        return message_passing_compiled.cost_of(self.graph, self.graph.costs, np.asarray(choice, dtype=np.int64))


def waited_for(tasks: Sequence[Future], tick: Callable[[], None]) -> None:
    """Returns when all tasks are done; raises what one of them raised."""
    while wait(tasks, timeout=EVERY).not_done:
        tick()
    for task in tasks:
        task.result()


def warm_up() -> None:
    """Compiles all of it, in a process beside this one too, or loads what was compiled before."""
    graph = graph_of(_smallest())
    message_passing_compiled.cost_of(graph, graph.costs, np.zeros(2, dtype=np.int64))
    beside = None
    if any(message_passing_compiled.cost_of.stats.cache_misses.values()):
        code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import warm_up_reductions as run; run()"
        beside = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _warm_up_searches()
    if beside is not None:
        beside.wait()  # what it could not leave on disk is compiled here
    warm_up_reductions()


def warm_up_reductions() -> None:
    reduce(_smallest(), lambda: None)


def _smallest() -> Problem:
    """Two nodes with memory between them."""
    edge = Edge(0, 1, np.array([[0.0, np.inf], [1.0, 0.0]]))
    lives = Live(0, 0, 1, np.array([1, 0])), Live(1, 0, 1, np.array([0, 1]))
    return Problem((np.array([0.0, 1.0]),) * 2, (edge,), lives, limit=1)


def _warm_up_searches() -> None:
    search = LargeSearch(_smallest(), seed=0, threads=1)
    search.ascent.round(2.0, search.stop, 1.0)
    search.ascent.least()
    for choice in ([0, 0], [1, 0]):
        search.searches[0].begin(choice, math.inf, search.ascent)
        search.searches[0].step()


class Ascent:
    """Messages and prices of a problem, on their way to the best bound."""

    def __init__(self, graph: Graph, memory: Memory):
        self.graph, self.memory = graph, memory
        self.to_left, self.to_right = np.zeros(graph.left_offsets[-1]), np.zeros(graph.right_offsets[-1])
        self.extra = np.empty(len(graph.costs))  # by how much options cost more than the best of their node
        self.choice = np.zeros(len(graph.offsets) - 1, dtype=np.int64)  # good under the present prices
        self.best, self.idle = -math.inf, 0
        self.owed = 0.0  # work that rounds have asked for, less what was done
        self.direction = np.zeros(len(memory.room))
        self.set_prices(np.zeros(len(memory.room)))
        self.best_prices = self.prices
        for _ in range(UNPRICED):
            self.best = max(self.best, self.sweep())
        self.reach = REACH * max(abs(self.best), float(np.ptp(graph.costs[graph.costs < np.inf])))
        self.finest = FINEST * self.reach
        self.work = SWEEP * len(graph.tables) + 4 * len(memory.usage) + OVERHEAD  # of one step
        self.bold = True  # steps may go too far, as long as that finds out where prices are needed
        self.settled = False  # going on is not worth it

    def round(self, known: float, stop: threading.Event, most: float) -> None:
        """Steps until that much work is done, given the cost of the best choice by now."""
        self.owed += most
        while self.owed > 0 and not (self.settled or stop.is_set()):
            self.owed -= self.step(known)
        message_passing_compiled.take(self.graph, self.costs, self.to_left, self.choice)

    def step(self, known: float) -> float:
        """Sweeps forward and backward, proves a bound and changes prices; returns how much work it was."""
        bound = self.sweep()
        gap, gained = min(max(known - self.best, 0.0), self.reach), bound - self.best
        if bound > self.best:
            self.reach *= FARTHER if bound > self.best + MUCH * gap else 1.0
            self.best, self.best_prices, self.idle = bound, self.prices, 0
        else:
            self.idle += 1
            if self.idle == PATIENCE:
                self.reach, self.idle = NEARER * gap, 0
        nodes = len(self.choice)
        temperature = max(TEMPERATURE * gap / nodes, TINY)
        over = message_passing_compiled.expected_over(self.graph, self.memory, self.extra, temperature)
        slope = np.where((over < 0) & (self.prices <= 0), 0.0, over)
        self.direction = SMOOTHING * self.direction + (1 - SMOOTHING) * slope
        scale = self.prices + NEW * self.prices.max() if self.prices.any() else np.ones(len(slope))
        square = (scale * self.direction**2).sum()
        if not self.bold:
            square = max(square, (scale * slope**2).sum())
        fine = self.reach < max(SETTLED * abs(self.best), self.finest)
        if square == 0:  # all fits at no price
            self.settled = not gained > SETTLED * self.reach
        elif fine and self.bold:
            self.bold, self.reach = False, max(AGAIN * abs(self.best), 10 * self.finest)
            self.direction = np.zeros(len(slope))
            self.set_prices(self.best_prices)
        elif fine:
            self.settled = True
        elif math.isfinite(bound):
            step = LENGTH * (self.best + gap - bound) / square
            self.set_prices(np.maximum(0.0, self.prices + step * scale * self.direction))
        return self.work

    def sweep(self, complete: bool = False) -> float:
        """Sweeps forward and backward: the bound that is proven."""
        parts = self.graph, self.costs, self.to_left, self.to_right, self.extra
        message_passing_compiled.sweep(*parts, True, False)
        bound, allowance = message_passing_compiled.sweep(*parts, False, complete)
        return bound - allowance - self.refund

    def least(self) -> np.ndarray:
        """What any choice with each option costs at least, under the best prices."""
        self.set_prices(self.best_prices)
        for _ in range(UNPRICED):
            self.sweep()
        bound = self.sweep(complete=True)
        self.best = max(self.best, bound)
        return bound + self.extra * (1 - 1e-9)

    def set_prices(self, prices: np.ndarray) -> None:
        total = prices.sum()
        if total > 0:
            grid = 2.0 ** math.ceil(math.log2(total)) * GRID
            prices = np.round(prices / grid) * grid
        self.prices = prices
        self.costs = message_passing_compiled.priced(self.graph, self.memory, prices)
        back = (prices * self.memory.room)[prices > 0]
        self.refund = math.fsum(back) + 8 * message_passing_compiled.HALF_ULP * math.fsum(np.abs(back))


class Moves:
    """Block moves over a graph. Plans are made as they are needed, and used again."""

    def __init__(self, graph: Graph, rng: np.random.Generator):
        self.graph, self.rng = graph, rng
        self.plans: list[elimination_compiled.Plan] = []
        self.frozen = np.zeros(len(graph.offsets) - 1)  # in how many plans each node is
        self.count = 0

    def move(self, costs: np.ndarray, choice: np.ndarray) -> float:
        """Improves a choice; returns how much work it was."""
        if len(self.plans) < PLANS and self.count % 2 == 0:
            chosen = self.new_plan()
        else:
            chosen = self.plans[self.rng.integers(len(self.plans))]
        self.count += 1
        elimination_compiled.move(self.graph, costs, chosen, choice)
        return chosen.work

    def new_plan(self) -> elimination_compiled.Plan:
        plan = self.plan(np.ones(len(self.frozen), dtype=bool), 0.7 * self.frozen)
        self.plans.append(plan)
        self.frozen[plan.frozen] += 1
        return plan

    def plan(self, movable: np.ndarray, reluctance: np.ndarray | float = 0.0) -> elimination_compiled.Plan:
        nodes = len(movable)
        reluctance = 2 * self.rng.random(nodes) + reluctance
        return elimination_compiled.plan(self.graph, movable, self.rng.random(nodes), reluctance, math.log(ENTRIES))


class Search:
    """Block moves under prices that follow the choice."""

    def __init__(self, graph: Graph, memory: Memory, seed: tuple[int, ...]):
        self.graph, self.memory = graph, memory
        self.rng = np.random.default_rng(seed)
        self.moves = Moves(graph, self.rng)
        self.lives = np.argsort(memory.node, kind="stable")
        self.starts = np.searchsorted(memory.node[self.lives], np.arange(len(graph.offsets)))
        self.best: np.ndarray | None = None
        self.cost, self.until_restart, self.rise = math.inf, 0, 1.0  # the factor of prices that rise
        self.owed = 0.0  # work that rounds have asked for, less what was done
        self.guide: tuple[np.ndarray, np.ndarray] = (
            np.zeros(0),
            np.zeros(0),
        )  # prices, and a choice that is good under them
        self.settled = self.local = False  # the guide will not change; moves go on near the best choice
        self.choice: np.ndarray = np.zeros(len(graph.offsets) - 1, dtype=np.int64)
        self.prices: np.ndarray = np.zeros(len(memory.room))
        finite = graph.tables[graph.tables < np.inf] if len(graph.tables) else graph.costs[graph.costs < np.inf]
        mean = memory.usage.mean() if len(memory.usage) else 1.0
        self.typical_price = TYPICAL * np.abs(finite).max(initial=0.0) / mean

    def begin(self, known: Sequence[int] | None, cost: float, ascent: Ascent) -> None:
        """Takes over what others found before a round."""
        if known is not None and cost < self.cost:
            self.best, self.cost = np.array(known, dtype=np.int64), cost
        self.guide, self.settled = (ascent.best_prices, ascent.choice.copy()), ascent.settled
        if not self.moves.count or (self.best is None and not self.prices.any()):
            self.restart()

    def round(self, stop: threading.Event, most: float) -> None:
        """Moves until that much work is done."""
        self.owed += most
        while self.owed > 0 and not stop.is_set():
            self.owed -= self.step()

    def step(self) -> float:
        """One block move, and what follows from it; returns how much work it was."""
        if self.until_restart <= 0:
            self.restart()
        self.until_restart -= 1
        if self.local:
            return self.local_step()
        work = self.moves.move(message_passing_compiled.priced(self.graph, self.memory, self.prices), self.choice)
        over = message_passing_compiled.over(self.memory, self.choice)
        work = 5 * work + self.improve(self.choice.copy(), over.copy())
        if self.until_restart > FOLLOWING:
            self.prices = self.rise * self.prices
        else:
            self.follow(over)
        return work + 100 * len(self.choice) + 20 * (len(self.memory.usage) + len(over)) + OVERHEAD

    def restart(self) -> None:
        """Goes on from where the ascent is; when it has settled, from low prices, and near the best choice, in turn."""
        self.prices, self.choice = self.guide[0], self.guide[1].copy()
        self.until_restart = FOLLOWING
        if self.settled and self.moves.count:
            self.local = self.best is not None and not self.local
            self.until_restart = LOCAL if self.local else RISING + FOLLOWING
            self.prices = self.prices * (low := self.between(LOWEST, 1.0))
            self.rise = low ** (-1 / RISING)

    def local_step(self) -> float:
        """Moves the nodes near a random one, others as they are in the best choice."""
        nodes = len(self.choice)
        size = math.ceil(nodes * self.between(SMALLEST, LARGEST))
        movable = np.zeros(nodes, dtype=bool)
        movable[near(self.graph, int(self.rng.integers(nodes)), size, self.rng)] = True
        plan = self.moves.plan(movable)
        assert self.best is not None, "it is near the best that is looked"
        choice = self.best.copy()
        costs = message_passing_compiled.priced(self.graph, self.memory, self.between(LOW, HIGH) * self.guide[0])
        elimination_compiled.move(self.graph, costs, plan, choice)
        work = self.improve(choice, message_passing_compiled.over(self.memory, choice))
        work += 5 * plan.work + 300 * nodes
        return work + 20 * (len(self.memory.usage) + len(self.prices)) + OVERHEAD

    def between(self, low: float, high: float) -> float:
        """A random number of any magnitude."""
        return low * (high / low) ** self.rng.random()

    def improve(self, choice: np.ndarray, over: np.ndarray) -> float:
        """Makes a choice fit, and cheaper, and keeps it if it is the best; both arguments change. Returns the work."""
        parts = self.graph, self.memory, self.starts, self.lives, choice, over
        fits, changes = local_search_compiled.repair(*parts, REPAIRS)
        if fits:
            local_search_compiled.descend(*parts)
            cost = message_passing_compiled.cost_of(self.graph, self.graph.costs, choice)
            if cost < self.cost:
                if self.best is None:
                    self.until_restart = 0  # prices rose steeply until something fitted
                self.best, self.cost = choice, cost
        return 100.0 * changes * len(choice)

    def follow(self, over: np.ndarray) -> None:
        """Lets prices rise where so many bytes are over the limit, or fall if none are."""
        more = np.maximum(over, 0.0)
        if self.best is None:  # anything that fits is welcome
            self.prices = np.where(over > 0, STEEP * self.prices + self.typical_price, self.prices)
        elif more.any():
            added = MORE * self.prices.sum() * more / more.sum()
            self.prices = np.where(over > 0, UP * self.prices, self.prices) + added
        else:
            self.prices = DOWN * self.prices
