"""Operations: what one takes on TPU however little it does, and what cutting a slice takes.

libtpu counts 1.2 us for every elementwise operation, reduction or copy, on v5e and v5p alike, and as much again for a
product of nothing but arguments to bring these in from memory, and to bring out a result, or what a loop stacks. Work
comes on top. Arguments that other products read are brought in while something else runs. A product of what lies in
the chip's own memory starts at once; one of a matrix and a vector is elementwise work. Random bits are counted along
each dim of an array.

Elementwise work and reductions that go over the same array, and do not wait for each other, are one operation with
several results. So is a loop that stores an array, with the sums of that array, and on TPU with what a turn stacks of
the arrays that it makes. What a larger loop repeats along a dim is computed ahead of it, by an operation of its own.

What works on numbers alone runs beside the rest. A device that cuts its part out of what it has whole runs an operation
of its own for that. What something is inserted into is copied or filled before, if it cannot be written over; the
insertion itself takes nothing then. A slice of a loop is copied at part of the memory's bandwidth, and a loop whose
slices come over from other slices of TPUs clears what it stacks.

Source: the cycles that libtpu notes on compiled v5e and v5p programs. `tests/mesh/test_targets.py` compiles operations
of every kind, and a slice, and reads their cycles.

On GPU every operation is a kernel, a product as any other. It starts once the one before it has ended. Source: loops of
small operations, timed on an H100 (`benchmarks/kernels.py`).
"""

from __future__ import annotations

import bisect
import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.model.equations import is_matrix_product
from autoshard.model.groups import Group, StackWriter
from autoshard.model.xla.gpu.library_kernels import kernels_beside
from autoshard.model.xla.products import multiplies_vector, product_sizes
from autoshard.primitives import INCOMPLETE_GAMMAS, FlopRule, facts_of
from autoshard.program import Equation, Program, Value

KERNEL_SECONDS = 2e-6  # from one kernel of a GPU to the next, however little they do; 1.0 to 2.8 by kind


@dataclass(frozen=True)
class OperationCosts:
    """What operations take beside their work, and slices."""

    least_seconds: float = 0.0  # of any operation, one that cuts a slice included
    product_seconds: float = 0.0  # of a product or convolution that reads an argument, or makes a result or a stack
    slice_bandwidth_share: float = 1.0  # of the memory's bandwidth, at which a loop copies what it slices
    are_kernels: bool = False  # of a GPU: products take as long to start as others, and no operation becomes several

    def seconds(self, group: Group) -> float:
        """What one run of a group takes, however little there is to do; 0 if it is no operation of its own."""
        extra = sum(map(_guarding_operations, group.equations))
        if self.are_kernels:
            read = {made.value.id for made in group.outputs}
            extra = group.counts_turns + sum(kernels_beside(equation, read) for equation in group.equations)
        else:
            extra += sum(map(_extra_operations, group.equations)) + _operations_before_loop(group)
        inside = self.least_seconds * extra
        if group.is_normalising:
            return 0.0
        if group.is_stack:
            stacks_arrays = any(math.prod(use.value.shape) > 1 for use in group.uses)
            is_apart = group.written_by is StackWriter.ITSELF and not group.runs_beside
            return self.least_seconds * (is_apart and stacks_arrays)
        if not group.outputs:  # the host alone gets something
            return inside
        if group.is_known or not any(math.prod(made.value.shape) for made in group.outputs):
            return self.least_seconds * group.is_copy
        if group.is_recomputed or group.ends_product or group.is_idle or group.runs_beside:
            return inside + self.least_seconds * group.runs_ahead
        if multiplies_vector(group):
            return inside + self.least_seconds
        if group.contracts and not self.are_kernels:
            is_small = all(math.prod(use.value.shape) < _SMALL_PRODUCT for use in group.uses)
            reads = group.begins or is_small  # other arguments are brought in while something runs
            return inside + self.product_seconds * (reads + (group.feeds_only_results or group.is_stacked))
        arrays = (*(use.value for use in group.uses), *(made.value for made in group.outputs))
        is_scalar_work = not self.are_kernels and all(math.prod(value.shape) <= 1 for value in arrays)
        is_vector_work = any(equation.primitive in _NEVER_SCALAR_WORK for equation in group.equations)
        is_several = _moves_complex_numbers(group) and not self.are_kernels
        runs = 0 if is_scalar_work and not is_vector_work else 1 + is_several
        return inside + self.least_seconds * runs

    def vector_seconds(self, group: Group, pieces: Mapping[int, np.ndarray]) -> np.ndarray | float:
        """What a product takes more where devices have one row of it each, and what follows it runs apart.

        Args:
            group: what is computed.
            pieces: factor -> into how many pieces each strategy splits it.
        """
        first = group.equations[0]
        is_number = math.prod(first.outputs[0].shape) <= 1 if first.outputs else True  # made by what reads its operands
        starts_apart = self.least_seconds and not self.are_kernels
        if not starts_apart or is_number or not is_matrix_product(first) or multiplies_vector(group):
            return 0.0
        return self.least_seconds * product_sizes(group, pieces).is_with_vector

    def counting_seconds(self, equation: Equation) -> float:
        """What the generator's counters take for each dim of random bits but the last; 0 of any other operation."""
        counts = equation.primitive == "random_bits" and not self.are_kernels
        return self.least_seconds * _OPERATIONS_PER_DIM if counts else 0.0

    def turn_seconds(self, equation: Equation) -> float:
        """What one row takes of a gather, or one update of a scatter, that is run as a loop; 0 of any other operation.

        XLA for TPU does so where rows are parts of rows: those of a `dynamic_slice` or a `dynamic_update_slice` in a
        batch.
        """
        if self.are_kernels or not is_loop_over_rows(equation):
            return 0.0
        is_flat = len(equation.inputs[0].shape) == 1
        return self.least_seconds * (_OPERATIONS_PER_PART if is_flat else _OPERATIONS_PER_ROW[equation.primitive[:7]])


