"""What a TPU program holds for operations that make several arrays: a table of these, each all the time.

Every temporary in the memory of a TPU starts at a multiple of `Backend.number_bytes`. An operation that makes a tuple
has a temporary with the addresses of its parts, and no two tuples ever share one. Three kinds make tuples: fused
operations with several results, and the copies that fetch arguments into the chip's own memory and take results out of
it, which hand on a semaphore. So a step of few bytes and many arrays holds mostly tables: 182 of 5.2 MB for two layers
of T5 with Adafactor.

An argument is fetched while other work runs, once, if the chip's own memory holds a shard. So one that is used without
other work's results is taken to be read where it lies, and a result that is made of arguments alone to be written
there. Numbers are no such arrays.

Source: buffers of training steps compiled for v5e:2x4 and v5p:2x2x2. `tests/model/xla/test_result_tables.py` compiles
some.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from autoshard.model.groups import Group
from autoshard.model.memory_terms import HeldArgument, HeldOutput
from autoshard.model.xla.backends import Backend

TABLES = "tables of operations with several results"  # what the node that holds them is called


@dataclass
class ResultTables:
    """The tables of one program, counted while its arguments and values are gone through."""

    backend: Backend
    devices: int
    copies: int = 0  # of arguments and results, between the chip's own memory and that of arrays
    stored: Counter[int] = field(default_factory=Counter)  # index of a group -> arrays that it makes
    beside: set[int] = field(default_factory=set)  # indices of groups that run in the operations of others

    def add_argument(self, argument: HeldArgument) -> None:
        """Counts the copy that fetches it."""
        fits = argument.value.bytes <= self.backend.on_chip_bytes * self.devices
        if fits and math.prod(argument.value.shape) > 1:
            self.copies += any(_has_work_before(group) for group, _ in argument.uses)

    def add_output(self, output: HeldOutput) -> None:
        """Counts the copy that takes it out, if it is a result, and the table of its group."""
        group = output.group
        if not (output.is_stored or output.has_buffer) or group.is_boundary:
            return
        if output.has_buffer and math.prod(output.value.shape) > 1 and not group.is_copy:
            self.copies += _has_work_before(group)
        self.stored[group.index] += 1
        if group.runs_beside:
            self.beside.add(group.index)

    @property
    def bytes(self) -> int:
        """Of all tables."""
        several = {index for index, count in self.stored.items() if count > 1}
        return self.backend.number_bytes * (self.copies + len(several | self.beside))


def _has_work_before(group: Group) -> bool:
    """Whether it reads what other groups make."""
    return any(not use.value.from_outside for use in group.uses)
