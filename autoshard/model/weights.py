"""Weights: what is made of the state alone, so that it can be gathered before it is used, and what waits for it."""

from __future__ import annotations

from collections.abc import Sequence, Set

from autoshard.model.groups import Group
from autoshard.program import Program


def made_of_state(program: Program, groups: Sequence[Group]) -> set[int]:
    """The arguments that stay from step to step, and the values that are made of these alone."""
    found = {program.arguments[i].id for i in program.state}
    for group in groups:
        if group.uses and not group.reduction and found.issuperset(use.value.id for use in group.uses):
            found.update(made.value.id for made in group.outputs)
    return found


def waited_for(groups: Sequence[Group], weights: Set[int]) -> set[int]:
    """What loops wait for: what they read, what turns begin with, and the weights that these are made of."""
    first, found = begin_turns(groups, weights), set[int]()
    for group in reversed(groups):
        is_read = group.enters_loop or group.index in first
        if is_read or any(made.value.id in found and made.value.id in weights for made in group.outputs):
            found.update(use.value.id for use in group.uses)
    return found


def begin_turns(groups: Sequence[Group], weights: Set[int]) -> set[int]:
    """The groups that are the first product in a turn of their loop, where every product waits for weights.

    What such a product reads is gathered before anything runs. Other weights are gathered beside it.
    """
    loops = {equation.loop for group in groups for equation in group.equations if equation.loop}
    waiting, first = set[int](), dict[tuple[int, int] | None, Group | None]()
    for group in groups:
        if group.trips == 1 or group.is_boundary:
            continue
        read = {use.value.id for use in group.uses}
        waits = not read.isdisjoint(waiting) or (group.contracts and not read.isdisjoint(weights))
        if waits:
            waiting.update(made.value.id for made in group.outputs)
        if group.contracts:
            at = group.equations[0].index
            around = [loop for loop in loops if loop[0] <= at < loop[1]]
            loop = min(around, key=lambda loop: loop[1] - loop[0], default=None)
            if not waits:
                first[loop] = None
            first.setdefault(loop, group)
    return {group.index for group in first.values() if group is not None}
