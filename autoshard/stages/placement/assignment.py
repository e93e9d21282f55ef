"""Loop equations and boundaries of the forward pass in, the stage of every equation out.

A forward equation belongs to the stage that its place in the line says. A backward equation that reads parameters
belongs to the stage that has them. All other backward equations go where the fewest bytes cross: one minimum cut per
boundary, the first boundary first, of the equations that are not before it yet.

Across a boundary, a value is sent once, however many read it. Forward values are sent to later stages, where the
backward pass may read them too. Values of the backward pass are sent to earlier stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from autoshard.errors import StageError
from autoshard.jaxprs import Var
from autoshard.program.user_code import source_of
from autoshard.stages.placement.flow import SINK, SOURCE, UNCUTTABLE, source_side
from autoshard.stages.roles import PipelineRoles, bytes_of
from autoshard.stages.stacks import EquationOrigin


def stages_of(
    roles: PipelineRoles,
    origins: Sequence[EquationOrigin],
    boundaries: Sequence[EquationOrigin],
    pinned: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Loop equation -> its stage, of those that belong to one: all but free ones and those that only add sums.

    Args:
        origins: per equation of the step, where it stands in the line of the forward pass.
        boundaries: where stages begin, all but the first.
        pinned: backward equation -> its stage, of those that no cut may move.

    Raises:
        StageError: an early stage would wait for a late one.
    """
    outside = roles.free | roles.added
    found: dict[int, int] = {}
    for i in roles.loop:
        if i not in roles.backward and i not in outside:
            found[i] = sum(_comes_before(boundary, origins[i]) for boundary in boundaries)
    homes = homes_of(roles, found)
    backward = [i for i in roles.loop if i in roles.backward and i not in outside]
    fixed: dict[int, int] = {}
    for i in backward:
        stages = {homes[var] for var in roles.inputs(i) if var in homes}
        if stages:
            fixed[i] = max(stages)
    fixed |= pinned or {}
    undecided = set(backward)
    for boundary in range(1, len(boundaries) + 1):
        edges = _edges(roles, found, fixed, undecided, boundary)
        # Of equal choices the earlier stage: a bias at the end of a stage has its gradient there, too.
        later, is_possible = source_side(edges, is_largest=False)
        if not is_possible:
            raise _impossible(roles, fixed, undecided, boundary)
        before = {i for i in undecided if i not in later}
        found |= dict.fromkeys(before, boundary - 1)
        undecided -= before
    return found | dict.fromkeys(undecided, len(boundaries))


def _comes_before(boundary: EquationOrigin, origin: EquationOrigin) -> bool:
    return (boundary.equation, boundary.trip) <= (origin.equation, origin.trip)


def homes_of(roles: PipelineRoles, stages: Mapping[int, int]) -> dict[Var, int]:
    """Parameter -> the one stage whose forward equations read it; those that several stages read have none."""
    readers: dict[Var, set[int]] = {}
    for i, stage in stages.items():
        for var in roles.inputs(i):
            if var in roles.parameters and i not in roles.backward:
                readers.setdefault(var, set()).add(stage)
    return {var: min(found) for var, found in readers.items() if len(found) == 1}


def _edges(
    roles: PipelineRoles, found: Mapping[int, int], fixed: Mapping[int, int], undecided: set[int], boundary: int
) -> dict[tuple[Hashable, Hashable], float]:
    """The graph whose cut says which undecided equations stay after a boundary, with the source."""
    edges: dict[tuple[Hashable, Hashable], float] = {}
    readers: dict[Var, list[int]] = {}
    for i in undecided:
        if i in fixed:
            edges[(SOURCE, i) if fixed[i] >= boundary else (i, SINK)] = UNCUTTABLE
        for var in roles.made_in_loop(i):
            readers.setdefault(var, []).append(i)
    for var, several in readers.items():
        maker, size = roles.makers[var], float(bytes_of(roles.step.twins[var]))
        if maker in roles.free or maker in roles.added:
            continue
        if maker in undecided:
            edges[maker, var] = size
            for i in several:
                edges[var, i] = edges[i, maker] = UNCUTTABLE
        elif maker not in roles.backward and found[maker] < boundary:
            others = (found.get(i, -1) for i in roles.readers[var] if i not in roles.backward)
            if not any(stage >= boundary for stage in others):
                edges[var, SINK] = size
                edges |= {(i, var): UNCUTTABLE for i in several}
        elif maker not in roles.backward:
            edges[SOURCE, var] = size
            edges |= {(var, i): UNCUTTABLE for i in several}
    return edges


def _impossible(roles: PipelineRoles, fixed: Mapping[int, int], undecided: set[int], boundary: int) -> StageError:
    """Which backward equations stand in each other's way."""
    early = [i for i in sorted(undecided) if fixed.get(i, boundary) < boundary]
    late = [i for i in sorted(undecided) if fixed.get(i, -1) >= boundary and early and i > early[0]]
    lines = [str(source_of(roles.step.equations[i]) or "unknown line") for i in (*early[:1], *late[:1])]
    return StageError(
        f"pipeline: the backward pass goes back and forth over the boundary before stage {boundary}: stage "
        f"{boundary} at {lines[-1]} waits for what an earlier stage makes at {lines[0]}.\n"
        "Cut the step elsewhere, or use fewer stages."
    )
