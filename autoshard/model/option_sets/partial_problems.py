"""A problem too large to be priced whole, or in time, in; a part of it that holds good choices out.

The first part has the axes of the mesh taken together in blocks. Each further part offers what lies near the best
choice of the one before, with that choice itself. That no other part holds a better choice is not proven: what is
proven is `least_seconds`, which holds for every strategy there is.

Where the clock ends even that, the part in which one dim is split over all axes, or as many as divide it, is
formulated: it is small, and holds the usual schemes over all devices and their mixtures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autoshard.errors import SolverError
from autoshard.layout import MeshShape
from autoshard.model.formulation import Formulation
from autoshard.model.memory_limit import solve_within
from autoshard.model.option_sets.option_set import OptionSet, Partition, RowOptionSet, place_of
from autoshard.model.pricing.formulation_deadline import FormulationTimeout
from autoshard.program import Program
from autoshard.solver.searches.search_run import Search

LEAST_AXES = 4  # axes of more than one device; a problem over fewer is always priced whole
MOST_LAYOUTS = 4_000  # of all shapes in the step together; a problem of no more is priced whole
REFINEMENTS = 1  # parts that are searched after the first, each near the best choice of the one before
MOST_CHANGED_AXES = 1  # mesh axes that an option near a choice may give to another factor
PART_SHARE = 0.125  # of the time limit: what each search in a part of a problem gets
LATE_REMARK = (
    "time: the time limit ended before the costs of all shardings were known. Only those were compared in which mesh "
    "axes split dims together. Raise time_limit= for a plan that may be faster."
)


def is_too_large(program: Program, mesh: MeshShape) -> bool:
    """Whether a problem is formulated in parts."""
    axes = sum(size > 1 for size in mesh.values())
    shapes = {value.shape for value in program.values}
    return axes >= LEAST_AXES and sum((len(shape) + 1) ** axes for shape in shapes) > MOST_LAYOUTS


def coarse_partitions(axes: Sequence[str]) -> tuple[Partition, ...]:
    """The ways to take axes that follow each other for one or two.

    >>> coarse_partitions("abc")
    ((('a', 'b', 'c'),), (('a',), ('b', 'c')), (('a', 'b'), ('c',)))
    """
    whole = tuple(axes)
    return ((whole,), *((whole[:i], whole[i:]) for i in range(1, len(whole))))


def in_time(mesh: MeshShape, formulated: Callable[..., Formulation], until: float) -> Formulation:
    """The whole problem; its part in which one dim is split as far as it goes, if the clock ends the whole.

    Args:
        formulated: makes the problem of a part, `offered=`, in time, `until=`.
        until: when time is up, as `time.monotonic` has it.
    """
    axes = _axes_of(mesh)
    if len(axes) <= 1:  # that part would be the whole
        return formulated()
    try:
        return formulated(until=until)
    except FormulationTimeout:
        return _as_one_axis(mesh, formulated)


def _as_one_axis(mesh: MeshShape, formulated: Callable[..., Formulation]) -> Formulation:
    part = formulated(offered=RowOptionSet(((tuple(_axes_of(mesh)),),), mesh=mesh))
    return replace(part, least=least_seconds(part), restrictions=(LATE_REMARK,), is_late=True)


def _axes_of(mesh: MeshShape) -> list[str]:
    return [axis for axis, size in mesh.items() if size > 1]


def formulated_near_best_choice(
    mesh: MeshShape,
    formulated: Callable[..., Formulation],
    time_limit: float,
    search: str | Search | None = None,
    until: float = math.inf,
) -> Formulation:
    """The part of a problem that lies near the best choice found, with the seconds that no choice goes below.

    Args:
        formulated: makes the problem of a part, `offered=`, in time, `until=`.
        time_limit: seconds for all of planning.
        search: as for `solve`.
        until: when time is up, as `time.monotonic` has it: the part made last is taken then.
    """
    axes = _axes_of(mesh)
    partitions = coarse_partitions(axes)
    try:
        part = formulated(offered=OptionSet(partitions), until=until)
    except FormulationTimeout:
        return _as_one_axis(mesh, formulated)
    try:
        for _ in range(REFINEMENTS):
            choice = solve_within(part, PART_SHARE * time_limit, until=until, search=search).choice
            near = near_choice(part, choice, _partitions_used(part, choice, partitions))
            part = formulated(offered=near, until=until)
    except SolverError:
        pass  # whoever solves the part says what is wrong
    except FormulationTimeout:
        part = replace(part, restrictions=(*part.restrictions, LATE_REMARK), is_late=True)
    return replace(part, least=least_seconds(part))


def near_choice(formulation: Formulation, choice: Sequence[int], partitions: tuple[Partition, ...]) -> OptionSet:
    """What lies near a choice, and some partitions."""
    groups = {}
    for group, priced in zip(formulation.groups, formulation.priced, strict=True):
        strategy = priced.strategies[choice[formulation.group_node(group)]]
        groups[group.index] = {axis: factor for factor, split in strategy.assignment for axis in split}
    homes = {i: place_of(options[choice[i]].home) for i, options in enumerate(formulation.arguments)}
    return OptionSet(partitions, groups, homes, MOST_CHANGED_AXES)


def _partitions_used(
    formulation: Formulation, choice: Sequence[int], partitions: Sequence[Partition]
) -> tuple[Partition, ...]:
    """The partition into one block, and of the others the one that most of a choice's seconds respect."""
    whole, *others = partitions
    if not others:
        return (whole,)
    respected = [0.0] * len(others)
    for group, priced in zip(formulation.groups, formulation.priced, strict=True):
        option = choice[formulation.group_node(group)]
        place = {axis: factor for factor, split in priced.strategies[option].assignment for axis in split}
        for i, partition in enumerate(others):
            if all(len({place.get(axis) for axis in block}) == 1 for block in partition):
                respected[i] += priced.seconds[option].total
    return whole, others[max(range(len(others)), key=respected.__getitem__)]


def least_seconds(part: Formulation) -> float:
    """Seconds that no choice of the whole problem goes below: its FLOPs and bytes, shared out over all devices."""
    devices = math.prod(part.mesh.values())
    pairs = zip(part.groups, part.priced, strict=True)
    least = [(part.prices.work.least_seconds(group, devices) * group.trips, priced) for group, priced in pairs]
    return math.fsum(min([seconds, *(one.compute for one in priced.seconds)]) for seconds, priced in least)
