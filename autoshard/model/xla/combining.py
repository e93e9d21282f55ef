"""Combining: XLA makes one collective of many of a kind that nothing waits for, gradient reductions above all.

Each then pays a part of one launch and latency, and its result is complete when the last of them is. Sources: the
defaults of XLA's combiners (xla/service/collective_utils.h) for GPU, compiled v5e programs for TPU.
`tests/mesh/test_targets.py` compiles gathers and reduce_scatters on either side of the GPU's limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Combining:
    """Which collectives are combined, and up to how many bytes."""

    kinds: frozenset[str] = frozenset({"all_reduce"})
    below_bytes: float = math.inf  # of the combined results; a collective of this size and more stays alone

    def share_of_launch(self, size: int) -> float:
        """The part of one launch and latency that a collective of `size` bytes pays when it is combined.

        >>> Combining(below_bytes=2**20).share_of_launch(2**18)
        0.25
        """
        return min(1.0, size / self.below_bytes)
