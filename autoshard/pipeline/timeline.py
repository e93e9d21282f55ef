"""What `simulate` finds, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoshard.pipeline.chart import chart
from autoshard.pipeline.orders import Schedule, Task
from autoshard.pipeline.plot import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Timeline:
    """When each task of a schedule runs, and what devices hold. `str` draws it."""

    schedule: Schedule
    start: dict[Task, float]  # s; of a group run as one, as if its tasks ran one after the other
    end: dict[Task, float]  # s; the results of a group run as one are there when its last task ends
    work: tuple[float, ...]  # s, per device
    peak: tuple[float, ...]  # per device, most microbatches in flight, in whole stages; each until B or W ends
    peak_bytes: tuple[float, ...]  # bytes, per device, of what forward tasks saved

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first task to the end of the last."""
        return max(self.end.values()) - min(self.start.values())

    @property
    def bubble(self) -> float:
        """Seconds of the makespan in which the busiest device does nothing."""
        return self.makespan - max(self.work)

    @property
    def idle(self) -> tuple[float, ...]:
        """Per device, seconds of doing nothing between its own first and last task.

        Papers on zero bubbles count these. They assume that a device goes on to the next step without the others.
        """
        return tuple(
            max(map(self.end.__getitem__, order)) - min(map(self.start.__getitem__, order)) - work if order else 0.0
            for order, work in zip(self.schedule.orders, self.work, strict=True)
        )

    def chart(self, width: int = 120) -> str:
        """One line of text per device, with time from left to right.

        Args:
            width: characters of the longest line at most. If tasks do not fit with their names, letters stand for them.
        """
        return chart(self.schedule, self.start, self.end, width)

    def __str__(self) -> str:
        return self.chart()

    def plot(self, axes: Axes | None = None) -> Any:
        """Draws the timeline: a `matplotlib.figure.Figure` with one bar per task and one row per device.

        Args:
            axes: of matplotlib, to draw on; by default those of a new figure.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        return plot(self.schedule, self.start, self.end, axes)
