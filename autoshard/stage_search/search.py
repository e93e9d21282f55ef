"""A space of stages in, out the best pipeline found and a bound that no other is below.

A *kind* of pipeline has a number of microbatches, sub-meshes of one size or of all sizes, a number of stages and a
schedule. Its choices come in the order of their bounds, and are simulated. The search goes on with the kind of the
least bound until that is no less than the best choice simulated, or until enough tasks have been simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.stage_search.chains import BestFirst, ChainProblem, Chains
from autoshard.stage_search.choices import ChosenStage, PipelineChoice, SimulatedChoice, StageSearchResult
from autoshard.stage_search.chunks import ChunkProblem, balanced, chunk_bound
from autoshard.stage_search.polishing import polished
from autoshard.stage_search.simulating import schedule_form, simulated
from autoshard.stage_search.tables import StageSpace, StageTable


@dataclass(frozen=True)
class SearchSettings:
    """How much is tried. Counts, not seconds: the same space has the same result everywhere."""

    most_tasks: int = 600_000  # of schedules, simulated in all: about 4 microseconds each
    gap: float = 0.002  # a choice that is proven to be this near the best is good enough
    most_mixed_entries: int = (
        40_000_000  # of the tables for sub-meshes of several sizes; beyond, the smallest are left out
    )
    others: int = 8  # choices beside the best that are told


class Kind:
    """Choices that differ in cuts and sub-meshes alone."""

    def __init__(self, schedule: str, chunks: int, microbatches: int, stages: int) -> None:
        self.schedule, self.chunks, self.microbatches, self.stages = schedule, chunks, microbatches, stages

    bound: float

    def next(self, below: float) -> tuple[ChosenStage, ...] | None:
        """The next choice of virtual stages, if one can take less than `below`."""
        raise NotImplementedError

    @property
    def tasks(self) -> int:
        """Tasks of its schedule, about."""
        return 2 * self.microbatches * self.stages * self.chunks


class ChainKind(Kind):
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


class ChunkKind(Kind):
    """Several virtual stages per device: one choice, and the moves from it."""

    def __init__(self, problem: ChunkProblem, schedule: str, chunks: int) -> None:
        super().__init__(schedule, chunks, problem.microbatches, len(problem.starts) // chunks)
        self.bound = chunk_bound(problem)
        self._problem: ChunkProblem | None = problem

    def next(self, below: float) -> tuple[ChosenStage, ...] | None:
        """The balanced choice, once."""
        problem, self._problem = self._problem, None
        return None if problem is None or self.bound >= below else balanced(problem)


def search_stages(space: StageSpace, settings: SearchSettings | None = None) -> StageSearchResult:
    """The fastest pipeline found in a space, with a lower bound.

    Never worse than the best of each kind's first choice. `StageSearchResult.gap` says how far from the best possible
    it can be. All figures are those of the tables.
    """
    return _Search(space, settings or SearchSettings()).result()


class _Search:
    def __init__(self, space: StageSpace, settings: SearchSettings) -> None:
        self.space, self.settings = space, settings
        self.tasks = 0
        self.seen: dict[tuple[object, ...], SimulatedChoice | None] = {}
        self.best: SimulatedChoice | None = None

    @property
    def incumbent(self) -> float:
        return math.inf if self.best is None else self.best.seconds

    def result(self) -> StageSearchResult:
        kinds = sorted(kinds_of(self.space, self.settings), key=lambda kind: kind.bound)
        for share in (0.5, 1.0):  # one choice of each kind and what is near it, then as many as are left
            self._look_at(kinds, share, only_first=share < 1.0)
        left = min((kind.bound for kind in kinds), default=math.inf)
        fitting = sorted(
            (one for one in self.seen.values() if one is not None and one.fits), key=lambda one: one.seconds
        )
        return StageSearchResult(
            self.best, min(self.incumbent, left), _best_of_kinds(fitting)[: self.settings.others], len(self.seen)
        )

    def _look_at(self, kinds: list[Kind], share: float, *, only_first: bool) -> None:
        """Simulates choices until none can be better, or the share of tasks is used up."""
        waiting = [kind for kind in kinds if math.isfinite(kind.bound)]
        limit = share * self.settings.most_tasks
        while waiting and (self.tasks < limit or self.best is None):
            kind = min(waiting, key=lambda one: one.bound)
            if kind.bound >= self.incumbent * (1 - self.settings.gap):
                return
            stages = kind.next(self.incumbent)
            if stages is None or only_first:
                waiting.remove(kind)
            if stages is None:
                continue
            found = self.simulate(PipelineChoice(kind.schedule, kind.chunks, kind.microbatches, stages))
            if found is not None and found.fits and found.seconds < self.incumbent * 1.1:
                found = polished(self.space, found, self.simulate, lambda: self.tasks < limit)
            if found is not None and found.fits and found.seconds < self.incumbent:
                self.best = found

    def simulate(self, choice: PipelineChoice) -> SimulatedChoice | None:
        """What a choice takes; each is simulated once."""
        if choice.key not in self.seen:
            self.tasks += 2 * choice.microbatches * len(choice.stages)
            self.seen[choice.key] = simulated(self.space, choice)
        return self.seen[choice.key]


def _best_of_kinds(fitting: list[SimulatedChoice]) -> tuple[SimulatedChoice, ...]:
    """The fastest of each schedule, number of stages and number of microbatches, without the very fastest."""
    found: dict[tuple[object, ...], SimulatedChoice] = {}
    for one in fitting:
        choice = one.choice
        found.setdefault((choice.schedule, choice.chunks, choice.microbatches, len(choice.stages)), one)
    return tuple(found.values())[1:]


def kinds_of(space: StageSpace, settings: SearchSettings) -> Iterator[Kind]:
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
                yield from _chunk_kinds(space, microbatches, tables, chunked, stages)


def _chain_kinds(
    space: StageSpace,
    microbatches: int,
    tables: tuple[StageTable, ...],
    schedules: list[str],
    stages: int | None,
    most: int,
) -> Iterator[Kind]:
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
            yield ChainKind(max(chains, key=lambda one: one.least(count)), name, count)


def _chunk_kinds(
    space: StageSpace,
    microbatches: int,
    tables: tuple[StageTable, ...],
    schedules: list[tuple[str, int]],
    stages: int,
) -> Iterator[Kind]:
    for name, chunks in schedules:
        if stages * chunks > space.layers:
            continue
        form = schedule_form(name, stages, chunks)
        if form is not None:
            yield ChunkKind(ChunkProblem(space, form, microbatches, tables), name, chunks)


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
