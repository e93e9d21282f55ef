"""Two plans in, what one decides otherwise than the other out: meshes, layouts of arrays, collectives.

Predicted seconds and peaks are not compared, since they change with what autoshard knows of machines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.layout import spec_text
from autoshard.mesh.collectives import Collective
from autoshard.plans.annotations import Annotations
from autoshard.plans.plan import PlacedArray, PlanData

_ABSENT = "not there"
_LISTED_CHANGES = 20  # changes that a text lists at most


@dataclass(frozen=True)
class PlanChange:
    """One thing that two plans say otherwise."""

    what: str  # "state/params/w float32[64, 64]"
    before: str  # what the first plan says of it
    after: str  # what the second says


def changes_of(before: PlanData, after: PlanData) -> tuple[PlanChange, ...]:
    """What the second plan decides otherwise than the first; () if they are the same plan.

    Where the programs differ, inner values cannot be told apart: the collectives then say what changed inside.
    """
    changes = [
        *_changes({"mesh": str(dict(before.mesh.shape))}, {"mesh": str(dict(after.mesh.shape))}),
        *_changes(before.choices, after.choices),
        *_changes(_layouts(before.arguments), _layouts(after.arguments)),
        *_changes(_layouts(before.captured), _layouts(after.captured)),
        *_changes(_layouts(before.results, "result "), _layouts(after.results, "result ")),
        *_changes(_totals(before.predicted.collectives), _totals(after.predicted.collectives)),
    ]
    if before.fingerprint == after.fingerprint:
        changes += _inner_changes(before.annotations, after.annotations)
    return tuple(changes)


def text_of_changes(changes: Sequence[PlanChange], before: str, after: str) -> str:
    """One line per change, the longest lists cut.

    Args:
        before: how a line names the first plan: ``"in the file"``.
        after: how it names the second.
    """
    lines = [f"  {one.what}: {one.before} {before}, {one.after} {after}" for one in changes[:_LISTED_CHANGES]]
    rest = len(changes) - _LISTED_CHANGES
    return "\n".join(lines + [f"  and {rest} more"] * (rest > 0))


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterable[PlanChange]:
    for what in {**before, **after}:
        if before.get(what) != after.get(what):
            yield PlanChange(what, before.get(what, _ABSENT), after.get(what, _ABSENT))


def _layouts(arrays: Iterable[PlacedArray], kind: str = "") -> dict[str, str]:
    return {f"{kind}{one.name} {one.type}": spec_text(one.layout) for one in arrays}


def _totals(collectives: Iterable[Collective]) -> dict[str, str]:
    """Kind and axes -> how many run in a step, and how many bytes these make on one device."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for one in collectives:
        total = found[f"{one.kind} over {', '.join(one.axes)}" + " in each turn of a loop" * one.is_per_turn]
        total[0] += one.count
        total[1] += one.bytes
    return {what: f"{count} with {size:,} bytes" for what, (count, size) in found.items()}


def _inner_changes(before: Annotations, after: Annotations) -> Iterable[PlanChange]:
    """How many inner values lie, and are read, otherwise."""
    kinds: dict[str, tuple[Mapping[Any, Any], Mapping[Any, Any]]] = {
        "inner values": (before.homes, after.homes),
        "copies of inner values": (before.copies, after.copies),
        "operands of operations": (before.wants, after.wants),
        "sums of which each device gets a slice": (before.scatters, after.scatters),
        "calls of operations": (before.runs, after.runs),
    }
    for what, (first, second) in kinds.items():
        others = sum(first.get(key) != second.get(key) for key in {**first, **second})
        if others:
            yield PlanChange(f"{others} {what}", "one way", "another way")
