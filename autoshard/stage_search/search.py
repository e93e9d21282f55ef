"""A space of stages in, out the best pipeline found and a bound that no other is below.

A *kind* of pipeline has a number of microbatches, sub-meshes of one size or of all sizes, a number of stages and a
schedule. Its choices come in the order of their bounds, and are simulated. The search goes on with the kind of the
least bound until that is no less than the best choice simulated, or until enough tasks have been simulated.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.stage_search.chains import BestFirst, ChainProblem, Chains
from autoshard.stage_search.choices import ChosenStage, PipelineChoice, SimulatedChoice, StageSearchResult
from autoshard.stage_search.chunks import ChunkProblem, balanced, mean_bound
from autoshard.stage_search.fit_memory import fitted_to_memory
from autoshard.stage_search.layer_capacity import RoomForLayers
from autoshard.stage_search.local_moves import polished
from autoshard.stage_search.simulating import (
    estimated_seconds,
    in_flight_of,
    schedule_facts,
    schedule_form,
    simulated,
)
from autoshard.stage_search.tables import StageSpace, StageTable
from autoshard.stage_search.tightening import KindBound
from autoshard.stage_search.whole_layers import WholeLayers

_NEGLIGIBLE_WEIGHT_SHARE = 0.01  # of the work: gradients of weights that take less are as good as none
_PROGRAM_TASK_SHARE = 0.03  # of the tasks: so many in linear programs for bounds, where a task takes 300 microseconds
_LARGEST_PROGRAM = 6_000  # tasks: what programs take grows faster than they do
_PROMISING_FACTOR = (
    1.1  # a choice that is estimated, or simulated, to take so many times as long may still lead to the best
)


@dataclass(frozen=True)
class SearchSettings:
    """How much is tried. Counts, not seconds: the same space has the same result everywhere, unless time is up."""

    most_tasks: int = 600_000  # of schedules, simulated in all: about 4 microseconds each
    gap_of_programs: float = 0.04  # a bound that is this near is not raised by programs
    gap: float = 0.002  # a choice that is proven to be this near the best is good enough
    most_mixed_entries: int = (
        40_000_000  # of the tables for sub-meshes of several sizes; beyond, the smallest are left out
    )
    polished: int = 6  # choices from which moves are tried first
    others: int = 8  # choices beside the best that are told
    until: float = math.inf  # when time is up, as `time.monotonic` has it


@dataclass(frozen=True, eq=False)
class SearchMemory:
    """What searches found that holds for the next one, of a space in which some tables are others.

    Keys have the identities of tables, so entries keep these alive.
    """

    firsts: dict[tuple[object, ...], tuple[tuple[StageTable, ...], float, tuple[ChosenStage, ...] | None]] = field(
        default_factory=dict
    )  # tables, bound and first choice of kinds with several virtual stages per device
    simulated: list[SimulatedChoice] = field(default_factory=list)

    def simulated_in(self, space: StageSpace) -> dict[tuple[object, ...], SimulatedChoice | None]:
        """The choices of a space whose seconds are known, by their keys."""
        tables = {id(table) for costs in space.costs.values() for table in costs.tables}
        return {
            one.choice.key: one
            for one in self.simulated
            if (one.choice.schedule, one.choice.chunks) in space.schedules
            and all(id(stage.table) in tables for stage in one.choice.stages)
        }


class PipelineKind:
    """Choices that differ in cuts and sub-meshes alone."""

    def __init__(self, schedule: str, chunks: int, microbatches: int, stages: int) -> None:
        self.schedule, self.chunks, self.microbatches, self.stages = schedule, chunks, microbatches, stages

    bound: float

    @property
    def estimate(self) -> float:
        """Seconds that its best choice takes, about."""
        return self.bound

    @property
    def tasks(self) -> int:
        """Tasks of its schedule, about."""
        return 2 * self.microbatches * self.stages * self.chunks

    def next(self, below: float) -> tuple[ChosenStage, ...] | None:
        """The next choice of virtual stages, if one can take less than `below`."""
        raise NotImplementedError

    def tighten(self, most_tasks: float, enough: float) -> int:
        """Raises the bound a little, to what is enough; how many tasks that took, or 0 if nothing can be done.

        Args:
            most_tasks: that the programs for the bound may have.
            enough: s.
        """
        return 0


class ChainPipelines(PipelineKind):
    """One virtual stage per device."""

    def __init__(self, chains: Chains, schedule: str, stages: int) -> None:
        super().__init__(schedule, 1, chains.problem.microbatches, stages)
        self._leaves = BestFirst(chains, stages)

    @property
    def bound(self) -> float:  # type: ignore[override]
        """Seconds that no choice to come is below."""
        return self._leaves.bound

    def next(self, below: float) -> tuple[ChosenStage, ...] | None:
        """The next choice in the order of bounds."""
        return self._leaves.next(below)


class ChunkPipelines(PipelineKind):
    """Several virtual stages per device: one choice, and the moves from these."""

    def __init__(
        self, problem: ChunkProblem, whole: WholeLayers, schedule: str, chunks: int, memory: SearchMemory
    ) -> None:
        super().__init__(schedule, chunks, problem.microbatches, problem.devices)
        self.bound = whole.bound(problem.form.placement)
        self._estimate = max(self.bound, whole.estimate(problem.devices, chunks))
        self._problem, self._whole, self._memory = problem, whole, memory
        self._is_new = True
        self._tight: KindBound | None = None

    @property
    def estimate(self) -> float:
        """Seconds with equal virtual stages."""
        return self._estimate

    def next(self, below: float) -> tuple[ChosenStage, ...] | None:
        """The balanced choice, once. The bounds of the mean and of memory, which take longer, are made only now."""
        first, self._is_new = self._is_new, False
        if not first or self.bound >= below:
            return None
        tables = self._problem.tables
        key = self.schedule, self.chunks, self.microbatches, *map(id, tables)
        if key not in self._memory.firsts:
            self.bound = max(self.bound, mean_bound(self._problem))
            if self.bound >= below:
                return None
            if self._room is not None and not self._room.is_enough():
                self.bound = math.inf
            stages = balanced(self._problem) if self.bound < below else None
            fitting = None if stages is None else fitted_to_memory(self._problem, stages, self._in_flight)
            self._memory.firsts[key] = tables, self.bound, fitting
        _, known, stages = self._memory.firsts[key]
        self.bound = max(self.bound, known)
        return stages if self.bound < below else None

    @functools.cached_property
    def _room(self) -> RoomForLayers | None:
        """None: there is no such schedule for so many microbatches."""
        return RoomForLayers(self._problem, self._whole, self._in_flight) if self._in_flight else None

    @property
    def _in_flight(self) -> Sequence[NDArray[np.int64]]:
        """() where there is no such schedule for so many microbatches."""
        return in_flight_of(self.schedule, self.stages, self.chunks, self.microbatches) or ()

    def tighten(self, most_tasks: float, enough: float) -> int:
        """Raises the bound by one program of its schedule, or by means that take no time; how many tasks that took."""
        if self._room is None:
            self.bound = math.inf
            return 1
        if self._tight is None:
            self._tight = KindBound(self._problem, self._whole, self._room, self._estimate, enough)
            self.bound = max(self.bound, self._tight.seconds)
            return 1
        facts = schedule_facts(self.schedule, self.stages, self.chunks, self.microbatches)
        if facts is None:  # there is no such schedule for so many microbatches
            self.bound = math.inf
            return 1
        taken = self._tight.raise_once(facts, min(most_tasks, _LARGEST_PROGRAM))
        self.bound = max(self.bound, self._tight.seconds)
        return taken


def search_stages(
    space: StageSpace, settings: SearchSettings | None = None, memory: SearchMemory | None = None
) -> StageSearchResult:
    """The fastest pipeline found in a space, with a lower bound.

    Never worse than the best of each kind's first choice. `StageSearchResult.gap` says how far from the best possible
    it can be. All figures are those of the tables.

    Args:
        memory: what earlier searches found; this one adds to it.
    """
    found = StageSearchResult(None, math.inf, (), 0)
    memory = SearchMemory() if memory is None else memory
    for some in _useful(space):
        found = _StageSearch(some, settings or SearchSettings(), memory).result()
        if found.best is not None:
            break
    return found


def _useful(space: StageSpace) -> list[StageSpace]:
    """Where no stage has gradients of weights apart, as in recomputed layers, first without the schedules for these.

    Such schedules then only have longer orders. They may hold less, so they count where nothing else fits.
    """
    tables = [table for costs in space.costs.values() for table in costs.tables]
    apart = max(float(np.max(table.weight, where=np.isfinite(table.weight), initial=0.0)) for table in tables)
    work = max(float(np.max(table.work, where=np.isfinite(table.work), initial=0.0)) for table in tables)
    forms = {one: schedule_form(one[0], 2, one[1]) for one in space.schedules}
    plain = [one for one, form in forms.items() if form is None or not form.has_weight_tasks]
    if apart > _NEGLIGIBLE_WEIGHT_SHARE * work or not plain or len(plain) == len(forms):
        return [space]
    return [replace(space, schedules=plain), space]


class _StageSearch:
    def __init__(self, space: StageSpace, settings: SearchSettings, memory: SearchMemory) -> None:
        self.space, self.settings, self.memory = space, settings, memory
        self.tasks = 0
        self.seen: dict[tuple[object, ...], SimulatedChoice | None] = memory.simulated_in(space)
        self.best: SimulatedChoice | None = None

    @property
    def incumbent(self) -> float:
        return math.inf if self.best is None else self.best.seconds

    def result(self) -> StageSearchResult:
        kinds = list(kinds_of(self.space, self.settings, self.memory))
        self._look_at_first_choices(kinds, 0.4)
        self._polish(0.7)
        self._look_further(kinds, 1.0)
        self._tighten(kinds)
        left = min((kind.bound for kind in kinds), default=math.inf)
        fitting = sorted(
            (one for one in self.seen.values() if one is not None and one.fits), key=lambda one: one.seconds
        )
        others = _best_of_kinds(fitting)[1 : self.settings.others + 1]
        return StageSearchResult(self.best, min(self.incumbent, left), others, len(self.seen))

    def _may_go_on(self, share: float) -> bool:
        """Whether less than a share of the tasks has been simulated, or nothing that fits is known."""
        return self.tasks < share * self.settings.most_tasks and not self._is_late()

    def _is_late(self) -> bool:
        return time.monotonic() > self.settings.until

    def _look_at_first_choices(self, kinds: Sequence[PipelineKind], share: float) -> None:
        """Simulates the first choice of each kind, in the order of what they are estimated to take."""
        first: list[tuple[float, int, PipelineChoice]] = []
        least = math.inf
        for kind in sorted(kinds, key=lambda kind: kind.estimate):
            if (
                kind.estimate >= least * _PROMISING_FACTOR
                or not math.isfinite(kind.estimate)
                or (first and self._is_late())
            ):
                break
            stages = kind.next(math.inf)
            if stages is not None:
                choice = PipelineChoice(kind.schedule, kind.chunks, kind.microbatches, stages)
                first.append((estimated_seconds(self.space, choice), len(first), choice))
                least = min(least, first[-1][0])
        for estimate, _, choice in sorted(first, key=lambda one: one[:2]):
            if estimate >= self.incumbent * _PROMISING_FACTOR or (self.best is not None and not self._may_go_on(share)):
                return
            self._take(self.simulate(choice))

    def _polish(self, share: float) -> None:
        """Moves from the best choices of several kinds."""
        fitting = sorted(
            (one for one in self.seen.values() if one is not None and one.fits), key=lambda one: one.seconds
        )
        for one in _best_of_kinds(fitting)[: self.settings.polished]:
            if one.seconds < self.incumbent * _PROMISING_FACTOR:
                self._take(polished(self.space, one, self.simulate, lambda: self._may_go_on(share)))

    def _look_further(self, kinds: Sequence[PipelineKind], share: float) -> None:
        """Simulates choices of the kind with the least bound until none can be better, or the tasks are used up."""
        waiting = [kind for kind in kinds if math.isfinite(kind.bound)]
        while waiting and (self.best is None or self._may_go_on(share)):
            kind = min(waiting, key=lambda one: one.bound)
            if kind.bound >= self.incumbent * (1 - self.settings.gap):
                return
            stages = kind.next(self.incumbent)
            if stages is None:
                waiting.remove(kind)
                continue
            found = self._take(self.simulate(PipelineChoice(kind.schedule, kind.chunks, kind.microbatches, stages)))
            if found is self.best and found is not None:
                self._take(polished(self.space, found, self.simulate, lambda: self._may_go_on(share)))

    def _tighten(self, kinds: Sequence[PipelineKind]) -> None:
        """Raises the least bound for as long as it can be, and is far from the best choice."""
        left, enough = (
            _PROGRAM_TASK_SHARE * self.settings.most_tasks,
            self.incumbent * (1 - self.settings.gap_of_programs),
        )
        while left > 0 and kinds and not self._is_late():
            kind = min(kinds, key=lambda one: one.bound)
            taken = kind.tighten(left, enough) if kind.bound < enough else 0
            if taken == 0:
                return
            left -= taken

    def _take(self, found: SimulatedChoice | None) -> SimulatedChoice | None:
        """Keeps a choice if it is the best that fits."""
        if found is not None and found.fits and found.seconds < self.incumbent:
            self.best = found
        return found

    def simulate(self, choice: PipelineChoice) -> SimulatedChoice | None:
        """What a choice takes; each is simulated once."""
        if choice.key not in self.seen:
            self.tasks += 2 * choice.microbatches * len(choice.stages)
            found = self.seen[choice.key] = simulated(self.space, choice)
            if found is not None:
                self.memory.simulated.append(found)
        return self.seen[choice.key]


def _best_of_kinds(fitting: list[SimulatedChoice]) -> tuple[SimulatedChoice, ...]:
    """The fastest of each schedule, number of stages and number of microbatches."""
    found: dict[tuple[object, ...], SimulatedChoice] = {}
    for one in fitting:
        choice = one.choice
        found.setdefault((choice.schedule, choice.chunks, choice.microbatches, len(choice.stages)), one)
    return tuple(found.values())


def kinds_of(space: StageSpace, settings: SearchSettings, memory: SearchMemory) -> Iterator[PipelineKind]:
    """Every kind of pipeline in a space."""
    plain = [name for name, chunks in space.schedules if chunks == 1]
    chunked = [(name, chunks) for name, chunks in space.schedules if chunks > 1]
    for microbatches, costs in space.costs.items():
        for tables in families(space, costs.tables, settings):
            equal = len({table.shape.devices for table in tables}) == 1
            stages = space.row.devices // tables[0].shape.devices if equal else None
            most = min(space.most_stages, space.layers, stages or space.row.devices)
            if stages is not None and stages > most:
                continue
            yield from _chain_kinds(space, microbatches, tables, plain, stages, most)
            if stages is not None and stages > 1:
                yield from _chunk_kinds(space, microbatches, tables, chunked, stages, memory)


def _chain_kinds(
    space: StageSpace,
    microbatches: int,
    tables: tuple[StageTable, ...],
    schedules: list[str],
    stages: int | None,
    most: int,
) -> Iterator[PipelineKind]:
    known: dict[tuple[bool, bool], Chains] = {}
    # What follows a stage has to come back before its first backward task: so many microbatches may be in flight, and
    # no schedule of these makes do with fewer.
    in_flight = tuple(float(min(left, microbatches)) for left in range(1, most + 1))
    for name in schedules:
        counts = [stages] if stages is not None else list(range(2, most + 1))
        forms = {count: schedule_form(name, count, 1) for count in counts}
        for count, form in forms.items():
            if form is None:
                continue
            split = form.has_weight_tasks
            for without in (False, True) if split else (False,):
                if (split, without) not in known:
                    problem = ChainProblem(space, microbatches, tables, most, in_flight, split, without)
                    known[split, without] = Chains(problem)
            chains = (known[split, without] for without in (False, True) if (split, without) in known)
            yield ChainPipelines(max(chains, key=lambda one: one.least(count)), name, count)


def _chunk_kinds(
    space: StageSpace,
    microbatches: int,
    tables: tuple[StageTable, ...],
    schedules: list[tuple[str, int]],
    stages: int,
    memory: SearchMemory,
) -> Iterator[PipelineKind]:
    known: dict[bool, WholeLayers] = {}
    for name, chunks in schedules:
        if stages * chunks > space.layers:
            continue
        form = schedule_form(name, stages, chunks)
        if form is not None:
            split = form.has_weight_tasks
            if split not in known:
                known[split] = WholeLayers.of(space, microbatches, tables, has_weight_tasks=split)
            yield ChunkPipelines(ChunkProblem(space, form, microbatches, tables), known[split], name, chunks, memory)


def families(
    space: StageSpace, tables: tuple[StageTable, ...], settings: SearchSettings
) -> Iterator[tuple[StageTable, ...]]:
    """The tables of each size of sub-mesh that divides the row; and those of all sizes together, if not too many."""
    sizes = sorted({table.shape.devices for table in tables})
    for size in sizes:
        if space.row.devices % size == 0:
            yield tuple(table for table in tables if table.shape.devices == size)
    for least in sizes[:-1]:
        mixed = tuple(table for table in tables if table.shape.devices >= least)
        starts = sum(len(table.shape.starts) for table in mixed)
        most = min(space.most_stages, space.layers, -(-space.row.devices // least))
        if (space.layers + 1) ** 2 * starts * most <= settings.most_mixed_entries:
            yield mixed
            return
