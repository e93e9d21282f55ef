"""What a step holds as temporaries and as results, and which temporaries lie elsewhere than arrays do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.model.heap.room_in_results import ResultBuffer, RoomInResults, WaitingSum
from autoshard.model.memory_terms import HeldBytes
from autoshard.solver.problem import Live


@dataclass(frozen=True)
class RelocatedTemporaries:
    """Temporaries of one choice that take no room in the memory that arrays come from, at most program points."""

    lives: Sequence[Live]
    bytes: np.ndarray  # that lie elsewhere, per program point; of what is resharded, too
    shares: np.ndarray | None = None  # of these lives that lie elsewhere, per program point; None: all of each


@dataclass(frozen=True)
class Heap:
    """The lives of a problem that are temporaries, and the buffers that stand for results all the time."""

    room_in_results: RoomInResults = field(default_factory=RoomInResults)
    on_chip: list[Live] = field(default_factory=list)  # temporaries that the chip's own memory may hold
    outside: list[Live] = field(default_factory=list)  # temporaries that it never holds
    tables: list[Live] = field(default_factory=list)  # there only if something lies outside (`result_tables.py`)

    def add(self, live: Live, held: HeldBytes) -> None:
        """Notes a life of the problem by what it holds."""
        if held.in_heap and held.is_one_buffer:
            self.room_in_results.temporaries.append(live)
        if held.in_heap:
            (self.on_chip if held.may_be_on_chip else self.outside).append(live)
        if held.delays:
            self.room_in_results.sums.append(WaitingSum(live, held.delays))
        if held.written:
            self.room_in_results.results.append(ResultBuffer(live, held.written))

    def is_outside_empty(self, choice: Sequence[int]) -> bool:
        """Whether a choice leaves no temporary but such as the chip's own memory may hold."""
        return not any(live.usage[choice[live.node]] for live in self.outside)
