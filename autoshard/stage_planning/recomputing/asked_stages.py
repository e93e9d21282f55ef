"""Stages that the user asks for in, out the same with what they compute again: as is fastest within the memory.

All stages are planned at every price of memory. Of the prices at which a stage fits, it gets the one at which it works
least: what a stage takes and holds does not depend on what others compute again. So stages with more microbatches in
flight compute more again. To keep less may take less time even where there is room, since what is kept is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.stages.placement.recomputing import MemoryPrices, PricedStep
from autoshard.stages.planned_pipeline import AskedStages, PlannedPipeline

MOST_PRICES = 8  # of memory that a stage chooses from: neighbours differ by a seventh of what can be computed again


@dataclass(frozen=True)
class StageFigures:
    """What a pipeline that is planned takes and holds."""

    seconds: float  # per step
    work: Sequence[float]  # s per step that each stage works
    too_large: Collection[int]  # the devices of the schedule that hold more than they may


@dataclass(frozen=True, eq=False)
class StageLevels:
    """The search for what stages that are asked for compute again."""

    asked: AskedStages
    figures: Callable[[PlannedPipeline], StageFigures]
    until: float = math.inf  # when the search ends, as `time.monotonic` has it, once something fits

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

    def unfit(self, pipeline: PlannedPipeline, figures: StageFigures) -> set[int]:
        """The parts that hold too much, by their numbers."""
        placement, stages = pipeline.schedule.placement, self.asked.stages
        over = {v % stages for v, device in enumerate(placement) if device in figures.too_large}
        return {number for number, part in enumerate(self.parts) if not part.isdisjoint(over)}

    def fastest(self) -> PlannedPipeline:
        """The fastest stages that fit; the leanest ones where none do.

        Raises:
            MicrobatchError: a microbatch would keep something else than the whole batch.
        """
        ways = [self.asked.planned(is_limited=False)]
        best = dict[int, tuple[float, int]]()  # part -> the seconds that it works, and the level
        last = len(self.prices) - 1
        order = (last, *range(last)) if self.prices else ()
        for level in order:  # the leanest first
            if time.monotonic() > self.until and len(best) == len(self.parts):
                break
            ways.append(self.planned([level] * len(self.parts)))
            figures = self.figures(ways[-1])
            over = self.unfit(ways[-1], figures)
            for number, part in enumerate(self.parts):
                if number not in over:
                    found = sum(figures.work[stage] for stage in part), level
                    best[number] = min(best.get(number, found), found)
        if len(best) == len(self.parts):
            ways.append(self.planned([best[number][1] for number in range(len(best))]))
        fitting = [(figures.seconds, n) for n, one in enumerate(ways) if not (figures := self.figures(one)).too_large]
        return ways[min(fitting)[1]] if fitting else ways[min(1, len(ways) - 1)]
