"""The matrix unit of a TPU core: products of a batch, each of which it starts anew.

A product of a batch takes as long as filling and emptying the unit, however few rows and columns it has. So many small
products take longer than their FLOPs say. One operand stands in the unit, in squares of 128 x 128 numbers that are
filled up; the rows of the other stream past it. XLA lets that operand stream with which the product is faster.

Source: the cycles that libtpu notes on v5e programs of 256 and 512 products of 3 to 16 rows and columns, 11 to 15 each,
and on 14 single products of 1 to 4,096 rows, columns and summed numbers: 256 cycles, and those of the padded FLOPs.
`tests/model/xla/test_units.py` compiles some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.model.equations import is_matrix_product
from autoshard.model.groups import Group
from autoshard.model.xla.products import REAL_PRODUCTS, product_sizes


@dataclass(frozen=True)
class MatrixUnit:
    """How long products take on it beside their FLOPs."""

    clock: float = 1.0  # cycles per second
    product_cycles: float = 0.0  # of one product of a batch, at least
    side: int = 0  # rows and columns of a square; 0: it is not known

    def seconds(self, group: Group, pieces: Mapping[int, np.ndarray]) -> np.ndarray | float:
        """What the products of a batch take at least, per strategy; 0 where there is no batch, or no matrix unit.

        Args:
            group: what is computed.
            pieces: factor -> into how many pieces each strategy splits it.
        """
        (first, *_) = group.equations
        if not self.product_cycles or not is_matrix_product(first):
            return 0.0
        _, (batch, _) = first.params["dimension_numbers"]
        left = group.operands[first.index][0]
        if not any(left[dim] for dim in batch):
            return 0.0
        sizes = product_sizes(group, pieces)
        products = sizes.batch * (REAL_PRODUCTS if first.outputs[0].dtype.kind == "c" else 1)
        return np.where(sizes.is_with_vector, 0.0, products * self.product_cycles / self.clock)

    def padding(self, group: Group, pieces: Mapping[int, np.ndarray]) -> np.ndarray | float:
        """How many times its FLOPs a product takes, since the operand that stands in the unit is filled up.

        Args:
            group: what is computed.
            pieces: factor -> into how many pieces each strategy splits it.
        """
        (first, *_) = group.equations
        if not self.side or not is_matrix_product(first):
            return 1.0
        sizes = product_sizes(group, pieces)
        rows, summed, columns = (
            np.ceil(size / self.side) * self.side / size for size in (sizes.rows, sizes.summed, sizes.columns)
        )
        return np.where(sizes.is_with_vector, 1.0, summed * np.minimum(rows, columns))
