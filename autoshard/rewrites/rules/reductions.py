"""``sum_i (A_i B) = (sum_i A_i) B``: sums of products before the product; and products of what is broadcast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.jaxprs import JaxprEqn, aval_of
from autoshard.rewrites.graph import BodyGraph, ScaledProduct
from autoshard.rewrites.product import Label, Operand, Product
from autoshard.rewrites.rewrite import Match, register


@register("summed_product", "sum_i (A_i B) = (sum_i A_i) B")
def summed_product(graph: BodyGraph) -> Iterator[Match]:
    """A product of which only the sum over some dims is read: a dim of one operand is summed there first.

    A dim of both operands is summed by the product itself.
    """
    for eqn in graph.jaxpr.eqns:
        if eqn.primitive.name != "reduce_sum":
            continue
        cast, between = graph.maker(eqn.invars[0]), list[JaxprEqn]()
        if cast is not None and is_widening(cast):
            between.append(cast)
        found = graph.scaled_product((between or [eqn])[-1].invars[0])
        if found is None or found.scales or eqn.params.get("out_sharding") is not None:
            continue
        between += found.through
        if all(map(graph.is_read_once, (found.product.out, *(one.outvars[0] for one in between)))):
            yield _summed(eqn, found)


def is_widening(eqn: JaxprEqn) -> bool:
    """Whether an equation casts floating or complex numbers to a dtype that has all of them.

    Sums of bfloat16 begin so.
    """
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
    return bool(jnp.issubdtype(before, jnp.inexact) and jnp.promote_types(before, after) == after)


def _summed(eqn: JaxprEqn, found: ScaledProduct) -> Match:
    product = found.product
    dtype = aval_of(eqn.outvars[0]).dtype
    gone = {found.labels[dim] for dim in eqn.params["axes"]}
    out = [label for label in found.labels if label not in gone]

    def build(left: Any, right: Any) -> list[Any]:
        arrays, labels = [], []
        for array, one, other in zip((left, right), product.operands, reversed(product.operands), strict=True):
            alone = [label for label in one.labels if label in gone and label not in other.labels]
            array = array.astype(dtype) if alone else array
            arrays.append(jnp.sum(array, [one.labels.index(label) for label in alone]) if alone else array)
            labels.append([label for label in one.labels if label not in alone])
        arrays = [array.astype(jnp.result_type(*arrays)) for array in arrays]
        return [product.contract(arrays[0], labels[0], arrays[1], labels[1], out, dtype)]

    inputs = (product.left.atom, product.right.atom)
    return Match((eqn.outvars[0],), inputs, build, ("summed", tuple(eqn.params["axes"])))


@register("broadcast_product", "A [b b ... b] = (A 1) b")
def broadcast_product(graph: BodyGraph) -> Iterator[Match]:
    """A product with an array that is broadcast: what is the same everywhere is computed once."""
    for product in graph.products.values():
        for side, operand in enumerate(product.operands):
            found = _source(graph, operand)
            if found is not None:
                yield _broadcast(product, side, *found)
                break


def _source(graph: BodyGraph, operand: Operand) -> tuple[JaxprEqn, dict[int, Label]] | None:
    """The equation that broadcasts an operand, and dim of what was broadcast -> its label; None if there is none."""
    labels, eqn = operand.labels, graph.maker(operand.atom)
    while eqn is not None and (eqn.primitive.name == "transpose" or is_widening(eqn)):
        if eqn.primitive.name == "transpose":
            before = dict(zip(eqn.params["permutation"], labels, strict=True))
            labels = tuple(before[dim] for dim in sorted(before))
        eqn = graph.maker(eqn.invars[0])
    if eqn is None or eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) != 1:
        return None
    source, dims = aval_of(eqn.invars[0]).shape, eqn.params["broadcast_dimensions"]
    kept = {i: labels[dim] for i, dim in enumerate(dims) if source[i] == eqn.params["shape"][dim]}
    return (eqn, kept) if source and len(kept) < len(labels) else None


def _broadcast(product: Product, side: int, eqn: JaxprEqn, kept: dict[int, Label]) -> Match:
    here, other = product.operands[side], product.operands[1 - side]
    labels = tuple(kept.values())
    gone = [label for label in here.labels if label not in labels]
    summed = [label for label in gone if label not in product.result]  # the other operand has them, too
    out = [label for label in product.result if label in labels or label in other.labels]
    small = Operand(eqn.invars[0], labels)

    def build(source: Any, array: Any) -> list[Any]:
        source = jnp.reshape(source.astype(array.dtype), [size for i, size in enumerate(source.shape) if i in kept])
        rest = [label for label in other.labels if label not in summed]
        reduced = jnp.sum(array, [other.labels.index(label) for label in summed]) if summed else array
        arrays = [(source, small.labels), (reduced, rest)]
        (left, left_labels), (right, right_labels) = arrays if side == 0 else arrays[::-1]
        made = product.contract(left, left_labels, right, right_labels, out)
        shape = [product.sizes[label] for label in product.result]
        return [jax.lax.broadcast_in_dim(made, shape, [product.result.index(label) for label in out])]

    return Match((product.out,), (eqn.invars[0], other.atom), build, ("broadcast", side, tuple(map(str, labels))))
