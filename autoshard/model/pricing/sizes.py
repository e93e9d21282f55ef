"""Bytes that arrays take on one device, in memory and as resharded copies; remembered, since layers repeat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.layout import Layout, MeshShape, local_shape
from autoshard.model.pricing.memo import Memo, read_only
from autoshard.model.xla.backends import Backend
from autoshard.model.xla.convolutions import ImageDims, are_read_as_they_lie, lie_by_batch
from autoshard.model.xla.rounding import BFLOAT16_BYTES, Itemsizes, Readers, unrounded_itemsize
from autoshard.model.xla.tiles import elements_in_word, padded_size
from autoshard.program import Value


class ArraySizes:
    """How large the shards of values are, by one compiler."""

    def __init__(
        self,
        mesh: MeshShape,
        itemsizes: Itemsizes,
        backend: Backend,
        images: Mapping[int, ImageDims],
        memo: Memo,
        matrices: Mapping[int, tuple[int, ...]],
    ) -> None:
        self.mesh, self.itemsizes, self.backend, self.memo = mesh, itemsizes, backend, memo
        self.images = images  # values of which convolutions decide how they lie -> batch and feature dims
        self.matrices = matrices  # values of which batched products decide how they lie -> dims of their matrices
        self._elements: dict[tuple, int] = {}

    def minor_dims(self, value: Value) -> tuple[int, ...] | None:
        """The dims of `value` among which the two minor ones are; None: they may be any."""
        return self.images.get(value.id) or self.matrices.get(value.id)

    def order(self, value: Value) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """What decides how a value lies: its dims as images, and as matrices. The same dims lie otherwise as images."""
        return self.images.get(value.id), self.matrices.get(value.id)

    def local_bytes(self, value: Value, layout: Layout) -> int:
        """Bytes of `value` in the memory of one device."""
        return 0 if value.on_host else math.ceil(self.elements(value, layout) * self.itemsizes.stored(value))

    def sizes(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        """Bytes of `value` in the memory of one device, per layout. The array is shared, and not to be changed."""

        def local_bytes(layouts: Sequence[Layout]) -> np.ndarray:
            return read_only(np.array([self.local_bytes(value, layout) for layout in layouts]))

        what = value.shape, *self.order(value), value.on_host, self.itemsizes.stored(value)
        return self.memo.once(local_bytes, layouts, of=what)

    def returned_sizes(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        """Bytes of `value` as a result, per layout: it lies as any array does, and not as its makers want it."""
        if not self.minor_dims(value):
            return self.sizes(value, layouts)
        itemsize, packed = self.itemsizes.stored(value), elements_in_word(unrounded_itemsize(value))

        def local_bytes(layouts: Sequence[Layout]) -> np.ndarray:
            shapes = (local_shape(value.shape, one, self.mesh) for one in layouts)
            elements = [padded_size(shape, self.backend.tile, packed=packed) for shape in shapes]
            return read_only(np.ceil(np.array(elements) * itemsize).astype(np.int64))

        return self.memo.once(local_bytes, layouts, of=(value.shape, packed, itemsize))

    def shard_bytes(self, value: Value, layout: Layout) -> int:
        """Bytes of the elements of `value` that one device has."""
        return math.ceil(math.prod(local_shape(value.shape, layout, self.mesh)) * unrounded_itemsize(value))

    def copy_bytes(self, value: Value, layout: Layout, readers: Readers = None) -> int:
        """Bytes of a resharded copy of `value` in the memory of one device."""
        return math.ceil(self.elements(value, layout) * self.itemsizes.moving(value, readers))

    def copy_sizes(self, value: Value, layouts: Sequence[Layout], readers: Readers = None) -> np.ndarray:
        """Bytes of a resharded copy of `value` for these readers, per layout; shared, and not to be changed."""

        def copy_bytes(layouts: Sequence[Layout]) -> np.ndarray:
            return read_only(np.array([self.copy_bytes(value, layout, readers) for layout in layouts]))

        what = value.shape, *self.order(value), self.itemsizes.moving(value, readers)
        return self.memo.once(copy_bytes, layouts, of=what)

    def image_bytes(self, value: Value, layout: Layout, images: ImageDims) -> int:
        """Bytes of a copy of `value`, if convolutions, whose batch and feature dims these are, want one, else 0."""
        shape, tile = local_shape(value.shape, layout, self.mesh), self.backend.tile
        if are_read_as_they_lie(shape, images, tile):
            return 0
        itemsize = unrounded_itemsize(value)
        rounded = min(itemsize, BFLOAT16_BYTES) if self.backend.rounding.operands else itemsize
        return math.ceil(self.elements(value, layout, images) * rounded)

    def elements(self, value: Value, layout: Layout, images: ImageDims | None = None) -> int:
        """Elements of `value` that one device has, with padding; as images if these dims are given."""
        images = images or self.images.get(value.id)
        minor = images or self.matrices.get(value.id)
        packed = elements_in_word(unrounded_itemsize(value))
        key = value.shape, layout, images, minor, packed
        if key not in self._elements:
            shape = local_shape(value.shape, layout, self.mesh)
            if images and self.backend.tile and lie_by_batch(shape, images, self.backend.tile):
                minor = None
            self._elements[key] = padded_size(shape, self.backend.tile, minor, packed)
        return self._elements[key]
