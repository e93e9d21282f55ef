"""What searches may take: work that is counted, so that a busy machine finds what a quiet one does.

Work is counted in seconds of a quiet core, by what takes the time: entries of tables, visits of nodes, looks of HiGHS.
How much a search has left decides what it does next. The clock decides nothing: it only ends a search that is late.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

QUIET_SHARE = 0.4  # of a time limit: the work in it. A machine 2.5 times as busy, or as slow, still does all of it


@dataclass(eq=False)
class Budget:
    """What one search may take, or several in turn.

    >>> budget = Budget.of(60.0)
    >>> first = budget.part(0.5)
    >>> first.spend(2.0)
    >>> first.left, budget.left
    (10.0, 22.0)
    """

    work: float  # seconds of a quiet core, those done before it was made included
    until: float  # when the clock ends it, as time.monotonic() has it
    done: float = 0.0
    interrupted: bool = False  # by Ctrl-C: nothing else is to start
    whole: Budget | None = None  # what this one is a part of
    needs_choice: bool = True  # whether a first choice is sought a little past its end: none is known

    @classmethod
    def of(cls, time_limit: float, until: float = math.inf) -> Budget:
        """That of a time limit in seconds, which starts now.

        Args:
            until: when the clock ends it, if that is before.
        """
        return cls(QUIET_SHARE * time_limit, min(until, time.monotonic() + time_limit))

    def part(self, share: float) -> Budget:
        """A share of what is left of it."""
        work, until = share * self.left, time.monotonic() + share * self.seconds
        return Budget(work, until, whole=self, needs_choice=self.needs_choice)

    @property
    def left(self) -> float:
        return max(0.0, self.work - self.done)

    @property
    def seconds(self) -> float:
        """How long it is until the clock ends it."""
        return max(0.0, self.until - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether nothing is left of it, or the clock has ended it."""
        return self.interrupted or not self.left or not self.seconds

    def spend(self, seconds: float) -> None:
        """Counts work that was done."""
        self.done += seconds
        if self.whole is not None:
            self.whole.spend(seconds)

    def interrupt(self) -> None:
        self.interrupted = True
        if self.whole is not None:
            self.whole.interrupt()
