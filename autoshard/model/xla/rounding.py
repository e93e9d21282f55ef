"""Rounding: groups in, the values out that XLA keeps or moves in fewer bits than the program says.

On TPU a matrix product or convolution of float32 operands rounds them to bfloat16, unless the program asks for more
precision. A value that only such products read is rounded where it is made: it is stored, moved between devices and
summed over them as bfloat16. A copy for such products alone is rounded before it is moved.

Types of 4 and 2 bits are packed: two and four elements lie in a byte.

CPU has no collectives of bfloat16, which it moves as float32, nor of 8-bit floats, which it moves as float16. TPU
reduces booleans as 32-bit integers.

What a program converts itself moves in the smaller type. A value that the program rounds after it is moved is rounded
before. On GPU a value that the program widens before it is moved is widened after.

Source: the dtypes of collectives and buffers in compiled programs. `tests/mesh/test_targets.py` compiles a step whose
weights TPU gathers in bfloat16 and GPU in float32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax.lax import Precision

from autoshard.model.groups import Group
from autoshard.program import Equation, Program, Value, dtype_name

BFLOAT16_BYTES = 2  # per element
# Bytes per element of what compiled programs store in fewer than 8 bits.
PACKED_BYTES = {"float4_e2m1fn": 0.5, "int2": 0.25, "int4": 0.5, "uint2": 0.25, "uint4": 0.5}
Readers = Collection[Group] | None  # of a resharded copy; None: all groups that read the value
# These only move elements, so if their result is rounded, their operand is rounded instead.
_MOVES_ONLY = frozenset({"concatenate", "pad", "rev", "scan_const", "scan_slice", "scan_stack", "slice", "split"})
_DEFAULT_PRECISIONS = (None, "default", Precision.DEFAULT)


def unrounded_itemsize(value: Value | np.ndarray) -> float:
    """Bytes per element of a value that is not rounded.

    >>> unrounded_itemsize(np.zeros(3)), unrounded_itemsize(jnp.zeros(3, "int4"))
    (8, 0.5)
    """
    return PACKED_BYTES.get(dtype_name(value.dtype), value.itemsize)


@dataclass(frozen=True)
class Rounding:
    """Which values a compiler rounds, and when."""

    operands: bool = False  # float32 operands of products to bfloat16, as early as possible
    before_moves: bool = False  # a value that the program converts to a smaller type after a move: before the move
    widens_after_moves: bool = False  # a value that the program converts to a larger type before a move: after it
    moves_as: Mapping[str, int] = field(default_factory=dict)  # types moved and summed in others -> bytes of these
    sums_as: Mapping[str, int] = field(default_factory=dict)  # types that are only summed in others -> bytes of these


@dataclass(frozen=True)
class Itemsizes:
    """Bytes per element of values in memory, and of their resharded copies."""

    kept: frozenset[int] = frozenset()  # values that are stored rounded
    moved: Mapping[int, float] = field(default_factory=dict)  # of all resharded copies of a value, if smaller
    read: Mapping[tuple[int, int], float] = field(
        default_factory=dict
    )  # (value, group) -> of the copy for it, if smaller
    shared: Mapping[int, float] = field(default_factory=dict)  # of the copy for all readers, if smaller
    fused: frozenset[int] = frozenset()  # values of which only a rounded elementwise result is stored
    rounding: Rounding = field(default_factory=Rounding)  # the compiler's

    def of(self, value: Value) -> float:
        """Bytes per element of a value as it is made."""
        return BFLOAT16_BYTES if value.id in self.kept else unrounded_itemsize(value)

    def summed(self, value: Value) -> float:
        """Bytes per element of the partial sums of a value, as devices add them up."""
        name = dtype_name(value.dtype)
        return self.rounding.sums_as.get(name) or self.rounding.moves_as.get(name) or self.of(value)

    def stored(self, value: Value) -> float:
        """Bytes per element of a value in memory."""
        return BFLOAT16_BYTES if value.id in self.fused else self.of(value)

    def moving(self, value: Value, readers: Readers = None) -> float:
        """Bytes per element of a resharded copy for these readers; by default for all."""
        if wide := self.rounding.moves_as.get(dtype_name(value.dtype)):
            return wide
        size = self.moved.get(value.id, unrounded_itemsize(value))
        if readers is None:
            return min(size, self.shared.get(value.id, size))
        return min(size, max((self.read.get((value.id, group.index), size) for group in readers), default=size))


def itemsizes_of(program: Program, groups: Sequence[Group], rounding: Rounding) -> Itemsizes:
    """The itemsizes of a program's values under a compiler that rounds so."""
    if not (rounding.operands or rounding.before_moves or rounding.widens_after_moves):
        return Itemsizes(rounding=rounding)
    readers: dict[int, list[Group]] = defaultdict(list)
    for group in groups:
        for use in group.uses:
            readers[use.value.id].append(group)
    results = {value.id for value in program.results if isinstance(value, Value)}
    replacing = {value.id for i in program.carried.values() if isinstance(value := program.results[i], Value)}
    kept: set[int] = set()
    moved: dict[int, float] = {}
    reading: dict[tuple[int, int], float] = {}
    shared: dict[int, float] = {}
    wanted: dict[int, float] = {}  # value -> the most that any of its readers reads

    def rounds(group: Group) -> bool:
        if group.contracts:
            return _at_default_precision(group.equations[0].params.get("precision"))
        moves = group.only_moves or group.equations[0].primitive in _MOVES_ONLY
        return moves and all(made.value.id in kept for made in group.outputs)

    def read(group: Group, value: Value) -> float:
        """Bytes per element of the first thing that a group makes of a value."""
        bare = unrounded_itemsize(value)
        if rounding.operands and dtype_name(value.dtype) == "float32" and rounds(group):
            return BFLOAT16_BYTES
        readings = [equation for equation, _ in group.reading.get(value.id, ())]
        if rounding.before_moves and readings and all(map(_converts, readings)):
            return max(unrounded_itemsize(equation.outputs[0]) for equation in readings)
        if rounding.operands and group.equations[0].primitive in _MOVES_ONLY:
            return max((wanted.get(made.value.id, bare) for made in group.outputs), default=bare)
        return bare

    def note(value: Value) -> None:
        """Notes which copies of a value are smaller."""
        sizes = {group.index: read(group, value) for group in readers[value.id]}
        smaller = {group: size for group, size in sizes.items() if size < unrounded_itemsize(value)}
        reading.update({(value.id, group): size for group, size in smaller.items()})
        if sizes and value.id not in results:
            wanted[value.id] = max(sizes.values())
        if smaller and smaller.keys() == sizes.keys() and value.id not in replacing:
            shared[value.id] = max(smaller.values())

    for group in reversed(groups):  # readers before what they read, but for what loops hand on
        for made in group.outputs:
            users = readers[made.value.id]
            if not users:
                continue
            wide = dtype_name(made.value.dtype) == "float32"
            if rounding.operands and wide and made.value.id not in results and all(map(rounds, users)):
                kept.add(made.value.id)
                moved[made.value.id] = wanted[made.value.id] = BFLOAT16_BYTES
                continue
            note(made.value)
            maker = program.makers[made.value.id]
            source = maker.inputs[0] if _converts(maker) else made.value
            if rounding.widens_after_moves and (itemsize := unrounded_itemsize(source)) < unrounded_itemsize(
                made.value
            ):
                moved[made.value.id] = itemsize
    for value in program.arguments:
        note(value)
    fused = {
        group.outputs[0].value.id
        for group in groups
        if rounding.operands
        and group.contracts
        and group.outputs[0].value.id not in results
        and _reader_is_fused(group, readers[group.outputs[0].value.id], kept)
    }
    return Itemsizes(frozenset(kept), moved, reading, shared, frozenset(fused), rounding)


def _converts(equation: Equation) -> bool:
    """Whether the equation makes floating-point numbers of other floating-point numbers."""
    if equation.primitive != "convert_element_type":
        return False
    return all(jnp.issubdtype(x.dtype, jnp.floating) for x in (*equation.inputs, *equation.outputs))


def _reader_is_fused(product: Group, users: Sequence[Group], kept: set[int]) -> bool:
    """Whether XLA fuses the one reader of a product into the product, and stores what the reader makes."""
    if len(users) != 1 or not users[0].fuses:
        return False
    made = users[0].outputs
    shape = product.outputs[0].value.shape
    return all(one.value.id in kept and math.prod(one.value.shape) == math.prod(shape) for one in made)


def _at_default_precision(precision) -> bool:
    pair = precision if isinstance(precision, tuple) else (precision,)
    return all(one in _DEFAULT_PRECISIONS for one in pair)
