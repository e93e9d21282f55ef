"""A formulation and a choice in, what holds memory on one device at each point of the step out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.model.formulation import Formulation
from autoshard.model.heap.result_tables import TABLES
from autoshard.program import Program

_MOST_MOMENTS = 96  # program points that are kept; of each stretch of points, the one at which the most is held
_MOST_LINES = 5  # lines of the user with a part each; the values of all other lines are one part
_MOST_ARGUMENT_PARTS = 8  # parts into which arguments are divided


@dataclass(frozen=True)
class MemoryPart:
    """What some of a step's arrays hold on one device, over the step."""

    name: str  # "state/params", or "values made at train.py:41"
    kind: str  # "argument" or "value"
    bytes: tuple[int, ...]  # per moment


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use on one device over a step, by what holds them."""

    lines: tuple[str, ...]  # per moment, in the order of the program: the user's line, and the operation there
    parts: tuple[MemoryPart, ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes per moment, of all parts."""
        return tuple(sum(part.bytes[moment] for part in self.parts) for moment in range(len(self.lines)))

    @property
    def peak(self) -> int:
        """The moment at which the most is held."""
        return max(range(len(self.lines)), key=self.totals.__getitem__)


def memory_use(formulation: Formulation, choice: Sequence[int]) -> MemoryUse:
    """What holds memory over a step, under one option per node."""
    program = formulation.program
    points = len(program.equations) + 1
    held: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(points + 1))
    arguments = _argument_parts(program)
    lines = list(_lines(formulation))
    elsewhere = formulation.elsewhere(choice)
    shared = frozenset(map(id, elsewhere.lives))
    partly: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(points + 1))
    for live in formulation.problem.lives:
        size = live.usage[choice[live.node]]
        is_home = live.node < len(arguments) and live.start == 0 and live.end >= points - 1
        part = ("argument", arguments[live.node]) if is_home else ("value", lines[live.node])
        bytes_of = partly if id(live) in shared else held
        bytes_of[part][live.start] += size
        bytes_of[part][min(live.end, points)] -= size
    over = {part: difference.cumsum()[:points] for part, difference in held.items()}
    if elsewhere.shares is not None:
        for part, difference in partly.items():
            over[part] = over.get(part, 0.0) + difference.cumsum()[:points] * (1 - elsewhere.shares[:points])
    total = formulation.bytes_in_use_outside_chip(choice)[:points]
    moments = _moments(total)
    at_moments = {part: over[part][moments] for part in over}
    return MemoryUse(
        lines=tuple(_moment_text(program, moment) for moment in moments),
        parts=tuple(_parts(at_moments, total[moments])),
    )


def _parts(held: dict[tuple[str, str], np.ndarray], total: np.ndarray) -> Iterator[MemoryPart]:
    """Arguments first, then the lines whose values hold the most at the peak, then all the rest."""
    peak = int(total.argmax())
    values = sorted((part for part in held if part[0] == "value"), key=lambda part: -held[part][peak])
    named = [part for part in values[:_MOST_LINES] if held[part][peak] > 0]
    shown = [part for part in held if part[0] == "argument"] + named
    rest = total - sum((held[part] for part in shown), np.zeros_like(total))
    for kind, name in shown:
        yield MemoryPart(name, kind, tuple(held[kind, name].astype(int).tolist()))
    if rest.max(initial=0.0) >= 1:  # less than 0 where a value is gone while it is resharded
        yield MemoryPart("other values", "value", tuple(np.maximum(rest, 0).astype(int).tolist()))


def _moments(total: np.ndarray) -> list[int]:
    """Points at which the most is held, one of each stretch of points."""
    stretches = np.array_split(np.arange(len(total)), min(_MOST_MOMENTS, len(total)))
    return [int(stretch[total[stretch].argmax()]) for stretch in stretches]


def _argument_parts(program: Program) -> list[str]:
    """The part of each argument: as many keys of its path as leave few parts."""
    names = [value.name.split("/") for value in program.arguments]
    own = len(program.own_arguments)
    for keys in (2, 1):
        parts = ["/".join(name[: keys if i in program.carried else 1]) for i, name in enumerate(names)]
        parts[own:] = ["closed-over arrays"] * (len(parts) - own)
        if len(Counter(parts)) <= _MOST_ARGUMENT_PARTS:
            return parts
    return ["arguments"] * own + ["closed-over arrays"] * (len(names) - own)


def _lines(formulation: Formulation) -> Iterator[str]:
    """Per node, which values it decides about, as the user knows them."""
    copies, values = "copies of arguments", formulation.program.values
    shared = {shared.node: values[value] for value, shared in formulation.shared.items()}
    for node in range(len(formulation.problem.costs)):
        group = node - len(formulation.arguments)
        if 0 <= group < len(formulation.groups):
            yield f"values made at {formulation.groups[group].equations[-1].source or 'unknown line'}"
        else:
            value = shared.get(node)
            if value is not None and not value.from_outside:
                yield f"values made at {value.source or 'unknown line'}"
            else:
                yield TABLES if value is None and group >= 0 else copies


def _moment_text(program: Program, point: int) -> str:
    if point >= len(program.equations):
        return "end of the step"
    equation = program.equations[point]
    return f"{equation.source or 'unknown line'} ({equation.primitive})"