def is_loop_over_rows(equation: Equation) -> bool:
    """Whether XLA for TPU runs a gather or a scatter row by row, as a loop or one after the other.

    So it does if each is a part of a row, as a slice is, or a part along several dims. Of few rows it gathers parts at
    once that are whole in the two minor dims, and it writes even whole rows one by one if their places say where they
    begin.
    """
    name, shapes = equation.primitive[:7], [value.shape for value in equation.inputs]
    if name not in _OPERATIONS_PER_ROW or (count := math.prod(shapes[1][:-1])) < 2:
        return False
    numbers = equation.params["dimension_numbers"]
    dropped = numbers.collapsed_slice_dims if name == "gather" else numbers.inserted_window_dims
    dims = [dim for dim in range(len(shapes[0])) if dim not in {*numbers.operand_batching_dims, *dropped}]
    if name == "gather":
        sizes = equation.params["slice_sizes"]
        if count < LEAST_LOOP_ROWS:
            return any(sizes[dim] < shapes[0][dim] for dim in dims if dim >= len(shapes[0]) - 2)
        parts = [sizes[dim] for dim in dims if 1 < sizes[dim] < shapes[0][dim]]
        return len(parts) > 1 or any(part >= _LEAST_ROW_PART for part in parts)
    parts = [shapes[2][dim] for dim in numbers.update_window_dims]
    begins = count < LEAST_LOOP_ROWS and not {*dims}.isdisjoint(numbers.scatter_dims_to_operand_dims)
    return begins or any(part < shapes[0][dim] for part, dim in zip(parts, dims, strict=True))


def _guarding_operations(equation: Equation) -> int:
    """Operations that keep a scatter's only update, written in place, from what is out of bounds; 0 of others."""
    if not equation.primitive.startswith("scatter"):
        return 0
    indices = equation.inputs[1]
    if not isinstance(indices, Value) or indices.is_known:
        return 0
    return _OPERATIONS_OF_GUARD if math.prod(indices.shape[:-1]) == 1 else 0


def _extra_operations(equation: Equation) -> int:
    """Operations that XLA makes of an equation beside the first."""
    if equation.primitive == "gather" and math.prod(equation.inputs[1].shape[:-1]) < LEAST_LOOP_ROWS:
        return 0
    if equation.primitive == "tridiagonal_solve":  # one row after the other
        return max(0, _OPERATIONS_OF_SYSTEM_ROW * (equation.inputs[0].shape[-1] - 1) - 2)
    if equation.primitive == "triangular_solve":
        rows = equation.inputs[0].shape[-1]
        is_called = equation.inputs[0].dtype in (np.float32, np.complex64)
        each = _OPERATIONS_OF_WIDE_TRIANGLE_ROW.get(equation.inputs[0].dtype.name, _OPERATIONS_OF_TRIANGLE_ROW)
        return 2 if is_called else _OPERATIONS_AROUND_ROWS + each * min(rows, _LARGEST_TRIANGLE)
    if equation.primitive == "fft":
        return _OPERATIONS_OF_TRANSFORM * len(equation.params["fft_lengths"])
    if equation.primitive == "rng_bit_generator":
        return _OPERATIONS_OF_GENERATOR.get(equation.params["algorithm"].name, 0)
    if equation.primitive in _OPERATIONS_OF_ONE_KEY and math.prod(equation.inputs[0].shape) == 1:
        return _OPERATIONS_OF_ONE_KEY[equation.primitive]
    return _EXTRA_OPERATIONS.get(equation.primitive, 0)


