"""Why one argument lies as it does: the layout that was chosen beside the next best ones, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autoshard.layout import Layout, spec_of
from autoshard.plans.plan import PlacedArray
from autoshard.plans.prediction import Prediction
from autoshard.report.difference import largest_difference
from autoshard.report.html.page import sections_html
from autoshard.report.section import Bytes, Column, Phrase, RelativeChange, Row, Seconds, Section, Spec
from autoshard.report.text import text_of


@dataclass(frozen=True)
class PricedLayout:
    """One layout of an argument, and the cheapest step found in which the argument lies so."""

    layout: Layout
    predicted: Prediction
    bound: float  # proven: no step in which it lies so takes fewer seconds
    fits: bool  # whether the step is within the memory limit; if not, it is the cheapest without one

    @property
    def spec(self) -> PartitionSpec:
        """The layout as a PartitionSpec."""
        return spec_of(self.layout)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the step."""
        return self.predicted.step_seconds

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the step, bytes per device."""
        return self.predicted.peak_bytes


@dataclass(frozen=True)
class Explanation:
    """Why one argument lies as it does."""

    argument: PlacedArray
    chosen: PricedLayout
    others: tuple[PricedLayout, ...]  # the next best layouts, best first; each solved with the argument lying so
    reasons: tuple[str, ...]  # what forced the choice, a sentence or two each
    axes: tuple[str, ...]  # of the mesh, in its order
    count: int = 1  # how many arguments the path that was asked for fits; this is the first

    def __str__(self) -> str:
        return text_of(explanation_sections(self))

    def _repr_html_(self) -> str:
        return sections_html(explanation_sections(self), self.axes)


def explanation_sections(explanation: Explanation) -> list[Section]:
    """An explanation as a report, in the order in which it is read."""
    argument = explanation.argument
    also: Phrase = (
        ()
        if explanation.count == 1
        else (
            " (the first of ",
            explanation.count,
            " that fit)",
        )
    )
    title = argument.name, *also, ", ", argument.type, ", lies as ", Spec(argument.layout), ": "
    return [
        Section(lines=((*title, Bytes(argument.local_bytes), " on each device"),)),
        _layouts(explanation),
        Section(("Why",), lines=tuple(("- ", reason) for reason in explanation.reasons)),
    ]


def _layouts(explanation: Explanation) -> Section:
    chosen = explanation.chosen
    rows: list[Row] = [
        (Spec(chosen.layout), Seconds(chosen.step_seconds), "chosen", Bytes(chosen.peak_bytes), "", ""),
        *(_row(other, chosen) for other in explanation.others),
    ]
    columns = (
        *(Column("per step", is_number=True), Column("", is_number=True)),
        *(Column("peak per device", is_number=True), Column(""), Column("beside the chosen one")),
    )
    lines: tuple[Phrase, ...] = () if explanation.others else (("There is no other layout to compare it with.",),)
    return Section(("Step if it lies as",), columns, tuple(rows), lines)


def _row(other: PricedLayout, chosen: PricedLayout) -> Row:
    over = "" if other.fits else "over the limit"
    change = RelativeChange(other.step_seconds, chosen.step_seconds)
    figures = Spec(other.layout), Seconds(other.step_seconds), change, Bytes(other.peak_bytes), over
    return *figures, largest_difference(other.predicted, chosen.predicted)
