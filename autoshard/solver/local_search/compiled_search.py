"""Rounds of compiled searches as an algorithm of the table, with integer programs over what bounds leave."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autoshard.solver.bounds.forbid_options import CEILINGS, solve_below
from autoshard.solver.exact.programs import IntegerProgram
from autoshard.solver.incumbent import SOLVED_GAP, Incumbent, most_sum
from autoshard.solver.local_search.forest_moves import ForestMoves
from autoshard.solver.local_search.settings import ROUNDS, RoundSettings
from autoshard.solver.run import NoChoice, ProblemPart, SolverRun

if TYPE_CHECKING:
    from autoshard.solver.local_search.large_search import RoundResult


@dataclass(frozen=True)
class CompiledSearch:
    """Ascent of the bound and block moves by compiled code, until time is up or the incumbent is good enough.

    Large parts share the time that is left. A smaller part comes here when bounds have taken half of it.
    """

    program_share: float = 0.3  # of the time left: what an integer program gets in turn with searches
    rounds: RoundSettings = ROUNDS
    moves: ForestMoves = field(default_factory=ForestMoves)
    program: IntegerProgram = field(default_factory=IntegerProgram)

    def applies(self, part: ProblemPart, run: SolverRun) -> bool:
        many = part.options > run.sizes.few_options or part.incumbent.always_tolerant
        return part.bounds_pay and (many or part.is_large)

    def improve(self, part: ProblemPart, run: SolverRun) -> bool:
        with run.clock.hurry(part.share) if part.is_large else contextlib.nullcontext():
            self._improve(part, run)
        return True

    def _improve(self, part: ProblemPart, run: SolverRun) -> None:
        incumbent, large = part.incumbent, run.load_compiled()
        if not run.clock.is_timed:  # by time go the largest problems, on which these moves are slow
            self.moves.improve_if_far(part, run)
        search = large.LargeSearch(
            part.problem, seed=run.seed, threads=run.threads, counted=not run.clock.is_timed, settings=self.rounds
        )
        most, has_fixed = most_sum(part.problem), False
        with run.report.during("search"):
            try:
                for found in search.rounds(lambda: incumbent.choice, run.clock.left, run.clock.check):
                    _learn(incumbent, found)
                    run.clock.count(found.iterations)
                    run.clock.budget.spend(self.rounds.seconds * found.iterations)
                    if incumbent.bound > most + SOLVED_GAP * abs(most):
                        raise NoChoice
                    if found.settled and not has_fixed and not incumbent.is_solved:
                        has_fixed = True
                        self._solve_with_few(part, search.ascent.least(), run)
                    if incumbent.is_close:
                        return
            finally:  # time that is up and Ctrl-C come in the midst of a round
                _learn(incumbent, search.found(None))

    def _solve_with_few(self, part: ProblemPart, least: np.ndarray, run: SolverRun) -> None:
        """Solves the part with the options that a better choice can have, if these are few.

        Args:
            least: per option of all nodes, what any choice with it costs at least.
        """
        incumbent, few = part.incumbent, run.sizes.few_options
        sizes = [len(costs) for costs in part.problem.costs]
        per_node: Sequence[np.ndarray] = np.split(least, np.cumsum(sizes)[:-1])
        for share in CEILINGS if incumbent.best else ():
            ceiling = min(incumbent.bound + share * (incumbent.cost - incumbent.bound), incumbent.target)
            if incumbent.is_close or (least < ceiling).sum() > few:
                return
            with run.clock.hurry(self.program_share):
                solve_below(incumbent, ceiling, per_node, run)
        if not incumbent.is_close and len(least) <= few:
            with run.clock.hurry(self.program_share):
                self.program.improve(part, run)


def _learn(incumbent: Incumbent, found: RoundResult) -> None:
    if found.choice is not None:
        incumbent.offer(found.choice)
    incumbent.prove(found.bound)
