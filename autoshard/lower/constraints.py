"""A program and its annotations in, the values that get a constraint out, each with its layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autoshard.layout import Layout
from autoshard.plans.annotations import Annotations
from autoshard.program import Equation, Program, Value


def constraints_of(program: Program, annotations: Annotations) -> dict[int, Layout]:
    """The constraints of inner values: value -> layout. All that was planned, but arguments and what follows.

    Of a product that is only transposed, as gradients of weights are, the transposed one gets the constraint: XLA makes
    the product in that order then, and would otherwise turn all that meets the gradient, weight and moments, round.
    """
    arguments = {value.id for value in program.arguments}
    free = arguments | set(annotations.implied)
    constraints = {value: layout for value, layout in annotations.homes.items() if value not in free}
    for product, equation in _transposed_products(program, annotations):
        if product in free:
            continue
        home = constraints.pop(product)
        constraints[equation.outputs[0].id] = tuple(home[dim] for dim in equation.params["permutation"])
    return constraints


def _transposed_products(program: Program, annotations: Annotations) -> Iterator[tuple[int, Equation]]:
    """Products that nothing but a transpose reads, and that as they are."""
    products = {
        equation.outputs[0].id
        for equation in program.equations
        if equation.primitive == "dot_general" and equation.index not in annotations.scatters
    }
    readers = Counter(value.id for value in program.results if isinstance(value, Value))
    readers.update(x.id for equation in program.equations for x in equation.inputs if isinstance(x, Value))
    for equation in program.equations:
        if equation.primitive == "transpose" and isinstance(product := equation.inputs[0], Value):
            home = annotations.homes.get(product.id)
            as_is = annotations.wants.get((equation.index, 0), home) == home
            if product.id in products and home is not None and readers[product.id] == 1 and as_is:
                yield product.id, equation
