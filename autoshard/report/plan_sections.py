"""A plan in, the sections of its report out: what lies where, what a step costs, what other ways to shard it cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autoshard.mesh.collectives import Collective
from autoshard.plans.memory_use import MemoryUse
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.plans.prediction import Prediction
from autoshard.report.folding import COLLECTIVE_ROWS, folded
from autoshard.report.section import (
    ArrayCount,
    Bytes,
    Column,
    NameList,
    Phrase,
    Piece,
    Row,
    Seconds,
    Section,
    Share,
    Spec,
)
from autoshard.report.units import bytes_text, seconds_text

_MAX_ARRAYS = 40  # rows of arguments or results; all further arrays share one row

# What other ways to shard a step cost, or why one has no figures. None: nobody has looked for them.
Alternatives = Mapping[str, Prediction | str] | None


def plan_sections(plan: PlanData, alternatives: Alternatives) -> list[Section]:
    """The report of a plan, in the order in which it is read."""
    return [
        summary(plan),
        arguments(plan),
        *([captured(plan)] if plan.captured else []),
        results(plan),
        *([activations(plan)] if plan.activations else []),
        comparison(plan, alternatives),
        *([meshes(plan)] if plan.meshes else []),
        *([memory(plan.memory_use)] if plan.memory_use is not None else []),
        collectives(plan.predicted.collectives),
        *(Section(lines=(("Warning: ", warning),)) for warning in plan.warnings),
    ]


def repr_text(plan: PlanData) -> str:
    """A plan in one line, whatever its size."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    predicted = plan.predicted
    figures = f"{seconds_text(predicted.step_seconds)} per step, {bytes_text(predicted.peak_bytes)} per device"
    return f"<Plan of {plan.name!r} on ({mesh}): {len(plan.arguments)} arguments, {figures}, {plan.status}>"


def summary(plan: PlanData) -> Section:
    """The step and its mesh; time, memory and proof of the plan."""
    axes: list[Piece] = []
    for axis, size in plan.mesh.shape.items():
        axes += [", " if axes else "", axis, "=", size]
    machine = "" if plan.machine is None else f", planned for {plan.machine}"
    limit: Phrase = () if plan.memory is None else (" of ", Bytes(plan.memory))
    predicted = plan.predicted
    return Section(
        lines=(
            (plan.name, " on ", plan.mesh.size, " devices (", *axes, ")", machine),
            (
                *(Seconds(predicted.step_seconds), " per step, ", Bytes(predicted.peak_bytes), *limit),
                *(" per device; ", *proof(plan)),
            ),
        )
    )


def proof(plan: PlanData) -> Phrase:
    """How good the plan is proven to be."""
    if plan.status == "optimal":
        return ("optimal on this mesh: no sharding of this step is predicted to be faster",)
    if plan.bound <= 0:
        return ("not proven to be near the best",)
    return "at most ", Share(plan.gap), f" slower than {plan.bound_is_of}"


def arguments(plan: PlanData) -> Section:
    """Every argument, those that lie alike in one row."""
    return _placed(("Arguments (", *_total_bytes(plan.argument_bytes, plan.arguments), ")"), plan.arguments)


def captured(plan: PlanData) -> Section:
    """The large arrays that the step closes over."""
    on_device = sum(one.local_bytes for one in plan.captured if not one.on_host)
    return _placed(("Closed-over arrays (", *_total_bytes(on_device, plan.captured), ")"), plan.captured)


def _total_bytes(on_device: int, placed: Sequence[PlacedArray]) -> Phrase:
    on_host = sum(one.local_bytes for one in placed if one.on_host)
    more: Phrase = (", ", Bytes(on_host), " on its host") if on_host else ()
    return Bytes(on_device), " per device", *more


def results(plan: PlanData) -> Section:
    """The results, without those that lie as the argument whose place they take."""
    as_before = {
        result
        for argument, result in plan.carried.items()
        if plan.results[result].layout == plan.arguments[argument].layout
    }
    others = [placed for i, placed in enumerate(plan.results) if i not in as_before]
    title = "Other results (the rest lie as the arguments they replace)" if as_before else "Results"
    return _placed((title,), others)


def _placed(title: Phrase, placed: Sequence[PlacedArray]) -> Section:
    lines = folded(placed)
    rows: list[Row] = [
        (name, ArrayCount(len(alike)), alike[0].type, Spec(alike[0].layout), _local_bytes(alike))
        for name, alike in lines[:_MAX_ARRAYS]
    ]
    if rest := [one for _, alike in lines[_MAX_ARRAYS:] for one in alike]:
        rows.append((("and ", len(rest), " more"), "", "", "", _local_bytes(rest)))
    columns = Column(""), Column("whole array"), Column("PartitionSpec"), Column("per device", is_number=True)
    return Section(title, columns, tuple(rows))


