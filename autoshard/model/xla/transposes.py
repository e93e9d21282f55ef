"""Transposes: XLA's CPU backend copies operands of products whose dims it wants in another order.

Source: the heaps of compiled CPU programs. `tests/end_to_end/test_what_xla_does.py` compiles models for CPU, and
`tests/model/test_lifetimes.py` has products of all orders by hand.
"""

from __future__ import annotations

from autoshard.model.equations import is_kernel_gradient, is_matrix_product
from autoshard.model.groups import Use


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
