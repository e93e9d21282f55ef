"""Streams: how arrays pass through the vector unit of a TPU core, for elementwise work, reductions and copies.

A loop reads its arrays register by register, at the same rate from memory and from the chip's own memory. What it
writes to memory streams out beside what it reduces; what it writes to the chip takes nothing. A number of fewer than
four bytes is packed before it is written. Arrays pass in windows, and each window takes a microsecond to start, unless
everything fits into one. The windows of a fusion are large. An operation that XLA has not fused with any other has
windows of 128 registers.

Source: the cycles that libtpu notes on v5e programs of elementwise work, reductions and copies, of float32, bfloat16
and int8, one to four operands and 0.5 to 64 MiB. `tests/model/xla/test_streams.py` compiles some.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from autoshard.model.groups import Group, StackWriter
from autoshard.model.xla.units.vector_unit import REGISTER
from autoshard.primitives import FlopRule, facts_of
from autoshard.program import Value

_FEW_PARTS = 4  # of a concatenation, each of which XLA pads to the size of the whole
STREAMED_BYTES = 4  # of a number, below which numbers are packed before they are written

# Elementwise operations that XLA for TPU makes of one primitive, and does not write as several.
_SINGLE = frozenset({
    "abs", "add", "add_any", "and", "ceil", "copy", "copy_p", "cos", "div", "eq", "exp", "expm1", "floor", "ge", "gt",
    "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow",
    "reduce_max", "reduce_min", "reduce_sum", "rem", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "sub", "tan",
    "tanh", "xor",
})  # fmt: skip
_WHOLE_TYPES = (jnp.bfloat16, np.dtype(np.float32), np.dtype(np.int32))  # that no operation casts before it computes


@dataclass(frozen=True)
class Streams:
    """Cycles of what passes through the vector unit."""

    clock: float = 1.0  # cycles per second
    bandwidth: float = 1.0  # of the memory of the chip that was measured, in bytes/s
    bandwidth_share: float = 0.0  # of this, at which arrays pass, wherever they lie; 0: they have no price of their own
    register_cycles: float = 0.0  # of one register that is reduced, or packed
    window_cycles: float = 0.0  # to start a window of a fusion
    window_bytes: float = math.inf  # of all arrays of a fusion
    window_elements: float = math.inf  # of one array of a fusion
    alone_bytes: float = math.inf  # of all arrays of an operation by itself that pass in one window
    alone_elements: float = math.inf  # of a window of such an operation, if one does not do
    alone_cycles: float = 0.0  # to start such a window
    widened: Mapping[int, int] = field(
        default_factory=dict
    )  # id of what is only made wider -> that of what it is made of

    def counted(self, groups: Iterable[Group]) -> Streams:
        """The same for the groups of a program."""
        widening = (group for group in groups if group.widens)
        pairs = ((one.value.id, use.value.id) for group in widening for use in group.uses for one in group.outputs)
        return replace(self, widened=dict(pairs))

    def counts(self, group: Group) -> bool:
        """Whether a group passes through the vector unit as streams, and nothing else decides what it takes."""
        if not self.bandwidth_share or group.ends_product or not group.outputs:
            return False
        if group.is_stack:
            return group.written_by is not StackWriter.PRODUCT
        (first, *_) = group.equations
        facts = facts_of(first.primitive)
        is_loop = (
            group.fuses or (facts.work is FlopRule.REDUCTION and facts.is_loop) or first.primitive == "concatenate"
        )
        values = (*(use.value for use in group.uses), *(made.value for made in group.outputs))
        return is_loop and all(getattr(value.dtype, "kind", "c") != "c" for value in values)

    def counts_product(self, group: Group) -> bool:
        """Whether a group is a product, or ends one, and what it makes passes through the vector unit on the way."""
        if not self.bandwidth_share or not group.outputs or not (group.contracts or group.ends_product):
            return False
        values = (*(use.value for use in group.uses), *(made.value for made in group.outputs))
        return all(getattr(value.dtype, "kind", "c") != "c" for value in values)

    def is_alone(self, group: Group, recomputed: Container[int]) -> bool:
        """Whether a group is one operation that XLA fuses with no other.

        A reduction reads narrow numbers as they are, and is no fusion for that.

        Args:
            group: elementwise work, a reduction or a copy.
            recomputed: ids of values that their readers compute again.
        """
        if group.read_before is not None or group.is_stack:
            return False
        if group.only_moves:
            return True
        (first, *rest) = group.equations
        if rest or first.primitive not in _SINGLE or any(value.dtype not in _WHOLE_TYPES for value in first.outputs):
            return False
        shapes = {value.shape if isinstance(value, Value) else None for value in first.inputs}
        stored = (self.widened.get(use.value.id, use.value.id) not in recomputed for use in group.uses)
        return len(shapes) == 1 and None not in shapes and all(stored)

    def seconds(
        self,
        elements: np.ndarray,
        read: np.ndarray | float,
        written: np.ndarray | float,
        reduced: np.ndarray | float,
        packed: np.ndarray | float,
        bandwidth: float,
        *,
        is_alone: bool,
    ) -> np.ndarray | float:
        """What a loop takes beside its start, per strategy.

        Args:
            elements: that the loop goes over.
            read: bytes, wherever they lie.
            written: bytes that go to memory.
            reduced: elements that it takes in to sum them up.
            packed: elements of narrow results.
            bandwidth: of a device's memory, in bytes/s. Where it is half of what was measured, all takes twice as long.
            is_alone: whether XLA fuses it with nothing.

        >>> v5e = Streams(1.5e9, 819e9, 0.88, 8.6, 1490, 7.5e6, 2**20, 5e6, 2**17, 1740)
        >>> n, most = np.array([2**24.0]), np.zeros(1)
        >>> (v5e.seconds(n, 4 * n, 4 * n, most, most, 819e9, is_alone=False) * 1e6).round()  # 203 us by libtpu's cycles
        array([204.])
        >>> (v5e.seconds(n, 4 * n, 4 * n, most, most, 819e9, is_alone=True) * 1e6).round()  # 336 us
        array([335.])
        """
        byte_cycles = self.clock / (self.bandwidth_share * self.bandwidth)
        out = np.maximum(written * byte_cycles, reduced / REGISTER * self.register_cycles)
        cycles = read * byte_cycles + out + packed / REGISTER * self.register_cycles
        moved = read + written
        if is_alone:
            cycles = cycles + (moved > self.alone_bytes) * elements / self.alone_elements * self.alone_cycles
        else:
            windows = np.maximum(moved / self.window_bytes, elements / self.window_elements)
            cycles = cycles + np.where(windows > 1, windows, 0.0) * self.window_cycles
        return cycles / self.clock * (self.bandwidth / bandwidth)


def passes_of_joining(parts: int) -> float:
    """How often the result is gone over to join so many parts: XLA pads each of a few parts, and cuts out of many.

    Source: libtpu's cycles for 2, 4 and 8 parts.
    """
    return 0.67 + 0.5 * parts if parts <= _FEW_PARTS else 1.0
