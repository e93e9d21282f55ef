"""What a tactic says of one mesh axis, as data: how state lies, what may be split, what may be communicated."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.tactics.roles import Dim, GroupRole, StateRole


class Storage(enum.Enum):
    """How arguments lie along an axis."""

    WHOLE = "whole"
    SPLIT = "split"  # along any dim that the axis divides; whole only where there is none
    FEATURES = "split along features"  # the same of dims that are features
    EXPERTS = "split along experts"
    OPEN = "open"


class Payload(enum.Enum):
    """What is communicated, by what it is for."""

    PARAMETERS = "parameters"  # and what is made of these alone
    STACKS = "stacks"  # parameters of all turns of a loop at once
    UPDATES = "updates"  # gradients that are summed, and what optimizers make
    ACTIVATIONS = "activations"


@dataclass(frozen=True)
class AllowedSplit:
    """Along which dims an axis may split groups of one kind.

    >>> AllowedSplit(Dim.BATCH)
    AllowedSplit(dims=<Dim.BATCH: 1>, is_required=True)
    """

    dims: Dim | None  # None: along any
    is_required: bool = True  # whether the axis splits a group wherever it can; otherwise a group may stay whole


NOTHING = AllowedSplit(Dim.OTHER, is_required=False)  # the axis splits no such group
ANYTHING = AllowedSplit(None, is_required=False)


@dataclass(frozen=True)
class AxisRule:
    """What holds along one mesh axis. What a field has no entry for is left to the solver.

    Collectives are named by kind: "all_gather" and "all_to_all" of reshardings, "all_reduce" and "reduce_scatter" of
    sums. To slice what is whole is always allowed, since it is free.
    """

    state: Mapping[StateRole, Storage] = field(default_factory=dict)
    batch: Dim | None = None  # the dims along which arrays of the batch are split; OTHER: they are whole; None: open
    splits: Mapping[GroupRole, AllowedSplit] = field(default_factory=dict)
    reshardings: Mapping[Payload, frozenset[str]] = field(default_factory=dict)
    sums: Mapping[GroupRole, frozenset[str]] = field(default_factory=dict)
    scatters: frozenset[GroupRole] = frozenset()  # whose products are reduce_scattered wherever they can be
    apart_from: frozenset[str] = frozenset()  # axes with which it splits no dim of a weight or its product together

    def refined(self, other: AxisRule) -> AxisRule:
        """This rule, with what the other says in its place."""
        return AxisRule(
            {**self.state, **other.state},
            self.batch if other.batch is None else other.batch,
            {**self.splits, **other.splits},
            {**self.reshardings, **other.reshardings},
            {**self.sums, **other.sums},
            self.scatters | other.scatters,
            self.apart_from | other.apart_from,
        )
