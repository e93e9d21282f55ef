"""Sorts on GPU: elements are compared and exchanged in steps, of which long rows take more.

XLA sorts rows by a bitonic network: rows of n elements take k (k + 1) / 2 steps, with k the logarithm of n (Batcher,
1968). A stable sort exchanges positions, too. Source: `python benchmarks/kernels.py --sorts` on an H100. A single row,
and narrow numbers in rows of 65,536, go to CUB and take far less. `tests/model/xla/test_sorts.py` holds six of the
measured figures against prices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from autoshard.model.groups import Group
from autoshard.program import Equation

POSITION_BYTES = 4  # of a position that is sorted with an element
_KEPT_OF, _MOST_KEPT = 1024, 16  # elements, of which a kernel keeps so many


@dataclass(frozen=True)
class Sorts:
    """Seconds of a step, of each element on a device."""

    element_seconds: float = 0.0
    byte_seconds: float = 0.0  # more, for each byte of all that moves with it

    def seconds(self, group: Group) -> float:
        """Of whole arrays on one device; 0 of what sorts nothing, or where sorts cost what they move."""
        (first, *_) = group.equations
        if not self.element_seconds:
            return 0.0
        if first.primitive == "sort":
            # who leaves some of what is sorted unread sorts positions anyway
            positions = POSITION_BYTES * (first.params["is_stable"] and len(group.outputs) == len(first.inputs))
            moved = sum(one.dtype.itemsize for one in first.inputs) + positions
            length = first.inputs[0].shape[first.params["dimension"]]
        elif first.primitive in ("approx_top_k", "top_k") and not is_kept_by_kernel(first):
            moved, length = first.inputs[0].dtype.itemsize + POSITION_BYTES, first.inputs[0].shape[_axis(first)]
        else:
            return 0.0
        return self.of_rows(math.prod(first.inputs[0].shape), length, moved)

    def of_rows(self, elements: int, length: int, moved: float) -> float:
        """Of so many elements in rows of a length.

        Args:
            moved: bytes that move with each element.
        """
        doublings = math.ceil(math.log2(max(2, length)))
        steps = doublings * (doublings + 1) / 2
        return elements * steps * (self.element_seconds + self.byte_seconds * moved)


def is_kept_by_kernel(equation: Equation) -> bool:
    """Whether a kernel keeps the few largest of many elements (xla/backends/gpu: `TopKSpecializer`)."""
    operand, few = equation.inputs[0], equation.params["k"] <= _MOST_KEPT
    return few and operand.dtype in (np.float32, jnp.bfloat16) and operand.shape[_axis(equation)] >= _KEPT_OF


def _axis(equation: Equation) -> int:
    """Along which dim of its operand it keeps the largest."""
    return equation.params["axis" if equation.primitive == "top_k" else "reduction_dimension"]
