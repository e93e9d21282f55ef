"""``[A B] [C; D] = A C + B D`` and ``[A; B] C = [A C; B C]``: products with what is concatenated, part by part.

In a split dim a concatenation moves most of what it makes to other devices. Part by part nothing moves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.jaxprs import DropVar, JaxprEqn, Var, aval_of
from autoshard.rewrites.graph import BodyGraph
from autoshard.rewrites.product import Atom, Product
from autoshard.rewrites.rewrite import Match, register


@dataclass(frozen=True)
class _ConcatenationReader:
    """An equation that reads something concatenated, and can take it part by part."""

    result: Var
    other: Atom  # its other operand
    # the parts, their first places with the end of the last, the other operand -> the result
    build: Callable[[Sequence[Any], Sequence[int], Any], Any]


@register("split_concatenation", "[A B] [C; D] = A C + B D")
def split_concatenation(graph: BodyGraph) -> Iterator[Match]:
    """Products and convolutions with something concatenated; what else reads that is left as it is."""
    for eqn in graph.jaxpr.eqns:
        if eqn.primitive.name != "concatenate" or len(eqn.invars) < 2:
            continue
        (whole,) = eqn.outvars
        dim = eqn.params["dimension"]
        found = (_reader(graph, one, whole, dim) for one in graph.readers[whole])
        # Each by itself: what the backward pass multiplies is made of what the forward pass has multiplied.
        for reader in {one.result: one for one in found if one is not None}.values():
            yield _split(eqn, reader)


def _split(eqn: JaxprEqn, reader: _ConcatenationReader) -> Match:
    places = [0]
    for atom in eqn.invars:
        places.append(places[-1] + aval_of(atom).shape[eqn.params["dimension"]])

    def build(*arrays: Any) -> list[Any]:
        return [reader.build(arrays[:-1], places, arrays[-1])]

    return Match((reader.result,), (*eqn.invars, reader.other), build, ("split", eqn.params["dimension"]))


def _reader(graph: BodyGraph, eqn: JaxprEqn, whole: Var, dim: int) -> _ConcatenationReader | None:
    if eqn.invars.count(whole) > 1:
        return None
    if eqn.outvars[0] in graph.products:
        return _of_product(graph.products[eqn.outvars[0]], whole, dim)
    if eqn.primitive.name == "conv_general_dilated":
        return _of_convolution(eqn, whole, dim)
    return None


def _of_product(product: Product, whole: Var, dim: int) -> _ConcatenationReader | None:
    side = 0 if product.left.atom is whole else 1
    here, other = product.operands[side], product.operands[1 - side]
    label = here.labels[dim]
    if label in product.result and label in other.labels:
        return None

    def build(parts: Sequence[Any], places: Sequence[int], array: Any) -> Any:
        made = []
        for part, start, stop in zip(parts, places, places[1:], strict=False):
            beside = array
            if label in other.labels:
                beside = jax.lax.slice_in_dim(array, start, stop, axis=other.labels.index(label))
            operands = [(part, here.labels), (beside, other.labels)]
            (left, left_labels), (right, right_labels) = operands if side == 0 else operands[::-1]
            made.append(product.contract(left, left_labels, right, right_labels, product.result))
        if label in product.result:
            return jax.lax.concatenate(made, product.result.index(label))
        return functools.reduce(jax.lax.add, made)

    return _ConcatenationReader(product.out, other.atom, build)


def _of_convolution(eqn: JaxprEqn, whole: Var, dim: int) -> _ConcatenationReader | None:
    """A convolution of what is concatenated in its channels, or in its rows, as its kernel's gradient has channels."""
    numbers = eqn.params["dimension_numbers"]
    if eqn.invars[0] is not whole or dim not in numbers.lhs_spec[:2] or not _is_ungrouped(eqn):
        return None
    is_summed = dim == numbers.lhs_spec[1]

    def build(parts: Sequence[Any], places: Sequence[int], kernel: Any) -> Any:
        made = []
        for part, start, stop in zip(parts, places, places[1:], strict=False):
            own = jax.lax.slice_in_dim(kernel, start, stop, axis=numbers.rhs_spec[1]) if is_summed else kernel
            made.append(eqn.primitive.bind(part, own, **eqn.params))
        return functools.reduce(jax.lax.add, made) if is_summed else jax.lax.concatenate(made, numbers.out_spec[0])

    return _ConcatenationReader(eqn.outvars[0], eqn.invars[1], build)


