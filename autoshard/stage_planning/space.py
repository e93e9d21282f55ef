"""A step that can be cut, and a mesh, in; the space that the search of stages chooses from, out.

Units are planned for a few numbers of microbatches. In between, seconds and bytes of a microbatch are affine in its
rows. What is kept between steps, and what runs once, does not depend on the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.errors import StageError
from autoshard.layout import MeshShape
from autoshard.mesh.topology import Topology
from autoshard.model.xla.backends import Backend
from autoshard.stage_planning.sub_meshes import SubMeshShape, device_row, sub_mesh_shapes
from autoshard.stage_planning.unit_costs import UnitCosts, UnitCut, lean_unit_costs, unit_costs
from autoshard.stage_search import MicrobatchCosts, StageSpace, StageTable

CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12)  # virtual stages per device: more of them than divide the layers evenly gain little
SCHEDULES = (
    *(("1f1b", 1), ("eager_1f1b", 1), ("zb_h1", 1), ("zb_h2", 1), ("gpipe", 1)),
    *((name, chunks) for name in ("interleaved_1f1b", "looped_bfs") for chunks in CHUNKS),
    *(("zb_v", 2), ("v_half", 2), ("v_min", 2)),
)
# Seconds that a controller takes to dispatch one task and its transfers: measured on CPU with 64 programs and 56
# transfers, 310 microseconds each. No task is taken to be shorter.
DISPATCH_SECONDS = 3.1e-4


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
    most_stages: int = 32


@dataclass(frozen=True, eq=False)
class PlannedSpace:
    """The space, and the sub-meshes behind its tables, by their names."""

    space: StageSpace
    shapes: Mapping[str, SubMeshShape]


def planned_space(request: SpaceRequest) -> PlannedSpace | None:
    """The space of stages of a step; None if no sub-mesh has costs for all units.

    Raises:
        StageError: in no number of microbatches can it be cut.
    """
    cuts: dict[int, UnitCut] = {}
    refusal: StageError | None = None
    for count in sorted(request.planned):
        try:
            cuts[count] = request.cut_into_units(count)
        except StageError as error:
            refusal = error
    if refusal is not None and not cuts:
        raise refusal
    units = len(next(iter(cuts.values())).planned)
    row = device_row(request.mesh_shape, request.topology)
    memory = request.memory * request.backend.usable
    shapes = list(request.shapes) or sub_mesh_shapes(request.mesh_shape, request.topology, memory)
    fewest, most = request.least_stages, min(units, request.most_stages)
    shapes = [shape for shape in shapes if fewest * shape.in_row.devices <= row.devices <= most * shape.in_row.devices]
    if not shapes:
        return None
    tables: dict[int, list[StageTable]] = {count: [] for count in request.microbatches}
    for shape in shapes:
        stages = max(1, row.devices // shape.in_row.devices)
        for variant, found in _variants(cuts, shape, request.backend, stages).items():
            for count in request.microbatches:
                layers = between_microbatches(found, count).layer_costs()
                tables[count].append(layers.table(shape.in_row, variant))
    if not all(tables.values()):
        return None
    first = min(cuts)
    sent = {count: cuts[first].crossing * (first / count) for count in request.microbatches}
    costs = {count: MicrobatchCosts(tuple(tables[count]), sent[count], sent[count]) for count in request.microbatches}
    space = StageSpace(row, costs, request.schedules, request.least_task_seconds, request.most_stages)
    return PlannedSpace(space, {shape.in_row.name: shape for shape in shapes})


def _variants(
    cuts: Mapping[int, UnitCut], shape: SubMeshShape, backend: Backend, stages: int
) -> dict[str, dict[int, UnitCosts]]:
    """Costs on one sub-mesh by number of microbatches: of plans for speed, and of such as fit where those do not."""
    fast = {count: unit_costs(cut, shape, backend) for count, cut in cuts.items()}
    found = {count: one for count, one in fast.items() if one is not None}
    if not found:
        return {}
    most = max(found)  # of which each holds the least
    leaner = lean_unit_costs(cuts[most], shape, backend, found[most], stages, float(min(stages, most)))
    if leaner is None or leaner is found[most]:
        return {"": found}
    return {"": found, "lean": {count: _in_proportion(leaner, one, found[most]) for count, one in found.items()}}


def _in_proportion(known: UnitCosts, other: UnitCosts, base: UnitCosts) -> UnitCosts:
    """Costs for another number of microbatches, which grow as those of other plans do."""
    ratio = np.divide(other.values, base.values, out=np.ones_like(base.values), where=base.values > 0)
    return UnitCosts(known.values * ratio)


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
    return UnitCosts(np.maximum(values, known[many].values * min(1.0, 1 / count / low)))


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
