"""The integer program as an algorithm of the table: the last one, since it ends with the optimum or with the time.

What HiGHS and cvxpy import takes a second, so `integer_program` is loaded when it is first needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.solver.exact.narrow_parts import Elimination
from autoshard.solver.run import NoChoice, ProblemPart, SolverRun

LARGE_ELIMINATION = Elimination(most_entries=1 << 30)  # of all tables together: what takes four seconds


@dataclass(frozen=True)
class IntegerProgram:
    """The part goes to HiGHS, with the best choice so far to start from.

    A part of which options are forbidden may have become narrow: elimination is tried first, with larger tables.
    """

    elimination: Elimination = LARGE_ELIMINATION

    def applies(self, part: ProblemPart, run: SolverRun) -> bool:
        return True

    def improve(self, part: ProblemPart, run: SolverRun) -> bool:
        incumbent = part.incumbent
        if incumbent.is_solved or (self.elimination.applies(part, run) and self.elimination.improve(part, run)):
            return True
        integer_program = run.load_programs()
        with run.report.during("integer program"):
            was_rejected = run.clock.is_rejected
            gap = incumbent.tolerance() if run.goal.gap_ends_programs or was_rejected else 0.0
            outcome = integer_program.cheapest(
                part.problem, incumbent.choice, seed=run.seed, gap=gap, **run.clock.program_limits()
            )
        if outcome.bound == math.inf:
            raise NoChoice
        incumbent.prove(outcome.bound)
        if outcome.choice is not None:
            incumbent.offer(outcome.choice)
        if outcome.interrupted:
            raise KeyboardInterrupt
        run.clock.check()
        if was_rejected and not run.clock.is_rejected:
            return self.improve(part, run)  # on from a choice that is accepted, to a smaller gap
        return True
