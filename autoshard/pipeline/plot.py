"""A timeline in matplotlib, which is imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autoshard.errors import MissingPackageError
from autoshard.pipeline.chart import names_of
from autoshard.pipeline.orders import Schedule, Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"F": "#8fb8de", "B": "#9fd39f", "W": "#f3c98b"}


def plot(schedule: Schedule, start: Mapping[Task, float], end: Mapping[Task, float], axes: Axes | None) -> Any:
    """A figure with one bar per task and one row per device."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "timeline.plot() draws with matplotlib, which is not installed.\n"
            "pip install 'autoshard[plot]', or use timeline.chart(), which needs nothing."
        ) from error
    if axes is None:
        axes = Figure(figsize=(10, 0.5 * schedule.stages + 1), layout="constrained").subplots()
    names = names_of(schedule)
    for device, order in enumerate(schedule.orders):
        for task in order:
            seconds = end[task] - start[task]
            axes.barh(device, seconds, left=start[task], color=_COLOURS[task.kind], edgecolor="black", linewidth=0.5)
            axes.text(start[task] + seconds / 2, device, names[task][1:], ha="center", va="center", fontsize=7)
    axes.set_yticks(range(schedule.stages), [f"device {device}" for device in range(schedule.stages)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(f"{schedule.name}: {schedule.microbatches} microbatches")
    return axes.figure
