"""Bounds of single options as an algorithm of the table: what is too dear for a better choice is forbidden.

Kolmogorov's reparametrised costs say of each option what any choice with it costs at least (`message_passing.py`). A
ceiling between bound and incumbent then leaves a smaller problem, which is simplified and solved in turn. If that finds
nothing below the ceiling, the ceiling is a bound.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.bounds.message_passing import Relaxation
from autoshard.solver.bounds.settings import RELAXATION, RelaxationSettings
from autoshard.solver.exact.programs import IntegerProgram
from autoshard.solver.incumbent import SOLVED_GAP, Incumbent, most_sum
from autoshard.solver.local_search.forest_moves import ForestMoves, ForestState
from autoshard.solver.run import NoChoice, ProblemPart, SolverRun

# Of the way from the bound to the best choice: ceilings on the cost of choices with an option, in turn.
CEILINGS = (0.001, 0.03, 0.2, 1.0)


@dataclass(frozen=True)
class OptionBounds:
    """Message passing raises the bound; then the part is solved with more and more of its options, cheap ones first.

    If options are forbidden that are too dear for a choice much better than the best one known, the rest is small. It
    often has an optimum that is as good as any choice with the others could be.
    """

    time_share: float = 0.5  # of the time left, for parts of the whole problem; then compiled code has to help
    bounds_share: float = 0.5  # of that, until choices are looked for in other ways
    build_sweeps: float = 10.0  # what it takes to build a relaxation
    quick_seconds: float = 10.0  # of a quiet core: after so long a good enough choice ends bounds without prices, too
    polishing_gap: float = 0.05  # of the bound: what a choice may cost more to be worth moves
    close_share: float = 0.05  # of the time left, for what follows bounds once the gap is that of repeated nodes
    relaxation: RelaxationSettings = RELAXATION
    moves: ForestMoves = field(default_factory=ForestMoves)
    program: IntegerProgram = field(default_factory=IntegerProgram)

    def applies(self, part: ProblemPart, run: SolverRun) -> bool:
        many = part.options > run.sizes.bounded_options or part.incumbent.always_tolerant
        return part.bounds_pay and many and not part.is_large

    def improve(self, part: ProblemPart, run: SolverRun) -> bool:
        with run.report.during("bounds"), run.clock.hurry(self.time_share if part.of_whole else 1.0):
            self._improve(part, run)
            return True
        return False  # there was too little time

    def _improve(self, part: ProblemPart, run: SolverRun) -> None:
        relaxation = Relaxation(part.problem, self.relaxation)
        start = run.clock.budget.done
        run.clock.spend(self.build_sweeps * relaxation.seconds)
        if self._raise_bound(part, relaxation, start, run):
            return
        self.moves.improve_if_far(part, run)
        is_close = part.incumbent.gap <= run.goal.repeated_gap
        with run.clock.hurry(self.close_share) if is_close else contextlib.nullcontext():
            self._solve_with_few(part, relaxation, run)

    def _raise_bound(self, part: ProblemPart, relaxation: Relaxation, start: float, run: SolverRun) -> bool:
        """Sweeps until the bound rises no more; whether the incumbent is good enough.

        Args:
            start: what was spent of the budget before.
        """
        incumbent, tolerates = part.incumbent, _tolerates(part, run)
        most = most_sum(incumbent.problem)
        moves = functools.cache(lambda: ForestState(incumbent.problem, np.random.default_rng(run.seed)))
        with run.clock.hurry(self.bounds_share):
            for choice, bound in relaxation.rounds(lambda: incumbent.cost):
                run.clock.budget.spend(relaxation.seconds)
                if choice is not None:
                    incumbent.offer(choice)
                    if relaxation.cost - bound <= self.polishing_gap * abs(bound):
                        self.moves.polish(incumbent, moves(), choice, relaxation.prices.values, run)
                incumbent.prove(bound)
                if incumbent.bound > most + SOLVED_GAP * abs(most):
                    raise NoChoice
                is_priced = bool(relaxation.prices.values.any())
                run.memory_binds |= is_priced
                is_slow = run.clock.budget.done - start > self.quick_seconds
                may_tolerate = is_priced or incumbent.always_tolerant or is_slow
                if incumbent.is_solved or (tolerates and may_tolerate and incumbent.is_close):
                    return True
                run.clock.check()
        return False

    def _solve_with_few(self, part: ProblemPart, relaxation: Relaxation, run: SolverRun) -> None:
        incumbent, has_moved = part.incumbent, False
        if not incumbent.best:
            self.moves.improve(part, run)
            has_moved = True
        backward, forward = relaxation.least(forward=False), relaxation.least(forward=True)
        least = [np.maximum(a, b) for a, b in zip(backward, forward, strict=True)]
        dearest = max(map(np.max, least)) + SOLVED_GAP
        for share in CEILINGS:
            if incumbent.is_solved:
                return
            ceiling = incumbent.bound + share * (min(incumbent.cost, dearest) - incumbent.bound)
            solve_below(incumbent, min(ceiling, incumbent.target), least, run)
            if not has_moved and not incumbent.is_close:
                self.moves.improve(part, run)
                has_moved = True
            if incumbent.is_close and _tolerates(part, run):
                return
        self.program.improve(part, run)


def _tolerates(part: ProblemPart, run: SolverRun) -> bool:
    """Whether a choice that is close to the best one is good enough."""
    return part.options > run.sizes.few_options or part.incumbent.always_tolerant


def solve_below(
    incumbent: Incumbent, ceiling: float, least: Sequence[np.ndarray], run: SolverRun, *, enough_fewer: float = 0.5
) -> None:
    """Solves a problem with only those options that choices below the ceiling may have.

    Args:
        least: node -> option -> what any choice with it costs at least.
        enough_fewer: of the options: if more are left, bounds are not worth looking for again.
    """
    allowed = {node: np.flatnonzero(costs < ceiling) for node, costs in enumerate(least)}
    left = sum(map(len, allowed.values())) / sum(map(len, least))
    if left == 1:
        return
    fewer = Incumbent(incumbent.problem.restrict(allowed))
    fewer.tolerance, fewer.always_tolerant = incumbent.tolerance, incumbent.always_tolerant

    def tell() -> None:
        if fewer.choice is not None:
            incumbent.offer(fewer.choice)
        incumbent.prove(min(ceiling, fewer.bound))

    fewer.tell = tell
    try:
        run.solve(fewer, bounds_pay=left < enough_fewer)
    except NoChoice:
        incumbent.prove(ceiling)
    finally:
        fewer.disconnect()
