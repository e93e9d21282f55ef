"""``(A B) C = A (B C)``: chains of products in another order; and ``X (W + A B) = X W + (X A) B``, as for LoRA."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.jaxprs import JaxprEqn, Var
from autoshard.rewrites.graph import BodyGraph, ScaledProduct
from autoshard.rewrites.product import Atom, Label, Operand, Product
from autoshard.rewrites.rewrite import Match, register

# An order that takes this many times the FLOPs of the one that is written is not looked at.
MOST_FLOPS = 2.0


@dataclass(frozen=True)
class _ChainReader:
    """A product that reads the inner one, in labels of which the inner one's are ``("inner", ...)``."""

    product: Product
    other: Operand
    inner: tuple[Operand, Operand]
    result: tuple[Label, ...]

    def order(self, first: int) -> tuple[Label, ...] | None:
        """The labels of what the other operand makes with this one of the inner product; None if that cannot be."""
        one, rest = self.inner[first], self.inner[1 - first]
        if not set(one.labels) & set(self.other.labels):
            return None
        needed = {*rest.labels, *self.result}
        both = dict.fromkeys((*self.other.labels, *one.labels))
        # `dot_general` cannot sum over a dim of one operand alone: what only one has must stay.
        if any(label not in needed and (label in self.other.labels) != (label in one.labels) for label in both):
            return None
        return tuple(label for label in both if label in needed)

    def flops(self, first: int | None) -> float:
        """Of both products in this order; None: as written."""
        sizes = self.other.sizes | self.inner[0].sizes | self.inner[1].sizes

        def points(*labels: Sequence[Label]) -> float:
            return float(math.prod(sizes[label] for label in {one for several in labels for one in several}))

        left, right = (one.labels for one in self.inner)
        if first is None:
            return points(left, right) + points(self.other.labels, self.result)
        made = self.order(first)
        assert made is not None, "the caller looks"
        return points(self.other.labels, self.inner[first].labels) + points(made, self.inner[1 - first].labels)

    def build(self, first: int, left: Any, right: Any, other: Any, scales: Sequence[Any]) -> Any:
        arrays, made = (left, right), self.order(first)
        assert made is not None, "the caller looks"
        part = self.product.contract(other, self.other.labels, arrays[first], self.inner[first].labels, made)
        rest = self.inner[1 - first]
        out = self.product.contract(part, made, arrays[1 - first], rest.labels, self.result)
        return functools.reduce(jax.lax.mul, scales, out)


def _reader(product: Product, side: int, found: ScaledProduct) -> _ChainReader:
    """A product of which one operand is another product, with transposes and numbers between."""
    dims = dict(zip(found.labels, product.operands[side].labels, strict=True))  # label of the inner one -> of the outer
    names: dict[Label, Label] = {
        label: ("outer", dims[label]) if label in dims else ("inner", label) for label in found.product.sizes
    }
    outer: dict[Label, Label] = {label: ("outer", label) for label in product.sizes}
    named, inner = product.renamed(outer), found.product.renamed(names)
    return _ChainReader(product, named.operands[1 - side], inner.operands, named.result)


