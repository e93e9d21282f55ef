"""What a running `solve` tells whoever waits for it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoshard.solver.problem import relative_gap

REPORT_SECONDS = 0.4  # between two reports of progress, if nothing changes


@dataclass(frozen=True)
class Progress:
    """What is known at one moment of a `solve`.

    >>> Progress("moves", cost=4.0, bound=3.0, seconds=0.5).gap
    0.25
    """

    stage: str  # what the solver does now, as a user reads it
    cost: float  # of the best choice so far; inf while there is none
    bound: float  # proven: no feasible choice costs less; -inf while there is none
    seconds: float  # since solve was called

    @property
    def gap(self) -> float:
        """How far the cost may be from the best, as a share of it; inf while either is unknown."""
        return relative_gap(self.cost, self.bound)


class Report:
    """Where the time of one `solve` goes, by stage; passes what is known on to whoever waits for it."""

    def __init__(self, progress: Callable[[Progress], None] | None):
        self.progress = progress
        self.start = self.entered = time.monotonic()
        self.last = -math.inf  # when `progress` was called last
        self.stage = "start"
        self.seconds: dict[str, float] = {}
        self.cost, self.bound = math.inf, -math.inf

    @contextlib.contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Time within goes to this stage."""
        outer = self.enter(stage)
        try:
            yield
        finally:
            self.enter(outer)

    def enter(self, stage: str) -> str:
        """Begins a stage, and returns the one that was left."""
        now = time.monotonic()
        self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + now - self.entered
        outer, self.stage, self.entered = self.stage, stage, now
        self.tell()
        return outer

    def finish(self) -> dict[str, float]:
        """Ends the last stage, and returns the seconds of each."""
        self.enter("end")
        return self.seconds

    def know(self, cost: float, bound: float) -> None:
        self.cost, self.bound = cost, bound
        self.tell()

    def tick(self) -> None:
        """Calls `progress` if it was not called for a while."""
        if self.progress and time.monotonic() - self.last > REPORT_SECONDS:
            self.tell()

    def tell(self) -> None:
        if self.progress:
            self.last = time.monotonic()
            self.progress(Progress(self.stage, self.cost, self.bound, self.last - self.start))
