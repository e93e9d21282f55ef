"""The units of a step, each planned on each sub-mesh: what the tables of the search are made of.

Units that look alike are planned once. Seconds and bytes of a microbatch are taken as affine in its rows: they are
planned for a few numbers of rows, and interpolated between these.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import StageError
from autoshard.model.xla.backends import Backend
from autoshard.stage_planning.costs import StageCost, SubMeshModel
from autoshard.stage_planning.cut_step import CutStep
from autoshard.stage_planning.sub_meshes import SubMeshShape
from autoshard.stage_search import LayerCosts
from autoshard.stage_search.tables import Numbers
from autoshard.stages.programs import LOOP
from autoshard.stages.units import Unit, Units

FIELDS = ("forward", "backward", "weight", "after", "fixed_bytes", "microbatch_bytes", "working_bytes")  # of LayerCosts
LOOP_FIELDS = FIELDS[: len(LOOP)]  # seconds of one microbatch
# How many times as fast or slow as alone a unit behind another one is taken to be at most, however they were planned.
MOST_APART = 1.5
MOST_TRIPS = 4  # of a loop, planned as one stage

# How well units are planned for tables. The stages that are chosen are planned as any step is, if they fit so.
_EFFORT: Mapping[str, Any] = {"gap": 0.03, "work": 2.0, "shares": (1.0,)}
_ALIKE = 1e-3  # units are planned as one if their FLOPs and their parameters differ by no larger share


@dataclass(frozen=True)
class StageOfSeveral:
    """A stage of several units of one kind, and the stage that is one of them."""

    stage: int
    units: int  # how many it has
    one: int  # the other stage


@dataclass(frozen=True, eq=False)
class UnitCut:
    """A step cut so that one unit of each kind is a stage of its own; nobody plans the stages between."""

    cut: CutStep
    planned: tuple[int, ...]  # per unit, the stage that is the unit of its kind
    crossing: Numbers  # bytes of one microbatch that cross the cut before each unit, one way; 0 at both ends
    several: StageOfSeveral | None = None  # units of the most frequent kind

    @classmethod
    def of(cls, units: Units, cut_at: Callable[[Sequence[int]], CutStep]) -> UnitCut:
        """
        Args:
            cut_at: first units of all stages but the first -> the step cut so.

        Raises:
            StageError: it has no units, or cannot be cut around units of all kinds, whichever of their kind they are.
        """
        if not units.units:
            raise StageError(
                "pipeline: the forward pass computes nothing per row of the batch that a stage could have.\n"
                "Leave pipeline= out."
            )
        kinds = kinds_of(units.units)
        found: dict[int, list[int]] = {}
        for number, kind in enumerate(kinds):
            found.setdefault(kind, []).append(number)
        # The first of several units may differ from the others in what it reads.
        ways = [[min(1, len(numbers) - 1), len(numbers) // 2, -1, 0] for numbers in found.values()]
        refusal: StageError | None = None
        several = max(found.values(), key=len)
        tried = set[tuple[int, ...]]()
        most = (_in_one_loop(units.units, several), 2, 1)
        for picked, count in itertools.product(dict.fromkeys(zip(*ways, strict=True)), dict.fromkeys(most)):
            chosen = {kind: numbers[at] for (kind, numbers), at in zip(found.items(), picked, strict=True)}
            ends = {first for number in chosen.values() for first in (number, number + 1)}
            run = _run(several, set(chosen.values()), count) if count > 1 else None
            ends |= set() if run is None else {run, run + count}
            firsts = tuple(sorted(ends - {0, len(units.units)}))
            if firsts in tried:  # cutting takes long
                continue
            tried.add(firsts)
            try:
                made = cut_at(firsts)
                break
            except StageError as error:
                refusal = error
        else:
            assert refusal is not None, "there is a unit of some kind"
            raise refusal
        stage_of = {number: bisect.bisect_right(firsts, number) for number in chosen.values()}
        crossing = [0.0, *(float(unit.crossing_bytes) for unit in units.units[1:]), 0.0]
        planned = tuple(stage_of[chosen[kind]] for kind in kinds)
        longer = None if run is None else StageOfSeveral(bisect.bisect_right(firsts, run), count, planned[run])
        return cls(made, planned, np.array(crossing), longer)


def _run(numbers: Sequence[int], apart: Collection[int], count: int) -> int | None:
    """The first of so many neighbours among units of one kind of which none is a stage by itself, if there are such."""
    free = {number for number in numbers if number not in apart}
    return next((one for one in numbers if free.issuperset(range(one, one + count))), None)


def _in_one_loop(units: Sequence[Unit], numbers: Sequence[int]) -> int:
    """How many units of one kind are planned as one stage: more of them where they are trips of one loop.

    A loop is planned as fast whatever its trips, and what its first trips cost beside is spread over more of them.
    """
    loops = {units[number].start.equation for number in numbers}
    return MOST_TRIPS if len(loops) == 1 and len(numbers) > MOST_TRIPS else 2


def kinds_of(units: Sequence[Unit]) -> list[int]:
    """Per unit, the first that costs the same or nearly so: the last layer may have the norm behind it, too."""
    found: list[int] = []
    for number, unit in enumerate(units):
        firsts = (first for first in dict.fromkeys(found) if _is_alike(unit, units[first]))
        found.append(next(firsts, number))
    return found


def _is_alike(unit: Unit, other: Unit) -> bool:
    flops = math.isclose(unit.forward_flops, other.forward_flops, rel_tol=_ALIKE)
    return flops and math.isclose(unit.parameter_bytes, other.parameter_bytes, rel_tol=_ALIKE)


@dataclass(frozen=True, eq=False)
class UnitCosts:
    """Costs of every unit on one sub-mesh for one number of microbatches, [field, unit], as `FIELDS` has them."""

    values: Numbers
    loop_bytes: float = 0.0  # that a stage of several units of a loop works in beside what one of them does
    in_loop: NDArray[np.bool_] | None = None  # which units the loop has
    further: float = 1.0  # times what it takes alone, a unit of the loop takes behind another one in a stage

    def layer_costs(self) -> LayerCosts:
        """The same for the search of stages."""
        figures = dict(zip(FIELDS, self.values, strict=True))
        return LayerCosts(**figures, loop_bytes=self.loop_bytes, in_loop=self.in_loop, further=self.further)


def unit_costs(units: UnitCut, shape: SubMeshShape, backend: Backend, until: float = math.inf) -> UnitCosts | None:
    """Every unit of a step planned on one sub-mesh for speed alone; None if some unit was not planned.

    Args:
        until: when planning ends, as `time.monotonic` has it.

    Raises:
        FormulatingLate: it is that late.
    """
    where = SubMeshModel(shape.mesh, shape.topology, backend, math.inf, until)
    return _of_units(units, lambda stage: units.cut.cost(stage, where, in_flight=1.0, **_EFFORT))


def with_loops(
    units: UnitCut, shape: SubMeshShape, backend: Backend, costs: UnitCosts, until: float = math.inf
) -> UnitCosts:
    """The same costs with what a stage of several units is found to take, and to work in, beside what one of them does.

    Raises:
        FormulatingLate: planning has to end, as for `unit_costs`.
    """
    several = units.several
    if several is None:
        return costs
    where = SubMeshModel(shape.mesh, shape.topology, backend, math.inf, until)
    found = units.cut.cost(several.stage, where, in_flight=1.0, **_EFFORT)
    if found is None:
        return costs
    in_loop = np.array(units.planned) == several.one
    one = dict(zip(FIELDS, costs.values[:, units.planned.index(several.one)].tolist(), strict=True))
    alone, together = sum(one[name] for name in LOOP_FIELDS), sum(found.seconds[kind] for kind in LOOP)
    further = (together - alone) / ((several.units - 1) * alone) if alone > 0 else 1.0
    more = max(0.0, found.working_bytes - one["working_bytes"])
    return replace(costs, loop_bytes=more, in_loop=in_loop, further=min(max(further, 1 / MOST_APART), MOST_APART))


def lean_unit_costs(
    units: UnitCut,
    shape: SubMeshShape,
    backend: Backend,
    fast: UnitCosts,
    stages: int,
    in_flight: float,
    until: float = math.inf,
) -> UnitCosts | None:
    """The same within the memory of a pipeline of so many equal stages; `fast` itself if that fits.

    Every unit gets a part of the memory beside what one of them works in: as large a part as it takes of the fast
    choice. Units that are planned as one share the parts of those that a stage has: what each holds counts as often,
    and what it works in once. One that does not fit takes about the least that it can.

    Raises:
        FormulatingLate: planning has to end, as for `unit_costs`.
    """
    fixed, left, working = (fast.values[FIELDS.index(name)] for name in FIELDS[-3:])
    held = fixed + in_flight * left
    room = shape.in_row.memory_bytes
    if held.sum() / stages + working.max() <= room:
        return fast
    share = stages * max(0.0, room - working.max()) / held.sum()

    def cost(stage: int) -> StageCost | None:
        unit = units.planned.index(stage)
        copies = max(1.0, units.planned.count(stage) / stages)
        limit = (copies * held[unit] * share + working[unit]) / backend.usable
        where = SubMeshModel(shape.mesh, shape.topology, backend, limit, until)
        return units.cut.cost(stage, where, in_flight=in_flight, or_leanest=True, copies=copies, **_EFFORT)

    return _of_units(units, cost)


def _of_units(units: UnitCut, cost_of: Callable[[int], StageCost | None]) -> UnitCosts | None:
    values = np.zeros((len(FIELDS), len(units.planned)))
    known: dict[int, StageCost] = {}
    for unit, stage in enumerate(units.planned):
        if stage not in known:
            found = cost_of(stage)
            if found is None:
                return None
            known[stage] = found
        values[:, unit] = known[stage].row
    return UnitCosts(values)