def _readers(graph: BodyGraph, inner: Product) -> list[tuple[_ChainReader, ScaledProduct]] | None:
    """All products that read one, through transposes and numbers; None if something else reads it."""
    found, waiting = list[tuple[_ChainReader, ScaledProduct]](), [inner.out]
    while waiting:
        var = waiting.pop()
        if var in graph.results:
            return None
        for eqn in graph.readers[var]:
            (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
            if out is not None and out in graph.products:
                product = graph.products[out]
                if eqn.invars[0] is eqn.invars[1]:
                    return None
                scaled = graph.scaled_product(var)
                assert scaled is not None and scaled.product is inner, "the way back"
                found.append((_reader(product, eqn.invars.index(var), scaled), scaled))
            elif isinstance(out, Var) and (scaled := graph.scaled_product(out)) is not None and scaled.product is inner:
                waiting.append(out)
            else:
                return None
    return found


@register("product_chain", "(A B) C = A (B C)")
def product_chain(graph: BodyGraph) -> Iterator[Match]:
    """Two products in another order, where nothing else reads the inner one. All products that read it change."""
    for inner in graph.products.values():
        found = _readers(graph, inner)
        if not found:
            continue
        firsts = [min(_orders(reader), key=reader.flops, default=None) for reader, _ in found]
        before = sum(reader.flops(None) for reader, _ in found)
        if None in firsts or sum(r.flops(f) for (r, _), f in zip(found, firsts, strict=True)) > MOST_FLOPS * before:
            continue
        yield _reordered(inner, found, [first for first in firsts if first is not None])


def _orders(reader: _ChainReader) -> list[int]:
    return [first for first in range(2) if reader.order(first) is not None]


def _reordered(inner: Product, found: Sequence[tuple[_ChainReader, ScaledProduct]], firsts: Sequence[int]) -> Match:
    scales = [scaled.scales for _, scaled in found]
    numbers = [scale for several in scales for scale in several]

    def build(left: Any, right: Any, *others: Any) -> list[Any]:
        given = iter(others[len(found) :])
        return [
            reader.build(first, left, right, other, [next(given) for _ in several])
            for (reader, _), first, other, several in zip(found, firsts, others, scales, strict=False)
        ]

    inputs: list[Atom] = [inner.left.atom, inner.right.atom, *(reader.other.atom for reader, _ in found), *numbers]
    return Match(tuple(reader.product.out for reader, _ in found), tuple(inputs), build, ("chain", tuple(firsts)))


@register("distributed_product", "X (W + A B) = X W + (X A) B")
def distributed_product(graph: BodyGraph) -> Iterator[Match]:
    """Products with a sum, of which one addend is a product, as LoRA writes its weights: the sum is never made."""
    for eqn in graph.jaxpr.eqns:
        if not graph.is_sum(eqn) or eqn.outvars[0] in graph.results:
            continue
        for plain, made in (eqn.invars, reversed(eqn.invars)):
            scaled = graph.scaled_product(made)
            if scaled is None or graph.scaled_product(plain) is not None or isinstance(plain, Var) is False:
                continue
            match = _distributed(graph, eqn, plain, scaled)
            if match is not None:
                yield match
            break


def _distributed(graph: BodyGraph, eqn: JaxprEqn, plain: Atom, scaled: ScaledProduct) -> Match | None:
    """All readers of the sum of an array and a product; None if one of them is no product, or takes more work."""
    (total,) = eqn.outvars
    readers = graph.readers[total]
    outs = [one.outvars[0] for one in readers]
    if not readers or any(out not in graph.products for out in outs) or len(set(outs)) < len(outs):
        return None
    sides = [one.invars.index(total) for one in readers]
    found = [_reader(graph.products[out], side, scaled) for out, side in zip(outs, sides, strict=True)]
    firsts = [min(_orders(reader), key=reader.flops, default=None) for reader in found]
    if None in firsts:
        return None
    inner = scaled.product

    def build(left: Any, right: Any, base: Any, *others: Any) -> list[Any]:
        made, scales = [], others[len(found) :]
        for reader, first, side, other in zip(found, firsts, sides, others, strict=False):
            product = reader.product
            operands = [base, other] if side == 0 else [other, base]
            labels = [one.labels for one in product.operands]
            whole = product.contract(operands[0], labels[0], operands[1], labels[1], product.result)
            assert first is not None, "looked at above"
            made.append(jax.lax.add(whole, reader.build(first, left, right, other, scales)))
        return made

    others = [reader.other.atom for reader in found]
    inputs = (inner.left.atom, inner.right.atom, plain, *others, *scaled.scales)
    return Match(tuple(outs), inputs, build, ("distributed", tuple(sides)))