# Operations of a compiled program beside the one that an equation becomes: computing indices, taking apart the words of
# a key, copying images, and the turns of loops that run until the last element has settled.
_EXTRA_OPERATIONS = {
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "reduce_window_sum"), 1),
    **dict.fromkeys(INCOMPLETE_GAMMAS, 13),  # of loops that turn once by libtpu's count
    "regularized_incomplete_beta": 6,  # of a loop that turns once, too
    "conv_general_dilated": 2,
    "gather": 2,
    "ormqr": 40,
    "philox4x32": 4,
    "random_bits": 1,
    "random_fold_in": 3,
    "random_gamma": 32,
    "random_split": 3,
    "svd": 190,
    "symmetric_product": 1,
    "threefry2x32": 3,
}
_OPERATIONS_OF_ONE_KEY = {"random_fold_in": 1, "random_split": 2}  # extra ones; the words of one key are scalars
_OPERATIONS_OF_GENERATOR = {"RNG_DEFAULT": 2, "RNG_PHILOX": 9, "RNG_THREE_FRY": 8}  # extra ones, on words of its state
_OPERATIONS_OF_SYSTEM_ROW = 3  # of a tridiagonal system, which is solved row by row
_OPERATIONS_OF_TRIANGLE_ROW = 3  # of a triangular system in other than 32 bits, which is inverted row by row
_OPERATIONS_OF_WIDE_TRIANGLE_ROW = {"float64": 164, "complex128": 492}  # each number is a sum of several narrow ones
_OPERATIONS_AROUND_ROWS = 4  # around that loop
_LARGEST_TRIANGLE = 128  # rows that are inverted by themselves; larger triangles are products of such
_OPERATIONS_OF_TRANSFORM = 2  # extra ones of each dim: the parts of complex numbers are put together and copied
_SMALL_PRODUCT = 8 * 128  # numbers; products of fewer do not start at once, wherever they lie
_LOOP_BYTES = 4  # of a number that a loop goes over, or of narrower ones beside such
_NEVER_SCALAR_WORK = frozenset({"reduce_precision"})  # run as vector work on a single element, too
_OPERATIONS_OF_GUARD = 2  # is it out of bounds; and what lies there, if so. Along a split dim there are one or none
_OPERATIONS_PER_DIM = 3  # of random bits: counting the places along a dim
_LEAST_ROW_PART = 8  # elements; XLA for TPU picks smaller parts of a row as single elements
LEAST_LOOP_ROWS = 16  # rows of a gather, or updates of a scatter; fewer are picked one after the other
_NEUTRAL = {"add": 0, "max": -math.inf, "min": math.inf, "mul": 1, "sub": 0}  # numbers that change nothing
_MOST_BETWEEN = 64  # groups that are looked at to see for which others one waits
_OPERATIONS_PER_ROW = {"gather": 3, "scatter": 4}  # in a loop over rows
_OPERATIONS_PER_PART = 2  # the same of parts of a single dim


def beginning(groups: Sequence[Group], repeated: Sequence[bool]) -> list[bool]:
    """Per group, whether it reads arguments alone, or what is computed of such as it reads.

    Args:
        groups: in program order.
        repeated: per group, whether its readers compute it again.
    """
    found, given = [], set[int]()
    for group in groups:
        found.append(all(use.value.from_outside or use.value.id in given for use in group.uses))
        if found[-1] and repeated[group.index] and not group.is_boundary:
            given.update(made.value.id for made in group.outputs)
    return found


def runs_before_readers(
    groups: Sequence[Group], users: Sequence[Sequence[Group]], repeated: Sequence[bool]
) -> list[bool]:
    """Per group, whether readers would compute it again, but for that they repeat it along a dim: it runs before them.

    Args:
        groups: in program order.
        users: per group, the groups that read what it makes.
        repeated: per group, whether its readers compute it again.
    """
    found = []
    for group in groups:
        size = _size_of_loop(group)
        is_work = repeated[group.index] and group.fuses and size > 1 and any(map(_computes, group.equations))
        loops = (user for user in users[group.index] if user.fuses or facts_of(user.equations[0].primitive).is_loop)
        found.append(is_work and any(_size_of_loop(user) > size for user in loops if not user.is_boundary))
    return found


