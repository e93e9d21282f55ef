"""Values in, the bytes of them out that pass through memory: what a chip keeps, or readers make again, does not."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np

from autoshard.layout import Layout
from autoshard.model.groups import Use
from autoshard.model.pricing.sizes import ArraySizes
from autoshard.program import Value


class Traffic:
    """Which bytes of values go to and from the memory of one device."""

    def __init__(self, arrays: ArraySizes, instead: Mapping[int, Sequence[Value]], kept: Mapping[int, int]) -> None:
        self.arrays = arrays
        self.instead = instead  # values that their readers make again -> what they read for it
        self.kept = kept  # what can stay in the chip while a loop turns -> bytes of all that can in its loop
        self._figures: dict[int, tuple] = {}  # by ids of values

    def figures(self, value: Value) -> tuple:
        """What of a value decides what the work of groups takes that read it or make it."""
        if value.id not in self._figures:
            itemsizes = self.arrays.itemsizes.summed(value), self.arrays.itemsizes.stored(value)
            order = self.arrays.order(value)
            self._figures[value.id] = value.shape, *order, value.on_host, *itemsizes, self.kept_share(value)
        return self._figures[value.id]

    def read_instead(self, value: Value) -> Sequence[Value]:
        """What is in memory of what a reader of `value` reads."""
        return self.instead.get(value.id, (value,))

    def read_bytes(
        self, uses: Iterable[tuple[Use, Sequence[Layout]]], before: Container[int] = (), *, streaming: bool = False
    ) -> np.ndarray | float:
        """Of everything once, however many operands are made of it; per strategy.

        Args:
            before: ids of what need not be read.
            streaming: whether bytes count wherever they lie.
        """
        read: dict[int, np.ndarray] = {}
        for use, want in uses:
            local = self.arrays.sizes(use.value, want)
            whole = math.prod(use.value.shape) * self.arrays.itemsizes.stored(use.value)
            for value in self.read_instead(use.value):
                if value.id in before:
                    continue
                share = math.prod(value.shape) * self.arrays.itemsizes.stored(value) / whole if whole else 0.0
                size = local * share if streaming else self.outside(value, local * share)
                read[value.id] = np.maximum(read.get(value.id, 0.0), size)
        return sum(read.values(), start=0.0)

    def memory_traffic_bytes(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        """Bytes of `value` that go to memory and come from there, per layout."""
        return self.outside(value, self.arrays.sizes(value, layouts))

    def outside(self, value: Value, sizes: np.ndarray) -> np.ndarray:
        """Of what `value` takes those bytes that the chip has no room for."""
        share = self.kept_share(value)
        if math.isinf(share):
            return np.zeros_like(sizes)
        return self.arrays.backend.loop_memory.outside(sizes, share) if share else sizes

    def kept_share(self, value: Value) -> float:
        """The part that `value` has in all that is kept in the chip's own memory with it.

        It is 0 if it is not kept there, and infinite if it lies nowhere.
        """
        if value.id not in self.kept:
            return 0.0
        return value.bytes / self.kept[value.id] if self.kept[value.id] else math.inf