def _local_bytes(placed: Iterable[PlacedArray]) -> Bytes:
    return Bytes(sum(one.local_bytes for one in placed))


def activations(plan: PlanData) -> Section:
    """How the largest values inside the step lie, by the lines of the model that make them."""
    rows: list[Row] = [
        (one.line, ArrayCount(one.count), one.primitive, f"{one.dtype}{list(one.shape)}", Spec(one.layout),
         Bytes(one.count * one.local_bytes))
        for one in plan.activations
    ]  # fmt: skip
    columns = (
        *(Column(""), Column(""), Column("whole array"), Column("PartitionSpec")),
        Column("per device", is_number=True),
    )
    return Section(("Inside the step, the largest",), columns, tuple(rows))


def memory(use: MemoryUse) -> Section:
    """What the peak consists of."""
    peak = use.peak
    held = [(part.name, Bytes(part.bytes[peak])) for part in use.parts if part.bytes[peak]]
    title = "Memory at the peak, ", use.lines[peak]
    return Section(title, (Column("per device", is_number=True),), tuple(held))


def comparison(plan: PlanData, alternatives: Alternatives) -> Section:
    """Time and memory of the plan, beside those of other ways to shard the step."""
    rows = [_figures("this plan", plan.predicted, plan.memory)]
    for name, found in (alternatives or {}).items():
        rows.append((name, *[""] * 5, found) if isinstance(found, str) else _figures(name, found, plan.memory))
    headings = "per step", "compute", "communication", "exposed", "peak per device"
    columns = *(Column(heading, is_number=True) for heading in headings), Column("")
    lines: tuple[Phrase, ...] = ()
    if alternatives is None:
        lines = (("Not compared yet: plan.compare() finds what data parallel, FSDP and tensor parallel form cost.",),)
    return Section(("Predicted",), columns, tuple(rows), lines)


def _figures(name: str, predicted: Prediction, limit: float | None) -> Row:
    seconds = (
        predicted.step_seconds,
        predicted.compute_seconds,
        predicted.communication_seconds,
        predicted.exposed_seconds,
    )
    over = limit is not None and predicted.peak_bytes > limit
    return name, *map(Seconds, seconds), Bytes(predicted.peak_bytes), "over the limit" if over else ""


def meshes(plan: PlanData) -> Section:
    """The meshes that the step was planned for, the one that was chosen first."""
    rows: list[Row] = [
        (" x ".join(f"{axis} {size}" for axis, size in shape.items()), Seconds(seconds), Bytes(peak))
        for shape, seconds, peak in plan.meshes
    ]
    return Section(
        ("Meshes",), (*(Column(name, is_number=True) for name in ("per step", "peak per device")),), tuple(rows)
    )


def collectives(found: Iterable[Collective], title: str = "Collectives per step") -> Section:
    """The largest, each with the user's line and what asks for it."""
    ordered = sorted(_summed(found), key=lambda collective: -collective.bytes)
    if not ordered:
        return Section(lines=(("No collectives: the devices don't talk.",),))
    rows: list[Row] = [
        (one.kind, NameList(one.axes), _runs(one), Bytes(one.bytes), one.source, one.why)
        for one in ordered[:COLLECTIVE_ROWS]
    ]
    if rest := ordered[COLLECTIVE_ROWS:]:
        count, size = sum(one.count for one in rest), sum(one.bytes for one in rest)
        rows.append((("and ", len(rest), " more"), "", count, Bytes(size), "", ""))
    columns = (
        *(Column("over axes"), Column("runs", is_number=True), Column("bytes per device", is_number=True)),
        *(Column("for"), Column("")),
    )
    return Section((title,), columns, tuple(rows))


def _runs(one: Collective) -> Piece:
    """How often a collective runs; in a loop of unknown length, how often in a turn."""
    return f"{one.count} a turn" if one.is_per_turn else one.count


def _summed(collectives: Iterable[Collective]) -> list[Collective]:
    """Those of one kind, line and reason as one; of several reasons on one line, the largest is given."""
    found: dict[tuple, list[Collective]] = defaultdict(list)
    for one in collectives:
        found[one.kind, one.axes, one.source, one.is_per_turn].append(one)
    return [
        replace(
            max(alike, key=lambda one: one.bytes),
            bytes=sum(one.bytes for one in alike),
            count=sum(one.count for one in alike),
        )
        for alike in found.values()
    ]
