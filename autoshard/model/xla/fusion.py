"""Fusion: which work XLA's compilers do again in each reader of a value instead of storing the value.

Elementwise work goes into the loops that read it, on GPU also into reductions, gathers, scatters and sorts, on TPU into
products. Slices are cut as they are read; on GPU rows are gathered and parts joined so, too. On CPU what moves data is
one loop with its only reader (xla/service/cpu: `CpuInstructionFusion`). Source: compiled programs.
`tests/end_to_end/test_what_xla_does.py` compiles models for CPU devices and compares heaps,
`tests/mesh/test_targets.py` an associative scan for GPU, `test_messages.py`, `test_sorts.py` and
`test_concatenations.py` in `tests/model/xla` what scatters, sorts and elementwise work take in, and
`python benchmarks/prediction.py` nine models for CPU, TPU and GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Container, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autoshard.model.equations import is_matrix_product
from autoshard.model.groups import Group
from autoshard.model.xla.convolutions import copies_argument, reads_rounded
from autoshard.model.xla.cpu.reductions import computes_as_it_reduces
from autoshard.model.xla.gpu.normalisations import Normalisations, normalisations
from autoshard.primitives import FlopRule, facts_of
from autoshard.program import Equation, Program, Value

if TYPE_CHECKING:
    from autoshard.model.xla.backends import Backend

_SUMMED_PRODUCTS = frozenset({"mul", "square"})  # primitives whose results a sum of products adds up
_CHEAP_FOR_REALS = frozenset({"cos", "rem", "sin", "tan"})
_MAKES_KEYS = frozenset({"random_fold_in", "random_split"})
_SAME_ELEMENTS = frozenset({"copy", "new_ref", "random_unwrap", "random_wrap", "squeeze", "stop_gradient"})
# Arrays that readers read instead of one that is not stored: with more, XLA stores it. Source: compiled ResNets and
# transformers.
_MOST_OPERANDS = 3
# Steps of work on parts of what the last step made that GPUs do again, as those of an associative scan: all of one of
# 40 elements, forth or back. Source: scans and their gradients compiled for H100.
_MOST_SCAN_STEPS = 12
# Batch dims of a product whose softmax TPUs store: with groups of microbatches there are three. Source: attention
# compiled for v5e:2x4 with one, two and four microbatches.
_MOST_BATCH_DIMS = 2


@dataclass(frozen=True)
class Fusion:
    """What is fused beside elementwise work."""

    takes_in: frozenset[str] = frozenset()  # primitives that, as elementwise ones, do their operands' work again
    taken_in: frozenset[str] = frozenset()  # primitives whose work these do again, beside elementwise ones
    sinks_broadcasts: bool = False  # what repeats something smaller does so inside the loop that uses it
    stores_scattered: bool = False  # what scatters is no part of what reads it
    overwrites_operands: bool = False  # elementwise work goes into the buffer of an operand that nobody else reads
    overwritten_by: frozenset[str] = frozenset()  # other primitives that go into such a buffer
    reshapes_in_place: bool = False  # arrays are dense: other dims for the same elements are no copy
    stores_keys: bool = False  # keys that are made of many others are stored, whoever reads them
    reduces_apart_from: int = 0  # elements that one is made of; of fewer, readers do a reduction again
    normalises: bool = False  # softmaxes and norms of rows are one operation, whose result is stored
    stores_long: bool = False  # what XLA writes out as long polynomials is stored if several read it
    stores_softmaxes: bool = False  # what softmaxes of products and their gradients are made of is stored, too


@dataclass(frozen=True)
class DuplicatedProducers:
    """Per group, whether its readers compute it again: `Group.is_folded`, `Group.is_recomputed`, `Group.is_sunk`."""

    folded: Sequence[bool]
    repeated: Sequence[bool]
    lying: Sequence[int | None]  # `Group.lies_until`
    sunk: Sequence[bool]
    normalising: Set[int]  # by index: `Group.is_normalising`


def recomputation(
    program: Program,
    groups: Sequence[Group],
    users: Sequence[Sequence[Group]],
    stored: Set[int],
    backend: Backend,
    axes: Collection[int] = (),
    points: Sequence[int] = (),
) -> DuplicatedProducers:
    """What is computed again instead of stored.

    Args:
        program: values and equations.
        groups: its groups.
        users: per group, the groups that read what it makes.
        stored: values that are stored, whoever reads them.
        backend: the compiler.
        axes: the sizes of the mesh's axes.
        points: `Group.point` of each group.
    """
    stored = stored | _guarded(program, groups)
    rows = normalisations(groups, users) if backend.fusion.normalises else Normalisations()
    are_stored = [
        group.index in rows.ends or any(made.value.id in stored for made in group.outputs) for group in groups
    ]
    folds = not backend.fusion.takes_in
    ones = _ones(program)
    of_arguments = _of_arguments(groups)
    folded = [
        not is_stored and folds and _is_folded(group, users[group.index])
        for group, is_stored in zip(groups, are_stored, strict=True)
    ]
    through: dict[int, set[int]] = {}  # value that readers make again -> the values of its size that they read for it
    pads = "pad" in backend.fusion.taken_in
    padded = {e.outputs[0].id for e in program.equations if e.primitive == "pad" and pads}
    steps: dict[int, int] = {}  # value -> how many steps made it of what is stored, each on parts of what the last made
    moved: set[int] = set()  # made of what is moved as it is read
    cut: set[int] = set()  # what groups make that move
    repeated, sunk = [], []
    for group, is_stored in zip(groups, are_stored, strict=True):
        read = users[group.index]
        again = not is_stored and (
            _is_idle(group, read, ones, backend)
            or _is_repeated(group, users, folded, moved, backend, axes, rows, of_arguments)
        )
        wide = itertools.chain(*(users[user.index] if user.widens else [user] for user in read))
        count = max((steps.get(use.value.id, 0) + (use.value.id in cut) for use in group.uses), default=0)
        far = padded if count > _MOST_SCAN_STEPS else ()
        repeated.append(folded[group.index] or (again and not _reads_far(group, list(wide), through, far)))
        moves = group.equations[0].primitive in backend.fusion.taken_in
        if repeated[-1] and (moves or any(use.value.id in moved for use in group.uses)):
            moved.update(made.value.id for made in group.outputs)
        if count and any(e.primitive != "div" and _is_dear(e) for e in group.equations):
            count += 1  # what is dear, as the exponentials of a `cumlogsumexp`, is done again half as often
        if moves:
            cut.update(made.value.id for made in group.outputs)
            count = max((steps.get(use.value.id, 0) for use in group.uses), default=0)
        steps.update((made.value.id, count * repeated[-1]) for made in group.outputs)
        sunk.append(repeated[-1] and any(user.equations[0].primitive == "scan_const" for user in read))
    softmaxes = backend.fusion.stores_softmaxes
    lying = _ends_of_softmaxes(groups, users, repeated, points) if softmaxes else [None] * len(groups)
    return DuplicatedProducers(folded, repeated, lying, sunk, rows.inside)


def scattered_values(program: Program, readers: Mapping[int, Sequence[tuple[Equation, int]]]) -> frozenset[int]:
    """What XLA scatters into: what a scatter makes, or the one sum that reads this, which it makes in one."""
    found = set()
    for equation in program.equations:
        if equation.primitive.startswith("scatter"):
            (made,) = equation.outputs
            users = [reader for reader, _ in readers[made.id]]
            added = len(users) == 1 and users[0].primitive in ("add", "add_any") and equation.primitive == "scatter-add"
            found.add(users[0].outputs[0].id if added else made.id)
    return frozenset(found)


def read_through(groups: Sequence[Group]) -> dict[int, tuple[Value, ...]]:
    """What the readers of a value read instead of it, if XLA has each of them compute it again, in a loop or not."""
    found: dict[int, tuple[Value, ...]] = {}
    for group in groups:
        if group.equations[0].primitive == "scan_const":  # one operand; a number of the program is none that it uses
            inside = [one.value.id for one in group.outputs]
            found.update(
                itertools.product(inside, (found[use.value.id] for use in group.uses if use.value.id in found))
            )
        if group.is_recomputed:
            read = itertools.chain(*(found.get(use.value.id, (use.value,)) for use in group.uses))
            made = {made.value.id: made.value for made in group.outputs}
            if not group.fuses or group.is_stored_by_product:  # of a slice readers read as much as there is of it
                found.update((id, (value,)) for id, value in made.items())
            else:
                found.update(dict.fromkeys(made, tuple({value.id: value for value in read}.values())))
    return found


def _guarded(program: Program, groups: Sequence[Group]) -> set[int]:
    """Values that lie behind a barrier; of a view, what it views."""
    found = set(program.guarded)
    for group in reversed(groups):
        if group.is_view and any(made.value.id in found for made in group.outputs):
            found.difference_update(made.value.id for made in group.outputs)
            found.update(use.value.id for use in group.uses)
    return found


def _is_folded(group: Group, users: Sequence[Group]) -> bool:
    """Whether it is the product in a sum of products: of all that precedes a reduction, XLA folds only this into it."""
    products = {e.primitive for e in group.equations if not facts_of(e.primitive).relabels}
    return (
        bool(users)
        and products <= _SUMMED_PRODUCTS
        and {user.equations[0].primitive for user in users} == {"reduce_sum"}
    )


def _ones(program: Program) -> set[int]:
    """The values all of whose elements are one, as the program says it: what gradients start from."""
    found: set[int] = set()
    for equation in program.equations:
        facts = facts_of(equation.primitive)
        repeats = (facts.relabels and equation.primitive != "iota") or equation.primitive == "convert_element_type"
        if repeats and all(_is_constant_one(value, found) for value in equation.inputs):
            found.update(made.id for made in equation.outputs)
    return found


def _of_arguments(groups: Sequence[Group]) -> set[int]:
    """The values that are made elementwise of arguments of their size, or are views of such."""
    found: set[int] = set()
    for group in groups:
        if group.outputs and (group.fuses or group.is_view):
            size = math.prod(group.outputs[0].value.shape)
            wide = [use.value for use in group.uses if math.prod(use.value.shape) == size]
            if wide and all(value.from_outside or value.id in found for value in wide):
                found.update(made.value.id for made in group.outputs)
    return found


def _is_constant_one(value: Value | np.ndarray, ones: Container[int]) -> bool:
    if isinstance(value, Value):
        return value.id in ones
    is_number = value.shape == () and value.dtype.names is None  # derivatives by integers are of a dtype without values
    return is_number and bool(value == 1)


def _is_idle(group: Group, users: Sequence[Group], ones: Container[int], backend: Backend) -> bool:
    """Whether XLA makes no operation of a group: it multiplies by one, or says other dims of the same elements."""
    if not users or len(group.outputs) != 1 or any(user.is_boundary for user in users):
        return False
    makers = {made.id: equation for equation in group.equations for made in equation.outputs}
    value: Value | np.ndarray = group.outputs[0].value
    while isinstance(value, Value) and value.id in makers:
        equation = makers[value.id]
        if equation.primitive == "mul" and any(_is_constant_one(x, ones) for x in equation.inputs):
            wide = [x for x in equation.inputs if not _is_constant_one(x, ones)]
            if len(wide) != 1 or wide[0].shape != value.shape:
                return False
            value = wide[0]
        elif _keeps_elements(equation) and backend.fusion.reshapes_in_place:
            value = equation.inputs[0]
        else:
            return False
    return isinstance(value, Value) and value is not group.outputs[0].value


def _keeps_elements(equation: Equation) -> bool:
    """Whether it says other dims of the same elements, in the same order."""
    if equation.primitive == "reshape":
        return equation.params["dimensions"] is None
    if equation.primitive == "broadcast_in_dim":
        return math.prod(equation.inputs[0].shape) == math.prod(equation.outputs[0].shape)
    return equation.primitive in _SAME_ELEMENTS


def _is_repeated(
    group: Group,
    read_by: Sequence[Sequence[Group]],
    folded: Sequence[bool],
    moved: Container[int],
    backend: Backend,
    axes: Collection[int],
    rows: Normalisations,
    of_arguments: Container[int],
) -> bool:
    """Whether XLA fuses an elementwise group, a view, or what else it takes in, into every group that reads it.

    Args:
        group: what may be computed again.
        read_by: per group, the groups that read what it makes.
        folded: per group, whether it is part of the reduction that reads it.
        moved: values that are made of what is moved as it is read.
        backend: the compiler.
        axes: the sizes of the mesh's axes.
        rows: the kernels that normalise rows.
        of_arguments: values that are made elementwise of arguments.
    """
    first, users = group.equations[0].primitive, read_by[group.index]
    is_taken = group.fuses or first == "scan_slice" or first in backend.fusion.taken_in
    if not users or not (is_taken or _reduces_few(group, backend, axes)):
        return False
    if backend.fusion.takes_in:
        if backend.fusion.stores_keys and any(map(_makes_keys_of_many, group.equations)):
            return False
        if group.index not in rows.inside and _is_normalised(group, users):
            return False
        if backend.rounding.operands and any(reads_rounded(user.equations[0], group) for user in users):
            return False
        is_long = any(facts_of(equation.primitive).is_long for equation in group.equations)
        if backend.fusion.stores_long and is_long and len(set(map(id, users))) > 1:
            return False
        if backend.tile and any(copies_argument(group, user, of_arguments) for user in users):
            return False
        sunk = {"scan_const"} if backend.fusion.sinks_broadcasts and group.broadcasts else set()
        takers = backend.fusion.takes_in | sunk
        return all(user.is_stack or user.fuses or user.equations[0].primitive in takers for user in users)

    def takes(user: Group) -> bool:
        reader = user.equations[0]
        if reader.primitive in backend.fusion.taken_in:
            return True
        reads_other_dims = user.is_view and not group.is_view
        if reads_other_dims and any(is_matrix_product(one.equations[0]) for one in read_by[user.index]):
            return False
        reads_views = group.is_view and is_matrix_product(reader)
        if group.fuses and computes_as_it_reduces(reader, group.equations, alone, math.prod(axes)):
            return True
        return user.is_stack or (user.fuses and not folded[user.index]) or reads_views

    alone = len(set(map(id, users))) == 1

    if not all(map(takes, users)):
        return False
    if alone:
        return True
    movers = [one for one in (group, *users) if one.equations[0].primitive in backend.fusion.taken_in]
    # what is joined of parts, and joined again, as in an associative scan, would be too much to do twice
    is_nested = movers and (group in movers or any(use.value.id in moved for use in group.uses))
    return not (is_nested or any(map(_is_dear, group.equations)))


def _reduces_few(group: Group, backend: Backend, axes: Collection[int]) -> bool:
    """Whether it reduces so few elements to one that XLA does that in the loops that read it, and no axis splits them.

    Args:
        group: what may be computed again.
        backend: the compiler.
        axes: the sizes of the mesh's axes.
    """
    (first, *_) = group.equations
    if facts_of(first.primitive).work is not FlopRule.REDUCTION or not facts_of(first.primitive).is_loop:
        return False
    made = math.prod(first.outputs[0].shape)
    sizes = (group.sizes[factor] for factor in group.reduction & group.splittable)
    is_whole = all(size % axis for size in sizes for axis in axes if axis > 1)
    return is_whole and math.prod(first.inputs[0].shape) < backend.fusion.reduces_apart_from * made


def _reads_far(group: Group, users: Sequence[Group], through: dict[int, set[int]], padded: Container[int]) -> bool:
    """Whether several groups would each read too many arrays of its size to compute it again; notes which if not.

    So it is with the sums along residual connections, once they are long: each is made of all before it. What is padded
    is too many in a long associative scan: its sums are each made of such sums of half the length.

    Args:
        users: the groups that read what it makes, or what this is widened to.
        through: value -> the values of its size that it is computed again from; added to.
        padded: values that are padded as they are read.
    """
    size = math.prod(group.outputs[0].value.shape)
    wide = [use.value.id for use in group.uses if math.prod(use.value.shape) == size]
    read = set().union(*(through.get(value, {value}) for value in wide))
    far = len(read) > _MOST_OPERANDS or any(value in padded for value in wide)
    if far and len(set(map(id, users))) > 1:
        return True
    if group.fuses:
        through.update((made.value.id, read) for made in group.outputs)
    return False


def _is_dear(equation: Equation) -> bool:
    """Whether XLA does not compute it twice to save a buffer. By a constant it multiplies rather than divides."""
    if equation.primitive == "div" and not isinstance(equation.inputs[1], Value):
        return False
    if equation.primitive == "integer_pow":
        return bool(equation.params["y"] < 0)
    if equation.primitive in _CHEAP_FOR_REALS:
        return getattr(equation.outputs[0].dtype, "kind", "") == "c"
    return facts_of(equation.primitive).is_expensive


def _makes_keys_of_many(equation: Equation) -> bool:
    """Whether it makes new keys of an array of keys."""
    return equation.primitive in _MAKES_KEYS and math.prod(equation.inputs[0].shape) > 1


def _ends_of_softmaxes(
    groups: Sequence[Group],
    users: Sequence[Sequence[Group]],
    repeated: Sequence[bool],
    points: Sequence[int],
) -> list[int | None]:
    """`Group.lies_until` of each group; for arguments see `recomputation`.

    Of a softmax of a product XLA for TPU stores what is exponentiated, in its own bits, although it is exponentiated
    again in every reader. Where that is narrow numbers made wide and nothing else, it stores the narrow ones. It stores
    the gradient that two products read. If that gradient is made of no product of the softmax, as behind
    `jax.checkpoint`, one operation makes the gradient and the softmax, and both are stored. Where the product is
    transposed before the softmax, or has more batch dims than samples and heads, it stores the product, and computes
    all that comes after it again.
    """
    lying: list[int | None] = [None] * len(groups)
    apart: set[int] = set()  # values that are made elementwise of such a product
    exponents: dict[int, Group] = {}  # what is exponentiated -> the group that does
    makers = {made.value.id: group for group in groups for made in group.outputs}
    for group in groups:
        if group.contracts and _batch_dims(group.equations[0]) > _MOST_BATCH_DIMS:
            apart.update(made.value.id for made in group.outputs)
        if not group.fuses or not group.outputs:
            continue
        size = math.prod(group.outputs[0].value.shape)
        wide = [use.value for use in group.uses if math.prod(use.value.shape) == size]
        turned = any(equation.primitive == "transpose" for equation in group.equations)
        if turned or any(value.id in apart for value in wide):
            apart.update(one.value.id for one in group.outputs)
        elif repeated[group.index] and _is_normalised(group, users[group.index], and_read_again=True):
            widening = [makers[value.id] for value in wide if value.id in makers and makers[value.id].widens]
            narrow = [use.value.id for one in widening for use in one.uses if use.value.id in makers]
            for stored in [makers[id] for id in narrow] or [group]:
                lying[stored.index] = 0 if repeated[stored.index] else None
            exponents.update((one.value.id, group) for one in group.outputs)
        elif repeated[group.index] and len(wide) > 1 and _products(group, users, 2):
            softmax = next((exponents[value.id] for value in wide if value.id in exponents), None)
            if softmax is not None:
                lying[group.index] = 0
                for one in users[softmax.index]:
                    if repeated[one.index] and lying[one.index] is None and _feeds_products_first(one, group, users):
                        lying[one.index] = points[group.index] + 1
    return lying


def _products(group: Group, users: Sequence[Sequence[Group]], least: int = 1) -> list[Group]:
    """The products that read what a group makes, if there are so many."""
    found = {user.index: user for user in users[group.index] if user.contracts}
    return list(found.values()) if len(found) >= least else []


def _feeds_products_first(group: Group, gradient: Group, users: Sequence[Sequence[Group]]) -> bool:
    """Whether products read what a group makes, and nothing is made of them that a gradient is made of."""
    ahead = _products(group, users) if group is not gradient and group.fuses else []
    seen = {one.index for one in ahead}
    while ahead:
        for user in users[ahead.pop().index]:
            if user is gradient:
                return False
            if user.index < gradient.index and user.index not in seen:
                seen.add(user.index)
                ahead.append(user)
    return bool(seen)


def _batch_dims(equation: Equation) -> int:
    return len(equation.params["dimension_numbers"][1][0]) if equation.primitive == "dot_general" else 0


def _is_normalised(group: Group, users: Sequence[Group], *, and_read_again: bool = False) -> bool:
    """Whether it is dear, and read by what sums it up and by what divides it by the sum: a softmax.

    Args:
        and_read_again: whether others may read it, too.
    """
    if not any(_is_dear(equation) for equation in group.equations):
        return False
    wide = math.prod(group.outputs[0].value.shape)
    divided = [
        any(e.primitive == "div" and math.prod(e.outputs[0].shape) == wide for e in user.equations)
        for user in users
        if user.fuses
    ]
    return (
        any(divided)
        and (and_read_again or all(divided))
        and any(user.reduction and not user.contracts for user in users)
    )
