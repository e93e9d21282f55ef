"""What a step is once it is cut into stages: one program per stage and kind of task, on named values. Data alone.

A stage has up to five kinds of programs. In the order in which they run:

========  ======================================================================================================
kind      what it computes
========  ======================================================================================================
`before`  once per step: what microbatches read and no microbatch changes, and the first values of sums
`F`       for one microbatch: the forward pass through the stage
`B`       for one microbatch: the backward pass; with W programs, only what earlier stages wait for
`W`       for one microbatch: the rest of the backward pass, mostly gradients of weights
`after`   once per step: what needs all microbatches, as the optimizer; there may be several of one stage
========  ======================================================================================================

Example. `loss(w2 @ tanh(w1 @ x))` with SGD, cut between the two products. F of stage 0 reads ``argument w1`` and
``argument x`` and makes ``value h``. F of stage 1 reads ``value h`` and adds to ``sum loss``. B of stage 1 makes
``value dh`` and adds to ``sum dw2``, B of stage 0 adds to ``sum dw1``. `after` of stage 0 makes w1 from ``argument w1``
and ``sum dw1``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from autoshard.jaxprs import ClosedJaxpr, array_bytes
from autoshard.stages.roles import total_work
from autoshard.stages.stacks import EquationOrigin

LOOP = ("F", "B", "W")


class Key(NamedTuple):
    """The name of a value that programs hand to each other.

    ==========  ==================================================================
    kind        what `number` counts
    ==========  ==================================================================
    argument    flat arguments of the step
    piece       `StagePrograms.pieces`: trips of a stacked argument
    constant    arrays that the step closes over
    early       values that `before` programs make, once for all microbatches
    value       values that every microbatch has
    sum         sums over microbatches
    rows        values of which `after` programs read those of all microbatches
    late        values that `after` programs make
    microbatch  nothing: the number of the microbatch
    ==========  ==================================================================
    """

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


MICROBATCH = Key("microbatch", 0)


@dataclass(frozen=True)
class ArgumentPiece:
    """Some trips of a stacked argument: its rows from `start` to `stop` along dim 0."""

    argument: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class StageProgram:
    """One program of one stage, from named inputs to named outputs.

    A "sum" among the outputs of a loop program is the sum so far with this microbatch added; the program reads the sum
    before it under the same name.
    """

    kind: str  # "before", "F", "B", "W" or "after"
    stage: int
    jaxpr: ClosedJaxpr = field(repr=False)
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]

    @property
    def name(self) -> str:
        return f"{self.kind} of stage {self.stage}"

    @cached_property
    def flops(self) -> float:
        """FLOPs of one run, over whole arrays."""
        return total_work(self.jaxpr.jaxpr)

    @property
    def sums(self) -> tuple[Key, ...]:
        """The sums that one run adds to."""
        return tuple(key for key in self.outputs if key.kind == "sum") if self.kind in LOOP else ()


@dataclass(frozen=True)
class BlockCut:
    """What a block of the forward pass keeps, and which of its equations run again, by their numbers in it."""

    kept: tuple[int, ...]
    again: tuple[int, ...]


@dataclass(frozen=True)
class RecomputedBlocks:
    """What stages compute again instead of keep."""

    cuts: tuple[BlockCut, ...]  # per block
    seconds: tuple[float, ...]  # per stage: of computing again in one step, on one device


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """A step cut into stages, for so many microbatches."""

    name: str  # of the step
    stages: int
    microbatches: int
    has_weight_programs: bool  # whether W programs are apart from B programs
    before: Mapping[int, StageProgram]  # stage -> its program, of those that have one
    loop: Mapping[tuple[str, int], StageProgram]  # kind and stage -> its program, of those that have one
    after: tuple[StageProgram, ...]  # in an order in which they can run
    types: Mapping[Key, Any] = field(repr=False)  # -> ShapeDtypeStruct of one microbatch's value, or of the whole array
    pieces: tuple[ArgumentPiece, ...]
    homes: Mapping[Key, int]  # argument, piece or constant -> the stage that keeps it between steps
    results: tuple[tuple[Key, ...] | Any, ...]  # per flat result its parts along dim 0; a number is a literal
    constants: tuple[Any, ...] = field(repr=False)
    carried: Mapping[Key, Key]  # argument or piece -> the value that takes its place in the next step
    operations: Mapping[Key, str]  # sum -> how microbatches make it: "add", "max", "min", "and", "or" or "last"
    batch: frozenset[int] = frozenset()  # arguments that have rows of the batch
    boundaries: tuple[EquationOrigin, ...] = ()  # where stages begin in the whole step, all but the first
    own_statistics: str = ""  # the statistics of which each microbatch has its own, in words
    recomputed: RecomputedBlocks | None = None  # None: what is kept is as the step is written

    @property
    def programs(self) -> tuple[StageProgram, ...]:
        """All programs, in the order in which a step of one microbatch would run them."""
        loop = [self.loop[kind, stage] for kind in LOOP for stage in self._order(kind) if (kind, stage) in self.loop]
        return *self.before.values(), *loop, *self.after

    def _order(self, kind: str) -> range:
        return range(self.stages) if kind == "F" else range(self.stages)[::-1]

    @cached_property
    def makers(self) -> Mapping[Key, StageProgram]:
        """Who makes a value that every microbatch has, or that an `after` program makes."""
        made = ("value", "rows", "late")
        return {key: program for program in self.programs for key in program.outputs if key.kind in made}

    @cached_property
    def readers(self) -> Mapping[Key, tuple[StageProgram, ...]]:
        """Who reads a value."""
        found: dict[Key, list[StageProgram]] = {}
        for program in self.programs:
            for key in program.inputs:
                found.setdefault(key, []).append(program)
        return {key: tuple(programs) for key, programs in found.items()}

    def bytes_of(self, key: Key) -> int:
        """Bytes of one microbatch's value, or of the whole array."""
        return array_bytes(self.types[key])

    @cached_property
    def sends(self) -> Mapping[tuple[int, int], tuple[Key, ...]]:
        """From which stage to which, what every microbatch sends."""
        found: dict[tuple[int, int], list[Key]] = {}
        for key, maker in self.makers.items():
            for stage in sorted({program.stage for program in self.readers.get(key, ())} - {maker.stage}):
                if key.kind == "value":
                    found.setdefault((maker.stage, stage), []).append(key)
        return {pair: tuple(keys) for pair, keys in found.items()}

    @cached_property
    def kept(self) -> Mapping[int, tuple[Key, ...]]:
        """Per stage, what one microbatch keeps from its forward to its backward pass: the bytes in flight."""
        found: dict[int, list[Key]] = {stage: [] for stage in range(self.stages)}
        for (kind, stage), program in self.loop.items():
            if kind == "F":
                later = [self.loop[one, stage] for one in ("B", "W") if (one, stage) in self.loop]
                here = {*program.inputs, *program.outputs}
                read = dict.fromkeys(key for one in later for key in one.inputs if key.kind == "value" and key in here)
                found[stage] += read
        return {stage: tuple(keys) for stage, keys in found.items()}

    def given(self, donated: Collection[int]) -> list[Key]:
        """Of donated arguments and their pieces those whose memory a program may take: it alone reads them in the end.

        Args:
            donated: arguments.
        """
        keys = [Key("argument", i) for i in donated]
        keys += [Key("piece", n) for n, piece in enumerate(self.pieces) if piece.argument in donated]
        late = {key: [one for one in self.readers.get(key, ()) if one.kind == "after"] for key in keys}
        return [key for key in keys if len(late[key]) == 1]

    def check(self) -> None:
        """Asserts that programs read only what is made before, and that forward values flow forward."""
        known = {key for key in self.types if key.kind in ("argument", "piece", "constant", "microbatch")}
        for program in self.programs:
            missing = [key for key in program.inputs if key not in known and key.kind != "sum"]
            assert not missing, f"{program.name} reads {missing}, which nothing makes before it"
            known |= set(program.outputs)
            assert len(program.jaxpr.in_avals) == len(program.inputs)
            assert len(program.jaxpr.out_avals) == len(program.outputs)
