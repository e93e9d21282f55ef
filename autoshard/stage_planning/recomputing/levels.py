"""How much stages may compute again, as the search of stages has it: a few prices of memory by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.jaxprs import with_live_equations
from autoshard.mesh.topology import Topology
from autoshard.program.tracing import TracedStep
from autoshard.stages.placement.recomputing import MemoryPrices, PricedStep, has_marks

AS_WRITTEN = ""  # the level at which nothing is chosen
MOST_LEVELS = 3  # beside that: units are planned at each of them


@dataclass(frozen=True)
class RecomputationLevels:
    """The levels that stages choose from."""

    topology: Topology
    prices: Mapping[str, float] = field(default_factory=dict)  # name -> s per byte
    seconds: Mapping[str, float] = field(default_factory=dict)  # name -> of computing again in one step, on one device
    as_written: float = 0.0  # price at which a stage beside others with prices keeps about what the step is written to

    @classmethod
    def of(cls, traced: TracedStep, topology: Topology) -> RecomputationLevels:
        """Those of a step; none where nothing can be chosen."""
        priced = PricedStep.of(with_live_equations(traced.closed), topology)
        named = {f"remat {n}": price for n, price in enumerate(priced.prices(MOST_LEVELS + 1)[1:], start=1)}
        seconds = {name: priced.seconds(price) for name, price in named.items()}
        # Marks of `jax.checkpoint` mostly stand around whole layers, of which the least is kept then.
        return cls(topology, named, seconds, math.inf if has_marks(traced.closed.jaxpr) else 0.0)

    def keeping(self, variants: Sequence[str]) -> MemoryPrices | None:
        """What stages keep that have these variants of tables; None: all of them as the step is written."""
        levels = list(map(level_of, variants))
        if all(level == AS_WRITTEN for level in levels):
            return None
        return MemoryPrices(tuple(self.prices.get(level, self.as_written) for level in levels), self.topology)


def level_of(variant: str) -> str:
    """The level of a table.

    >>> level_of(variant_of("remat 1", "lean")), level_of(variant_of(AS_WRITTEN, "lean")), level_of("")
    ('remat 1', '', '')
    """
    return variant.removesuffix("lean").strip()


def variant_of(level: str, kind: str) -> str:
    """What a table is called that was planned at a level."""
    return f"{level} {kind}".strip()
