"""Overlap: the share of a collective's time that runs behind compute, where nothing waits for the result at once.

So does the share of transfers to the host's memory and back, as the kind "host". In loops XLA for TPU sends what one
turn stacks there while the next one runs, and fetches a slice while the turn before runs: all but two transfers are
hidden. Other compilers are held to wait.

XLA for TPU v5e gathers a weight of a loop beside the product before it, if that takes long enough; what the first
product of a turn reads, it waits for. For v5p it gathers all before it goes on.

Source: the schedules of compiled programs, in the median; `docs/benchmarks/prediction.md` has the shares for TPU,
`docs/benchmarks/plans.md` (Summary) those for GPU, which lie between what small and large models hide.
`tests/compiled/test_schedule.py` reads such schedules, `tests/mesh/test_targets.py` those of two loops for TPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Overlap:
    """How much of each kind of collective is hidden."""

    hidden_share: Mapping[str, float] = field(default_factory=dict)  # kind -> share of its seconds; 0 for other kinds

    def of(self, kind: str) -> float:
        """The hidden share of one kind.

        >>> Overlap({"all_gather": 0.5}).of("all_gather"), Overlap({"all_gather": 0.5}).of("all_reduce")
        (0.5, 0.0)
        """
        return self.hidden_share.get(kind, 0.0)