def _operations_before_loop(group: Group) -> int:
    """How many operations run before the loop of a group, on less than the loop goes over and repeats."""
    if not group.fuses or len(group.equations) == 1:
        return 0
    size = _size_of_loop(group)
    sizes = ((e, max((math.prod(made.shape) for made in e.outputs), default=0)) for e in group.equations)
    ahead = [equation for equation, elements in sizes if 1 < elements < size]
    part: dict[int, set[int]] = {}  # value -> all that are computed with it
    computed: set[int] = set()
    for equation in ahead:
        made = {value.id for value in equation.outputs}
        together = set(made)
        for value in equation.inputs:
            is_as_large = math.prod(value.shape) == math.prod(equation.outputs[0].shape)
            if isinstance(value, Value) and value.id in part and is_as_large:
                together |= part[value.id]
        part.update(dict.fromkeys(together, together))
        if _computes(equation):
            computed |= made
    return len({id(together) for together in part.values() if not together.isdisjoint(computed)})


def _moves_complex_numbers(group: Group) -> bool:
    """Whether it only moves complex numbers: XLA moves real and imaginary parts one after the other."""
    (first, *_) = group.equations
    facts = facts_of(first.primitive)
    moves = facts.work is FlopRule.NONE and not facts.is_boundary and (facts.is_loop or facts.slices)
    return moves and bool(first.outputs) and getattr(first.outputs[0].dtype, "kind", "") == "c"


def _size_of_loop(group: Group) -> int:
    """How many elements elementwise work or a reduction goes over."""
    made = (made for equation in group.equations for made in equation.outputs)
    values = made if group.fuses else (use.value for use in group.uses)
    return max((math.prod(value.shape) for value in values), default=0)


def _computes(equation: Equation) -> bool:
    """Whether an elementwise equation does more than move data, or give back its operand."""
    neutral = _NEUTRAL.get(equation.primitive)
    changing = equation.inputs[equation.primitive == "sub" :]  # 0 - x is another number than x
    numbers = [value for value in changing if not isinstance(value, Value) and value.size == 1]
    if neutral is not None and any(number.item() == neutral for number in numbers):
        return False
    return facts_of(equation.primitive).work is not FlopRule.NONE


def joined_operands(
    groups: Sequence[Group], repeated: Sequence[bool], ending: Sequence[Group | None], *, sums_as_made: bool = False
) -> list[frozenset[int] | None]:
    """Per group, what earlier ones read that run in one operation with it: all go over one array, and none waits.

    None if it runs by itself; nothing, if later groups run in its operation. Where much stands between two groups, the
    later one is taken to wait. Reductions that end the same product go over that.

    Args:
        groups: in program order.
        repeated: per group, whether its readers compute it again.
        ending: per group, the product that is one operation with it.
        sums_as_made: whether the loop that stores an array sums it up, too. The sum then counts it as read before.
    """
    makers = {made.value.id: group.index for group in groups for made in group.outputs}
    # A carry reads what the last turn has handed on, too; nothing waits for that in this one.
    made_by = ({makers.get(use.value.id, group.index) for use in group.uses} for group in groups)
    reads = [sorted(one for one in by if one < i)[-_MOST_BETWEEN - 1 :] for i, by in enumerate(made_by)]
    stored: dict[int, frozenset[int]] = {}  # value that readers make again -> the arrays that they read for it
    operations: dict[tuple, list[list[int]]] = defaultdict(list)  # what groups go over -> those of each operation
    loops: dict[int, tuple[tuple, list[int]]] = {}  # value -> what the loop that stores it goes over, and all in it
    found: list[frozenset[int] | None] = [None] * len(groups)
    read_by: list[frozenset[int]] = []  # per group
    for group in groups:
        arrays = (stored.get(use.value.id, {use.value.id}) for use in group.uses if math.prod(use.value.shape) > 1)
        read = frozenset().union(*arrays)
        read_by.append(read)
        if repeated[group.index]:
            stored.update((made.value.id, read) for made in group.outputs)
            continue
        product = ending[group.index]
        over = _loop_extent(group) if product is None and (sums_as_made or not group.is_stack) else None
        if product is not None and not group.fuses:
            over, read = (product.index,), frozenset(made.value.id for made in product.outputs)
        if over is None:
            continue
        waits_for, least = _awaited(group.index, reads)
        operation, made = None, frozenset[int]()
        if sums_as_made and not group.fuses:
            made_in = ((array, *loops[array]) for array in read if array in loops)
            storing = (
                (loop, frozenset({array}))
                for array, size, loop in made_in
                if size == over and loop[0] >= least and waits_for.intersection(loop) == {makers[array]}
                if all(_kinds(groups[one]) == _kinds(group) for one in loop if not groups[one].fuses)
            )
            operation, made = next(storing, (None, made))
        if operation is None:
            of_turn = (array for array in read if array in makers and not groups[makers[array]].is_boundary)
            others = (operations[over, array] for array in (of_turn if group.is_stack else read))
            starts = ((bisect.bisect_left(some, least, key=operator.itemgetter(0)), some) for some in others)
            near = (one for start, some in starts for one in some[start:])
            operation = next((one for one in near if waits_for.isdisjoint(one)), None)
        if operation is not None:
            found[operation[0]] = found[operation[0]] or frozenset()
            found[group.index] = made.union(*(read_by[one] for one in operation))
            operation.append(group.index)
        else:
            operation = [group.index]
            for array in read:
                operations[over, array].append(operation)
        if group.fuses:
            loops.update((made.value.id, (over, operation)) for made in group.outputs)
    return found


