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
from autoshard.stages.units import Unit, Units

FIELDS = ("forward", "backward", "weight", "after", "fixed_bytes", "microbatch_bytes", "working_bytes")  # of LayerCosts

# How well units are planned for tables. The stages that are chosen are planned as any step is, if they fit so.
_EFFORT: Mapping[str, Any] = {"gap": 0.03, "work": 2.0, "shares": (1.0,)}
_ALIKE = 1e-3  # units are planned as one if their FLOPs, parameters and results differ by no larger share


@dataclass(frozen=True, eq=False)
class UnitCut:
    """A step cut so that one unit of each kind is a stage of its own; nobody plans the stages between."""

    cut: CutStep
    planned: tuple[int, ...]  # per unit, the stage that is the unit of its kind
    crossing: Numbers  # bytes of one microbatch that cross the cut before each unit, one way; 0 at both ends
    pair: tuple[int, int] | None = None  # a stage of two units of the most frequent kind, and that of one

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
        for picked, has_pair in itertools.product(dict.fromkeys(zip(*ways, strict=True)), (True, False)):
            chosen = {kind: numbers[at] for (kind, numbers), at in zip(found.items(), picked, strict=True)}
            ends = {first for number in chosen.values() for first in (number, number + 1)}
            pair = _pair(several, set(chosen.values())) if has_pair else None
            ends |= set() if pair is None else {pair, pair + 2}
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
        two = None if pair is None else (bisect.bisect_right(firsts, pair), planned[pair])
        return cls(made, planned, np.array(crossing), two)


def _pair(numbers: Sequence[int], apart: Collection[int]) -> int | None:
    """The first of two neighbours among units of one kind of which neither is a stage by itself, if there are such."""
    pairs = (one for one, other in itertools.pairwise(numbers) if other == one + 1)
    return next((one for one in pairs if one not in apart and one + 1 not in apart), None)


def kinds_of(units: Sequence[Unit]) -> list[int]:
    """Per unit, the first that costs the same or nearly so: the last layer may have the norm behind it, too."""
    found: list[int] = []
    for number, unit in enumerate(units):
        firsts = (first for first in dict.fromkeys(found) if _is_alike(unit, units[first]))
        found.append(next(firsts, number))
    return found


def _is_alike(unit: Unit, other: Unit) -> bool:
    sizes = ((one.forward_flops, one.parameter_bytes, one.made_bytes) for one in (unit, other))
    return all(math.isclose(one, another, rel_tol=_ALIKE) for one, another in zip(*sizes, strict=True))


@dataclass(frozen=True, eq=False)
class UnitCosts:
    """Costs of every unit on one sub-mesh for one number of microbatches, [field, unit], as `FIELDS` has them."""

    values: Numbers
    loop_bytes: float = 0.0  # that a stage of several units of a loop works in beside what one of them does
    in_loop: NDArray[np.bool_] | None = None  # which units the loop has

    def layer_costs(self) -> LayerCosts:
        """The same for the search of stages."""
        figures = dict(zip(FIELDS, self.values, strict=True))
        return LayerCosts(**figures, loop_bytes=self.loop_bytes, in_loop=self.in_loop)


def unit_costs(units: UnitCut, shape: SubMeshShape, backend: Backend, until: float = math.inf) -> UnitCosts | None:
    """Every unit of a step planned on one sub-mesh for speed alone; None if some unit was not planned.

    Args:
        until: when planning ends, as `time.monotonic` has it.

    Raises:
        FormulationTimeout: it is that late.
    """
    where = SubMeshModel(shape.mesh, shape.topology, backend, math.inf, until)
    return _of_units(units, lambda stage: units.cut.cost(stage, where, in_flight=1.0, **_EFFORT))


def with_loops(
    units: UnitCut, shape: SubMeshShape, backend: Backend, costs: UnitCosts, until: float = math.inf
) -> UnitCosts:
    """The same costs with what a stage of two units is found to work in beside what one of them does.

    Raises:
        FormulationTimeout: planning has to end, as for `unit_costs`.
    """
    if units.pair is None:
        return costs
    where = SubMeshModel(shape.mesh, shape.topology, backend, math.inf, until)
    two = units.cut.cost(units.pair[0], where, in_flight=1.0, **_EFFORT)
    if two is None:
        return costs
    one = costs.values[FIELDS.index("working_bytes"), units.planned.index(units.pair[1])]
    in_loop = np.array(units.planned) == units.pair[1]
    return replace(costs, loop_bytes=max(0.0, two.working_bytes - float(one)), in_loop=in_loop)


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
        FormulationTimeout: planning has to end, as for `unit_costs`.
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
