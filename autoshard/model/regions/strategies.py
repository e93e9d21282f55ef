"""A group that is one call of an operation in, every way to split it out: its rule's and its implementations'."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autoshard.layout import MeshShape
from autoshard.model.groups import Group
from autoshard.model.strategies import Choices, Strategy, every_choice
from autoshard.operations.primitive import OPERATION
from autoshard.operations.running import Call
from autoshard.operations.split import Run
from autoshard.propagation.registry import rule_of


def is_call(group: Group) -> bool:
    """Whether a group is a call of an operation."""
    return group.equations[0].primitive == OPERATION


def operation_strategies(
    group: Group,
    mesh: MeshShape,
    choices: Choices = every_choice,
    near: Mapping[str, int] | None = None,
    known: dict[int, list[Strategy]] | None = None,
) -> list[Strategy]:
    """Every strategy of a call of an operation, or those that are offered; the first splits nothing.

    An implementation is traced to be priced. So one that leaves axes idle is left out where it can use them, too. Of
    blocks of axes, before it is known near which strategies to look, one with several roles is left out where another
    one splits the same with fewer.

    Args:
        near: mesh axis -> factor in the strategy near which the offered ones lie; it is kept.
        known: of calls, by their equations: all that the mesh allows, whatever is offered. This call adds to it.
    """
    (equation,) = group.equations
    known = {} if known is None else known
    if equation.index not in known:
        known[equation.index] = _every_strategy(group, mesh)
    found = known[equation.index]
    call = Call.of(equation, rule_of(equation))
    places = list(map(_place, found))
    if choices is not every_choice:
        offered = _offered(places, group, mesh, choices)
        if near is None:
            counts = [len(call.own_roles(one.run)) for one in found if one.run]
            offered = _simplest(list(zip(places, counts, strict=True)), offered)
        found, places = list(itertools.compress(found, offered)), list(itertools.compress(places, offered))
    used = {(one.run.name, frozenset(_roles(one.run).items())) for one in found if one.run}

    def is_idle(run: Run) -> bool:
        return any(name == run.name and _roles(run).items() < others for name, others in used)

    pairs = zip(found, places, strict=True)
    return [one for one, place in pairs if not (one.run and one.run.name and place != near and is_idle(one.run))]


def _every_strategy(group: Group, mesh: MeshShape) -> list[Strategy]:
    (equation,) = group.equations
    rule = rule_of(equation)
    call = Call.of(equation, rule)
    number = {factor: n for n, factor in enumerate(f for f in rule.factors if rule.sizes[f] > 1)}
    found = []
    for run in call.runs(mesh):
        reads, leaves = call.layouts(run, mesh)
        split = sorted((number[factor], axes) for factor, axes in call.assignment(run, mesh).items())
        wants = tuple(reads[use.operand] for use in group.uses)
        found.append(Strategy(tuple(split), wants, tuple(leaves), (), run=run))
    return found


def _offered(places: list[dict[str, int]], group: Group, mesh: MeshShape, choices: Choices) -> list[bool]:
    """Per strategy, whether it is offered."""
    axes = [axis for axis, size in mesh.items() if size > 1]
    factors = sorted({factor for place in places for factor in place.values()})
    offered = set(choices(group, axes, factors))
    return [tuple(place.get(axis) for axis in axes) in offered for place in places]


def _simplest(runs: Sequence[tuple[dict[str, int], int]], offered: Sequence[bool]) -> list[bool]:
    """Of those that are offered, the ones that have the fewest roles of all implementations that split the same.

    Args:
        runs: per strategy, how it splits, and how many roles its implementation has in it; 0 for the function itself.
    """
    keys = [(frozenset(place.items()), roles) for place, roles in runs]
    fewest: dict[frozenset, int] = {}
    for place, roles in itertools.compress(keys, offered):
        if roles:
            fewest[place] = min(roles, fewest.get(place, roles))
    return [flag and roles <= fewest.get(place, 0) for flag, (place, roles) in zip(offered, keys, strict=True)]


def _place(strategy: Strategy) -> dict[str, int]:
    """Mesh axis -> the factor that it splits. A role's axis splits several, of which the last stands for the role."""
    return {axis: factor for factor, split in strategy.assignment for axis in split}


def _roles(run: Run) -> dict[str, str]:
    """Mesh axis -> what it does in a call."""
    return {axis: role for role, axes in run.roles for axis in axes}