def _kinds(group: Group) -> set[object]:
    """The types that it makes. Of sums in numbers as they are, and wider, a loop makes one kind."""
    return {made.value.dtype for made in group.outputs}


def _loop_extent(group: Group) -> tuple | None:
    """What elementwise work and reductions have in common that run in one loop; None of any other group."""
    (first, *_) = group.equations
    values = [use.value for use in group.uses]
    facts = facts_of(first.primitive)
    reduces = facts.work is FlopRule.REDUCTION and facts.is_loop
    if group.fuses and not group.is_idle:
        if not any(map(_computes, group.equations)) or any(e.primitive == "transpose" for e in group.equations):
            return None  # what lies in another order is a copy
        values = [made.value for made in group.outputs]
    elif facts.slices:  # parts that are as large as each other
        values = [made.value for made in group.outputs]
    elif not (reduces or group.is_stack):
        return None
    widest = max(values, key=lambda value: math.prod(value.shape), default=None)
    if widest is None or math.prod(widest.shape) <= 1:
        return None
    if not group.fuses and getattr(widest.dtype, "kind", "") == "c":
        return None  # the parts of complex numbers are summed in loops of their own
    return group.trips, widest.shape, max(widest.itemsize, _LOOP_BYTES)


def _awaited(group: int, reads: Sequence[Sequence[int]]) -> tuple[set[int], int]:
    """The last groups that a group waits for, itself included, and the first index from which on these are all.

    Args:
        group: its index.
        reads: per group, the indices of those that make what it reads; of many, the last.
    """
    found, later = {group}, [-other for other in reads[group]]
    heapq.heapify(later)
    while later and len(found) <= _MOST_BETWEEN:
        other = -heapq.heappop(later)
        if other not in found:
            found.add(other)
            for one in reads[other]:
                heapq.heappush(later, -one)
    return found, 1 - later[0] if later else 0


def stack_writer(
    stack: Group, makers: Mapping[int, Group], repeated: Sequence[bool], ending: Sequence[Group | None]
) -> StackWriter:
    """Which operation writes what a loop stacks.

    Args:
        stack: what stacks.
        makers: value -> the group that makes it.
        repeated: per group, whether its readers compute it again.
        ending: per group, the product that is one operation with it.
    """
    found = StackWriter.ITSELF
    waiting, seen = [stack], {stack.index}
    while waiting:
        for use in waiting.pop().uses:
            maker = makers.get(use.value.id)
            if maker is None or maker.is_boundary:
                continue
            if maker.contracts or ending[maker.index] is not None:
                return StackWriter.PRODUCT
            if maker.fuses and not repeated[maker.index]:
                found = StackWriter.LOOP
            elif maker.fuses and maker.index not in seen:
                seen.add(maker.index)
                waiting.append(maker)
    return found


def bytes_stacked_by_loop(program: Program) -> dict[int, int]:
    """Values that are made in loops -> bytes of all that the innermost loop around them stacks."""
    stacks: dict[tuple[int, int], list[Equation]] = defaultdict(list)
    for equation in program.equations:
        if equation.primitive == "scan_stack":
            assert equation.loop is not None, "boundaries of loops know theirs"
            stacks[equation.loop].append(equation)
    found: dict[int, int] = {}
    for (start, end), stacked in sorted(stacks.items(), key=lambda item: (item[0][0], -item[0][1])):  # from outside in
        inside = (made for equation in program.equations[start:end] for made in equation.outputs)
        size = sum(equation.outputs[0].bytes for equation in stacked)
        found |= {made.id: size for made in inside if made.trips >= stacked[0].trips}
    return found
