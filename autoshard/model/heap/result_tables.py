"""What a TPU program holds for operations that make several arrays: a table of these, each all the time.

Every temporary in the memory of a TPU starts at a multiple of `Backend.number_bytes`. An operation that makes a tuple
has a temporary with the addresses of its parts, and no two tuples ever share one. Three kinds make tuples: fused
operations with several results, and the copies that fetch arguments into the chip's own memory and take results out of
it, which hand on a semaphore. So a step of few bytes and many arrays holds mostly tables.

An argument is fetched while other work runs, once, if the chip's own memory holds a shard, and a result is taken out
while other work runs. So a copy counts only where enough operations run before an argument's first use, or after a
result is made: programs of few operations have no tables. Numbers are no such arrays.

Source: buffers of training steps compiled for v5e:2x4 and v5p:2x2x2. `tests/model/xla/test_result_tables.py` compiles
some.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from dataclasses import dataclass, field

from autoshard.model.groups import Group
from autoshard.model.memory_terms import HeldArgument, HeldOutput
from autoshard.model.xla.backends import Backend

_OPERATIONS_BESIDE = 4  # that a copy runs beside at least
TABLES = "tables of operations with several results"  # what the node that holds them is called


@dataclass
class ResultTables:
    """The tables of one program, counted while its arguments and values are gone through."""

    backend: Backend
    devices: int
    used: list[int] = field(default_factory=list)  # program points of the first uses of arguments
    made: list[int] = field(default_factory=list)  # program points at which results are made
    stored: Counter[int] = field(default_factory=Counter)  # index of a group -> arrays that it makes
    groups: dict[int, Group] = field(default_factory=dict)  # such groups, by their indices

    def add_argument(self, argument: HeldArgument) -> None:
        """Notes the copy that fetches it."""
        fits = argument.value.bytes <= self.backend.on_chip_bytes * self.devices
        if fits and argument.uses and math.prod(argument.value.shape) > 1:
            self.used.append(min(group.point for group, _ in argument.uses))

    def add_output(self, output: HeldOutput) -> None:
        """Notes the copy that takes it out, if it is a result, and the table of its group."""
        group = output.group
        if not (output.is_stored or output.has_buffer) or group.is_boundary or group.is_idle:
            return
        if output.has_buffer and math.prod(output.value.shape) > 1:
            self.made.append(group.point)
        self.stored[group.index] += 1
        self.groups[group.index] = group

    @property
    def bytes(self) -> int:
        """Of all tables."""
        order = sorted(group.point for group in self.groups.values())
        if not self.backend.number_bytes or len(order) <= _OPERATIONS_BESIDE:
            return 0
        fetched = sum(bisect.bisect_left(order, point) >= _OPERATIONS_BESIDE for point in self.used)
        taken_out = sum(len(order) - bisect.bisect_right(order, point) >= _OPERATIONS_BESIDE for point in self.made)
        several = sum(self.stored[index] > 1 or group.runs_beside for index, group in self.groups.items())
        return self.backend.number_bytes * (fetched + taken_out + several)
