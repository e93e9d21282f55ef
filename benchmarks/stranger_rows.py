"""What `strangers.py` finds of one program: what was predicted, what was compiled, and the bars that it misses."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from exceptions import reason_of

MACHINES = ("cpu", "v5e:2x4", "h100:1x8")
FORMS = ("values", "gradient", "batch", "batch gradient")
PAGE_BYTES = 4096  # off by less: rounding of buffers, flags and counters
COLLECTIVES_WITHIN, PEAK_WITHIN, SECONDS_WITHIN = 0.10, 0.20, 2.0
BARS = {"collectives": 0.95, "peak": 0.90, "limit": 1.0, "seconds": 0.90}  # shares of programs


class Task(NamedTuple):
    """A program in one form, on one machine."""

    source: str  # "case", "harness" or "situation"
    name: str
    form: str  # one of FORMS
    machine: str  # one of MACHINES


@dataclass(frozen=True)
class Row:
    """What was predicted for one task, and what was compiled."""

    source: str
    name: str
    form: str
    machine: str
    family: str  # the primitive that the program is there for
    outcome: str  # "compared", "refused" by JAX or XLA without a plan too, "raises", "crashes" or "hangs"
    detail: str = ""  # the error
    predicted: Mapping[str, int] = field(default_factory=dict)  # kind of collective -> bytes
    compiled: Mapping[str, int | None] = field(default_factory=dict)  # None: not known how many
    predicted_peak: int = 0  # bytes
    peak: int = 0  # bytes
    usable: float = 1.0  # share of a limit that a plan may be predicted to fill
    checked_peak: int | None = None  # bytes after the check of compiled programs; None: not needed, or nothing runs
    predicted_seconds: float = 0.0
    seconds: float | None = None  # None: the compiler has no estimate
    unestimated: tuple[str, ...] = ()  # the operations of which it has none
    wall: float = 0.0  # s that the task took

    @property
    def task(self) -> Task:
        return Task(self.source, self.name, self.form, self.machine)

    @property
    def misses(self) -> dict[str, str]:
        """The bars that it misses, each with what is off."""
        if self.outcome != "compared":
            return {}
        found = {}
        off = [_beside(kind, self.predicted.get(kind, 0), self.compiled.get(kind, 0)) for kind in self.kinds_off]
        if off:
            found["collectives"] = ", ".join(off)
        if abs(self.predicted_peak - self.peak) > max(PEAK_WITHIN * self.peak, PAGE_BYTES):
            found["peak"] = f"{self.predicted_peak} predicted, {self.peak} bytes compiled"
        if self.checked_peak is not None and self.checked_peak - PAGE_BYTES > self.limit:
            found["limit"] = f"{self.limit:.0f} allowed, {self.checked_peak} bytes after the check"
        if (
            self.applies("seconds")
            and not 1 / SECONDS_WITHIN <= self.predicted_seconds / self.seconds <= SECONDS_WITHIN
        ):
            found["seconds"] = f"{self.predicted_seconds:.2e} predicted, {self.seconds:.2e} s compiled"
        return found

    @property
    def limit(self) -> float:
        """The tightest limit under which the plan would be made, in bytes."""
        return self.predicted_peak / self.usable

    @property
    def is_over(self) -> bool:
        """Whether the program is over that limit before the check."""
        return self.outcome == "compared" and self.peak - PAGE_BYTES > self.limit

    @property
    def kinds_off(self) -> list[str]:
        """The kinds of collectives whose bytes are off."""

        def is_off(predicted: int, compiled: int | None) -> bool:
            return compiled is None or abs(predicted - compiled) > COLLECTIVES_WITHIN * compiled

        kinds = sorted(self.predicted.keys() | self.compiled.keys())
        return [kind for kind in kinds if is_off(self.predicted.get(kind, 0), self.compiled.get(kind, 0))]

    def applies(self, bar: str) -> bool:
        """Whether a bar can be measured."""
        is_estimated = bool(self.seconds) and not self.unestimated
        return self.outcome == "compared" and (bar != "seconds" or is_estimated)

    def reason(self, bar: str) -> str:
        """Why it misses a bar."""
        what = f"{self.machine} {self.family} {self.form}"
        if bar == "seconds":
            return reason_of(what, bar, self.predicted_seconds, self.seconds or 0.0)
        if bar == "collectives":
            sent = (sum(size or 0 for size in sizes.values()) for sizes in (self.predicted, self.compiled))
            return reason_of(what, bar, *sent)
        return reason_of(what, bar, self.predicted_peak, self.peak)


def _beside(kind: str, predicted: int, compiled: int | None) -> str:
    return f"{kind} {predicted} predicted, {'unknown' if compiled is None else compiled} compiled"


def read(path: Path | None) -> dict[Task, Row]:
    """The rows of a run that was stopped."""
    lines = path.read_text().splitlines() if path and path.exists() else ()
    return {row.task: row for row in (Row(**json.loads(line)) for line in lines)}
