"""Products of sparse matrices on CPU: XLA stores a row of the other matrix for each element, times the element.

A scatter then adds these rows up. The places of the elements are made again, in bounds. Source: programs of
`bcoo_dot_general` of 5,000 and 50,000 elements. `tests/model/test_workspaces.py` compiles one.
"""

from __future__ import annotations

import math

from autoshard.program import Equation

_PLACE_BYTES = 4  # of one number that says where a row is


def product_bytes(equation: Equation, elements: float, places: float) -> float:
    """Bytes that a `bcoo_dot_general` takes beside its operands and its result.

    Args:
        equation: the product.
        elements: bytes of the sparse matrix's elements on one device.
        places: bytes of their places.
    """
    (_, contracted), (_, batch) = equation.params["dimension_numbers"]
    other = equation.inputs[2].shape
    row = math.prod(size for dim, size in enumerate(other) if dim not in (*contracted, *batch))
    count = elements / equation.inputs[0].dtype.itemsize
    return elements * row + places + count * _PLACE_BYTES
