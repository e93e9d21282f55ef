"""The unit that is planned: a `Group` of equations that XLA fuses into one loop, and what is known of it.

`grouping.py` makes the groups of a program.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from autoshard.layout import MeshShape, even_axes
from autoshard.model.equations import contracts, folds_by_hand, only_widens, sums_locally
from autoshard.primitives import facts_of
from autoshard.program import Equation, Value
from autoshard.propagation.halos import Reach

FactorDims = tuple[tuple[int, ...], ...]  # of one tensor: dim -> factors of its group, major to minor


class StackWriter(Enum):
    """Which operation writes what a loop stacks."""

    ITSELF = "one that does nothing else"  # what is stacked comes from outside its turn, or of what cannot write it
    LOOP = "an elementwise loop"
    PRODUCT = "a matrix product"  # which makes what is stacked, or what that is computed of on the way


@dataclass(frozen=True)
class Use:
    """One operand of a group: a value from outside it, and which factors its dims are."""

    value: Value
    dims: FactorDims  # in the group's factors
    equation: Equation
    operand: int  # which operand of `equation`


@dataclass(frozen=True)
class GroupOutput:
    """One value that a group makes, and that other groups or the caller read."""

    value: Value
    dims: FactorDims


@dataclass(frozen=True, eq=False)
class Group:
    """Equations planned as one node. Factors are named ``0, 1, ...``; factors of size 1 are left out.

    The fields with defaults are found by the passes of `grouping.py`, in the order in which they stand here.
    """

    index: int
    equations: tuple[Equation, ...]
    sizes: Mapping[int, int]  # factor -> size
    splittable: frozenset[int]
    reduction: frozenset[int]
    given: Mapping[int, tuple[str, ...]]  # factor -> the mesh axes that the user says
    open_axes: frozenset[str]  # mesh axes that may split given factors further, where no others may
    operands: Mapping[int, list[FactorDims]]  # equation index -> dims of its operands
    results: Mapping[int, list[FactorDims]]  # equation index -> dims of its results
    fuses: bool  # whether elementwise producers may join
    uses: tuple[Use, ...]
    outputs: tuple[GroupOutput, ...]  # what others read of it
    reaches: tuple[Reach[int], ...] = ()  # of its one equation: what devices read beyond their shards
    batch_factor: int | None = None  # of windows: the factor along which none moves
    hoisted_all_reduces: int | None = None  # how many per step finish its sum, if a loop only adds it up, as it lies
    accumulator: int | None = None  # of a sum: id of the total that XLA adds it and others to, before it reduces that
    summands: int = 1  # how many sums the accumulator adds up
    feeds_no_state: bool = False  # whether only results depend on it that take no argument's place: a loss
    feeds_only_results: bool = False  # whether its outputs go into results only, through elementwise groups alone
    handed_on_at: int | None = None  # if only results read it, or only what a loop hands on: the last point of these
    is_late: bool = False  # whether XLA for TPU makes it after all loops, if devices add nothing up for it
    point: int = 0  # the program point at which it runs
    ready_at: int = 0  # from which what it makes is held: earlier where XLA runs first what is ready first
    prepared: Mapping[int, int] = field(default_factory=dict)  # equation -> from which what it works on is held
    is_folded: bool = False  # whether it is part of the one reduction that reads it, which is a library call
    is_recomputed: bool = False  # whether XLA lets every reader compute it again, so that it need not be stored
    lies_until: int | None = None  # if readers compute it again, but it is stored, too: the least point until which
    is_sunk: bool = False  # whether it is recomputed inside a loop that it stands before
    is_normalising: bool = False  # whether a kernel that normalises rows computes it on the way
    is_stacked: bool = False  # whether a loop stacks what it makes, or what elementwise groups make of that
    ends_product: bool = False  # whether one operation makes it and the product that it reads or reduces
    begins: bool = False  # whether it reads arguments alone, or what is computed of such as it reads
    runs_ahead: bool = False  # whether its readers repeat what it makes along a dim: XLA computes it ahead of them
    read_before: frozenset[int] | None = None  # ids of what its operation has read by then; None: it runs by itself
    counts_turns: bool = False  # whether it runs in a loop whose turns XLA counts in an operation of its own
    written_by: StackWriter | None = None  # of a stack
    is_copy: bool = False  # whether it only moves what comes from outside, and is a result: XLA has to write a copy
    passes_before: int = 0  # how often XLA goes over what it inserts into, before it does: a copy is 2, filling it 1
    last_point: int = 0  # the last point at which it runs: later than `point` if its readers run it again

    @property
    def lies_nowhere(self) -> bool:
        """Whether what it makes is not stored, since every reader computes it again."""
        return self.is_recomputed and self.lies_until is None

    @property
    def runs_beside(self) -> bool:
        """Whether it runs in the operation of an earlier group, which goes over the same array."""
        return bool(self.read_before)

    @cached_property
    def only_moves(self) -> bool:
        return all(facts_of(equation.primitive).relabels for equation in self.equations)

    @cached_property
    def is_view(self) -> bool:
        """Whether it only renames the elements of one array: XLA makes no copy of it for a matrix product."""
        return all(facts_of(equation.primitive).is_view for equation in self.equations)

    @cached_property
    def reading(self) -> Mapping[int, tuple[tuple[Equation, int], ...]]:
        """Id of a value -> the equations that read it, and as which operand: a group may have thousands of both."""
        found = defaultdict[int, list[tuple[Equation, int]]](list)
        for equation in self.equations:
            for operand, value in enumerate(equation.inputs):
                if isinstance(value, Value):
                    found[value.id].append((equation, operand))
        return {value: tuple(readings) for value, readings in found.items()}

    @property
    def widens(self) -> bool:
        """Whether it only makes numbers wider: where readers take such work in, XLA stores what it reads."""
        return only_widens(self.equations)

    @property
    def is_boundary(self) -> bool:
        """Whether it only hands a value into a loop or branch, or out of it."""
        return facts_of(self.equations[0].primitive).is_boundary

    @property
    def is_known(self) -> bool:
        """Whether XLA computes all that it makes as it compiles."""
        return bool(self.outputs) and all(one.value.is_known for one in self.outputs)

    @property
    def is_idle(self) -> bool:
        """Whether it stands in a branch for another platform."""
        return self.equations[0].primitive == "idle"

    @property
    def enters_loop(self) -> bool:
        """Whether it hands a loop what that only reads."""
        return self.equations[0].primitive in ("scan_const", "scan_slice")

    @property
    def is_stack(self) -> bool:
        """Whether it writes what a loop's body makes into the loop's result, in place."""
        return self.equations[0].primitive == "scan_stack"

    @property
    def is_fill(self) -> bool:
        """Whether it repeats a number or counts: XLA makes it as it is wanted, wherever it is wanted."""
        return self.only_moves and self.reads_numbers

    @cached_property
    def broadcasts(self) -> bool:
        """Whether what it makes repeats something smaller."""
        size = math.prod(self.outputs[0].value.shape)
        widest = {e.primitive for e in self.equations if any(math.prod(made.shape) == size for made in e.outputs)}
        smaller = all(math.prod(use.value.shape) < size for use in self.uses)
        return smaller and all(facts_of(name).relabels and name != "iota" for name in widest)

    @property
    def reads_numbers(self) -> bool:
        """Whether it reads no array of several elements."""
        return all(math.prod(use.value.shape) == 1 for use in self.uses)

    @cached_property
    def contracts(self) -> bool:
        """Whether it is a matrix product or a convolution."""
        return contracts(self.equations[0])

    @property
    def can_wait(self) -> bool:
        """Whether it reduces something, for nothing but gradients or a loss."""
        if self.contracts:
            return self.handed_on_at is not None
        return self.feeds_no_state and self.trips == 1 and bool(self.reduction)

    @property
    def gathers_per_output(self) -> int:
        """How many arrays per output are gathered of a reduction that cannot be all_reduced; 0 if it can.

        Of positions XLA gathers the values, too.
        """
        (first, *_) = self.equations
        if first.primitive in ("argmax", "argmin"):
            return 2
        return int(folds_by_hand(first))

    def sums_locally(self, assignment: Mapping[int, tuple[str, ...]]) -> bool:
        """Whether the equation itself, on the shards of one device, makes what the device adds to its sum.

        Args:
            assignment: factor -> the mesh axes that split it.
        """
        (first, *_) = self.equations
        if first.primitive != "conv_general_dilated":
            return sums_locally(first)
        numbers = first.params["dimension_numbers"]
        pixels = itertools.chain(*(self.operands[first.index][0][dim] for dim in numbers.lhs_spec[2:]))
        taps = itertools.chain(*(self.operands[first.index][1][dim] for dim in numbers.rhs_spec[2:]))
        return assignment.keys().isdisjoint((*pixels, *taps))

    @cached_property
    def windows(self) -> frozenset[int]:
        """The factors of which devices exchange halos, where they are split."""
        return frozenset(rows.factor for reach in self.reaches for rows in reach.rows)

    def use_of(self, operand: int) -> int | None:
        """Which of its uses an operand of its one equation is; None for a literal."""
        (equation,) = self.equations
        value, dims = equation.inputs[operand], self.operands[equation.index][operand]
        return next((i for i, use in enumerate(self.uses) if use.value is value and use.dims == dims), None)

    def finish_trips(self, kind: str) -> int:
        """How often per step a collective finishes its result."""
        return self.trips if self.hoisted_all_reduces is None or kind != "all_reduce" else self.hoisted_all_reduces

    @cached_property
    def trips(self) -> int:
        return max(equation.trips for equation in self.equations)

    @cached_property
    def guessed(self) -> int:
        """Of the trips: turns of loops whose number a compiled program does not tell."""
        return max(equation.guessed for equation in self.equations)

    def given_on(self, mesh: MeshShape) -> dict[int, tuple[str, ...]]:
        """Factor -> of the axes that the user says, those that split it evenly, in the order of the mesh."""
        return given_evenly(self.given, self.sizes, mesh)

    def factors_of(self, equation: Equation) -> set[int]:
        """The factors that `equation` runs over."""
        dims = self.operands[equation.index] + self.results[equation.index]
        return {factor for tensor in dims for dim in tensor for factor in dim}


def reads_images(use: Use) -> bool:
    """Whether a convolution moves its windows over this operand."""
    return use.equation.primitive == "conv_general_dilated" and use.operand == 0


def given_evenly(
    given: Mapping[int, tuple[str, ...]], sizes: Mapping[int, int], mesh: MeshShape
) -> dict[int, tuple[str, ...]]:
    """Factor -> of the axes that are given for it, those that split its size evenly, in the order of the mesh."""
    return {factor: even_axes(sizes[factor], axes, mesh) for factor, axes in given.items()}
