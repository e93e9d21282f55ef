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
    """What loops wait for: what they read, and the weights that this is made of."""
    found: set[int] = set()
    for group in reversed(groups):
        if group.enters_loop or any(made.value.id in found and made.value.id in weights for made in group.outputs):
            found.update(use.value.id for use in group.uses)
    return found
