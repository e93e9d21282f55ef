"""An equation and the layouts around it in, the factors that XLA's SPMD partitioner splits out.

The partitioner decides operation by operation (openxla/xla, xla/service/spmd/spmd_partitioner.cc):

- A matrix product or a convolution: `products.py`.
- A reduction works on its operands as they lie, those after the first as the first does. The partial results are
  reduced, and the result then goes where it should.
- Everything else is computed in the layout of its result: operands go there first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.layout import Layout, MeshShape
from autoshard.model.equations import contracts
from autoshard.model.partitioner.products import Product, Split, product_split
from autoshard.program import Equation, Value
from autoshard.propagation.projection import factors_of_layout
from autoshard.propagation.rule import Rule


def split_of(
    equation: Equation, rule: Rule, operands: Sequence[Layout | None], results: Sequence[Layout], mesh: MeshShape
) -> Split:
    """The factors of an equation that each device has a piece of.

    Args:
        operands: how they lie; None for literals.
        results: how they are to lie.
    """
    if rule.given:
        return rule.given
    if contracts(equation) and operands[0] is not None and operands[1] is not None:
        tensors = *equation.inputs[:2], equation.outputs[0]
        shapes = tuple(value.shape for value in tensors)
        layouts = operands[0], operands[1], results[0]
        sizes = tuple(value.itemsize if isinstance(value, Value) else value.dtype.itemsize for value in tensors)
        return product_split(Product(rule, shapes, layouts, sizes, mesh))
    if rule.reduction:
        return _of_tensors(zip(rule.operands, operands, strict=True), rule, mesh)
    return _of_tensors(zip(rule.results, results, strict=True), rule, mesh)


def _of_tensors(tensors, rule: Rule, mesh: MeshShape) -> Split:
    """The factors that tensors split, the first ones first; what must be whole is left out."""
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for dims, layout in tensors:
        if layout is None:
            continue
        for factor, axes in factors_of_layout(dims, layout, rule.sizes, mesh).items():
            if factor in found or factor not in rule.splittable | rule.exchanged or not taken.isdisjoint(axes):
                continue
            found[factor] = axes
            taken.update(axes)
    return found
