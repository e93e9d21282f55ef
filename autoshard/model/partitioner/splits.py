"""An equation and the layouts around it in, the factors that XLA's SPMD partitioner splits out.

The partitioner decides operation by operation (openxla/xla, xla/service/spmd):

- A matrix product or a convolution: `products.py`.
- A reduction works on its operand as it lies. The partial results are reduced, and then go where they should.
- What picks from an array or adds into one, at given places, is split as one of its arrays is: as makes the fewest
  bytes, then as moves the fewest.
- What is joined along a dim that is to be split is split along another one, if it can be.
- Everything else is computed in the layout of its results: operands go there first. Where an operand can have no such
  layout, the result is computed whole and sliced.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from autoshard.layout import Layout, MeshShape, shards
from autoshard.model.equations import contracts
from autoshard.model.partitioner.placed_equation import PlacedEquation, SettledSplit, Split
from autoshard.model.partitioner.products import product_split
from autoshard.program import Equation
from autoshard.propagation.rule import Rule


def split_of(
    equation: Equation, rule: Rule, operands: Sequence[Layout | None], results: Sequence[Layout], mesh: MeshShape
) -> SettledSplit:
    """The factors of an equation that each device has a piece of.

    Args:
        operands: how they lie; None for literals.
        results: how they are to lie.
    """
    if rule.given:
        return SettledSplit(rule.given)
    placed = PlacedEquation.of(equation, rule, operands, results, mesh)
    if not any(placed.splits):
        return SettledSplit({})
    if contracts(equation) and len(placed.tensors) == 3:
        return product_split(placed)
    return SettledSplit(_other_split(equation, rule, placed))


def _other_split(equation: Equation, rule: Rule, placed: PlacedEquation) -> Split:
    """The same of what is no product."""
    read, made = placed.splits[: len(placed.operands)], placed.splits[len(placed.operands) :]
    if not rule.reduction:
        split = (
            _moved_to_other_dim(_first(made, rule), placed)
            if equation.primitive == "concatenate"
            else _first(made, rule)
        )
        return _with_layouts(split, placed)
    if len(read) == 1:
        return _first(read, rule)
    ways = [_first(order, rule) for order in itertools.permutations(placed.splits)]
    return min(ways, key=placed.cost)


def _with_layouts(split: Split, placed: PlacedEquation) -> Split:
    """As much of a split as leaves every tensor in a layout: what a reshape merges behind another dim stays whole."""
    kept: Split = {}
    left = dict(split)
    while True:
        fitting = next((factor for factor in left if placed.has_layouts({**kept, factor: left[factor]})), None)
        if fitting is None:
            return kept
        kept = {**kept, fitting: left.pop(fitting)}


def _moved_to_other_dim(split: Split, placed: PlacedEquation) -> Split:
    """A split of what is joined along a dim that is to be split: another dim takes its axes meanwhile."""
    (result,) = placed.results
    found = dict(split)
    for dim, axes in zip(result.dims, result.layout, strict=True):
        joined = axes and not found.keys() & set(dim)
        others = (factor for other in result.dims for factor in other if factor in placed.rule.splittable)
        for factor in others if joined else ():
            if placed.rule.sizes[factor] % shards((*found.get(factor, ()), *axes), placed.mesh) == 0:
                order = list(placed.mesh)
                found[factor] = tuple(sorted((*found.get(factor, ()), *axes), key=order.index))
                break
    return found


def _first(splits: Iterable[Split], rule: Rule) -> Split:
    """The factors that tensors split, the first tensors first; what must be whole is left out."""
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for split in splits:
        for factor, axes in split.items():
            if factor in found or factor not in rule.splittable | rule.exchanged or not taken.isdisjoint(axes):
                continue
            found[factor] = axes
            taken.update(axes)
    return found
