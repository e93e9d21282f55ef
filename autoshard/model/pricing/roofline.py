"""Groups and strategies in, seconds of their work on one device out: the roofline of FLOPs and bytes through memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autoshard.layout import Layout, local_shape, shards
from autoshard.mesh.compute import compute_seconds
from autoshard.mesh.topology import Topology
from autoshard.model.equations import compute_dtype, inserted_operand
from autoshard.model.groups import Group, StackWriter, reads_images
from autoshard.model.pricing.product_operations import ProductOperations
from autoshard.model.pricing.sizes import ArraySizes
from autoshard.model.pricing.traffic import Traffic
from autoshard.model.strategies import Strategy
from autoshard.model.xla.convolutions import (
    TURNS,
    are_read_as_they_lie,
    bytes_of_turns,
    lies_as_images,
)
from autoshard.model.xla.rounding import BFLOAT16_BYTES
from autoshard.model.xla.tiles import Tile, row_padding
from autoshard.model.xla.units.rows import copied_bytes
from autoshard.model.xla.units.sorting import WORD_BYTES, sorts_in_halves, turned_copies, turns_rows
from autoshard.model.xla.units.streams import STREAMED_BYTES, passes_of_joining
from autoshard.primitives import FlopRule, facts_of
from autoshard.program import Equation, Value

# These do no work: results are the operand's buffer.
_SAME_BUFFER = frozenset({"scan_const", "scan_carry", "branch_const", "branch_join"})
_READS_RESULT_BYTES = frozenset({"dynamic_slice", "gather", "slice", "scan_slice"})  # of operands


def _is_free(group: Group) -> bool:
    """Whether no time is taken: by what runs on other platforms, is computed in a kernel on the way, or is a view."""
    return group.is_idle or group.is_normalising or (group.only_moves and not (group.is_sunk or group.is_copy))


class GroupWork:
    """What groups compute, and what goes to and from memory for it."""

    def __init__(
        self,
        arrays: ArraySizes,
        topology: Topology,
        instead: Mapping[int, Sequence[Value]],
        kept: Mapping[int, int],
        products: Mapping[int, Group],
    ) -> None:
        """
        Args:
            instead: values that their readers make again -> what they read for it.
            kept: what can stay in the chip while a loop turns -> bytes of all that can in its loop.
            products: ids of what is made in an operation that begins with a product -> that product.
        """
        self.arrays, self.topology = arrays, topology
        self.traffic = Traffic(arrays, instead, kept)
        self.products = ProductOperations(arrays, topology, self.traffic, products)

    def seconds(self, group: Group, strategies: tuple[Strategy, ...], wants, makes) -> list[float]:
        """Roofline of the fused group: all its FLOPs, and only what enters and leaves it through memory."""
        if _is_free(group) or (group.equations[0].primitive in _SAME_BUFFER and not group.passes_before):
            return [0.0] * len(strategies)
        pieces = {
            factor: np.array([shards(strategy.axes.get(factor, ()), self.arrays.mesh) for strategy in strategies])
            for factor in group.sizes
        }
        split = {frozenset(group.factors_of(equation)): np.ones(len(strategies)) for equation in group.equations}
        for factors, ones in split.items():
            split[factors] = math.prod((pieces[factor] for factor in factors), start=ones)
        backend = self.arrays.backend
        is_stream = backend.streams.counts(group)
        moved = 0.0 if is_stream else self._bytes_moved(group, wants, makes)  # streams price it themselves
        through = np.maximum(moved, backend.vector_products.bytes_read(group, pieces))
        work = sum(
            self.products.flops(one)
            / split[frozenset(group.factors_of(one))]
            * self.products.padding(group, one, pieces)
            for one in group.equations
        )
        taken = [
            compute_seconds(work, through, compute_dtype(group.equations), self.topology),
            self.products.least_product_seconds(group, pieces),
            self._vector_seconds(group, split, makes),
        ]
        if sorting := backend.sorts.seconds(group):
            taken.append(sorting / split[frozenset(group.factors_of(group.equations[0]))])
        if is_stream:
            taken.append(self._stream_seconds(group, wants, makes))
        elif backend.streams.counts_product(group):
            finished = np.array([bool(strategy.finishes) for strategy in strategies])
            taken.append(self.products.stream_seconds(group, pieces, wants, makes, finished))
        for equation in group.equations:
            if (library := backend.libraries.get(equation.primitive)) is not None:
                shapes = [operand.shape for operand in equation.inputs]
                taken.append(library.seconds(equation.primitive, shapes, split[frozenset(group.factors_of(equation))]))
        beside = np.maximum(0.0, functools.reduce(np.maximum, taken) - self.products.product_lead_seconds(group, wants))
        least = self._least(group, pieces) + self._image_copies(group, wants, makes)
        least = least + self._row_copies(group, wants) + self._turned_copies(group, wants)
        found: list[float] = np.broadcast_to(least + beside, len(strategies)).tolist()
        return found

    def is_alone(self, group: Group) -> bool:
        """Whether a group is a stream of the vector unit that XLA fuses with nothing."""
        streams = self.arrays.backend.streams
        return streams.counts(group) and streams.is_alone(group, self.traffic.instead)

    def least_seconds(self, group: Group, devices: int) -> float:
        """Seconds that no strategy goes below: its FLOPs and bytes, shared out over all devices."""
        first = group.equations[0]
        if _is_free(group) or first.primitive in _SAME_BUFFER:
            return 0.0
        if self.products.ended(group):
            return self.arrays.backend.operations.seconds(group)
        values = {
            value.id: value for value in (*(use.value for use in group.uses), *(one.value for one in group.outputs))
        }
        for id in group.read_before or ():
            values.pop(id, None)
        moves_parts = group.is_recomputed or first.primitive in _READS_RESULT_BYTES or _inserted(first) is not None
        in_memory = (
            value for value in values.values() if not (moves_parts or value.on_host or self.traffic.kept_share(value))
        )
        sizes = [
            math.prod(value.shape) * self.arrays.itemsizes.stored(value)
            for value in in_memory
            if value.id not in self.traffic.instead
        ]
        work, dtype = sum(map(self.products.flops, group.equations)), compute_dtype(group.equations)
        shared = compute_seconds(work / devices, sum(sizes) / devices, dtype, self.topology)
        return self.arrays.backend.operations.seconds(group) + float(shared)

    def _least(self, group: Group, pieces: Mapping[int, np.ndarray]) -> np.ndarray | float:
        """Seconds that its operations take however little they do, per strategy.

        Args:
            pieces: factor -> into how many pieces each strategy splits it.
        """
        operations = self.arrays.backend.operations
        least: np.ndarray | float = operations.seconds(group) + operations.vector_seconds(group, pieces)
        for equation in group.equations:
            if turn := operations.turn_seconds(equation):
                least = least + turn * _row_counts(equation, group, pieces)
            if counting := operations.counting_seconds(equation):
                least = least + counting * _dims_but_last(equation, group, pieces)
        return least

    def _image_copies(
        self, group: Group, wants: Sequence[Sequence[Layout]], makes: Sequence[Sequence[Layout]]
    ) -> np.ndarray | float:
        """Seconds to bring images into the order of a convolution where they are arguments, and back as results.

        They are rounded on the way.
        """
        backend = self.arrays.backend
        if group.equations[0].primitive != "conv_general_dilated" or not backend.convolutions.copies_images:
            return 0.0
        images, _, made_dims = group.equations[0].params["dimension_numbers"]
        read = (
            self._copied(use.value, want, images, are_read_as_they_lie)
            for use, want in zip(group.uses, wants, strict=True)
            if reads_images(use) and use.value.from_outside
        )
        made = self._copied(group.outputs[0].value, makes[0], made_dims, lies_as_images) * group.feeds_only_results
        return (sum(read, start=0.0) + made) / self.topology.memory_bandwidth

    def _row_copies(self, group: Group, wants: Sequence[Sequence[Layout]]) -> np.ndarray | float:
        """Seconds to lay an array row by row that a gather picks rows of, per strategy."""
        first = group.equations[0]
        if self.arrays.backend.tile is None or first.primitive != "gather" or group.is_recomputed:
            return 0.0
        pairs = zip(group.uses, wants, strict=True)
        array, layouts = next((use.value, want) for use, want in pairs if (use.equation, use.operand) == (first, 0))
        itemsize = self.arrays.itemsizes.stored(array)
        shapes = (local_shape(array.shape, layout, self.arrays.mesh) for layout in layouts)
        copied = [copied_bytes(first, shape, itemsize) for shape in shapes]
        return 2 * np.array(copied) / self.topology.memory_bandwidth

    def _turned_copies(self, group: Group, wants: Sequence[Sequence[Layout]]) -> np.ndarray | float:
        """Seconds to turn rows that are sorted and to number their elements, if the chip has no room; per strategy."""
        backend = self.arrays.backend
        if not backend.streams.bandwidth_share or not turns_rows(group.equations[0]) or not group.uses:
            return 0.0
        first, value = group.equations[0], group.uses[0].value
        elements = self.arrays.sizes(value, wants[0]) / self.arrays.itemsizes.stored(value)
        size = elements * (WORD_BYTES if sorts_in_halves(first) else self.arrays.itemsizes.stored(value))
        none, bandwidth = np.zeros(1), self.topology.memory_bandwidth
        turned, numbered = (
            backend.streams.seconds(elements, read, size, none, none, bandwidth, is_alone=True) for read in (size, none)
        )
        copies = turned_copies(first, len(group.outputs))
        return np.where(2 * size > backend.on_chip_bytes, copies * turned + numbered, 0.0)

    def _copied(
        self,
        value: Value,
        layouts: Sequence[Layout],
        image_dims: Sequence[int],
        lies: Callable[[tuple[int, ...], Sequence[int], Tile | None], bool],
    ) -> np.ndarray:
        """Bytes that pass where images that lie otherwise outside of convolutions are copied, per layout."""
        shapes = [local_shape(value.shape, layout, self.arrays.mesh) for layout in layouts]
        elsewhere = np.array([not lies(shape, image_dims, self.arrays.backend.tile) for shape in shapes])
        return self.traffic.memory_traffic_bytes(value, layouts) * (1 + BFLOAT16_BYTES / value.itemsize) * elsewhere

    def _vector_seconds(
        self, group: Group, split: Mapping[frozenset[int], np.ndarray], makes: Sequence[Sequence[Layout]]
    ) -> np.ndarray | float:
        """What the functions in it take on the vector unit, per strategy.

        Args:
            split: factors of an equation -> into how many pieces each strategy splits them.
        """
        unit = self.arrays.backend.vector_unit
        counted = [equation for equation in group.equations if unit.counts(equation)]
        if not counted or not group.outputs:
            return 0.0
        made, layouts = max(
            zip((made.value for made in group.outputs), makes, strict=True), key=lambda pair: math.prod(pair[0].shape)
        )
        elements = np.array([self.arrays.elements(made, layout) for layout in layouts])
        bare = np.array([math.prod(local_shape(made.shape, layout, self.arrays.mesh)) for layout in layouts])
        padding = elements / np.maximum(1, bare)
        widest = (max(math.prod(made.shape) for made in one.outputs) for one in counted)
        sizes = (
            (one, size / split[frozenset(group.factors_of(one))]) for one, size in zip(counted, widest, strict=True)
        )
        return sum((unit.seconds(one, size * padding) for one, size in sizes), start=np.zeros(len(padding)))

    def _stream_seconds(
        self, group: Group, wants: Sequence[Sequence[Layout]], makes: Sequence[Sequence[Layout]]
    ) -> np.ndarray | float:
        """What a loop of the vector unit takes beside its start, per strategy: every array passes through it."""
        if group.is_recomputed and not group.is_sunk:
            return 0.0
        turns = group.outputs[0].value.shape[0] if group.is_stack else 1  # of a stack one slice is written
        sizes = [
            (one.value, self.arrays.sizes(one.value, made) / turns)
            for one, made in zip(group.outputs, makes, strict=True)
        ]
        written = sum((self.traffic.outside(value, size) for value, size in sizes), start=np.zeros(1))
        first = group.equations[0]
        read: np.ndarray | float
        if first.primitive in _READS_RESULT_BYTES or first.primitive == "concatenate":
            passes = passes_of_joining(len(first.inputs)) if first.primitive == "concatenate" else 1.0
            read = passes * sum((size for _, size in sizes), start=np.zeros(1))
        else:
            uses = zip(group.uses, wants, strict=True)
            read = self.traffic.read_bytes(uses, group.read_before or (), streaming=True)
        narrow = [(value, size) for value, size in sizes if self.arrays.itemsizes.stored(value) < STREAMED_BYTES]
        packed = sum((size / self.arrays.itemsizes.stored(value) for value, size in narrow), start=np.zeros(1))
        made = [size / self.arrays.itemsizes.stored(value) for value, size in sizes]
        taken_in = [
            self.arrays.sizes(use.value, want) / self.arrays.itemsizes.stored(use.value)
            for use, want in zip(group.uses, wants, strict=True)
        ]
        reduces = facts_of(first.primitive).work is FlopRule.REDUCTION and not group.runs_beside
        return self.arrays.backend.streams.seconds(
            functools.reduce(np.maximum, [*made, *taken_in]),
            read,
            written,
            reduces * functools.reduce(np.maximum, taken_in or [np.zeros(1)]),
            packed,
            self.topology.memory_bandwidth,
            is_alone=self.is_alone(group),
        )

    def _bytes_moved(self, group: Group, wants, makes) -> np.ndarray | float:
        """To and from memory, per strategy. What its readers make again they read themselves.

        What loops make again is charged as if it were made once, before them: if it were free it would lie anyhow, and
        XLA does make all of it if its readers want it in another layout.
        """
        if group.is_recomputed and not group.is_sunk:
            return 0.0
        first = group.equations[0]
        if first.primitive == "scan_carry":  # what a loop works on
            return group.passes_before * self.arrays.sizes(group.outputs[0].value, makes[0])
        written = sum(map(self.traffic.memory_traffic_bytes, (made.value for made in group.outputs), makes))
        if first.primitive in _READS_RESULT_BYTES:
            padding = self._row_padding(first, first.outputs[0], makes[0]) if makes else 1.0
            return (
                2
                * written
                * padding
                / (self.arrays.backend.operations.slice_bandwidth_share if first.primitive == "scan_slice" else 1.0)
            )
        if (operand := _inserted(first)) is not None:
            pairs = [
                (use, want)
                for use, want in zip(group.uses, wants, strict=True)
                if (use.equation, use.operand) == (first, operand)
            ]
            inserted = sum(
                self.traffic.read_bytes([(use, want)]) * self._row_padding(first, use.value, want)
                for use, want in pairs
            )
            if self.arrays.backend.streams.bandwidth_share and group.written_by is StackWriter.PRODUCT:
                return self.arrays.sizes(group.outputs[0].value, makes[0]) / group.outputs[0].value.shape[0]
            # what the chip keeps is written all the same
            least = sum((self.arrays.sizes(use.value, want) for use, want in pairs), start=np.zeros(1))
            moved = np.maximum(2 * inserted, least)
            return np.where(moved, moved, 2 * written) + group.passes_before * written
        again: np.ndarray | float = 0.0
        if TURNS in first.params:
            arrays = [(use.value, want) for use, want in zip(group.uses, wants, strict=True) if use.equation is first]
            sizes = [self.arrays.sizes(*one) for one in (*arrays, (group.outputs[0].value, makes[0]))]
            again = bytes_of_turns(first, sizes)
        passes = self.arrays.backend.fourier_products.memory_passes if first.primitive == "fft" else 0.0
        read = self.traffic.read_bytes(zip(group.uses, wants, strict=True), group.read_before or ())
        return read + written + again + passes * np.maximum(read, written)

    def _row_padding(self, equation: Equation, rows: Value, layouts: Sequence[Layout]) -> np.ndarray | float:
        """How many times larger the rows that a gather makes or a scatter inserts are when each lies by itself."""
        numbers = equation.params.get("dimension_numbers")
        window = getattr(numbers, "offset_dims", ()) or getattr(numbers, "update_window_dims", ())
        tile = self.arrays.backend.tile
        if tile is None or math.prod(rows.shape[dim] for dim in window) <= 1:
            return 1.0
        shapes = [local_shape(rows.shape, layout, self.arrays.mesh) for layout in layouts]
        together = [self.arrays.elements(rows, layout) for layout in layouts]
        pairs = zip(shapes, together, strict=True)
        return np.array([row_padding(shape, window, size, tile) for shape, size in pairs])


def _inserted(equation: Equation) -> int | None:
    """Which operand an equation writes into a part of its result, and touches no more than that."""
    return 0 if equation.primitive == "scan_stack" else inserted_operand(equation)


def _row_counts(equation: Equation, group: Group, pieces: Mapping[int, np.ndarray]) -> np.ndarray:
    """How many rows of a gather or updates of a scatter a device has, per strategy."""
    if equation.primitive == "gather":
        rows, window = equation.outputs[0].shape, equation.params["dimension_numbers"].offset_dims
        dims = group.results[equation.index][0]
    else:
        rows, window = equation.inputs[2].shape, equation.params["dimension_numbers"].update_window_dims
        dims = group.operands[equation.index][2]
    apart = [dim for dim in range(len(rows)) if dim not in window]
    split = math.prod((pieces[factor] for dim in apart for factor in dims[dim]), start=np.ones(1))
    return math.prod(rows[dim] for dim in apart) / split


def _dims_but_last(equation: Equation, group: Group, pieces: Mapping[int, np.ndarray]) -> np.ndarray:
    """How many dims of several elements a device has of random bits beside the last one, keys apart, per strategy."""
    dims = group.results[equation.index][0][len(equation.inputs[0].shape) :]
    sizes = [math.prod((group.sizes[f] / pieces[f] for f in dim), start=np.ones(1)) for dim in dims]
    return np.maximum(0.0, sum((size > 1 for size in sizes), start=np.zeros(1)) - 1)