def _is_ungrouped(eqn: JaxprEqn) -> bool:
    return bool(eqn.params["feature_group_count"] == 1 and eqn.params["batch_group_count"] == 1)


@register("sliced_product", "slices of A [B C] = A B, A C")
def sliced_product(graph: BodyGraph) -> Iterator[Match]:
    """A product or convolution of which only slices are read, in a dim of one operand: each slice by itself."""
    for eqn in graph.jaxpr.eqns:
        out = eqn.outvars[0] if len(eqn.outvars) == 1 else None
        readers = graph.readers[out] if out is not None else []
        if not readers or out in graph.results:
            continue
        slices = [_slices(one) for one in readers]
        dims = {one.dim for several in slices for one in several or ()}
        operand = _sliced_operand(graph, eqn, min(dims)) if len(dims) == 1 and None not in slices else None
        if operand is not None:
            yield _sliced(eqn, [one for several in slices for one in several or ()], *operand)


@dataclass(frozen=True)
class _Slice:
    """A part of an array in one dim."""

    result: Var
    dim: int
    start: int
    stop: int


def _slices(eqn: JaxprEqn) -> list[_Slice] | None:
    """What an equation takes of its operand, if that is slices in one dim."""
    if eqn.primitive.name == "split":
        stops = list(itertools.accumulate(map(int, eqn.params["sizes"])))
        places = zip(eqn.outvars, [0, *stops], stops, strict=False)
        read = [place for place in places if not isinstance(place[0], DropVar)]
        return [_Slice(var, eqn.params["axis"], start, stop) for var, start, stop in read]
    if eqn.primitive.name != "slice" or eqn.params["strides"] is not None:
        return None
    (result,) = eqn.outvars
    sizes = zip(aval_of(eqn.invars[0]).shape, aval_of(result).shape, strict=True)
    dims = [dim for dim, (before, after) in enumerate(sizes) if before != after]
    if len(dims) != 1:
        return None
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    return [_Slice(result, dims[0], starts[dims[0]], stops[dims[0]])]


def _sliced_operand(graph: BodyGraph, eqn: JaxprEqn, dim: int) -> tuple[int, int] | None:
    """The operand that has a dim of the result, and which of its dims that is; None if that is not one operand's."""
    product = graph.products.get(eqn.outvars[0])
    if product is not None:
        label = product.result[dim]
        found = [(side, one.labels.index(label)) for side, one in enumerate(product.operands) if label in one.labels]
        return found[0] if len(found) == 1 else None
    if eqn.primitive.name == "conv_general_dilated" and _is_ungrouped(eqn):
        numbers = eqn.params["dimension_numbers"]
        return {numbers.out_spec[0]: (0, numbers.lhs_spec[0]), numbers.out_spec[1]: (1, numbers.rhs_spec[0])}.get(dim)
    return None


def _sliced(eqn: JaxprEqn, slices: Sequence[_Slice], side: int, axis: int) -> Match:
    def build(*operands: Any) -> list[Any]:
        made = []
        for one in slices:
            arrays = list(operands)
            arrays[side] = jax.lax.slice_in_dim(arrays[side], one.start, one.stop, axis=axis)
            made.append(eqn.primitive.bind(*arrays, **eqn.params))
        return made

    return Match(tuple(one.result for one in slices), tuple(eqn.invars), build, ("sliced", slices[0].dim))
