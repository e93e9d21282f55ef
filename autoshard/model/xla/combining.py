"""Combining: XLA makes one collective of many of a kind that nothing waits for, gradient reductions above all.

Each then pays a part of one launch and latency, and its result is complete when the last of them is. Sources: the
defaults of XLA's combiners (xla/service/collective_utils.h) for GPU, compiled v5e programs for TPU.
`tests/mesh/test_targets.py` compiles gathers and reduce_scatters on either side of the GPU's limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoshard.model.groups import Group
from autoshard.primitives import facts_of


@dataclass(frozen=True)
class Combining:
    """Which collectives are combined, and up to how many bytes."""

    kinds: frozenset[str] = frozenset({"all_reduce"})
    below_bytes: float = math.inf  # of the combined results; a collective of this size and more stays alone
    among: int = 0  # how many at most are combined in a program: together they pay one launch; 0: not counted
    counts: bool = True  # whether these are counted

    def share_of_launch(self, size: int) -> float:
        """The part of one launch and latency that a collective of `size` bytes pays when it is combined.

        >>> Combining(below_bytes=2**20).share_of_launch(2**18), Combining(among=2).share_of_launch(2**18)
        (0.25, 0.5)
        """
        least = 1 / self.among if self.among else 0.0
        return min(1.0, max(size / self.below_bytes, least))

    def counted(self, groups: Iterable[Group]) -> Combining:
        """The same for a program of these groups, of which each that only results wait for may be summed over devices.

        The one loss of a program without gradients waits for a launch of its own.
        """
        if not self.counts:
            return self
        sums = (group for group in groups if group.feeds_only_results and _may_be_summed(group))
        return replace(self, among=sum(group.trips == 1 for group in sums))


def _may_be_summed(group: Group) -> bool:
    """Whether devices may have partial sums of it, or one of them the whole."""
    return group.contracts or bool(group.reduction) or facts_of(group.equations[0].primitive).from_one_device
