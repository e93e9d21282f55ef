"""A plan in, a figure of matplotlib out: memory over the step, and seconds beside the alternatives."""

from __future__ import annotations

from collections import Counter
from typing import Any

from autoshard.errors import MissingPackageError
from autoshard.plans.plan import PlanData
from autoshard.plans.prediction import Prediction
from autoshard.report.html.style import part_colour
from autoshard.report.plan_sections import Alternatives


def plan_figure(plan: PlanData, alternatives: Alternatives) -> Any:
    """A `matplotlib.figure.Figure` of one or two charts.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "plan.plot() draws with matplotlib, which is not installed.\n"
            "pip install 'autoshard[plot]', or use plan.show(), which needs nothing."
        ) from error
    use = plan.memory_use
    figure = Figure(figsize=(10, 7 if use is not None else 3.5), layout="constrained")
    axes = figure.subplots(2 if use is not None else 1, squeeze=False)[:, 0]
    if use is not None:
        counts: Counter[str] = Counter()
        colours = []
        for part in use.parts:
            colours.append(part_colour(counts[part.kind], part.kind))
            counts[part.kind] += 1
        sizes = [[size / 2**20 for size in part.bytes] for part in use.parts]
        labels = [_plain(part.name) for part in use.parts]
        axes[0].stackplot(range(len(use.lines)), *sizes, labels=labels, colors=colours, step="post")
        if plan.memory is not None and plan.memory <= 3 * max(use.totals):
            axes[0].axhline(plan.memory / 2**20, color="#c03a2b", linestyle="--", label="limit")
        axes[0].set(
            ylabel="MiB on one device", xlabel=f"over the step; peak at {_plain(use.lines[use.peak])}", xticks=[]
        )
        axes[0].margins(x=0)
        axes[0].set_title(_plain(plan.name))
        axes[0].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    found: dict[str, Prediction] = {"this plan": plan.predicted}
    found |= {name: one for name, one in (alternatives or {}).items() if isinstance(one, Prediction)}
    names = list(found)[::-1]
    exposed = [found[name].exposed_seconds * 1e3 for name in names]
    compute = [found[name].step_seconds * 1e3 - waits for name, waits in zip(names, exposed, strict=True)]
    axes[-1].barh(names, compute, color="#5b7fb9", label="compute")
    axes[-1].barh(names, exposed, left=compute, color="#e39a3b", label="communication that something waits for")
    axes[-1].set(xlabel="ms per step")
    axes[-1].legend(fontsize="small")
    return figure


def _plain(text: str) -> str:
    """A text that matplotlib takes for no formula."""
    return text.replace("$", r"\$")
