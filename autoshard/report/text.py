"""A `Plan` in, text for people out: what lies where, what a step costs, and what the usual ways would cost."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoshard.layout import spec_text
from autoshard.mesh.collectives import Collective
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.plans.prediction import Prediction

WIDTH = 110  # columns
_LINES = 40  # of arguments, before the rest is only counted
_COLLECTIVES = 12  # the same of collectives

_BYTES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def plan_text(plan: PlanData, alternatives: Mapping[str, Prediction | None], absent: Mapping[str, str]) -> str:
    """The whole report, `WIDTH` columns wide, without colours.

    Args:
        alternatives: what the plan is compared with; None where there are no figures.
        absent: why there are none.
    """
    sections = [_header(plan), _arguments(plan), _results(plan), _comparison(plan, alternatives, absent)]
    sections.append(collectives_text(plan.predicted.collectives))
    sections += [f"Warning: {warning}" for warning in plan.warnings]
    return "\n\n".join(section for section in sections if section)


def bytes_text(size: float) -> str:
    """
    >>> bytes_text(1536), bytes_text(12)
    ('1.5 KiB', '12 B')
    """
    for unit, factor in _BYTES:
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """
    >>> seconds_text(0.00123), seconds_text(4e-8), seconds_text(0)
    ('1.23 ms', '40 ns', '0 s')
    """
    for unit, factor in _SECONDS:
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def table_text(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without lines: the first column and those headed in capitals to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for header in headers:
        table.add_column(header.strip(), justify="right" if header.startswith(" ") else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    plain: dict[str, Any] = {
        "color_system": None,
        "force_terminal": False,
        "force_jupyter": False,
        "legacy_windows": False,
    }
    printed = io.StringIO()
    console = Console(file=printed, width=WIDTH, **plain)
    console.print(table)
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


# Sections.


def _header(plan: PlanData) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    limit = "" if plan.memory is None else f" of {bytes_text(plan.memory)}"
    return "\n".join(
        (
            f"{plan.name} on {plan.mesh.size} devices ({mesh})",
            f"{seconds_text(plan.predicted.step_seconds)} per step, {bytes_text(plan.predicted.peak_bytes)}{limit} "
            f"per device; {_proof(plan)}",
        )
    )


def _proof(plan: PlanData) -> str:
    if plan.status == "optimal":
        return "optimal: no sharding of this step is predicted to be faster"
    if plan.bound <= 0:
        return "not proven to be near the best"
    return f"at most {plan.gap:.2%} slower than the best possible"


def _arguments(plan: PlanData) -> str:
    total = sum(placed.local_bytes for placed in plan.arguments if not placed.on_host)
    on_host = sum(placed.local_bytes for placed in plan.arguments if placed.on_host)
    more = f", {bytes_text(on_host)} on its host" if on_host else ""
    return _placed_table(f"Arguments ({bytes_text(total)} per device{more})", plan.arguments)


def _results(plan: PlanData) -> str:
    """The results, without those that lie as the argument whose place they take."""
    as_before = {
        result
        for argument, result in plan.carried.items()
        if plan.results[result].layout == plan.arguments[argument].layout
    }
    others = [placed for i, placed in enumerate(plan.results) if i not in as_before]
    if not others:
        return ""
    title = "Other results (the rest lie as the arguments they replace)" if as_before else "Results"
    return _placed_table(title, others)


def _placed_table(title: str, placed: Sequence[PlacedArray]) -> str:
    lines = folded(placed)
    rows = [
        (
            name,
            f"x{len(same)}" if len(same) > 1 else "",
            same[0].type,
            spec_text(same[0].layout),
            bytes_text(sum(one.local_bytes for one in same)),
        )
        for name, same in lines[:_LINES]
    ]
    if rest := [one for _, same in lines[_LINES:] for one in same]:
        rows.append((f"and {len(rest)} more", "", "", "", bytes_text(sum(one.local_bytes for one in rest))))
    return table_text((title, "", "whole array", "PartitionSpec", " per device"), rows)


def _comparison(plan: PlanData, alternatives: Mapping[str, Prediction | None], absent: Mapping[str, str]) -> str:
    rows = [_figures("this plan", plan.predicted, plan.memory)]
    rows += [
        (name, *[""] * 5, absent[name]) if predicted is None else _figures(name, predicted, plan.memory)
        for name, predicted in alternatives.items()
    ]
    headers = "Predicted", " per step", " compute", " communication", " exposed", " peak per device", ""
    return table_text(headers, rows)


def _figures(name: str, predicted: Prediction, limit: float | None) -> tuple[str, ...]:
    busy = predicted.compute_seconds, predicted.communication_seconds, predicted.exposed_seconds
    seconds = predicted.step_seconds, *busy
    over = limit is not None and predicted.peak_bytes > limit
    return (name, *map(seconds_text, seconds), bytes_text(predicted.peak_bytes), "over the limit" if over else "")


def collectives_text(collectives: Iterable[Collective], title: str = "Collectives per step") -> str:
    """A table of the largest, each with the user's line and what asks for it."""
    ordered = sorted(_summed(collectives), key=lambda collective: -collective.bytes)
    if not ordered:
        return "No collectives: the devices don't talk."
    rows = [
        (one.kind, ", ".join(one.axes), str(one.count), bytes_text(one.bytes), one.source, one.why)
        for one in ordered[:_COLLECTIVES]
    ]
    if rest := ordered[_COLLECTIVES:]:
        count, size = sum(one.count for one in rest), sum(one.bytes for one in rest)
        rows.append((f"and {len(rest)} more", "", str(count), bytes_text(size), "", ""))
    return table_text((title, "over axes", " runs", " bytes per device", "for", ""), rows)


