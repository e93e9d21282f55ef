"""What a running `solve` tells whoever waits for it."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.solver.problem import relative_gap


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
