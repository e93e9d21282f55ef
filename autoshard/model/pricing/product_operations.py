"""Operations of a TPU that begin with a product: the matrix unit multiplies, the vector unit packs and writes.

Both work side by side, and memory beside them, so that the slowest decides. What XLA makes of a product on the way is
part of its operation. It takes only what the matrix unit does not hide.

Source: the cycles that libtpu notes on v5e, v5p and v6e programs of about 40 products, alone, and with a bias, an
activation, a residual or a sum behind them. `tests/model/xla/test_product_operations.py` compiles some.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autoshard.layout import Layout, MeshShape, shards
from autoshard.mesh.collectives import seconds as collective_seconds
from autoshard.mesh.compute import compute_seconds, flops
from autoshard.mesh.topology import Topology
from autoshard.model.equations import compute_dtype, is_matrix_product
from autoshard.model.groups import Group, Use
from autoshard.model.pricing.sizes import ArraySizes
from autoshard.model.pricing.traffic import Traffic
from autoshard.model.xla.convolutions import TURNS
from autoshard.model.xla.products import product_sizes
from autoshard.model.xla.units.streams import STREAMED_BYTES
from autoshard.primitives import FlopRule, facts_of
from autoshard.program import Equation

Pieces = Mapping[int, np.ndarray]  # factor -> into how many pieces each strategy splits it


class ProductOperations:
    """What products take in the units of a core, and what is made on the way with them."""

    def __init__(self, arrays: ArraySizes, topology: Topology, traffic: Traffic, products: Mapping[int, Group]) -> None:
        """
        Args:
            products: ids of what is made in an operation that begins with a product -> that product.
        """
        self.arrays, self.topology, self.traffic, self.products = arrays, topology, traffic, products

    def flops(self, equation: Equation) -> float:
        """FLOPs of an equation, as the unit does them that it runs in."""
        backend = self.arrays.backend
        if backend.fourier_products.passes and equation.primitive == "fft":
            return backend.fourier_products.flops(equation, backend.tile)
        return flops(equation)

    def padding(self, group: Group, equation: Equation, pieces: Pieces) -> np.ndarray | float:
        """How many times its FLOPs an equation of a group takes, per strategy."""
        if equation is not group.equations[0]:
            return 1.0
        backend = self.arrays.backend
        share = backend.convolutions.flops_share if equation.primitive == "conv_general_dilated" else 1.0
        return backend.matrix_unit.padding(group, pieces) * backend.convolutions.padding(group, pieces) / share

    def least_product_seconds(self, group: Group, pieces: Pieces) -> np.ndarray | float:
        """What products and convolutions take at least, whatever their FLOPs; 0 of all else."""
        unit, convolutions = self.arrays.backend.matrix_unit, self.arrays.backend.convolutions
        of_images = convolutions.grouped_seconds(group, pieces), convolutions.lone_seconds(group, pieces)
        return np.maximum(unit.seconds(group, pieces), np.maximum(*of_images))

    def stream_seconds(
        self,
        group: Group,
        pieces: Pieces,
        wants: Sequence[Sequence[Layout]],
        makes: Sequence[Sequence[Layout]],
        finished: np.ndarray,
    ) -> np.ndarray | float:
        """What the vector unit takes of a product, or of what ends one, per strategy.

        It packs and writes results, and reads what else they are made of. Operands of a product go to the matrix unit
        as they are, unless the chip has no room for them. What is stored is summed up while it is packed.

        Args:
            pieces: factor -> into how many pieces each strategy splits it.
            wants: the layouts of what it reads.
            makes: the layouts of what it makes.
            finished: whether a collective finishes the result, so that it is stored whoever reads it.
        """
        if group.is_recomputed and not group.is_stored_by_product:
            return 0.0
        first, backend, none = group.equations[0], self.arrays.backend, np.zeros(1)
        written, elements, packed = none, none, none
        for made, layouts in zip(group.outputs, makes, strict=True):
            size, itemsize = self.arrays.sizes(made.value, layouts), self.arrays.itemsizes.stored(made.value)
            outside = self.traffic.outside(made.value, size)
            if math.isinf(self.traffic.kept_share(made.value)):
                outside = size = size * finished
            written, elements = written + outside, np.maximum(elements, size / itemsize)
            packed = packed + (itemsize < STREAMED_BYTES) * size / itemsize
        uses = list(zip(group.uses, wants, strict=True))
        made_here = [pair for pair in uses if self._is_made_here(group, pair[0])]
        read: np.ndarray | float
        if group.contracts:
            sizes = (
                self.arrays.sizes(use.value, want) for use, want in uses if use.value.id not in self.traffic.instead
            )
            read = sum((np.where(size > backend.on_chip_bytes, size, 0.0) for size in sizes), start=none)
        else:
            before = group.read_before or frozenset()
            read = self.traffic.read_bytes((pair for pair in uses if pair not in made_here), before, streaming=True)
            apart = ~self._runs_in_product(group, wants)
            read = read + sum((self.arrays.sizes(use.value, want) * apart for use, want in made_here), start=none)
            read = read + self.traffic.read_bytes(made_here, {*self.products, *before}, streaming=True)
        reduced = none
        if facts_of(first.primitive).work is FlopRule.REDUCTION and not group.runs_beside:
            lies_nowhere = (
                (use.value, want) for use, want in made_here if math.isinf(self.traffic.kept_share(use.value))
            )
            taken_in = (self.arrays.sizes(*one) / self.arrays.itemsizes.stored(one[0]) for one in lies_nowhere)
            reduced = functools.reduce(np.maximum, taken_in, none)
        taken = backend.streams.seconds(
            elements,
            read,
            written,
            reduced,
            packed,
            self.topology.memory_bandwidth,
            is_alone=False,
        )
        return np.where(product_sizes(group, pieces).is_with_vector, 0.0, taken) if is_matrix_product(first) else taken

    def _is_made_here(self, group: Group, use: Use) -> bool:
        """Whether the operation that ends with `group` makes what this reads: the product, or what is summed up."""
        product = self.products.get(use.value.id) if group.ends_product else None
        return product is not None and not (group.fuses and product.outputs[0].value is not use.value)

    def ended(self, group: Group) -> tuple[Use, Group] | None:
        """What a group reads of the product that one operation makes together with it, and this product."""
        if not self.arrays.backend.streams.counts_product(group):
            return None
        made_here = (use for use in group.uses if self._is_made_here(group, use))
        return next(((use, self.products[use.value.id]) for use in made_here), None)

    def figures(self, group: Group) -> tuple | None:
        """What of the product that a group ends decides how long the matrix unit works on that."""
        found = self.ended(group)
        if found is None:
            return None
        ended, product = found
        first = product.equations[0]
        reads = tuple((self.traffic.figures(use.value), use.dims) for use in product.uses)
        made = product.results[first.index][0], first.outputs[0].shape, tuple(product.sizes.items())
        work = first.primitive, self.flops(first), compute_dtype((first,)), first.params.get(TURNS)
        return group.uses.index(ended), group.feeds_no_state, product.feeds_products, *work, reads, made

    def product_lead_seconds(self, group: Group, wants: Sequence[Sequence[Layout]]) -> np.ndarray | float:
        """How long the matrix unit is at work on the product that a group ends, while others wait; per strategy.

        Memory reads for the product in this time. It has the layout in which the group wants it.
        """
        found = self.ended(group)
        if found is None:
            return 0.0
        ended, product = found
        if not _has_shape_of(product, ended):
            return 0.0
        pieces = self._pieces(product, wants[group.uses.index(ended)])
        ahead = np.maximum(0.0, self._multiplying_seconds(product, pieces) - self._reading_seconds(product, pieces))
        return ahead * self._runs_in_product(group, wants)

    def _pieces(self, product: Group, layouts: Sequence[Layout]) -> Pieces:
        """Factor of a product -> into how many pieces each of the layouts of its result splits that."""
        pieces = {factor: np.ones(len(layouts)) for factor in product.sizes}
        for dim, factors in enumerate(product.results[product.equations[0].index][0]):
            if factors:
                pieces[factors[0]] = np.array([float(shards(layout[dim], self.arrays.mesh)) for layout in layouts])
        return pieces

    def _multiplying_seconds(self, product: Group, pieces: Pieces) -> np.ndarray:
        """Of the matrix unit, per layout of the result."""
        first = product.equations[0]
        work = self.flops(first) / _split(product.factors_of(first), pieces) * self.padding(product, first, pieces)
        multiplied = compute_seconds(work, 0.0, compute_dtype((first,)), self.topology)
        return np.maximum(multiplied, self.least_product_seconds(product, pieces))

    def _reading_seconds(self, product: Group, pieces: Pieces) -> np.ndarray:
        """Of memory, for the operands of a product; per layout of its result."""

        def read(use: Use) -> np.ndarray:
            whole = math.prod(use.value.shape) * self.arrays.itemsizes.stored(use.value)
            return self.traffic.outside(use.value, whole / _split(itertools.chain(*use.dims), pieces))

        return functools.reduce(np.add, map(read, product.uses)) / self.topology.memory_bandwidth

    def _runs_in_product(self, group: Group, wants: Sequence[Sequence[Layout]]) -> np.ndarray:
        """Whether a group runs in the operation of the product that it ends, per strategy.

        It does not if a collective finishes the product. That is taken to be so of gradients that state is updated by,
        which devices sum up and no product reads. It is also where devices want the same part of the product, if what
        they save by sharing out its sum takes longer than the all_reduce of that. What is laid out anew in between
        counts as shared out.
        """
        found = self.ended(group)
        if found is None:
            return np.array([False])
        ended, product = found
        devices = math.prod(self.arrays.mesh.values())
        updates_state = group.feeds_only_results and not group.feeds_no_state
        if updates_state and not product.feeds_products and devices > 1:
            return np.array([False])
        layouts = wants[group.uses.index(ended)]
        idle = [_idle_axes(layout, self.arrays.mesh) for layout in layouts]
        if not _has_shape_of(product, ended):
            return np.array([not axes for axes in idle])
        sharing = np.array([float(shards(axes, self.arrays.mesh)) for axes in idle])
        pieces = self._pieces(product, layouts)
        alone = np.maximum(self._multiplying_seconds(product, pieces), self._reading_seconds(product, pieces))
        reduced = [
            collective_seconds("all_reduce", axes, size, self.arrays.mesh, self.topology)
            for axes, size in zip(idle, self.arrays.sizes(ended.value, layouts), strict=True)
        ]
        return alone * (1 - 1 / sharing) <= np.array(reduced)


def _has_shape_of(product: Group, ended: Use) -> bool:
    """Whether what a group reads of a product has the dims of the product itself."""
    return ended.value.shape == product.equations[0].outputs[0].shape


def _split(factors: Iterable[int], pieces: Pieces) -> np.ndarray:
    """Into how many pieces these factors together are split, per strategy."""
    return functools.reduce(np.multiply, (pieces[factor] for factor in set(factors)), np.ones(1))


def _idle_axes(layout: Layout, mesh: MeshShape) -> tuple[str, ...]:
    """The axes along which devices have the same part of what lies so."""
    splitting = set(itertools.chain(*layout))
    return tuple(axis for axis, size in mesh.items() if size > 1 and axis not in splitting)
