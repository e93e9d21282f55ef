"""What a frontier is: plans that trade seconds for bytes, as data, text, table and chart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoshard.errors import MemoryLimitError, MissingPackageError
from autoshard.errors.kinds import checks_kinds
from autoshard.options import bytes_of
from autoshard.report.html.page import sections_html
from autoshard.report.section import Bytes, Column, Phrase, Seconds, Section, Share
from autoshard.report.text import text_of
from autoshard.report.units import bytes_text
from autoshard.user_plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Frontier:
    """Plans of one step, of which each is faster than all that hold no more than it does.

    Attributes:
        name: the step's.
        plans: fastest first, so that each holds less than the one before. `plan.bound` holds for all plans that hold no
            more than it; `plan.memory` is the limit under which it was found, in bytes per device.
        usable: the share of a limit that a plan fills at most; the rest stays free.
        is_free: whether the first plan was sought without a memory limit.
        left_out: which peaks were not looked at since the time limit ended, "between 2.0 MiB and 5.0 MiB"; "" if none.
    """

    name: str
    plans: tuple[Plan, ...]
    usable: float = 1.0
    is_free: bool = True
    left_out: str = ""

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def within(self, memory: str | float) -> Plan:
        """The fastest of these plans for a limit, in bytes per device or as ``"14GiB"``.

        Raises:
            MemoryLimitError: none holds so little.
        """
        limit = bytes_of(memory)
        for plan in self.plans:
            if self.limit_of(plan) <= limit:
                return plan
        least = self.limit_of(self.plans[-1])
        raise MemoryLimitError(
            f"no plan of the frontier of {self.name} fits in {bytes_text(limit)} per device; the smallest limit is "
            f"{bytes_text(least)}.\nTry a larger mesh, or remat='auto'.",
            budget=limit,
            needed=least,
        )

    @checks_kinds()
    def limit_of(self, plan: Plan) -> int:
        """The smallest memory limit that a plan fits in, in bytes per device."""
        return math.ceil(plan.predicted.peak_bytes / self.usable)

    def __str__(self) -> str:
        return text_of(self.sections())

    def sections(self) -> list[Section]:
        """The frontier as a table: a row per plan."""
        fastest = self.plans[0].cost
        rows = tuple(
            (
                Bytes(self.limit_of(plan)),
                Bytes(plan.predicted.peak_bytes),
                Seconds(plan.cost),
                Share(plan.cost / fastest - 1 if fastest else 0.0),
                Share(plan.gap),
            )
            for plan in self.plans
        )
        columns = tuple(Column(name, is_number=True) for name in ("peak", "step", "slower by", "gap"))
        first = "sought without a limit" if self.is_free else "within the memory that was given"
        lines: tuple[Phrase, ...] = ((f"The first plan is {first}, the last is the smallest found.",),)
        if self.left_out:
            lines += ((f"The time limit ended before plans were sought that hold {self.left_out}: raise time_limit.",),)
        return [Section((f"{self.name}: fits in",), columns, rows, lines)]

    def _repr_html_(self) -> str:
        return sections_html(self.sections(), dict(self.plans[0].mesh.shape))

    def plot(self) -> Figure:
        """A figure of matplotlib: seconds per step over bytes per device, and below each what is proven.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        figure: Figure = _figure(self)
        return figure


def _figure(frontier: Frontier) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "frontier.plot() draws with matplotlib, which is not installed.\n"
            "pip install 'autoshard[plot]', or print the frontier."
        ) from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    peaks = [plan.predicted.peak_bytes / 2**20 for plan in frontier.plans]
    seconds = [plan.cost * 1e3 for plan in frontier.plans]
    bounds = [plan.bound * 1e3 for plan in frontier.plans]
    axes.step(peaks, seconds, where="post", color="#5b7fb9", marker="o", label="plans")
    axes.step(peaks, bounds, where="post", color="#8a8a8a", linestyle="--", label="proven: no plan is faster")
    axes.set(xlabel="MiB on one device at the peak", ylabel="ms per step", title=frontier.name)
    axes.legend(fontsize="small")
    return figure
