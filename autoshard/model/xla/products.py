"""Products: operands that XLA copies in another order for them, and products of a matrix and a vector.

XLA's CPU backend copies operands whose dims it wants in another order. Source: the heaps of compiled CPU programs.
`tests/end_to_end/test_what_xla_does.py` compiles models for CPU, and `tests/model/test_lifetimes.py` has products of
all orders by hand.

XLA for TPU multiplies a matrix and a vector elementwise, and sums that up. Its matrix unit has no part in that, so the
matrix is read as it is, neither rounded nor kept in the chip. A batch of such products goes to the matrix unit. Source:
the cycles that libtpu notes on such products. `tests/mesh/test_targets.py` compiles some.

XLA for TPU makes Fourier transforms of matrix products: each dim is multiplied by the matrix of its transform, in three
products of real numbers, each in several passes of bfloat16. A long dim is transformed as two whose sizes multiply to
its own. Source: the cycles that libtpu notes on transforms of 64 to 2,048 points. The same test compiles one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autoshard.model.equations import is_kernel_gradient, is_matrix_product
from autoshard.model.groups import FactorDims, Group, Use
from autoshard.program import Equation


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
        left, right = group.operands[first.index]
        sizes = {factor: group.sizes[factor] / pieces[factor] for factor in _factors(left) | _factors(right)}
        (made,) = group.results[first.index]
        first_own, second_own = _factors(left) - _factors(right), _factors(right) - _factors(left)
        sides = first_own, second_own, _factors(left) & _factors(right) & _factors(made)
        rows, columns, batch = (
            math.prod((sizes[factor] for factor in side & sizes.keys()), start=np.ones(1)) for side in sides
        )
        read = math.prod(sizes.values(), start=np.ones(1)) * first.inputs[0].dtype.itemsize
        return np.where(((rows <= 1) | (columns <= 1)) & (batch <= 1), read / share, 0.0)


@dataclass(frozen=True)
class FourierProducts:
    """What Fourier transforms are made of, where these are matrix products."""

    passes: int = 0  # of the matrix unit, for one product of float32 numbers; 0: they are no matrix products
    longest: int = 256  # points that one matrix transforms

    def flops(self, equation: Equation) -> float:
        """FLOPs of a transform at the rate of the matrix unit.

        Args:
            equation: an `fft`.
        """
        lengths = equation.params["fft_lengths"]
        read, made = (math.prod(value.shape) for value in (equation.inputs[0], equation.outputs[0]))
        halved = min(read, made)  # of real numbers all but the last dim are transformed with half of the last one
        elements = [halved] * (len(lengths) - 1) + [max(read, made)]
        return 2.0 * _REAL_PRODUCTS * self.passes * sum(map(operator.mul, elements, map(self._rows, lengths)))

    def _rows(self, points: int) -> int:
        """How many numbers one number of a transform of so many points is a sum of, over all its products."""
        if points <= self.longest:
            return points
        part = max(size for size in range(1, math.isqrt(points) + 1) if points % size == 0)
        return points if part == 1 else self._rows(part) + self._rows(points // part)


_REAL_PRODUCTS = 3  # for one product of complex numbers


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
    return list(wanted) != sorted(wanted)
