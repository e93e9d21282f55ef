"""A problem that repeats itself, solved with one option for all nodes that look alike; how good that is, proven.

It comes before the table of algorithms, as it looks at the whole problem and not at its parts. Within it, the problem
of the kinds of nodes is solved as any other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.solver.bounds.message_passing import Relaxation, finite
from autoshard.solver.incumbent import Incumbent, least_sum
from autoshard.solver.local_search.reduce_memory import leaner_choice
from autoshard.solver.run import NoChoice, SolverRun, count_options
from autoshard.solver.symmetry.kind_problem import KindProblem, kind_problem
from autoshard.solver.symmetry.lifted_problem import lifted_problem
from autoshard.solver.symmetry.node_kinds import NodeKinds


@dataclass(frozen=True)
class RepeatedNodes:
    """Solves kinds of nodes, first as if there were no memory limit, and then within it."""

    least_options: int = 20_000  # from which on it pays
    kinds_share: float = 0.3  # of the nodes: with more kinds than this it does not pay
    priced_kinds_share: float = 0.25  # the same where memory binds
    lifted_kinds_share: float = 0.5  # of the nodes: with more kinds in a lifted bound, that of the whole costs no more
    comparing_seconds: float = 2e-5  # of a quiet core: what it takes to compare a node or an edge with others
    time_share: float = 0.25  # of the time left, for the problem of the kinds
    close_share: float = 0.3  # of the gap that is good enough: with a smaller one, bounds are left alone
    sweeps_per_choice: int = 10  # between two choices in which nodes alike may differ
    # Bounds are left alone when `sweeps_per_choice` sweeps close less than this share of the gap. Lifted bounds are
    # quick, and too large a gap is worth more sweeps: there the second share decides.
    stalled: float = 0.2
    stalled_lifted: float = 0.02

    def improve(self, incumbent: Incumbent, run: SolverRun) -> bool:
        """Offers choices and proves bounds; whether the two are as close as the goal has it."""
        problem = incumbent.problem
        if count_options(problem) <= self.least_options:
            return False
        with run.report.during("layers"):
            run.clock.spend(self.comparing_seconds * (len(problem.costs) + len(problem.edges)))
            node_kinds = NodeKinds(problem)
            small = kind_problem(node_kinds)
        share = len(small.problem.costs) / len(problem.costs)
        if share > self.kinds_share:
            return False
        limits = [None, problem.limit if share <= self.priced_kinds_share else None]
        for limit in dict.fromkeys(limits):
            try:
                kinds = self._solve_kinds(incumbent, small, limit, run)
            except NoChoice:
                return False
            if small.fits(kinds.choice):
                break
        else:
            return False
        with run.report.during("bounds"):
            self._prove(incumbent, node_kinds, small if limit is not None else None, run)
        return incumbent.gap <= run.goal.repeated_gap

    def _solve_kinds(self, incumbent: Incumbent, small: KindProblem, limit: float | None, run: SolverRun) -> Incumbent:
        """Solves the problem of the kinds within this limit, and offers its choice to the whole."""
        kinds = Incumbent(replace(small.problem, limit=limit, checked=True))
        kinds.prove(least_sum(kinds.problem))
        kinds.always_tolerant = True
        fits = functools.lru_cache(maxsize=1)(small.fits)
        kinds.tolerance = functools.partial(_tolerance, kinds, fits, self.close_share * run.goal.repeated_gap)
        try:
            with run.clock.hurry(self.time_share):
                run.solve(kinds, bounds_pay=True)
        finally:
            if kinds.choice is not None:
                incumbent.offer(small.expand(leaner_choice(small.problem, kinds.choice, run.seed)))
            kinds.disconnect()
        return kinds

    def _prove(self, incumbent: Incumbent, node_kinds: NodeKinds, priced: KindProblem | None, run: SolverRun) -> None:
        """Raises the bound of the whole, and offers choices in which nodes alike differ.

        Args:
            priced: the problem of the kinds if memory binds: it has the same points, and prices are found there.
        """
        dear = 2 * abs(incumbent.cost)
        few = None if priced else lifted_problem(node_kinds, self.lifted_kinds_share * len(incumbent.problem.costs))
        if few:
            relaxation = Relaxation(replace(few, problem=finite(few.problem, dear)))
            self._raise_bound(incumbent, relaxation, run, choose=False)
            if incumbent.gap <= run.goal.repeated_gap:
                return
        relaxation = Relaxation(finite(incumbent.problem, dear))
        if priced:
            small = Relaxation(finite(priced.problem, dear))
            for _ in small.rounds(lambda: incumbent.cost):
                run.clock.spend(small.seconds)
            relaxation.prices.set(small.prices.values)
        self._raise_bound(incumbent, relaxation, run, choose=True)

    def _raise_bound(self, incumbent: Incumbent, relaxation: Relaxation, run: SolverRun, *, choose: bool) -> None:
        """Sweeps as long as that pays.

        Args:
            choose: whether the relaxation is of the problem itself: it then has choices, in which nodes alike differ.
        """
        close, before = run.goal.repeated_gap, incumbent.bound
        for count in itertools.count(1):
            is_turn = count % self.sweeps_per_choice == 0
            run.clock.spend(relaxation.seconds)
            incumbent.prove(relaxation.sweep(forward=count % 2 == 1, choose=choose and is_turn))
            better = relaxation.better(incumbent.cost)
            if better is not None:
                incumbent.offer(better)
            if incumbent.gap <= self.close_share * close:
                return
            if is_turn:
                little = self.stalled if choose and incumbent.gap <= close else self.stalled_lifted
                if incumbent.bound - before < little * incumbent.gap * abs(incumbent.cost):
                    return
                before = incumbent.bound


def _tolerance(kinds: Incumbent, fits: Callable[[Sequence[int] | None], bool], gap: float) -> float:
    """How far from the best the choice of the kinds may be, if it fits."""
    near = gap * max(0.0, kinds.bound)
    return near if kinds.cost - kinds.bound <= near and fits(kinds.choice) else 0.0