def _summed(collectives: Iterable[Collective]) -> list[Collective]:
    """Those of one kind, line and reason as one; of several reasons on one line, the largest is given."""
    found: dict[tuple, list[Collective]] = defaultdict(list)
    for one in collectives:
        found[one.kind, one.axes, one.source].append(one)
    return [
        replace(
            max(alike, key=lambda one: one.bytes),
            bytes=sum(one.bytes for one in alike),
            count=sum(one.count for one in alike),
        )
        for alike in found.values()
    ]


# Folding of long lists.

Key = tuple[frozenset[str], ...]  # the words that stand at each place of a path


def folded(placed: Sequence[PlacedArray]) -> list[tuple[str, list[PlacedArray]]]:
    """Arrays of one shape, dtype and layout under one name: (pattern, the arrays it stands for), in order.

    Paths are folded place by place, numbers first, as long as a pattern stands for exactly its arrays. All numbers
    that occur at a place are written as ``*``, others in braces.

    >>> paths = [f"blocks/{i}/{name}" for i in range(12) for name in ("q", "k")]
    >>> [(name, len(same)) for name, same in folded([PlacedArray(path, (8,), "float32", ((),), 32) for path in paths])]
    [('blocks/*/{q,k}', 24)]
    """
    alike: dict[tuple, dict[Key, list[int]]] = defaultdict(dict)
    numbers: dict[tuple, set[str]] = defaultdict(set)  # the other words of a path, numbers masked -> what is there
    for index, one in enumerate(placed):
        words = tuple(one.name.split("/"))
        alike[len(words), one.type, one.layout].setdefault(tuple(map(_one, words)), []).append(index)
        for place, word in enumerate(words):
            if word.isdigit():
                numbers[_masked(words), place].add(word)
    lines = [
        (_pattern(key, placed, indices, numbers), indices) for boxes in alike.values() for key, indices in _boxes(boxes)
    ]
    lines.sort(key=lambda line: line[1])
    return [(name, [placed[i] for i in indices]) for name, indices in lines]


def _one(word: str) -> frozenset[str]:
    return frozenset((word,))


def _masked(words: Iterable[str]) -> tuple[str, ...]:
    return tuple("*" if word.isdigit() else word for word in words)


def _boxes(boxes: dict[Key, list[int]]) -> Iterable[tuple[Key, list[int]]]:
    """Unites keys that differ at one place only, again and again."""
    before = None
    while before != len(boxes):
        before = len(boxes)
        for is_number in (True, False):
            for place in range(len(next(iter(boxes)))):
                united: dict[tuple, tuple[Key, list[int]]] = {}
                for key, indices in boxes.items():
                    mixable = all(word.isdigit() == is_number for word in key[place])
                    others = (*key[:place], frozenset() if mixable else key[place], *key[place + 1 :])
                    old, found = united.get(others, (key, []))
                    united[others] = (*key[:place], key[place] | old[place], *key[place + 1 :]), found + indices
                boxes = dict(united.values())
    return ((key, sorted(indices)) for key, indices in boxes.items())


def _pattern(key: Key, placed: Sequence[PlacedArray], indices: list[int], numbers) -> str:
    paths = [placed[i].name.split("/") for i in indices]
    words = []
    for place, choices in enumerate(key):
        in_order = list(dict.fromkeys(path[place] for path in paths))
        there = set().union(*(numbers.get((_masked(path), place), ()) for path in paths))
        if len(choices) == 1:
            words.append(in_order[0])
        else:
            words.append("*" if choices == there else "{" + ",".join(_ranges(in_order)) + "}")
    return "/".join(words)


def _ranges(words: list[str]) -> list[str]:
    """Runs of numbers as ``0-3``.

    >>> _ranges(["0", "1", "2", "5"])
    ['0-2', '5']
    """
    if not all(word.isdigit() for word in words):
        return words
    runs: list[list[int]] = []
    for number in sorted(map(int, words)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]
