"""Two plans in, what differs between them out: layouts, seconds, bytes and collectives, as data and as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax.sharding import PartitionSpec

from autoshard.errors import ArgumentError
from autoshard.layout import Layout, spec_of
from autoshard.mesh.collectives import Collective
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.plans.prediction import Prediction
from autoshard.report.folding import COLLECTIVE_ROWS, folded
from autoshard.report.html.page import sections_html
from autoshard.report.section import (
    ArrayCount,
    Bytes,
    Column,
    NameList,
    Phrase,
    RelativeChange,
    Row,
    Seconds,
    Section,
    Spec,
)
from autoshard.report.text import text_of

_NOT_IN_PLAN = "(none)"  # of what one plan has and the other has not

# What one plan or prediction runs: kind, mesh axes, line -> [bytes, runs]
_Tally = Mapping[tuple[str, tuple[str, ...], str], Sequence[int]]


@dataclass(frozen=True)
class LayoutChange:
    """Arrays that lie one way in one plan and another way in the other."""

    name: str  # of one array, or a pattern for all of them
    count: int  # of arrays
    type: str  # "float32[64, 64]"
    here: Layout | None  # None: this plan has no such array
    there: Layout | None

    @property
    def spec(self) -> PartitionSpec | None:
        """How they lie in this plan."""
        return None if self.here is None else spec_of(self.here)

    @property
    def other_spec(self) -> PartitionSpec | None:
        """How they lie in the other plan."""
        return None if self.there is None else spec_of(self.there)


@dataclass(frozen=True)
class CollectiveChange:
    """Collectives of one kind and line of which one step runs more than the other."""

    kind: str
    axes: tuple[str, ...]
    source: str  # the user's line
    bytes: tuple[int, int]  # per device and step, in this plan and in the other
    count: tuple[int, int]  # runs per step

    @property
    def more_bytes(self) -> int:
        """How many more bytes this plan moves."""
        return self.bytes[0] - self.bytes[1]


@dataclass(frozen=True)
class Difference:
    """What differs between two plans, this one and the other; false if nothing does."""

    name: str
    other_name: str
    meshes: tuple[Mapping[str, int], Mapping[str, int]]  # axis -> devices
    step_seconds: tuple[float, float]  # of this plan, of the other
    peak_bytes: tuple[int, int]  # per device
    arguments: tuple[LayoutChange, ...]
    results: tuple[LayoutChange, ...]  # those that take no argument's place
    collectives: tuple[CollectiveChange, ...]  # those that differ most first
    choices: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # what else they decide otherwise: stages

    @classmethod
    def of(cls, plan: PlanData, other: PlanData) -> Difference:
        """The difference of two plans, loaded or not, of one step or of two.

        Raises:
            ArgumentError: `other` is no plan.
        """
        if not isinstance(other, PlanData):
            raise ArgumentError(
                f"diff({other!r}): another plan is needed, as Plan.load(path, mesh) reads it from a file"
            )
        return cls(
            name=plan.name,
            other_name=other.name,
            meshes=(dict(plan.mesh.shape), dict(other.mesh.shape)),
            step_seconds=(plan.predicted.step_seconds, other.predicted.step_seconds),
            peak_bytes=(plan.predicted.peak_bytes, other.predicted.peak_bytes),
            arguments=_moved((*plan.arguments, *plan.captured), (*other.arguments, *other.captured)),
            results=_moved(_own_results(plan), _own_results(other)),
            collectives=collective_changes(plan.predicted, other.predicted),
            choices={
                what: (plan.choices.get(what, _NOT_IN_PLAN), other.choices.get(what, _NOT_IN_PLAN))
                for what in {**plan.choices, **other.choices}
                if plan.choices.get(what) != other.choices.get(what)
            },
        )

    def __bool__(self) -> bool:
        pairs = (self.name, self.other_name), self.meshes, self.step_seconds, self.peak_bytes
        moved = self.arguments or self.results or self.collectives or self.choices
        return any(here != there for here, there in pairs) or bool(moved)

    def __str__(self) -> str:
        return text_of(difference_sections(self))

    def _repr_html_(self) -> str:
        return sections_html(difference_sections(self), {**self.meshes[0], **self.meshes[1]})


def collective_changes(here: Prediction, there: Prediction) -> tuple[CollectiveChange, ...]:
    """The collectives of which one step runs more than the other, those that differ most first."""
    ours, theirs = _tally(here.collectives), _tally(there.collectives)
    nothing = (0, 0)
    changes = []
    for kind, axes, source in dict.fromkeys((*ours, *theirs)):
        (size, count), (other_size, other_count) = (one.get((kind, axes, source), nothing) for one in (ours, theirs))
        if (size, count) != (other_size, other_count):
            changes.append(CollectiveChange(kind, axes, source, (size, other_size), (count, other_count)))
    return tuple(sorted(changes, key=lambda change: -abs(change.more_bytes)))


def difference_sections(difference: Difference) -> list[Section]:
    """A difference as a report, in the order in which it is read."""
    if not difference:
        return [Section(lines=(("The plans are the same.",),))]
    return [
        _figures(difference),
        _chosen(difference.choices),
        _changed("Arguments that lie otherwise", difference.arguments),
        _changed("Results that lie otherwise", difference.results),
        _changed_collectives(difference.collectives),
    ]


def wish_section(wish: str, now: Prediction, before: Prediction) -> Section:
    """What a wish costs, beside the plan that was asked."""
    seconds, peaks = (now.step_seconds, before.step_seconds), (now.peak_bytes, before.peak_bytes)
    rows: tuple[Row, ...] = (
        ("per step", *map(Seconds, seconds), RelativeChange(*seconds)),
        ("peak per device", *map(Bytes, peaks), RelativeChange(*peaks)),
    )
    columns = tuple(Column(heading, is_number=True) for heading in ("with the wish", "without", ""))
    lines: tuple[Phrase, ...] = (("What differs most: ", *largest_difference(now, before)),)
    return Section((f"What if {wish}",), columns, rows, lines)


def largest_difference(now: Prediction, other: Prediction) -> Phrase:
    """What makes most of the difference between two steps."""
    changes = [one for one in collective_changes(now, other) if one.more_bytes]
    more = [one for one in changes if one.more_bytes > 0]
    less = [one for one in changes if one.more_bytes < 0]
    for one in (more or less if now.step_seconds > other.step_seconds else less or more)[:1]:
        size = Bytes(abs(one.more_bytes)), " more" if one.more_bytes > 0 else " less"
        return f"{one.kind} over {', '.join(one.axes)}: ", *size, f" ({one.source})"
    compute = now.compute_seconds - other.compute_seconds
    if compute:
        return Seconds(abs(compute)), " more compute" if compute > 0 else " less compute"
    return ("the same work",)


def _figures(difference: Difference) -> Section:
    (here, there), (peak, other_peak) = difference.step_seconds, difference.peak_bytes
    lines: list[Phrase] = []
    if difference.name != difference.other_name:
        lines.append((difference.name, " is compared with ", difference.other_name, "."))
    if difference.meshes[0] != difference.meshes[1]:
        mine, others = (", ".join(f"{axis}={size}" for axis, size in mesh.items()) for mesh in difference.meshes)
        lines.append(("This plan is for the mesh (", mine, "), the other for (", others, ")."))
    rows: tuple[Row, ...] = (
        ("per step", Seconds(here), Seconds(there), RelativeChange(here, there)),
        ("peak per device", Bytes(peak), Bytes(other_peak), RelativeChange(peak, other_peak)),
    )
    columns = tuple(Column(heading, is_number=True) for heading in ("this plan", "the other", ""))
    return Section((difference.name,), columns, rows, tuple(lines))


def _chosen(choices: Mapping[str, tuple[str, str]]) -> Section:
    rows: tuple[Row, ...] = tuple((what, here, there) for what, (here, there) in choices.items())
    return Section(("Stages",), (Column("this plan"), Column("the other")), rows)


def _changed(title: str, changes: Sequence[LayoutChange]) -> Section:
    def spec(layout: Layout | None) -> Spec | str:
        return _NOT_IN_PLAN if layout is None else Spec(layout)

    rows = tuple((one.name, ArrayCount(one.count), one.type, spec(one.here), spec(one.there)) for one in changes)
    columns = Column(""), Column("whole array"), Column("this plan"), Column("the other")
    return Section((title,), columns, rows)


def _changed_collectives(changes: Sequence[CollectiveChange]) -> Section:
    rows: list[Row] = [
        (one.kind, NameList(one.axes), *one.count, *map(Bytes, one.bytes), one.source)
        for one in changes[:COLLECTIVE_ROWS]
    ]
    if rest := changes[COLLECTIVE_ROWS:]:
        counts = (sum(one.count[side] for one in rest) for side in (0, 1))
        sizes = (Bytes(sum(one.bytes[side] for one in rest)) for side in (0, 1))
        rows.append((("and ", len(rest), " more"), "", *counts, *sizes, ""))
    headings = "runs, this plan", "the other", "bytes, this plan", "the other"
    columns = Column("over axes"), *(Column(heading, is_number=True) for heading in headings), Column("for")
    return Section(("Collectives per step",), columns, tuple(rows))


def _own_results(plan: PlanData) -> list[PlacedArray]:
    taken = set(plan.carried.values())
    return [placed for i, placed in enumerate(plan.results) if i not in taken]


def _moved(here: Iterable[PlacedArray], there: Iterable[PlacedArray]) -> tuple[LayoutChange, ...]:
    """Arrays that lie otherwise, or that only one of the plans has; those alike under one pattern."""
    ours, theirs = ({placed.name: placed for placed in side} for side in (here, there))
    both = [name for name in ours if name in theirs and ours[name].type == theirs[name].type]
    moved = [name for name in both if ours[name].layout != theirs[name].layout]
    alone = [placed for name, placed in ours.items() if name not in both]
    missing = [placed for name, placed in theirs.items() if name not in both]

    def changes() -> Iterator[LayoutChange]:
        pairs = [replace(ours[name], layout=ours[name].layout + theirs[name].layout) for name in moved]
        for name, alike in folded(pairs):  # they have both layouts in common, one after the other
            ndim = len(alike[0].shape)
            layout = alike[0].layout
            yield LayoutChange(name, len(alike), alike[0].type, layout[:ndim], layout[ndim:])
        for name, alike in folded(alone):
            yield LayoutChange(name, len(alike), alike[0].type, alike[0].layout, None)
        for name, alike in folded(missing):
            yield LayoutChange(name, len(alike), alike[0].type, None, alike[0].layout)

    return tuple(changes())


def _tally(collectives: Iterable[Collective]) -> _Tally:
    found: dict[tuple[str, tuple[str, ...], str], Counter[int]] = defaultdict(Counter)
    for one in collectives:
        found[one.kind, one.axes, one.source].update({0: one.bytes, 1: one.count})
    return {key: (tally[0], tally[1]) for key, tally in found.items()}
