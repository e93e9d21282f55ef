"""The unit that is planned: a `Group` of equations that XLA fuses into one loop, with its properties.

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
    """Which operation writes the stacked output of a loop."""

    ITSELF = "one that does nothing else"  # the stacked value comes from outside the turn, or its maker cannot write it
    LOOP = "an elementwise loop"
    PRODUCT = "a matrix product"  # which makes the stacked value, perhaps by elementwise work on its result


@dataclass(frozen=True)
class Use:
    """One operand of a group: a value from outside the group, and the factors of its dims."""

    value: Value
    dims: FactorDims  # in the group's factors
    equation: Equation
    operand: int  # which operand of `equation`


@dataclass(frozen=True)
class GroupOutput:
    """One value that a group makes for other groups or for the caller."""

    value: Value
    dims: FactorDims


@dataclass(frozen=True, eq=False)
class Group:
    """Equations planned as one node. Factors are named ``0, 1, ...``; factors of size 1 are left out.

    The passes of `grouping.py` fill in the fields with defaults, in the order of the fields.
    """

    index: int
    equations: tuple[Equation, ...]
    sizes: Mapping[int, int]  # factor -> size
    splittable: frozenset[int]
    reduction: frozenset[int]
    given: Mapping[int, tuple[str, ...]]  # factor -> the mesh axes that the user gives
    open_axes: frozenset[str]  # the only mesh axes that may split given factors further
    operands: Mapping[int, list[FactorDims]]  # equation index -> dims of its operands
    results: Mapping[int, list[FactorDims]]  # equation index -> dims of its results
    fuses: bool  # whether elementwise producers may join
    uses: tuple[Use, ...]
    outputs: tuple[GroupOutput, ...]
    reaches: tuple[Reach[int], ...] = ()  # of its one equation: what devices read beyond their shards
    batch_factor: int | None = None  # of windows: the factor along which no window moves
    loop_total: Value | None = None  # what leaves a loop that only adds up its partial sums: they are reduced after it
    accumulator: int | None = None  # of a sum: id of the total to which XLA adds several sums before it reduces them
    summands: int = 1  # how many sums the accumulator adds up
    feeds_no_state: bool = False  # whether only results that replace no argument depend on it, as a loss does
    feeds_only_results: bool = False  # whether its outputs reach nothing but results, through elementwise groups alone
    feeds_products: bool = False  # whether a product reads what is made of its outputs
    handed_on_at: int | None = None  # the last point of its readers, if these are results or carries of a loop alone
    is_late: bool = False  # whether XLA for TPU runs it after all loops, if it needs no collective
    point: int = 0  # the program point at which it runs
    ready_at: int = 0  # from which what it makes is held: earlier where XLA runs first what is ready first
    prepared: Mapping[int, int] = field(default_factory=dict)  # equation -> from which what it works on is held
    is_folded: bool = False  # whether it is part of its only reader, a reduction by a library
    is_recomputed: bool = False  # whether XLA lets every reader compute it again, instead of storing it
    lies_until: int | None = None  # of a recomputed group that is stored, too: the least point until which it is
    is_sunk: bool = False  # whether it stands before a loop and is recomputed inside
    is_normalising: bool = False  # whether a kernel that normalises rows includes it
    is_stacked: bool = False  # whether a loop stacks its output, or what elementwise groups make of its output
    ends_product: bool = False  # whether it runs in the operation of the product that it reads or reduces
    begins: bool = False  # whether it depends on nothing but arguments and groups of this kind
    runs_ahead: bool = False  # whether XLA runs it before its readers, since these repeat its output along a dim
    read_before: frozenset[int] | None = None  # ids of what earlier groups of its operation read; None: it runs alone
    counts_turns: bool = False  # whether it runs in a loop with an operation that does nothing but count turns
    written_by: StackWriter | None = None  # of a stack
    is_copy: bool = False  # whether it is a result that only moves an argument: XLA has to write a copy
    passes_before: int = 0  # passes over the buffer before it inserts into it: 2 for a copy, 1 for filling
    last_point: int = 0  # the last point at which it runs; later than `point` if readers compute it again

    @property
    def hoisted_all_reduces(self) -> int | None:
        """How many per step finish its sum, if a loop only adds up partial sums."""
        return None if self.loop_total is None else self.loop_total.trips

    def reduced(self, output: int, *, after_loop: bool) -> Value:
        """What devices add up of an output: the output, or the total that leaves the loop which adds it up."""
        return self.loop_total if self.loop_total is not None and after_loop else self.outputs[output].value

    @property
    def lies_nowhere(self) -> bool:
        """Whether its output is not stored, since every reader computes it again."""
        return self.is_recomputed and self.lies_until is None

    @property
    def is_stored_by_product(self) -> bool:
        """Whether the operation of a product stores what this makes of it, though readers compute on from it again."""
        return self.is_recomputed and self.lies_until is not None and self.ends_product

    @property
    def runs_beside(self) -> bool:
        """Whether it runs in the operation of an earlier group, which goes over the same array."""
        return bool(self.read_before)

    @cached_property
    def only_moves(self) -> bool:
        return all(facts_of(equation.primitive).relabels for equation in self.equations)

    @cached_property
    def is_view(self) -> bool:
        """Whether it only renames the elements of one array, so that a matrix product reads the array itself."""
        return all(facts_of(equation.primitive).is_view for equation in self.equations)

    @cached_property
    def reading(self) -> Mapping[int, tuple[tuple[Equation, int], ...]]:
        """Id of a value -> the equations that read it, and as which operand.

        It is an index, since a group may have thousands of values and equations.
        """
        found = defaultdict[int, list[tuple[Equation, int]]](list)
        for equation in self.equations:
            for operand, value in enumerate(equation.inputs):
                if isinstance(value, Value):
                    found[value.id].append((equation, operand))
        return {value: tuple(readings) for value, readings in found.items()}

    @property
    def widens(self) -> bool:
        """Whether it only converts numbers to a wider type. If readers fuse it, XLA stores its operand instead."""
        return only_widens(self.equations)

    @property
    def is_boundary(self) -> bool:
        """Whether it only passes a value into a loop or branch, or out of one."""
        return facts_of(self.equations[0].primitive).is_boundary

    @property
    def is_known(self) -> bool:
        """Whether XLA computes all of its outputs at compile time."""
        return bool(self.outputs) and all(one.value.is_known for one in self.outputs)

    @property
    def is_idle(self) -> bool:
        """Whether it stands in a branch for another platform."""
        return self.equations[0].primitive == "idle"

    @property
    def enters_loop(self) -> bool:
        """Whether it passes a loop a value that the loop only reads."""
        return self.equations[0].primitive in ("scan_const", "scan_slice")

    @property
    def is_stack(self) -> bool:
        """Whether it writes an output of a loop's body into the result of the loop, in place."""
        return self.equations[0].primitive == "scan_stack"

    @property
    def is_fill(self) -> bool:
        """Whether it repeats a number or counts, so that XLA can make it in any layout for each reader."""
        return self.only_moves and self.reads_numbers

    @cached_property
    def broadcasts(self) -> bool:
        """Whether its output repeats a smaller array."""
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
        """Whether it is a reduction that nothing but gradients or a loss depends on."""
        if self.contracts:
            return self.handed_on_at is not None
        return self.feeds_no_state and self.trips == 1 and bool(self.reduction)

    @property
    def gathers_per_output(self) -> int:
        """How many arrays per output XLA gathers for a reduction that it cannot all_reduce; 0 if it can.

        For positions, as of `argmax`, XLA gathers the values, too.
        """
        (first, *_) = self.equations
        if first.primitive in ("argmax", "argmin"):
            return 2
        return int(folds_by_hand(first))

    def sums_locally(self, assignment: Mapping[int, tuple[str, ...]]) -> bool:
        """Whether the equation, run on the shards of one device, computes the partial sum of this device.

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
        """The factors along which devices exchange halos if they are split."""
        return frozenset(rows.factor for reach in self.reaches for rows in reach.rows)

    def use_of(self, operand: int) -> int | None:
        """The index of the use that is this operand of the group's only equation; None for a literal."""
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
        """The part of `trips` that a compiled program does not tell: turns of loops of unknown length."""
        return max(equation.guessed for equation in self.equations)

    def given_on(self, mesh: MeshShape) -> dict[int, tuple[str, ...]]:
        """Factor -> the axes given by the user that split it evenly, in the order of the mesh."""
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
    """Factor -> the axes given for it that split its size evenly, in the order of the mesh."""
    return {factor: even_axes(sizes[factor], axes, mesh) for factor, axes in given.items()}
