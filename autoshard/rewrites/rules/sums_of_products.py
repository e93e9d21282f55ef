"""``A B + C D = [A C] [B; D]``, and ``A B + A C = A (B + C)``: sums of products as one product."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.jaxprs import JaxprEqn
from autoshard.rewrites.graph import BodyGraph
from autoshard.rewrites.product import Atom, Label, Product, ordered
from autoshard.rewrites.rewrite import Match, register
from autoshard.rewrites.rules.joining import Concatenation


@dataclass(frozen=True)
class _Addend:
    """A product that is added up. Dims of its result are labelled by their place in the sum."""

    place: int  # among the addends
    product: Product

    @property
    def summed(self) -> list[Label]:
        """The labels over which it is summed."""
        return [label for label in self.product.left.labels if label not in self.product.result]


def _addends(graph: BodyGraph, atoms: Sequence[Atom]) -> list[_Addend]:
    """The addends that are products and that nothing else reads."""
    made = []
    for place, atom in enumerate(atoms):
        found = graph.scaled_product(atom)
        if found is None or found.scales:
            continue
        between = [found.product.out, *(eqn.outvars[0] for eqn in found.through)]
        if all(map(graph.is_read_once, between)):
            named = found.product.renamed({label: ("out", i) for i, label in enumerate(found.labels)})
            result = tuple(("out", i) for i in range(len(found.labels)))
            made.append(_Addend(place, Product(named.eqn, named.left, named.right, result)))
    return made


def _total(eqn: JaxprEqn, atoms: Sequence[Atom], several: Sequence[_Addend], inputs: Sequence[Atom], form: Any, build: Any) -> Match:  # fmt: skip  # noqa: E501
    """A sum in which some addends are built at once, and the others added to that."""
    places = {one.place for one in several}
    others = tuple(atom for place, atom in enumerate(atoms) if place not in places)

    def total(*arrays: Any) -> list[Any]:
        return [functools.reduce(jax.lax.add, arrays[len(inputs) :], build(*arrays[: len(inputs)]))]

    return Match((eqn.outvars[0],), (*inputs, *others), total, form)


@register("sum_of_products", "A B + C D = [A C] [B; D]")
def sum_of_products(graph: BodyGraph) -> Iterator[Match]:
    """Products that are added up, as one that sums over both: it leaves one partial sum."""
    for eqn, atoms in graph.sums():
        groups = defaultdict[tuple[Any, ...], list[_Addend]](list)
        for addend in map(_turned, _addends(graph, atoms)):
            outs = [frozenset(one.labels) & frozenset(addend.product.result) for one in addend.product.operands]
            groups[addend.product.how, *outs, len(addend.summed)].append(addend)
        for several in groups.values():
            if len(several) > 1 and (match := _as_one(graph, eqn, atoms, several)) is not None:
                yield match


def _turned(addend: _Addend) -> _Addend:
    """The addend with that operand left which has the first dim of the result that is not in both."""
    product = addend.product
    for label in product.result:
        left, right = (label in one.labels for one in product.operands)
        if left != right:
            if right:
                return _Addend(addend.place, Product(product.eqn, product.right, product.left, product.result))
            break
    return addend


def _as_one(graph: BodyGraph, eqn: JaxprEqn, atoms: Sequence[Atom], several: Sequence[_Addend]) -> Match | None:
    first = several[0].product
    out = first.result
    # Dims that are summed come first, so that both operands are joined in the same one.
    kept = [[label for label in out if label in one.labels] for one in first.operands]
    orders = [[[*one.summed, *kept[side]] for one in several] for side in range(2)]
    shapes = [
        [tuple(one.product.sizes[label] for label in order) for one, order in zip(several, orders[side], strict=True)]
        for side in range(2)
    ]
    joining = Concatenation.of(shapes[0], graph.devices)
    if joining is None or joining != Concatenation.of(shapes[1], graph.devices):
        return None
    labels = [joining.labels(orders[side][0]) for side in range(2)]
    operands = [one.product.operands[side] for side in range(2) for one in several]

    def build(*arrays: Any) -> Any:
        count = len(several)
        placed = [
            ordered(array, operand.labels, order)
            for array, operand, order in zip(arrays, operands, [*orders[0], *orders[1]], strict=True)
        ]
        left, right = joining.joined(placed[:count]), joining.joined(placed[count:])
        return first.contract(left, labels[0], right, labels[1], out)

    return _total(eqn, atoms, several, [one.atom for one in operands], ("one product", len(several)), build)


@register("common_factor", "A B + A C = A (B + C)")
def common_factor(graph: BodyGraph) -> Iterator[Match]:
    """Products of one operand that are added up, as one product with the sum of the others."""
    for eqn, atoms in graph.sums():
        groups = defaultdict[tuple[Any, ...], list[_Addend]](list)
        for addend in _addends(graph, atoms):
            for side in range(2):
                shared = addend.product.operands[side]
                names = {label: ("shared", i) for i, label in enumerate(shared.labels) if label in addend.summed}
                named = addend.product.renamed(names)
                key = (
                    shared.atom,
                    side,
                    named.how,
                    named.operands[side].labels,
                    frozenset(named.operands[1 - side].labels),
                )
                if all(addend.place != other.place for other in groups[key]):
                    groups[key].append(_Addend(addend.place, named))
        for (_, side, *_), several in groups.items():
            if len(several) > 1:
                yield _factored(eqn, atoms, several, side)


def _factored(eqn: JaxprEqn, atoms: Sequence[Atom], several: Sequence[_Addend], side: int) -> Match:
    first = several[0].product
    shared, own = first.operands[side], first.operands[1 - side]
    owns = [one.product.operands[1 - side] for one in several]

    def build(x: Any, *others: Any) -> Any:
        alike = [ordered(array, one.labels, own.labels) for array, one in zip(others, owns, strict=True)]
        return first.contract(x, shared.labels, functools.reduce(jax.lax.add, alike), own.labels, first.result)

    return _total(eqn, atoms, several, [shared.atom, *(one.atom for one in owns)], ("factored", side), build)
