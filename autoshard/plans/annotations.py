"""The shardings of a plan's inner values: what `lower` writes into the program."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autoshard.layout import Layout
from autoshard.operations.split import CallRun
from autoshard.operations.sums import Stages


@dataclass(frozen=True)
class Scatter:
    """How partial sums become the sum, of which each device gets a slice."""

    dim: int  # of the result, which is sliced
    stages: Stages
    others: tuple[str, ...]  # mesh axes over which the slices are all_reduced


@dataclass(frozen=True)
class Annotations:
    """The shardings of inner values: what `lower` writes into the program. Values and equations by index."""

    homes: Mapping[int, Layout]  # value -> the layout it is made in
    copies: Mapping[int, Layout]  # value -> the layout of the copy its readers share
    wants: Mapping[tuple[int, int], Layout]  # (equation, operand) -> the layout it is read in
    scatters: Mapping[int, Scatter] = field(default_factory=dict)  # equation -> how its partial sums are finished
    sums: Mapping[int, Layout] = field(default_factory=dict)  # value -> how its sum lies before XLA slices it
    implied: Collection[int] = frozenset()  # values that propagation brings to their layout without a constraint
    runs: Mapping[int, CallRun] = field(default_factory=dict)  # call of an operation -> what computes it on shards
