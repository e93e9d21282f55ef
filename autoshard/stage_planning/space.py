"""A step that can be cut, and a mesh, in; the space that the search of stages chooses from, out.

Units are planned for a few numbers of microbatches. Of others, seconds and bytes of a microbatch are taken as affine in
its rows. What is kept between steps, and what runs once, does not depend on the rows. Seconds are convex in the rows,
since few rows take as long as the weights are read for. So what is taken from fewer rows is too little: the costs of
what the search chooses are planned afterwards (`PlannedSpace.with_planned`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import ConflictError, MicrobatchError, StageError
from autoshard.layout import MeshShape
from autoshard.mesh.topology import Topology
from autoshard.model.pricing.formulation_deadline import FormulationTimeout
from autoshard.model.xla.backends import Backend
from autoshard.stage_planning.recomputing.levels import AS_WRITTEN, level_of, variant_of
from autoshard.stage_planning.sub_meshes import SubMeshShape, device_row, sub_mesh_shapes
from autoshard.stage_planning.unit_costs import FIELDS, UnitCosts, UnitCut, lean_unit_costs, unit_costs, with_loops
from autoshard.stage_search import MicrobatchCosts, StageSpace, StageTable

CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12)  # virtual stages per device: more of them than divide the layers evenly gain little
SCHEDULES = (
    *(("1f1b", 1), ("eager_1f1b", 1), ("zb_h1", 1), ("zb_h2", 1), ("gpipe", 1)),
    *((name, chunks) for name in ("interleaved_1f1b", "looped_bfs") for chunks in CHUNKS),
    *(("zb_v", 2), ("v_half", 2), ("v_min", 2)),
)
# Microbatches in flight on the first device, as a share of the stages, in interleaved 1F1B with two chunks. With one
# chunk it is 1, with more than two less than 1.5.
MOST_IN_FLIGHT = 1.5
# Seconds that a controller takes to dispatch one task and its transfers: measured on CPU with 64 programs and 56
# transfers, 310 microseconds each. No task is taken to be shorter.
DISPATCH_SECONDS = 3.1e-4
# Of the work of a step as it is written, what a level of recomputation can save: a forward pass that runs again, of two
# and a backward pass of twice the work.
MOST_SAVED_SHARE = 0.25


@dataclass(frozen=True)
class SpaceRequest:
    """What the space of stages is made of."""

    cut_into_units: Callable[[int], UnitCut]  # number of microbatches -> the step with units as stages
    mesh_shape: MeshShape
    topology: Topology
    backend: Backend
    memory: float  # bytes per device
    microbatches: Sequence[int]  # to choose from
    planned: Sequence[int]  # of these, those that units are planned for
    schedules: Sequence[tuple[str, int]] = SCHEDULES
    least_task_seconds: float = DISPATCH_SECONDS
    shapes: Sequence[SubMeshShape] = ()  # () for all
    least_stages: int = 1
    most_stages: int = 32  # of a pipeline, however many devices there are
    until: float = math.inf  # when planning units ends, as `time.monotonic` has it: others are left then
    level: str = AS_WRITTEN  # of recomputation, at which `cut_into_units` cuts
    enough: float = math.inf  # s per step: what takes longer for speed alone is not planned for less memory


@dataclass(frozen=True, eq=False)
class PlannedSpace:
    """The space, and the sub-meshes behind its tables, by their names."""

    space: StageSpace
    shapes: Mapping[str, SubMeshShape]
    _planners: Mapping[str, _UnitPlanner]  # by levels of recomputation

    def with_planned(self, microbatches: int, tables: Collection[tuple[str, str]]) -> PlannedSpace | None:
        """The space with costs that are planned for a number of microbatches, and not taken from others.

        Args:
            tables: names of the sub-meshes that they are planned on, and variants.

        Returns:
            None if all of these were planned before, or cannot be.
        """
        asked = {(name, level_of(variant)) for name, variant in tables}
        planned = {one for one in asked if self._planners[one[1]].plan_further(self.shapes[one[0]], microbatches)}
        if not planned:
            return None
        for name, level in planned:
            shape = self.shapes[name]
            self._planners[level].plan_lean(shape, self.space.row.devices // shape.in_row.devices, microbatches)
        known, found = self.space.costs[microbatches], list[StageTable]()
        for (name, shape), (level, planner) in itertools.product(self.shapes.items(), self._planners.items()):
            own = planner.tables(shape, microbatches) if (name, level) in planned else known.tables
            found += [one for one in own if one.shape.name == name and level_of(one.variant) == level]
        costs = replace(known, tables=tuple(found))
        return replace(self, space=replace(self.space, costs={**self.space.costs, microbatches: costs}))

    def with_level(self, request: SpaceRequest) -> PlannedSpace:
        """The space with tables of another level of recomputation, as far as units were planned at it.

        Args:
            request: that of the level, for the same microbatches.
        """
        planner, written, devices = _UnitPlanner(request), self._planners[AS_WRITTEN], self.space.row.devices
        for count in sorted(request.planned):
            with contextlib.suppress(MicrobatchError, StageError, FormulationTimeout):
                planner.cut(count)
        most = request.enough / (1 - MOST_SAVED_SHARE)
        _plan_units(planner, [one for one in self.shapes.values() if written.seconds(one, devices) <= most], devices)
        costs = {
            count: replace(
                known,
                tables=(
                    *known.tables,
                    *(one for shape in self.shapes.values() for one in planner.tables(shape, count)),
                ),
            )
            for count, known in self.space.costs.items()
        }
        planners = {**self._planners, request.level: planner}
        return replace(self, space=replace(self.space, costs=costs), _planners=planners)


class _UnitPlanner:
    """Costs of units on sub-meshes in numbers of microbatches: each planned once, when it is asked for."""

    def __init__(self, request: SpaceRequest) -> None:
        self.request = request
        self.cuts: dict[int, UnitCut] = {}
        self.fast: dict[str, dict[int, UnitCosts]] = {}  # by names of sub-meshes and numbers of microbatches
        self._lean: dict[str, dict[int, UnitCosts]] = {}  # the same for plans that fit
        self._with_loops: set[tuple[str, int]] = set()  # of which stages of several units were planned, too

    def cut(self, microbatches: int) -> UnitCut:
        """
        Raises:
            StageError: the step cannot be cut so.
        """
        if microbatches not in self.cuts:
            self.cuts[microbatches] = self.request.cut_into_units(microbatches)
        return self.cuts[microbatches]

    def plan(self, shape: SubMeshShape, microbatches: int) -> bool:
        """Plans for speed; whether costs are known now that were not."""
        found = self.fast.setdefault(shape.in_row.name, {})
        if microbatches in found:
            return False
        try:
            costs = unit_costs(self.cut(microbatches), shape, self.request.backend, self.request.until)
        except (ConflictError, MicrobatchError, StageError, FormulationTimeout):  # others can be planned, or are
            return False
        if costs is not None:
            found[microbatches] = costs
        return costs is not None

    def seconds(self, shape: SubMeshShape, devices: int) -> float:
        """Of a step that runs on such sub-meshes alone, so many devices in all, planned for speed: of its work."""
        work, stages = slice(0, FIELDS.index("after")), devices / shape.in_row.devices
        found = (count * float(costs.values[work].sum()) for count, costs in self.fast[shape.in_row.name].items())
        return min(found, default=math.inf) / stages

    def plan_further(self, shape: SubMeshShape, microbatches: int) -> bool:
        """Plans for speed, stages of several units too; whether costs are known now that were not."""
        is_new, known = self.plan(shape, microbatches), self.fast[shape.in_row.name]
        if microbatches not in known or (shape.in_row.name, microbatches) in self._with_loops:
            return is_new
        self._with_loops.add((shape.in_row.name, microbatches))
        try:
            found = with_loops(
                self.cut(microbatches), shape, self.request.backend, known[microbatches], self.request.until
            )
        except (ConflictError, FormulationTimeout):
            return is_new
        is_new |= found.loop_bytes > 0
        known[microbatches] = found
        return is_new

    def plan_lean(self, shape: SubMeshShape, stages: int, microbatches: int) -> bool:
        """Plans to fit where plans for speed do not fit in a pipeline of so many equal stages; whether that was so."""
        name, in_flight = shape.in_row.name, min(MOST_IN_FLIGHT * stages, float(microbatches))
        fast = self.fast[name][microbatches]
        how = self.cut(microbatches), shape, self.request.backend, fast, stages, in_flight, self.request.until
        try:
            leaner = lean_unit_costs(*how)
        except FormulationTimeout:
            return False
        if leaner is None or leaner is fast:
            return False
        self._lean.setdefault(name, {})[microbatches] = leaner
        return True

    def tables(self, shape: SubMeshShape, microbatches: int) -> list[StageTable]:
        """Those of one sub-mesh: of plans for speed, and of such as fit where those do not.

        Lean plans are planned for few numbers of microbatches. For others their costs grow as those of fast plans do.
        """
        fast, lean = self.fast.get(shape.in_row.name, {}), self._lean.get(shape.in_row.name, {})
        if not fast:
            return []
        costs = between_microbatches(fast, microbatches)
        variants = {"": costs}
        if lean:
            most = microbatches if microbatches in lean else max(lean)
            variants["lean"] = _in_proportion(lean[most], costs, fast[most])
        level = self.request.level
        return [one.layer_costs().table(shape.in_row, variant_of(level, name)) for name, one in variants.items()]


def planned_space(request: SpaceRequest) -> PlannedSpace | None:
    """The space of stages of a step; None if no sub-mesh has costs for all units.

    Raises:
        StageError: in no number of microbatches can it be cut.
    """
    planner = _UnitPlanner(request)
    refusal: StageError | None = None
    for count in sorted(request.planned):
        try:
            planner.cut(count)
        except StageError as error:
            refusal = error
    if refusal is not None and not planner.cuts:
        raise refusal
    units = len(next(iter(planner.cuts.values())).planned)
    row = device_row(request.mesh_shape, request.topology)
    memory = request.memory * request.backend.usable
    is_limit = request.memory < request.topology.memory_bytes  # less than the smallest device has
    shapes = list(request.shapes) or sub_mesh_shapes(
        request.mesh_shape, request.topology, memory, is_limit_for_all=is_limit
    )
    fewest, most = request.least_stages, min(units, request.most_stages)
    shapes = [shape for shape in shapes if fewest * shape.in_row.devices <= row.devices <= most * shape.in_row.devices]
    first = next(iter(planner.cuts))
    _plan_units(planner, shapes, row.devices)
    costs = {}
    for count in request.microbatches:
        tables = tuple(itertools.chain(*(planner.tables(shape, count) for shape in shapes)))
        if not tables:
            return None
        sent = planner.cut(first).crossing * (first / count)
        costs[count] = MicrobatchCosts(tables, sent, sent)
    space = StageSpace(row, costs, request.schedules, request.least_task_seconds, request.most_stages)
    return PlannedSpace(space, {shape.in_row.name: shape for shape in shapes}, {request.level: planner})


def _plan_units(planner: _UnitPlanner, shapes: Sequence[SubMeshShape], devices: int) -> None:
    """Plans units on sub-meshes of so many devices in all, in the numbers of microbatches in which they are cut."""
    for shape in shapes:
        planned = [count for count in planner.cuts if planner.plan(shape, count)]
        if planner.seconds(shape, devices) >= planner.request.enough:
            continue
        # Lean plans for one number of microbatches do until one is chosen: with the most, each holds the least.
        stages = max(1, devices // shape.in_row.devices)
        for count in sorted(planned, reverse=True):
            if planner.plan_lean(shape, stages, count):
                break


def _in_proportion(known: UnitCosts, other: UnitCosts, base: UnitCosts) -> UnitCosts:
    """Costs for another number of microbatches, which grow as those of other plans do."""
    ratio = np.divide(other.values, base.values, out=np.ones_like(base.values), where=base.values > 0)
    return replace(other, values=known.values * ratio)


def between_microbatches(known: Mapping[int, UnitCosts], count: int) -> UnitCosts:
    """Costs for a number of microbatches, affine in the rows of one between those that are known.

    >>> one = UnitCosts(np.array([[4.0]] * 7))
    >>> two = UnitCosts(np.array([[3.0]] * 7))
    >>> float(between_microbatches({1: one, 2: two}, 4).values[0, 0])
    2.5
    """
    if count in known or len(known) == 1:
        return known.get(count) or next(iter(known.values()))
    rows = sorted((1 / one, one) for one in known)
    pairs = list(itertools.pairwise(rows))
    (low, many), (high, few) = next((pair for pair in pairs if 1 / count <= pair[1][0]), pairs[-1])
    share = (1 / count - low) / (high - low)
    values = known[many].values * (1 - share) + known[few].values * share
    least = known[many].values * min(1.0, 1 / count / low)
    looped = max(known[many], known[few], key=lambda one: one.loop_bytes)
    return replace(looped, values=np.maximum(values, least))


def microbatch_counts(rows: int, most: int = 512) -> list[int]:
    """Numbers of microbatches to choose from: powers of two that divide the batch, or all divisors if there are few.

    No microbatch has one row if another number of them does, since a dim of one element is a case of its own to JAX.

    >>> microbatch_counts(64), microbatch_counts(6), microbatch_counts(2)
    ([2, 4, 8, 16, 32], [2, 3], [2])
    """
    divisors = [count for count in range(2, min(rows, most) + 1) if rows % count == 0]
    powers = [count for count in divisors if count & (count - 1) == 0]
    found = powers if len(powers) >= 3 else divisors
    return [count for count in found if count < rows] or found
