"""The bound of one kind of pipeline, raised step by step by programs that take longer.

A kind is split into parts by how the last layers are cut. The part of the least bound is raised first. A part has four
programs: the small ones without tasks first, then those with them; each with a limit of layers per device, which holds
below some seconds, and without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.stage_search.chunks import ChunkProblem
from autoshard.stage_search.fractional import fractional_bound
from autoshard.stage_search.layer_capacity import RoomForLayers
from autoshard.stage_search.simulating import ScheduleFacts
from autoshard.stage_search.whole_layers import LAST_LAYERS, Ending, LayerLimit, WholeLayers, endings

SMALL_PROGRAM = 50  # tasks of a program with them that takes as long as one without


class KindBound:
    """Seconds that no choice of a kind is below."""

    def __init__(
        self, problem: ChunkProblem, whole: WholeLayers, room: RoomForLayers, estimate: float, enough: float
    ) -> None:
        """
        Args:
            estimate: s that choices take, about.
            enough: s; the bound need not be raised above these.
        """
        self._problem, self._whole, self._room, self._estimate, self._enough = problem, whole, room, estimate, enough
        self._parts = self._by_ending(0.0)
        whole_kind = _EndingBound(problem, whole, (0,), estimate, self.seconds)
        # A limit of layers does little before it is known where the last ones are.
        if whole_kind.programs[-1].limit is None and sum(part.bound < enough for part in self._parts) > 1:
            self._parts = [whole_kind]

    @property
    def seconds(self) -> float:
        """The bound so far."""
        return min((part.bound for part in self._parts), default=float("inf"))

    def raise_once(self, facts: ScheduleFacts, most_tasks: float = math.inf) -> int:
        """Solves a program of the part that has the least bound.

        Args:
            most_tasks: that the program may have.

        Returns:
            How many tasks the program has, 0 if none is left: a small one counts as so many tasks as take its time.
        """
        part = min(self._parts, key=lambda one: one.bound, default=None)
        if part is not None and not part.programs and part.ending == (0,):
            self._parts = self._by_ending(part.bound)
            part = min(self._parts, key=lambda one: one.bound)
        if part is None or not part.programs:
            return 0
        tasks = len(facts.graph.operations) if part.programs[-1].has_tasks else SMALL_PROGRAM
        if tasks > most_tasks:
            return 0
        part.solve(self._problem, facts)
        return tasks

    def _by_ending(self, known: float) -> list[_EndingBound]:
        problem, found = self._problem, []
        for ending in endings(problem.space.layers, len(problem.form.placement), LAST_LAYERS):
            least = max(known, self._room.bound(ending, self._enough))
            found.append(_EndingBound(problem, self._whole, ending, self._estimate, least))
        return found


class _EndingBound:
    """The choices of a kind whose last layers are cut in one way, or in any with the ending (0,)."""

    def __init__(
        self, problem: ChunkProblem, whole: WholeLayers, ending: Ending, estimate: float, known: float
    ) -> None:
        self.ending = ending
        self.bound = max(known, whole.bound(problem.form.placement, ending))
        limit = whole.limit(problem.form.placement, ending)
        self.programs = [_BoundProgram(None, True), _BoundProgram(None, False)]
        if limit is not None and limit.seconds > self.bound:
            limits = (None, limit) if limit.seconds >= estimate else (limit, None)
            self.programs = [_BoundProgram(one, has_tasks) for has_tasks in (True, False) for one in limits]

    def solve(self, problem: ChunkProblem, facts: ScheduleFacts) -> None:
        """Raises the bound to that of the next program."""
        program = self.programs.pop()
        limit = program.limit
        found = fractional_bound(problem, facts, self.ending, limit, has_tasks=program.has_tasks)
        self.bound = max(self.bound, found)
        # A limit only raises what a program finds, up to its seconds.
        if limit is not None and found < limit.seconds:
            self.programs = [one for one in self.programs if one.limit is not None or one.has_tasks > program.has_tasks]
        self.programs = [one for one in self.programs if one.limit is None or one.limit.seconds > self.bound]


@dataclass(frozen=True)
class _BoundProgram:
    """A program for a bound: within a limit of layers per device or without, with tasks or small."""

    limit: LayerLimit | None
    has_tasks: bool
