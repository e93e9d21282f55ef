"""Products: operands that XLA copies in another order for them, and products of a matrix and a vector.

XLA's CPU backend copies operands whose dims it wants in another order. Source: the heaps of compiled CPU programs.
`tests/end_to_end/test_what_xla_does.py` compiles models for CPU, and `tests/model/test_lifetimes.py` has products of
all orders by hand.

XLA for TPU multiplies a matrix and a vector elementwise, and sums that up. Its matrix unit has no part in that, so the
matrix is read as it is, neither rounded nor kept in the chip. So it does with a batch of such products if the vectors
are matrices of one row or column, or if the matrices have fewer than 64 rows or columns; plain vectors times larger
ones go to the matrix unit. Products of two vectors are always elementwise. Source: what libtpu makes of 197 such
products for v5e. `tests/mesh/test_targets.py` compiles some, `tests/model/xla/test_units.py` batches.

XLA for TPU makes Fourier transforms of matrix products: each dim is multiplied by the matrix of its transform, in three
products of real numbers, each in several passes of bfloat16. A long dim is transformed as two whose sizes multiply to
its own. Source: the cycles that libtpu notes on transforms of 17 to 2,048 points. The same test compiles one, and
`tests/model/xla/test_small_programs.py` a short one.

XLA for TPU lays the batch dims of products outside the dims of their matrices: tiles are filled with rows and columns,
however few these are. Source: the layouts of compiled v5e programs. `tests/model/xla/test_softmaxes.py` compiles
attention over a length that fills no tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.model.equations import is_kernel_gradient, is_matrix_product
from autoshard.model.groups import FactorDims, Group, Use
from autoshard.model.xla.tiles import Tile, padded_size
from autoshard.program import Equation, Program

_LEAST_IN_UNIT = 64  # rows and columns of the matrices of a batch whose products with plain vectors the unit makes


def matrix_dims(program: Program) -> dict[int, tuple[int, ...]]:
    """Values of the shapes that batched products read and make -> the dims of their matrices. Arguments lie otherwise.

    What a loop stacks of such values, or slices from a stack, has them one dim further in.
    """
    found: dict[tuple[int, ...], set[int]] = {}
    for equation in program.equations:
        if equation.primitive != "dot_general":
            continue
        (_, (left_batch, right_batch)) = equation.params["dimension_numbers"]
        pairs = zip(
            (*equation.inputs, *equation.outputs), (left_batch, right_batch, range(len(left_batch))), strict=True
        )
        dims = [(one.shape, _matrix(one.shape, batch)) for one, batch in pairs]
        if left_batch and all(len(matrix) > 1 for _, matrix in dims):
            for shape, matrix in dims:
                found.setdefault(shape, set()).update(matrix)
    for equation in program.equations:
        if equation.primitive == "scan_stack" and equation.inputs[0].shape in found:
            found[equation.outputs[0].shape] = {dim + 1 for dim in found[equation.inputs[0].shape]}
    made_inside = (output for equation in program.equations for output in equation.outputs)
    return {value.id: tuple(sorted(found[value.shape])) for value in made_inside if value.shape in found}


def _matrix(shape: Sequence[int], batch: Sequence[int]) -> list[int]:
    """The dims of an operand or result that are no batch, those of one element aside."""
    return [dim for dim, size in enumerate(shape) if dim not in batch and size > 1]


@dataclass(frozen=True)
class ProductSizes:
    """Dims of a matrix product on one device, per strategy."""

    batch: np.ndarray
    rows: np.ndarray
    summed: np.ndarray
    columns: np.ndarray
    has_row_dim: bool  # whether the first operand has a dim for its rows, and be it of one
    has_column_dim: bool  # the same of the second operand and its columns

    @property
    def multiplications(self) -> np.ndarray:
        return self.batch * self.rows * self.summed * self.columns

    @property
    def is_with_vector(self) -> np.ndarray:
        """Whether it is elementwise work: products of vectors, or of matrices of one row or column.

        Plain vectors times the matrices of a batch are products, if these are not small.
        """
        one_row, one_column, is_single = self.rows <= 1, self.columns <= 1, self.batch <= 1
        is_small = is_single | (np.minimum(self.summed, np.maximum(self.rows, self.columns)) < _LEAST_IN_UNIT)
        row_is_alone = one_row & (is_small | self.has_row_dim)
        return (one_row & one_column) | row_is_alone | (one_column & (is_small | self.has_column_dim))


def product_sizes(group: Group, pieces: Mapping[int, np.ndarray]) -> ProductSizes:
    """The dims of the product that a group begins with.

    Args:
        pieces: factor -> into how many pieces each strategy splits it.
    """
    (first, *_) = group.equations
    left, right = map(_factors, group.operands[first.index][:2])
    (made,) = map(_factors, group.results[first.index])

    def size(factors: set[int]) -> np.ndarray:
        return math.prod((group.sizes[factor] / pieces[factor] for factor in factors), start=np.ones(1))

    summed, batch = first.params["dimension_numbers"]
    has_row_dim, has_column_dim = (
        len(value.shape) > len(summed[side]) + len(batch[side]) for side, value in enumerate(first.inputs[:2])
    )
    return ProductSizes(
        size(left & right & made),
        size(left - right),
        size(left & right - made),
        size(right - left),
        has_row_dim,
        has_column_dim,
    )


def multiplies_vector(group: Group) -> bool:
    """Whether a group begins with elementwise products that make several numbers."""
    (first, *_) = group.equations
    if not is_matrix_product(first) or math.prod(first.outputs[0].shape) <= 1:
        return False
    return bool(product_sizes(group, dict.fromkeys(group.sizes, np.ones(1))).is_with_vector.item())


@dataclass(frozen=True)
class VectorProducts:
    """How fast a product of a matrix and a vector goes over the matrix, where it is made elementwise."""

    bandwidth_share: Mapping[int, float] = field(default_factory=dict)  # bytes per element -> share of that of memory

    def bytes_read(self, group: Group, pieces: Mapping[int, np.ndarray]) -> np.ndarray | float:
        """Bytes that memory reads in the time of the product, per strategy; 0 where it is no product with a vector.

        Args:
            group: what is computed.
            pieces: factor -> into how many pieces each strategy splits it.
        """
        (first, *_) = group.equations
        if not is_matrix_product(first) or first.inputs[0].dtype.itemsize not in self.bandwidth_share:
            return 0.0
        share = self.bandwidth_share[first.inputs[0].dtype.itemsize]
        sizes = product_sizes(group, pieces)
        read = sizes.multiplications * first.inputs[0].dtype.itemsize
        return np.where(sizes.is_with_vector, read / share, 0.0)


@dataclass(frozen=True)
class FourierProducts:
    """What Fourier transforms are made of, where these are matrix products."""

    passes: int = 0  # of the matrix unit, for one product of float32 numbers; 0: they are no matrix products
    longest: int = 256  # points that one matrix transforms
    side: int = 1  # rows and columns of the matrix unit, to which the matrix of a transform is filled up
    memory_passes: float = 0.0  # times that three products are read and their sums written, of what is transformed

    def flops(self, equation: Equation, tile: Tile | None) -> float:
        """FLOPs of a transform at the rate of the matrix unit, padding included.

        Args:
            equation: an `fft`.
            tile: to which arrays are padded.
        """
        lengths, shapes = equation.params["fft_lengths"], [equation.inputs[0].shape, equation.outputs[0].shape]
        halved, whole = sorted(shapes, key=math.prod)  # of real numbers all but the last dim are half as long
        arrays = [halved] * (len(lengths) - 1) + [whole]
        products = (
            padded_size(shape, tile) * self._summed(points) for shape, points in zip(arrays, lengths, strict=True)
        )
        return 2.0 * REAL_PRODUCTS * self.passes * sum(products)

    def _summed(self, points: int) -> int:
        """How many numbers one number of a transform of so many points is a sum of, over all its products.

        The matrix unit is filled up: it sums 128 numbers for a transform of 17 points.
        """
        if points <= self.longest:
            return -(-points // self.side) * self.side
        part = max(size for size in range(1, math.isqrt(points) + 1) if points % size == 0)
        return points if part == 1 else self._summed(part) + self._summed(points // part)


REAL_PRODUCTS = 3  # for one product of complex numbers


def _factors(dims: FactorDims) -> set[int]:
    return {factor for dim in dims for factor in dim}


def transposes(use: Use) -> bool:
    """Whether XLA's CPU backend makes a transposed copy of this operand; it reads matrices either way round."""
    if is_kernel_gradient(use.equation):
        return use.operand == 0
    if not is_matrix_product(use.equation) or len(use.value.shape) <= 2:
        return False
    contracted, batched = (sides[use.operand] for sides in use.equation.params["dimension_numbers"])
    kept = [dim for dim in range(len(use.value.shape)) if dim not in (*contracted, *batched)]
    wanted = (*batched, *kept, *contracted) if use.operand == 0 else (*batched, *contracted, *kept)
    wide = [dim for dim in wanted if use.value.shape[dim] > 1]
    return wide != sorted(wide)
