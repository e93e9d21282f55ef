"""What one `solve` may still spend: iterations, work or seconds, whichever it is counted in."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autoshard.solver.incumbent import Incumbent
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.settings import Goal


@dataclass(frozen=True)
class ClockSettings:
    """What is kept for the end of a run, and what it may take past it."""

    grace: float = 3.0  # s, or iterations, past the limit to find a first choice
    verifying_times: float = 3.0  # times the time to verify a choice: what is kept for the end of a run
    verifying_share: float = 0.2  # of the time limit: the most that is kept for the end


CLOCK = ClockSettings()


class SearchTimeout(Exception):
    """The time limit has passed."""


class Clock:
    """The time of one run of `solve`. It is counted in iterations if these are given, else in work or in seconds."""

    def __init__(
        self,
        budget: Budget,
        iterations: int | None,
        *,
        is_timed: bool,
        incumbent: Incumbent,
        goal: Goal,
        tick: Callable[[], None],
    ):
        """
        Args:
            is_timed: whether seconds decide, instead of work.
            incumbent: that of the whole problem.
            tick: called whenever the time is checked.
        """
        self.budget, self.incumbent, self.tick = budget, incumbent, tick
        self.accepts = goal.accepts and functools.lru_cache(maxsize=1)(goal.accepts)
        self.rejected_share = goal.rejected_share
        self.iterations: float | None = None if iterations is None else 0.0  # done; None: they are not counted
        self.is_timed = is_timed
        self.latest = budget.until
        self.deadline = budget.work if iterations is None else float(iterations)
        self.work_until = math.inf  # of the budget: work that ends what is in a hurry, beside the deadline
        self.rejected_until = math.inf  # until when a choice that is not accepted is improved
        self.grace = CLOCK.grace if budget.needs_choice else 0.0

    def begin(self, first: Callable[[], None]) -> None:
        """Runs what finds a first choice, and sets time aside for what comes when time is up."""
        start = time.monotonic()
        first()
        if self.iterations is None:
            left = max(0.0, self.latest - time.monotonic())
            self.latest -= min(CLOCK.verifying_times * (time.monotonic() - start), CLOCK.verifying_share * left)
        if self.is_timed:
            self.deadline = self.latest
        self.rejected_until = self.now() + self.rejected_share * self.left()

    def extend(self) -> None:
        """Gives what explains a failure a second more, or an iteration, and no grace; none if a choice is known."""
        self.grace = 0.0
        if self.budget.needs_choice:
            self.deadline = max(self.deadline, self.now() + 1)
            self.latest = max(self.latest, time.monotonic() + 1)

    def resume(self, since: float) -> None:
        """Goes on as if no time had passed since then, as `time.monotonic` has it."""
        waited = time.monotonic() - since
        self.latest += waited
        if self.is_timed:
            self.deadline += waited

    def now(self) -> float:
        """Iterations that are done, or work, or seconds."""
        if self.iterations is not None:
            return self.iterations
        return time.monotonic() if self.is_timed else self.budget.done

    def left(self) -> float:
        """Iterations, work or seconds until time is up, for a choice like the best one."""
        return max(0.0, min(self.deadline, self.rejected_until if self.is_rejected else math.inf) - self.now())

    @property
    def is_rejected(self) -> bool:
        """Whether the best choice is one that is not accepted."""
        choice = self.incumbent.choice
        return self.accepts is not None and choice is not None and not self.accepts(choice)

    def check(self) -> None:
        """Raises SearchTimeout when time is up; later, while there is no choice."""
        self.tick()
        grace = 0.0 if self.incumbent.best else self.grace
        is_over = self.now() - self.deadline > grace or time.monotonic() - self.latest > grace
        if is_over or self.budget.done > self.work_until:
            raise SearchTimeout

    def count(self, iterations: float) -> None:
        if self.iterations is not None:
            self.iterations += iterations

    def spend(self, seconds: float) -> None:
        """Counts work in seconds of a quiet core, and checks the time."""
        self.budget.spend(seconds)
        self.check()

    @contextlib.contextmanager
    def hurry(self, share: float, most_work: float = math.inf) -> Iterator[None]:
        """Gives what is within a share of the time that is left, and goes on after it when that is up.

        Args:
            most_work: of what counts no iterations: seconds of a quiet core that it may take where these are counted.
                No more than the share of the budget, either.
        """
        deadline, work_until = self.deadline, self.work_until
        self.deadline = self.now() + share * self.left()
        if self.iterations is not None and math.isfinite(most_work):
            self.work_until = min(work_until, self.budget.done + min(most_work, share * self.budget.left))
        try:
            yield
        except SearchTimeout:
            if self.now() >= deadline or time.monotonic() >= self.latest or self.budget.done > work_until:
                raise
        finally:
            self.deadline, self.work_until = deadline, work_until

    def program_limits(self) -> dict[str, Any]:
        """What an integer program may spend, as keywords of `integer_program.cheapest`."""
        if self.is_timed:
            return {"time_limit": self.left()}
        time_limit = max(0.0, self.latest - time.monotonic())
        if self.iterations is not None:
            return {"time_limit": time_limit, "look": self._count_look, "spend": self._spend_look}
        return {"time_limit": time_limit, "spend": self._spend_look}

    def _count_look(self) -> bool:
        """Counts a look of HiGHS as an iteration; whether that was the last one."""
        self.count(1)
        return self.left() == 0

    def _spend_look(self, seconds: float) -> bool:
        """Counts the work of HiGHS; whether that was the last."""
        self.budget.spend(seconds)
        return self.left() == 0
