"""The report of a plan with stages: a table of stages, the bubble, and the timeline as a chart."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.pipeline import Timeline
from autoshard.plans.prediction import Prediction
from autoshard.report.html.elements import Html, element
from autoshard.report.section import Bytes, Column, Phrase, Row, Seconds, Section, Share
from autoshard.report.units import bytes_text
from autoshard.stage_planning.planned_stage import PlannedStage
from autoshard.stages.planned_pipeline import PlannedPipeline

_WIDTH, _ROW, _GAP = 1000, 22, 4  # of the chart, in units of its own
_COLOURS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b"}
_MOST_BARS = 4000  # of the chart; with more tasks, those of the first and last microbatches are drawn


def stages_section(
    stages: Sequence[PlannedStage], timeline: Timeline, without: Prediction | str | None, bound: float
) -> Section:
    """What each stage has, takes and holds; how long devices wait; and the best plan without stages beside it.

    Args:
        bound: s per step that no pipeline takes less than, in proportion to units planned one by one; 0 if not known.
    """
    rows: list[Row] = []
    for number, stage in enumerate(stages):
        axes = " ".join(f"{axis}={size}" for axis, size in stage.mesh.shape.items() if size > 1) or "one device"
        rows.append((
            f"stage {number}", _span(stage.layers), axes, Seconds(stage.seconds), Bytes(stage.peak_bytes),
            f"{stage.in_flight:g}", Bytes(stage.sent_bytes),
        ))  # fmt: skip
    columns = (
        *(Column("layers"), Column("sub-mesh"), Column("works", is_number=True)),
        *(Column("peak per device", is_number=True), Column("in flight", is_number=True)),
        Column("sends per step", is_number=True),
    )
    schedule, share = timeline.schedule, timeline.bubble / timeline.makespan if timeline.makespan else 0.0
    lines: list[Phrase] = [
        (
            f"Schedule {schedule.name} with {schedule.microbatches} microbatches: the loop takes ",
            *(Seconds(timeline.makespan), ", of which the busiest stage waits ", Seconds(timeline.bubble), " ("),
            *(Share(share), ")."),
        )
    ]
    if bound:
        lines.append(("In proportion to layers planned one by one, no pipeline takes less than ", Seconds(bound), "."))
    if isinstance(without, str):
        lines.append((f"Without stages: {without}",))
    elif without is not None:
        lines.append(
            (
                *("Without stages the best plan takes ", Seconds(without.step_seconds), " per step and "),
                *(Bytes(without.peak_bytes), " per device."),
            )
        )
    return Section(("Stages",), columns, tuple(rows), tuple(lines))


def tactics_remarks(pipeline: PlannedPipeline) -> tuple[str, ...]:
    """What the plans of programs say of tactics, each remark once and with the programs that it is of."""
    found: dict[str, list[str]] = {}
    for program, plan in zip(pipeline.programs.programs, pipeline.plans, strict=True):
        for remark in plan.warnings:
            if remark.startswith("tactics: "):
                found.setdefault(remark, []).append(program.name)
    count = len(pipeline.plans)
    return tuple(one if len(names) == count else f"{', '.join(names)}: {one}" for one, names in found.items())


def recomputation_remarks(pipeline: PlannedPipeline) -> tuple[str, ...]:
    """What stages compute again because autoshard chose so, and what they keep."""
    found = pipeline.programs.recomputed
    if found is None:
        return ()
    kept = {stage: sum(map(pipeline.programs.bytes_of, keys)) for stage, keys in pipeline.programs.kept.items()}
    parts = [
        f"stage {stage} keeps {bytes_text(kept[stage])} of each microbatch for its backward pass"
        + (f" and computes again for {seconds:.3g} s per step, as one device would" if seconds else "")
        for stage, seconds in enumerate(found.seconds)
    ]
    return (f"remat='auto': {'; '.join(parts)}.",)


def _span(layers: Sequence[str]) -> str:
    """The first and the last of the user's lines."""
    if not layers:
        return ""
    first, last = layers[0], layers[-1]
    return f"{len(layers)}: {first}" if first == last else f"{len(layers)}: {first} to {last}"


def timeline_html(timeline: Timeline) -> Html:
    """When each task runs: a row per device of the schedule, time from left to right."""
    begin = min(timeline.start.values(), default=0.0)
    scale = _WIDTH / timeline.makespan if timeline.makespan else 0.0
    bars = []
    tasks = [(device, task) for device, order in enumerate(timeline.schedule.orders) for task in order]
    for device, task in tasks[:_MOST_BARS]:
        x, width = (timeline.start[task] - begin) * scale, (timeline.end[task] - timeline.start[task]) * scale
        bars.append(
            element(
                "rect",
                element("title", str(task)),
                x=round(x, 2),
                y=device * (_ROW + _GAP),
                width=round(max(width - 0.3, 0.3), 2),
                height=_ROW,
                fill=_COLOURS[task.kind],
            )
        )
    height = len(timeline.schedule.orders) * (_ROW + _GAP)
    chart = element("svg", *bars, viewBox=f"0 0 {_WIDTH} {height}", role="img", style="width:100%")
    legend = "One row per stage's devices; blue: forward, orange: backward, green: gradients of weights."
    return element("section", element("h2", "Timeline"), element("p", legend, class_="soft"), chart)
