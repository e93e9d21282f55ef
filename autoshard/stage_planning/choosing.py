"""A traced step and a mesh in, the best pipeline found for it out: searched on tables, then planned stage by stage."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh

from autoshard.errors import ConflictError, MicrobatchError, StageError
from autoshard.layout import Layout, MeshShape
from autoshard.mesh.topology import Topology
from autoshard.microbatches.batch import batch_of
from autoshard.model.pricing.formulation_deadline import FormulationTimeout
from autoshard.model.xla.backends import Backend
from autoshard.program import Program
from autoshard.program.tracing import TracedStep
from autoshard.solver.runtime.garbage_collection import uncollected
from autoshard.solver.searches.search_run import Search
from autoshard.stage_planning.cut_step import CutStep, KnownStages
from autoshard.stage_planning.exact_stages import ExactPipeline, exact_pipeline
from autoshard.stage_planning.recomputing.levels import AS_WRITTEN, RecomputationLevels, level_of
from autoshard.stage_planning.space import (
    DISPATCH_SECONDS,
    MOST_SAVED_SHARE,
    SCHEDULES,
    PlannedSpace,
    SpaceRequest,
    microbatch_counts,
    planned_space,
)
from autoshard.stage_planning.sub_meshes import SubMeshShape
from autoshard.stage_planning.unit_costs import UnitCut
from autoshard.stage_search import (
    PipelineChoice,
    SearchMemory,
    SearchSettings,
    SimulatedChoice,
    StageSearchResult,
    StageSpace,
    search_stages,
    simulated,
)
from autoshard.stages.cutting import CuttableStep, cut
from autoshard.stages.stage_tactics import StageTactics
from autoshard.tactics.requests import TacticLike

PLANNED_EXACTLY = 2  # of the choices of the search: planned stage by stage until so many fit
SEARCHES = 4  # at most, each on tables with more planned costs than the one before
TIGHTER_SEARCHES = 2  # at most, once no choice fits whose stages were planned
# Of the time limit: when the last units are planned, and of the rest, when the search of stages ends.
UNITS_SHARE, SEARCH_SHARE = 0.5, 0.3
LEVELS_SHARE = 0.5  # of the time limit: what levels of recomputation get at least where nothing fits without them
LESS_THAN_TABLES = 0.1  # whole stages take up to such a share less than the tables add up
ACCURATE = 0.02  # relative: costs taken from other numbers of microbatches that are so near are not searched again


class SlowStagesError(StageError):
    """Every pipeline takes longer than is of use."""


@dataclass(frozen=True)
class PlanningTarget:
    """What a step is planned for."""

    mesh_shape: MeshShape
    topology: Topology
    backend: Backend
    memory: float  # bytes per device


@dataclass(frozen=True, eq=False)
class ChosenPipeline:
    """The best pipeline found."""

    pipeline: ExactPipeline
    shapes: Mapping[str, SubMeshShape]  # by the names of its stages' sub-meshes
    units: tuple[str, ...]  # what each unit is called: the user's line
    search: StageSearchResult
    tabled_seconds: float  # of the same choice by the tables that were searched

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.pipeline.simulated.seconds

    @property
    def bound(self) -> float:
        """Seconds that no pipeline of the search takes less than, if whole stages were to the tables as this one's are.

        The tables add up units that were planned one by one, so that their seconds are not those of whole stages.
        """
        return self.seconds * min(1.0, self.search.bound / self.tabled_seconds)


class CuttableSteps:
    """A traced step in any number of microbatches, cut in any places."""

    def __init__(
        self,
        traced: TracedStep,
        program: Program,
        mesh: AbstractMesh,
        fixed: Mapping[int, Layout] | None = None,
        levels: RecomputationLevels | None = None,
        tactics: Sequence[TacticLike] = (),
        search: str | Search | None = None,
    ) -> None:
        """
        Args:
            program: the step as it was traced.
            mesh: under which the step was traced.
            fixed: argument -> how it has to lie.
            levels: how much stages may compute again; None: what is kept is as the step is written.
            tactics: that hold in every stage.
            search: what plans stages, as for `solve`; None: the solver's own way.
        """
        self._tactics, self._program, self._search = tuple(tactics), program, search
        self.levels = levels
        self.traced, self.carried, self.name, self._mesh = traced, program.carried, program.name, mesh
        self.donated, self.fixed = program.donated, fixed or {}
        self.rows = batch_of(traced, 1).batch
        self.in_microbatches, self._known_units = functools.cache(self._in_microbatches), KnownStages()

    def _in_microbatches(self, count: int) -> CuttableStep:
        with jax.sharding.use_abstract_mesh(self._mesh):
            return CuttableStep.of(self.traced, count, self.carried, self.name)

    def units_of(self, count: int) -> Any:
        """Where the step may be cut."""
        return self.in_microbatches(count).units()

    def cut_at(self, count: int, firsts: Sequence[int], weight_programs: bool, variants: Sequence[str] = ()) -> CutStep:
        """The step cut before these units.

        Args:
            variants: of the tables of stages, which have their levels of recomputation.

        Raises:
            StageError: it cannot be cut there, or not at such levels.
        """
        step = self.in_microbatches(count)
        keeps = None if self.levels is None else self.levels.keeping(variants)
        try:
            with jax.sharding.use_abstract_mesh(self._mesh):
                made = cut(step, step.units().boundaries(firsts), weight_programs=weight_programs, keeps=keeps)
        except MicrobatchError as error:  # the step itself runs in microbatches
            raise StageError(str(error)) from error
        tactics = StageTactics(self._tactics, made, self._program) if self._tactics else None
        return CutStep(made, self.donated, self.fixed, tactics, self._search)

    def cut_into_units(self, count: int, level: str = AS_WRITTEN) -> UnitCut:
        """The step with one unit of each kind as a stage of its own."""

        def cut_at(firsts: Sequence[int]) -> CutStep:
            found = self.cut_at(count, firsts, True, [level] * (len(firsts) + 1))
            return replace(found, known=self._known_units)  # some are alike at all levels

        return UnitCut.of(self.units_of(count), cut_at)


@uncollected()
def choose_pipeline(
    steps: CuttableSteps,
    machine: PlanningTarget,
    *,
    counts: Sequence[int] | None = None,
    schedules: Sequence[tuple[str, int]] = SCHEDULES,
    least_task_seconds: float | None = None,
    least_stages: int = 2,
    shapes: Sequence[SubMeshShape] = (),
    settings: SearchSettings | None = None,
    until: float = math.inf,
    levels: Mapping[str, float] | None = None,
    enough: float = math.inf,
) -> ChosenPipeline | None:
    """The pipeline of the fewest predicted seconds that was found, with every stage planned; None if none fits.

    Args:
        counts: numbers of microbatches to choose from; by default those that `microbatch_counts` names.
        schedules: names and chunks to choose from.
        least_task_seconds: that dispatching a task takes.
        least_stages: a pipeline of fewer stages does not count.
        shapes: of sub-meshes to choose from; by default all.
        until: when planning ends, as `time.monotonic` has it: the best pipeline known is taken then, if there is one.
        levels: of recomputation that stages choose from, beside what the step is written to keep, and the seconds that
            each computes again in a step. They are tried after that, in the time that it leaves.
        enough: s per step: pipelines that take longer are of no use. Levels are not tried that compute again for
            longer, even on all devices together.

    Raises:
        MicrobatchError: the step cannot run in microbatches, with the line.
        StageError: it cannot be cut.
        SlowStagesError: no pipeline takes as little as is enough.
    """
    begin = time.monotonic()
    counts = _possible(steps, microbatch_counts(steps.rows) if counts is None else list(counts))
    if not counts:
        return None
    planned = sorted({counts[len(counts) // 2], counts[-1]})
    dispatch = DISPATCH_SECONDS if least_task_seconds is None else least_task_seconds
    # The last stage runs F and B of all microbatches, once one of them has come through the others, and it goes back.
    least = 2 * (min(counts) + least_stages - 1) * dispatch
    if least >= enough:
        raise SlowStagesError(f"dispatching the tasks of a pipeline takes {least:.4g} s per step or more.")
    request = SpaceRequest(
        steps.cut_into_units,
        machine.mesh_shape,
        machine.topology,
        machine.backend,
        machine.memory,
        counts,
        planned,
        schedules,
        shapes=shapes,
        least_task_seconds=dispatch,
        least_stages=least_stages,
        until=_part_of_time(until, UNITS_SHARE),
    )
    found = planned_space(request)
    if found is None:
        return None
    settings = settings or SearchSettings()
    most = enough / (1 - MOST_SAVED_SHARE) if levels else enough
    tried, found, result = _searched(found, steps, machine, settings, until, most)
    if levels:
        if tried.best is None and math.isfinite(until):
            until = max(until, time.monotonic() + LEVELS_SHARE * (until - begin))
        ends = _part_of_time(until, UNITS_SHARE)
        known = min(enough, _seconds(tried.best))
        useful = [name for name, again in levels.items() if again / found.space.row.devices < known]
        for number, level in enumerate(useful):
            planned_by = _part_of_time(ends, 1 / (len(useful) - number))
            cut = functools.partial(steps.cut_into_units, level=level)
            how = replace(request, cut_into_units=cut, level=level, until=planned_by, enough=known)
            found = found.with_level(how)
        again, found, result = _searched(found, steps, machine, settings, until) if useful else (tried, found, result)
        if tried.best is None or (again.best is not None and _seconds(again.best) < _seconds(tried.best)):
            tried = replace(again, refusal=tried.refusal or again.refusal)
    if tried.best is None:
        if tried.refusal is not None:
            raise tried.refusal
        return None
    names = tuple(unit.name for unit in steps.units_of(counts[0]).units)
    return ChosenPipeline(tried.best, found.shapes, names, result, tried.tabled_seconds)


def _possible(steps: CuttableSteps, counts: Sequence[int]) -> Sequence[int]:
    """The numbers of microbatches that the step can run in: rows that it treats together may be too few in many.

    Raises:
        MicrobatchError: it can run in none.
    """
    while counts:
        try:
            steps.units_of(counts[-1])
            break
        except MicrobatchError:
            steps.units_of(counts[0])
            counts = counts[:-1]
    return counts


def _searched(
    found: PlannedSpace,
    steps: CuttableSteps,
    machine: PlanningTarget,
    settings: SearchSettings,
    until: float,
    enough: float = math.inf,
) -> tuple[_Outcome, PlannedSpace, StageSearchResult]:
    """The best choices of a space, planned stage by stage; the space with what was planned for that.

    Raises:
        SlowStagesError: by the tables none takes as little as is enough.
    """
    settings = replace(settings, until=_part_of_time(until, SEARCH_SHARE))
    found, result = search_planned(found, settings, enough)
    excess = _Excess()
    tried = _planned_exactly(result, found, steps, machine, excess, until)
    for _ in range(TIGHTER_SEARCHES):
        over = tried.most_over
        if tried.best is not None or over == 1.0 or time.monotonic() > until:
            break
        # By the tables all of these fit. Those that hold less by as much as these hold more are left.
        again = search_stages(with_less_room(found.space, over), settings)
        tried = _planned_exactly(again, found, steps, machine, excess, until, tried.refusal)
    return tried, found, result


def _part_of_time(until: float, share: float) -> float:
    """When a share of the time is up that is left until then."""
    now = time.monotonic()
    return until if math.isinf(until) else now + share * (until - now)


@dataclass(frozen=True)
class _Outcome:
    """What came of choices whose stages were planned."""

    best: ExactPipeline | None  # None: none fits
    tabled_seconds: float  # of the best one, by the tables
    refusal: StageError | None  # why one of them cannot be cut
    most_over: float  # times what the tables say, at most, is held by devices that hold too much


@dataclass(frozen=True)
class _Excess:
    """Of choices whose planned stages hold too much: how many times what the tables say they hold, at least.

    Choices of one number of microbatches on the same sub-meshes are alike in that, however they are cut: one that would
    hold too much even with the least of these factors is not planned.
    """

    least: dict[tuple[object, ...], float] = field(default_factory=dict)

    def add(self, tabled: SimulatedChoice, planned: SimulatedChoice) -> float:
        """That of a choice that does not fit, by the tables and as its stages were planned."""
        pairs = zip(planned.peak_bytes, tabled.peak_bytes, strict=True)
        over = max([1.0, *(peak / in_table for peak, in_table in pairs if in_table > 0)])
        key = self._kind(tabled.choice)
        self.least[key] = min(over, self.least.get(key, math.inf))
        return over

    def is_too_large(self, tabled: SimulatedChoice, choice: PipelineChoice) -> bool:
        """Whether a choice is expected to hold too much.

        Args:
            choice: the same on tables that say how much room there is.
        """
        times, homes = self.least.get(self._kind(choice), 1.0), tabled.timeline.schedule.placement
        rooms = (stage.table.shape.memory_bytes for stage in choice.stages)
        return any(times * tabled.peak_bytes[home] > room for home, room in zip(homes, rooms, strict=True))

    @staticmethod
    def _kind(choice: PipelineChoice) -> tuple[object, ...]:
        names = {f"{stage.table.shape.name} {level_of(stage.table.variant)}" for stage in choice.stages}
        return choice.microbatches, choice.devices, *sorted(names)


def _planned_exactly(
    result: StageSearchResult,
    found: PlannedSpace,
    steps: CuttableSteps,
    machine: PlanningTarget,
    excess: _Excess,
    until: float,
    refusal: StageError | None = None,
) -> _Outcome:
    """The fastest choice of a search, which has them in the order of their seconds, as far as it pays to plan them."""
    best: ExactPipeline | None = None
    tabled, fitting, most_over = math.inf, 0, 1.0
    fastest = [result.best] if result.best else []
    for one in (*fastest, *result.others):
        if fitting == PLANNED_EXACTLY or time.monotonic() > until:
            break
        # Whole stages take longer than the tables say, of which this one may have less: half of it, say.
        if best is not None and one.seconds >= (tabled + _seconds(best)) / 2:
            break
        choice = on_tables(one.choice, found.space)
        if excess.is_too_large(one, choice):
            continue
        try:
            exact = exact_pipeline(found.space, choice, steps.cut_at, found.shapes, machine.backend, until)
        except FormulationTimeout:
            break
        except StageError as error:  # it cannot be cut there, and perhaps elsewhere
            refusal = error
            continue
        except ConflictError:  # tactics leave nothing there, and perhaps elsewhere
            continue
        if exact is None:
            continue
        if exact.simulated.fits:
            fitting += 1
            if exact.simulated.seconds < _seconds(best):
                best, tabled = exact, one.seconds
        else:
            most_over = max(most_over, excess.add(one, exact.simulated))
    return _Outcome(best, tabled, refusal, most_over)


def with_less_room(space: StageSpace, times: float) -> StageSpace:
    """The space of devices with so many times less memory."""
    costs = {}
    for count, one in space.costs.items():
        shapes = [replace(table.shape, memory_bytes=table.shape.memory_bytes / times) for table in one.tables]
        tables = (replace(table, shape=shape) for table, shape in zip(one.tables, shapes, strict=True))
        costs[count] = replace(one, tables=tuple(tables))
    return replace(space, costs=costs)


def search_planned(
    found: PlannedSpace, settings: SearchSettings, enough: float = math.inf
) -> tuple[PlannedSpace, StageSearchResult]:
    """The best pipeline of a space, once the costs that it rests on are planned for its number of microbatches.

    Raises:
        SlowStagesError: none takes as little as is enough.
    """
    memory, first = SearchMemory(), replace(settings, gap_of_programs=1.0, polished=1)  # nothing is proven yet
    for _ in range(SEARCHES - 1):
        if time.monotonic() > settings.until:
            break
        result = search_stages(found.space, first, memory)
        best = result.best
        if best is None:
            break
        if result.bound * (1 - LESS_THAN_TABLES) > enough:
            raise SlowStagesError(
                f"by the costs of its layers no pipeline takes less than {result.bound:.4g} s per step."
            )
        choice = best.choice
        tables = {(stage.table.shape.name, stage.table.variant) for stage in choice.stages}
        more = found.with_planned(choice.microbatches, tables)
        if more is None:
            break
        again = simulated(more.space, on_tables(choice, more.space))
        is_near = again is not None and abs(again.seconds - best.seconds) <= ACCURATE * best.seconds
        found = more
        if is_near and again is not None and again.fits:
            break
    return found, search_stages(found.space, settings, memory)


def on_tables(choice: PipelineChoice, space: StageSpace) -> PipelineChoice:
    """The same choice by the tables of another space of the same sub-meshes."""
    tables = {(table.shape.name, table.variant): table for table in space.costs[choice.microbatches].tables}
    stages = (replace(one, table=tables[one.table.shape.name, one.table.variant]) for one in choice.stages)
    return replace(choice, stages=tuple(stages))


def _seconds(pipeline: ExactPipeline | None) -> float:
    return math.inf if pipeline is None else pipeline.simulated.seconds
