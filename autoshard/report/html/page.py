"""A plan in, its report as HTML out: a fragment for notebooks, or one file that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoshard.plans.plan import PlanData
from autoshard.plans.prediction import Prediction
from autoshard.report.html.charts import memory_chart, seconds_bars
from autoshard.report.html.elements import Html, element, joined
from autoshard.report.html.style import STYLE
from autoshard.report.html.tables import Colours, axis_html, section_html
from autoshard.report.html.tree import tree_html
from autoshard.report.plan_sections import Alternatives, activations, captured, collectives, proof, results
from autoshard.report.section import Section
from autoshard.report.text import written
from autoshard.report.units import bytes_text, seconds_text


def plan_html(
    plan: PlanData, alternatives: Alternatives, more: Sequence[Section] = (), last: Sequence[Section] = ()
) -> Html:
    """The report as a fragment, with its style.

    Args:
        more: sections that stand behind the head, as what a wish costs.
        last: sections that stand at the end.
    """
    colours = {axis: i for i, axis in enumerate(plan.mesh.shape)}
    parts = [
        _head(plan, colours),
        *(section_html(section, colours) for section in more),
        *_memory(plan),
        _comparison(plan, alternatives),
        element("section", element("h2", "Arguments"), tree_html(plan.arguments, colours)),
        *([section_html(captured(plan), colours)] if plan.captured else []),
        section_html(results(plan), colours),
        *([section_html(activations(plan), colours)] if plan.activations else []),
        section_html(collectives(plan.predicted.collectives), colours),
        *(element("div", f"Warning: {warning}", class_="warning") for warning in plan.warnings),
        *(section_html(section, colours) for section in last),
    ]
    return joined(element("style", Html(STYLE)), element("div", *parts, class_="autoshard"))


def sections_html(sections: Iterable[Section], axes: Iterable[str]) -> Html:
    """Any sections as a fragment, with its style.

    Args:
        axes: of the mesh, in its order: each has the colour that it has in the report of a plan.
    """
    colours = {axis: i for i, axis in enumerate(axes)}
    shown = [section_html(section, colours) for section in sections]
    return joined(element("style", Html(STYLE)), element("div", *shown, class_="autoshard"))


def page(title: str, body: Html) -> str:
    """One HTML file that shows a fragment."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(_GROUND)),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


_GROUND = """
:root { color-scheme: light dark; } body { margin: 0; background: #fff; }
@media (prefers-color-scheme: dark) { body { background: #14191f; } }
"""


def _head(plan: PlanData, colours: Colours) -> Html:
    axes = [joined(axis_html(axis, colours), f"={size} ") for axis, size in plan.mesh.shape.items()]
    machine = f", planned for {plan.machine}" if plan.machine else ""
    predicted = plan.predicted
    limit = "" if plan.memory is None else f"of {bytes_text(plan.memory)} on each device"
    waits = seconds_text(predicted.exposed_seconds)
    proven = "optimal" if plan.status == "optimal" else f"within {plan.gap:.2%}" if plan.bound > 0 else "unproven"
    cards = [
        _card(seconds_text(predicted.step_seconds), f"per step, {waits} of it waiting for communication"),
        _card(bytes_text(predicted.peak_bytes), limit or "on each device", _filled(plan)),
        _card(proven, written(proof(plan))),
    ]
    return element(
        "header",
        element("h1", plan.name),
        element("div", f"{plan.mesh.size} devices: ", *axes, machine, class_="soft"),
        element("div", *cards, class_="cards"),
    )


def _card(figure: str, words: str, below: Html | None = None) -> Html:
    return element("div", element("b", figure), element("span", words, class_="soft"), below or Html(), class_="card")


def _filled(plan: PlanData) -> Html:
    """How much of the limit the peak takes."""
    if not plan.memory:
        return Html()
    share = min(1.0, plan.predicted.peak_bytes / plan.memory)
    return element("div", element("span", class_="compute", style=f"width:{share:.2%}"), class_="track")


def _memory(plan: PlanData) -> Iterable[Html]:
    use = plan.memory_use
    if use is not None:
        yield element("section", element("h2", "Memory of one device"), memory_chart(use, plan.memory))


def _comparison(plan: PlanData, alternatives: Alternatives) -> Html:
    rows: list[tuple[str, Prediction | str]] = [("this plan", plan.predicted), *(alternatives or {}).items()]
    legend = element(
        "p",
        element("span", class_="swatch compute"),
        "compute ",
        element("span", class_="swatch talk"),
        "communication that something waits for",
        class_="soft",
    )
    asks = element("p", "Not compared yet: plan.compare() finds what other forms cost.", class_="soft")
    title = element("h2", "Seconds of a step")
    return element("section", title, seconds_bars(rows, plan.memory), legend, asks if alternatives is None else Html())
