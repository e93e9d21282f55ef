"""How much stages may compute again, as the search of stages has it: a few prices of memory by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.jaxprs import with_live_equations
from autoshard.mesh.topology import Topology
from autoshard.program.tracing import TracedStep
from autoshard.stages.placement.recomputing import MemoryPrices, PricedStep

AS_WRITTEN = ""  # the level at which nothing is chosen
MOST_LEVELS = 3  # beside that: units are planned at each of them


@dataclass(frozen=True)
class RecomputationLevels:
    """The levels that stages choose from."""

    topology: Topology
    prices: Mapping[str, float] = field(default_factory=dict)  # name -> s per byte
    seconds: Mapping[str, float] = field(default_factory=dict)  # name -> of computing again in one step, on one device

    @classmethod
    def of(cls, traced: TracedStep, topology: Topology) -> RecomputationLevels:
        """Those of a step; none where nothing can be chosen."""
        priced = PricedStep.of(with_live_equations(traced.closed), topology)
        named = {f"remat {n}": price for n, price in enumerate(priced.prices(MOST_LEVELS + 1)[1:], start=1)}
        return cls(topology, named, {name: priced.seconds(price) for name, price in named.items()})

    def keeping(self, variants: Sequence[str]) -> MemoryPrices | None:
        """What stages keep that have these variants of tables; None: all of them as the step is written."""
        found = [self.prices.get(level_of(one), 0.0) for one in variants]
        return MemoryPrices(tuple(found), self.topology) if any(found) else None


def level_of(variant: str) -> str:
    """The level of a table.

    >>> level_of(variant_of("remat 1", "lean")), level_of(variant_of(AS_WRITTEN, "lean")), level_of("")
    ('remat 1', '', '')
    """
    return variant.removesuffix("lean").strip()


def variant_of(level: str, kind: str) -> str:
    """What a table is called that was planned at a level."""
    return f"{level} {kind}".strip()
