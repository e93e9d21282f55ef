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
    in_loops: Mapping[str, float] = field(default_factory=dict)  # the same for turns of loops, where it is another

    def of(self, kind: str, in_loop: bool) -> float:
        """The hidden share of one kind.

        >>> tpu = Overlap({"all_gather": 0.2}, in_loops={"all_gather": 0.8})
        >>> tpu.of("all_gather", in_loop=False), tpu.of("all_gather", in_loop=True), tpu.of("all_reduce", in_loop=True)
        (0.2, 0.8, 0.0)
        """
        outside = self.hidden_share.get(kind, 0.0)
        return self.in_loops.get(kind, outside) if in_loop else outside
