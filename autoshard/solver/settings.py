"""What a caller wants of a search, and the sizes of problems at which `solve` changes its way.

The numbers of one algorithm are the fields of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """When a choice is good enough: by default when it is proven to be optimal. Gaps are relative to the bound."""

    gap: float = 0.0  # of a problem of more than a few options; what is cheap is tried all the same
    priced_gap: float = 0.0  # the same once memory has prices, as it binds
    gap_ends_programs: bool = False  # whether an integer program ends with that gap, too
    # The gap at which nodes that look alike may keep one option, and what follows bounds gets little time.
    repeated_gap: float = 0.0
    prefers_lean: bool = False  # whether a choice that costs the same and holds less is taken instead
    # Whether a choice is of use, where that takes more than the problem says.
    accepts: Callable[[Sequence[int]], bool] | None = None
    rejected_gap: float = 0.0  # the gap that is good enough while the best choice is not of use
    rejected_share: float = 1.0  # of the time: what is spent while the best choice is not of use


PROVEN = Goal()


@dataclass(frozen=True)
class Sizes:
    """Where a problem counts as small or large."""

    few_options: int = 4000  # of which the optimum is found, and not only what is close to it
    bounded_options: int = 1000  # from which on bounds come before the integer program
    # Compiled code pays from so many options, and entries of the lives' tables, on. The second number holds once it
    # is loaded.
    compiled_options: int = 200_000
    loaded_options: int = 20_000


USUAL_SIZES = Sizes()
