"""A group that is one call of an operation in, every way to split it out: its rule's and its implementations'."""

from __future__ import annotations

from collections.abc import Mapping

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
    group: Group, mesh: MeshShape, choices: Choices = every_choice, near: Mapping[str, int] | None = None
) -> list[Strategy]:
    """Every strategy of a call of an operation, or those that are offered; the first splits nothing.

    Args:
        near: mesh axis -> factor in the strategy near which the offered ones lie; it is kept.
    """
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
    return found if choices is every_choice else _offered(found, group, mesh, choices, near or {})


def _offered(
    strategies: list[Strategy], group: Group, mesh: MeshShape, choices: Choices, near: Mapping[str, int]
) -> list[Strategy]:
    """Those that are offered. An axis of a role splits several factors, of which the last stands for the role.

    An implementation is traced to be priced. So one that leaves axes idle is left out where it can use them, too.
    """
    axes = [axis for axis, size in mesh.items() if size > 1]
    places = [{axis: factor for factor, split in one.assignment for axis in split} for one in strategies]
    factors = sorted({factor for place in places for factor in place.values()})
    offered = set(choices(group, axes, factors))
    pairs = zip(strategies, places, strict=True)
    found = [(one, place) for one, place in pairs if tuple(place.get(axis) for axis in axes) in offered]
    used = {(one.run.name, frozenset(_roles(one.run).items())) for one, _ in found if one.run}

    def is_idle(run: Run) -> bool:
        return any(name == run.name and _roles(run).items() < others for name, others in used)

    return [one for one, place in found if not (one.run and one.run.name and place != near and is_idle(one.run))]


def _roles(run: Run) -> dict[str, str]:
    """Mesh axis -> what it does in a call."""
    return {axis: role for role, axes in run.roles for axis in axes}
