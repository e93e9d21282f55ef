"""``X A, X B = X [A B]``: products that share an operand as one, as of queries, keys and values, or gate and up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.jaxprs import aval_of
from autoshard.rewrites.graph import BodyGraph
from autoshard.rewrites.product import Atom, Label, Operand, Product, ordered
from autoshard.rewrites.rewrite import Match, register
from autoshard.rewrites.rules.joining import JOINED, Concatenation


@dataclass(frozen=True)
class _Factor:
    """One of the products that share an operand, labelled alike: shared dims by their place, its own as they come."""

    product: Product
    own: Operand


def _factor(product: Product, side: int) -> tuple[tuple[Any, ...], _Factor]:
    """A product as a factor of one of its operands; and what factors that can be fused have in common."""
    shared, own = product.operands[side], product.operands[1 - side]
    names: dict[Label, Label] = {label: ("shared", i) for i, label in enumerate(shared.labels)}
    free = [label for label in own.labels if label not in names]
    names |= {label: ("own", i) for i, label in enumerate(free)}
    named = product.renamed(names)
    own = named.operands[1 - side]
    used = frozenset(label for label in own.labels if label[0] == "shared")  # type: ignore[index]
    kept = frozenset(named.result) & used
    return (shared.atom, side, named.how, used, kept, len(free)), _Factor(named, own)


@register("fused_products", "X A, X B = X [A B]")
def fused_products(graph: BodyGraph) -> Iterator[Match]:
    """Products of one operand, with others of one shape or of shapes that differ in one dim, as one product."""
    groups = defaultdict[tuple[Any, ...], list[_Factor]](list)
    for product in graph.products.values():
        for side in range(2):
            key, factor = _factor(product, side)
            if all(factor.own.atom is not other.own.atom for other in groups[key]):
                groups[key].append(factor)
    for key, factors in groups.items():
        alike = defaultdict[tuple[int, ...], list[_Factor]](list)
        for factor in factors:
            alike[_canonical_shape(factor)].append(factor)
        subsets = [factors, *alike.values()] if len(alike) > 1 else [factors]
        for several in subsets:
            joining = Concatenation.of([_canonical_shape(one) for one in several], graph.devices)
            if len(several) > 1 and joining is not None:
                yield _fused(key[0], several, joining)


def _canonical(factor: _Factor) -> list[Label]:
    """The labels of its own operand in the order in which all factors have them."""
    return sorted(factor.own.labels)  # type: ignore[type-var]


def _canonical_shape(factor: _Factor) -> tuple[int, ...]:
    return tuple(factor.own.sizes[label] for label in _canonical(factor))


def _fused(shared: Atom, factors: Sequence[_Factor], joining: Concatenation) -> Match:
    first = factors[0]
    side = 0 if first.product.left.atom is not first.own.atom else 1
    if first.product.left.atom is first.product.right.atom:
        side = 0
    common = first.product.operands[side]
    canonical = _canonical(first)
    label = None if joining.dim is None else canonical[joining.dim]
    joined_labels = joining.labels(canonical)

    def build(x: Any, *others: Any) -> list[Any]:
        own = joining.joined(
            [ordered(array, one.own.labels, canonical) for array, one in zip(others, factors, strict=True)]
        )
        out = [label for label in first.product.result if label in common.labels]
        free = [one for one in joined_labels if one not in common.labels]
        made = first.product.contract(x, common.labels, own, joined_labels, [*out, *free])
        parts = joining.taken_apart(made, [*out, *free], label)
        labels = [one for one in (*out, *free) if one != JOINED]
        return [ordered(part, labels, one.product.result) for part, one in zip(parts, factors, strict=True)]

    results = tuple(one.product.out for one in factors)
    return Match(
        results, (shared, *(one.own.atom for one in factors)), build, ("fused", side, len(aval_of(shared).shape))
    )
