"""What a step holds as temporaries and as results, and which temporaries lie where a result will.

XLA reserves the buffer of a result for the whole program. Until the result is written, temporaries lie there: the
largest first, each in the smallest buffer that is as large and free while the temporary is needed
(xla/service/buffer_assignment.cc). `tests/model/test_workspaces.py` compiles programs that show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.model.lifetimes import HEAP_OVERHEAD
from autoshard.model.memory_terms import HeldBytes
from autoshard.solver.problem import Live

BUFFERS_AT_ONCE = 32  # of results, that are looked at together for one that is free: most often the first few are


@dataclass(frozen=True)
class Elsewhere:
    """Temporaries of one choice that take no room in the memory that arrays come from, at most program points."""

    lives: Sequence[Live]
    bytes: np.ndarray  # that lie elsewhere, per program point; of what is resharded, too
    shares: np.ndarray | None = None  # of these lives that lie elsewhere, per program point; None: all of each


@dataclass(frozen=True)
class Heap:
    """The lives of a problem that are temporaries, and the buffers that stand for results all the time."""

    buffers: list[Live] = field(default_factory=list)  # temporaries of one buffer each, with the gaps between them
    on_chip: list[Live] = field(default_factory=list)  # temporaries that the chip's own memory may hold
    results: list[Live] = field(default_factory=list)  # from the point that first writes them

    def add(self, live: Live, held: HeldBytes) -> None:
        """Notes a life of the problem by what it holds."""
        if held.in_heap and held.is_one_buffer:
            self.buffers.append(live)
        if held.in_heap and held.may_be_on_chip:
            self.on_chip.append(live)
        if held.written_at is not None:
            self.results.append(Live(live.node, held.written_at, live.end, live.usage))

    def in_results(self, choice: Sequence[int]) -> list[Live]:
        """The temporaries that lie in buffers of results, under one option per node."""
        results = [(live.usage[choice[live.node]], live) for live in self.results]
        results = sorted(((size, live) for size, live in results if size), key=lambda one: one[0])
        if not results:
            return []
        sizes = np.array([size for size, _ in results])
        end = max(live.end for _, live in results)
        taken = np.zeros((len(results), end), bool)
        for row, (_, live) in enumerate(results):
            taken[row, live.start :] = True
        room, found = sizes * HEAP_OVERHEAD, list[Live]()
        held = [(live.usage[choice[live.node]], live) for live in self.buffers if live.start < live.end]
        for size, live in sorted((one for one in held if 0 < one[0] <= room[-1]), key=lambda one: -one[0]):
            for first in range(int(np.searchsorted(room, size)), len(room), BUFFERS_AT_ONCE):
                free = ~taken[first : first + BUFFERS_AT_ONCE, live.start : live.end].any(axis=1)
                if free.any():
                    taken[first + int(free.argmax()), live.start : live.end] = True
                    found.append(live)
                    break
        return found
