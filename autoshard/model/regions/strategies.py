"""A group that is one call of an operation in, every way to split it out: its rule's and its implementations'."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.layout import MeshShape
from autoshard.model.groups import Group
from autoshard.model.option_sets.option_set import OptionSet
from autoshard.model.strategies import Strategy
from autoshard.operations.call import Call
from autoshard.operations.primitive import OPERATION
from autoshard.operations.split import CallRun
from autoshard.propagation.registry import rule_of


def is_call(group: Group) -> bool:
    """Whether a group is a call of an operation."""
    return group.equations[0].primitive == OPERATION


def operation_strategies(
    group: Group, mesh: MeshShape, offered: OptionSet | None = None, known: dict[int, list[Strategy]] | None = None
) -> list[Strategy]:
    """Every strategy of a call of an operation, or those that are offered; the first splits nothing.

    A call is traced to be priced. So an implementation that leaves axes idle is left out where it can use them, too. Of
    what is offered as blocks of axes alone, and not near a choice, the function itself is, unless it splits nothing;
    and an implementation with several roles is left out where another one splits the same with fewer.

    Args:
        known: of calls, by their equations: all that the mesh allows, whatever is offered. This call adds to it.
    """
    (equation,) = group.equations
    known = {} if known is None else known
    if equation.index not in known:
        known[equation.index] = _every_strategy(group, mesh)
    found, chosen = known[equation.index], None
    near = [True] * len(found)
    if offered is not None:
        found, near = _offered(found, group, mesh, offered)
        chosen = offered.groups.get(group.index)
    used = {(one.run.name, frozenset(_roles(one.run).items())) for one in found if one.run}

    def is_idle(strategy: Strategy, is_near: bool) -> bool:
        run = strategy.run
        if run is None or not run.roles or (is_near and not run.name) or _place(strategy) == chosen:
            return False
        return any(name == run.name and _roles(run).items() < others for name, others in used)

    return [one for one, is_near in zip(found, near, strict=True) if not is_idle(one, is_near)]


def _every_strategy(group: Group, mesh: MeshShape) -> list[Strategy]:
    (equation,) = group.equations
    rule = rule_of(equation)
    call = Call.of(equation, rule)
    number = {factor: n for n, factor in enumerate(f for f in rule.factors if rule.sizes[f] > 1)}
    found = []
    for run in call.runs(mesh):
        reads, makes = call.layouts(run, mesh)
        split = sorted((number[factor], axes) for factor, axes in call.assignment(run, mesh).items())
        wants = tuple(reads[use.operand] for use in group.uses)
        found.append(Strategy(tuple(split), wants, tuple(makes), (), run=run))
    return found


def _offered(
    found: Sequence[Strategy], group: Group, mesh: MeshShape, offered: OptionSet
) -> tuple[list[Strategy], list[bool]]:
    """The strategies that are offered, and of each whether it lies near a choice."""
    call = Call.of(group.equations[0], rule_of(group.equations[0]))
    axes = [axis for axis, size in mesh.items() if size > 1]
    factors = sorted({factor for strategy in found for factor in _place(strategy).values()})
    blocks, near = offered.of_blocks(axes, factors), offered.near(group, axes, factors)
    places = [tuple(map(_place(strategy).get, axes)) for strategy in found]
    roles = [len(call.own_roles(strategy.run)) if strategy.run else 0 for strategy in found]
    fewest: dict[tuple, int] = {}  # how a call is split -> roles of the simplest implementation that does it
    for place, count in zip(places, roles, strict=True):
        if count:
            fewest[place] = min(count, fewest.get(place, count))
    kept = [
        (strategy, place in near)
        for strategy, place, count in zip(found, places, roles, strict=True)
        if place in near or (place in blocks and count <= fewest.get(place, 0))
    ]
    return [strategy for strategy, _ in kept], [is_near for _, is_near in kept]


def _place(strategy: Strategy) -> dict[str, int]:
    """Mesh axis -> the factor that it splits. A role's axis splits several, of which the last stands for the role."""
    return {axis: factor for factor, split in strategy.assignment for axis in split}


def _roles(run: CallRun) -> dict[str, str]:
    """Mesh axis -> what it does in a call."""
    return {axis: role for role, axes in run.roles for axis in axes}
