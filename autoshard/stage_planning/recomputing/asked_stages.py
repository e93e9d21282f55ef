"""Stages that the user asks for in, out the same with what they compute again so that each of them fits.

Of every device of the schedule the cheapest level is sought at which it fits, for all devices at once: what a device
holds does not depend on what others compute again. Devices with more microbatches in flight thus compute more again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.jaxprs import REMAT, Jaxpr, inner_jaxprs
from autoshard.stages.placement.recomputing import MemoryPrices, PricedStep
from autoshard.stages.planned_pipeline import AskedStages, PlannedPipeline

MOST_PRICES = 12  # of memory that a stage chooses from: neighbours differ by an eleventh of what can be computed again


@dataclass(frozen=True, eq=False)
class StageLevels:
    """The search for what stages that are asked for compute again."""

    asked: AskedStages
    too_large: Callable[[PlannedPipeline], Sequence[int]]  # the devices of the schedule that hold more than they may
    seconds: Callable[[PlannedPipeline], float]  # per step

    @cached_property
    def prices(self) -> tuple[float, ...]:
        """Of memory, in seconds per byte: from that at which nothing is computed again to one that is never paid."""
        return PricedStep.of(self.asked.step.whole, self.asked.options.topology).prices(MOST_PRICES)

    @cached_property
    def parts(self) -> list[frozenset[int]]:
        """Stages that share devices, in the schedules in which a device has several, or a stage several devices."""
        placement, stages, found = self.asked.order.placement, self.asked.stages, list[frozenset[int]]()
        for device in sorted(set(placement)):
            own = frozenset(v % stages for v, home in enumerate(placement) if home == device)
            joined = [one for one in found if not one.isdisjoint(own)]
            found = [one for one in found if one.isdisjoint(own)] + [own.union(*joined)]
        return found

    def planned(self, levels: Sequence[int]) -> PlannedPipeline:
        """The stages, with one of the prices for each part of them."""
        price = {stage: self.prices[level] for part, level in zip(self.parts, levels, strict=True) for stage in part}
        chosen = MemoryPrices(tuple(price[stage] for stage in range(self.asked.stages)), self.asked.options.topology)
        return self.asked.planned(chosen, is_limited=False)

    def unfit(self, pipeline: PlannedPipeline) -> set[int]:
        """The parts that hold too much, by their numbers."""
        placement, stages, found = pipeline.schedule.placement, self.asked.stages, set(self.too_large(pipeline))
        over = {v % stages for v, device in enumerate(placement) if device in found}
        return {number for number, part in enumerate(self.parts) if not part.isdisjoint(over)}

    def fastest(self) -> PlannedPipeline:
        """The stages with as little computed again as fits; the leanest where nothing does, or where no choice is.

        Raises:
            MicrobatchError: a microbatch would keep something else than the whole batch.
        """
        as_written = self.asked.planned(is_limited=False)
        too_large = self.unfit(as_written)
        is_plain = not _has_marks(self.asked.step.whole.jaxpr)
        if (not too_large and is_plain) or not self.prices:
            return as_written
        last = len(self.prices) - 1
        leanest = self.planned([last] * len(self.parts))
        if self.unfit(leanest):
            return leanest if too_large else as_written
        high = [last if number in too_large or not is_plain else 0 for number in range(len(self.parts))]
        low = [0 if number in too_large and is_plain else -1 for number in range(len(self.parts))]
        while any(b - a > 1 for a, b in zip(low, high, strict=True)):
            middle = [(a + b) // 2 if b - a > 1 else b for a, b in zip(low, high, strict=True)]
            over = self.unfit(self.planned(middle))
            for number, level in enumerate(middle):
                if number in over:
                    low[number] = level
                else:
                    high[number] = level
        ways = [leanest, self.planned(high)]
        # With less kept there may be room for layouts that take less time than computing again.
        further = [min(level + 1, last) if level else 0 for level in high]
        ways += [self.planned(further)] if further != high else []
        ways += [as_written]
        return min(ways, key=lambda one: (bool(self.unfit(one)), self.seconds(one)))


def _has_marks(jaxpr: Jaxpr) -> bool:
    """Whether the user says somewhere what is computed again."""
    return any(
        eqn.primitive.name in REMAT or any(_has_marks(inner.jaxpr) for inner in inner_jaxprs(eqn)) for eqn in jaxpr.eqns
    )
