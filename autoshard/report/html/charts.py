"""Memory over a step, and seconds of a plan beside its alternatives, as charts of plain SVG and HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoshard.plans.memory_use import MemoryUse
from autoshard.plans.prediction import Prediction
from autoshard.report.html.elements import Html, element, joined
from autoshard.report.html.style import part_colour
from autoshard.report.units import bytes_text, seconds_text

_WIDTH, _HEIGHT = 1000, 260  # of a chart, in units of its own
_HEADROOM_SHARE = 1.08  # of the height, above what is highest
_FAR_LIMIT_FACTOR = 3.0  # a limit so many times as high as the peak is said, not drawn


def memory_chart(use: MemoryUse, limit: float | None) -> Html:
    """What holds memory over the step, one part on the other, against the limit."""
    totals, peak = use.totals, use.peak
    is_drawn = limit is not None and limit <= _FAR_LIMIT_FACTOR * totals[peak]
    top = max(totals[peak], limit if is_drawn and limit is not None else 0) * _HEADROOM_SHARE or 1.0
    moments = len(use.lines)

    def x(moment: float) -> float:
        return round(moment / moments * _WIDTH, 2)

    def y(size: float) -> float:
        return round(_HEIGHT - size / top * _HEIGHT, 2)

    below = [0] * moments
    drawn = []
    for part, colour in zip(use.parts, _colours(use), strict=True):
        above = [b + size for b, size in zip(below, part.bytes, strict=True)]
        up = [f"{x(i)},{y(above[i])} {x(i + 1)},{y(above[i])}" for i in range(moments)]
        down = [f"{x(i + 1)},{y(below[i])} {x(i)},{y(below[i])}" for i in reversed(range(moments))]
        drawn.append(element("polygon", points=" ".join([*up, *down]), fill=colour))
        below = above
    grid = [element("line", x1=0, x2=_WIDTH, y1=y(top * s), y2=y(top * s), class_="grid") for s in (0.25, 0.5, 0.75)]
    hovered = [
        element(
            "rect",
            element("title", f"{line}\n{bytes_text(total)}"),
            x=x(i),
            y=0,
            width=x(1),
            height=_HEIGHT,
            class_="moment",
        )
        for i, (line, total) in enumerate(zip(use.lines, totals, strict=True))
    ]
    is_right = peak > moments / 2
    mark = element(
        "text",
        f"peak {bytes_text(totals[peak])}, {use.lines[peak]}",
        x=x(peak + 0.5),
        y=y(totals[peak]) - 6 if y(totals[peak]) > 18 else 14,
        text_anchor="end" if is_right else "start",
    )
    line = []
    if is_drawn and limit is not None:
        line = [
            element("line", x1=0, x2=_WIDTH, y1=y(limit), y2=y(limit), class_="limit"),
            element(
                "text",
                f"limit {bytes_text(limit)}",
                x=0 if is_right else _WIDTH,
                y=y(limit) + 14,
                text_anchor="start" if is_right else "end",
                class_="limit-text",
            ),
        ]
    chart = element(
        "svg",
        *grid,
        *drawn,
        *line,
        mark,
        *hovered,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label="memory in use over the step",
    )
    caption = element(
        "p", "From the first operation of the step to the last; the bars above a place are what is held there."
    )
    return joined(chart, element("div", caption, class_="soft"), _legend(use))


def _legend(use: MemoryUse) -> Html:
    """What the colours mean, and how much each part holds at the peak."""
    entries = []
    for part, colour in zip(use.parts, _colours(use), strict=True):
        swatch = element("span", class_="swatch", style=f"background:{colour}")
        size = element("span", bytes_text(part.bytes[use.peak]), class_="number soft")
        entries.append(element("div", swatch, element("span", part.name), size))
    return element("div", *entries, class_="legend")


def _colours(use: MemoryUse) -> list[str]:
    counts: Counter[str] = Counter()
    found = []
    for part in use.parts:
        found.append(part_colour(counts[part.kind], part.kind))
        counts[part.kind] += 1
    return found


def seconds_bars(rows: Sequence[tuple[str, Prediction | str]], limit: float | None) -> Html:
    """Compute and exposed communication per step of a plan and of others, one bar each, and their peaks."""
    found = [one for _, one in rows if isinstance(one, Prediction)]
    longest = max((one.step_seconds for one in found), default=0.0) or 1.0
    lines = []
    for name, one in rows:
        if isinstance(one, str):
            lines.append(element("tr", element("td", name), element("td", one, class_="words", colspan=4)))
            continue
        compute = one.step_seconds - one.exposed_seconds
        track = element(
            "div",
            element("span", class_="compute", style=f"width:{compute / longest:.2%}"),
            element("span", class_="talk", style=f"width:{one.exposed_seconds / longest:.2%}"),
            class_="track",
        )
        is_over = limit is not None and one.peak_bytes > limit
        peak = element("span", bytes_text(one.peak_bytes), class_="over") if is_over else bytes_text(one.peak_bytes)
        lines.append(
            element(
                "tr",
                element("td", name),
                element("td", track, style="width:45%"),
                element("td", seconds_text(one.step_seconds), class_="number"),
                element("td", peak, class_="number"),
                element("td", "over the limit" if is_over else "", class_="over"),
            )
        )
    heads = [element("th", text, class_=kind) for text, kind in _HEADS]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *lines))
    return element("div", table, class_="scroll")


_HEADS = (("", ""), ("", ""), ("per step", "number"), ("peak per device", "number"), ("", ""))
