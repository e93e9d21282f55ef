"""Products taken out of loops: many small ones, each with its own reduction over devices, become one.

``sum_t (A_t B_t) = [A_1 .. A_n] [B_1; ..; B_n]``: gradients of weights that all turns of a recurrent network share.
``[x_1 W; ..; x_n W] = [x_1; ..; x_n] W``: what goes into the turns, and what comes out of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.jaxprs import JaxprEqn, Literal, Var, aval_of
from autoshard.remat.numbering import needed, variables
from autoshard.rewrites.graph import BodyGraph, ScaledProduct
from autoshard.rewrites.loop import ScanLoop, is_plain
from autoshard.rewrites.product import Atom
from autoshard.rewrites.rewrite import Match, register

_TURN = "turn"  # the label of the dim of all turns


@register("loop_product", "[x_1 W; ..; x_n W] = [x_1; ..; x_n] W")
def loop_product(graph: BodyGraph) -> Iterator[Match]:
    """Products in a scan that no carry goes into, before it; and those that go into no carry, after it."""
    for eqn in graph.jaxpr.eqns:
        loop = ScanLoop.of(eqn, graph.devices)
        if loop is None or not loop.graph.products:
            continue
        early, late = _products_before_loop(loop), _products_after_loop(loop)
        if early or late:
            yield _taken_out(loop, early, late)


def _products_before_loop(loop: ScanLoop) -> list[Var]:
    """The products that are made of slices alone, and of what is the same in all turns."""
    carried, sliced = loop.depends(loop.carried), loop.depends(loop.slices)
    found = []
    for var in loop.graph.products:
        if var not in carried and var in sliced:
            before = needed([eqn for eqn in loop.equations if carried.isdisjoint(eqn.outvars)], [var])
            if all(map(is_plain, before)):
                found.append(var)
    return found


def _products_after_loop(loop: ScanLoop) -> list[JaxprEqn]:
    """Products with what is the same in all turns that go into no carry, and all that is made of them."""
    on = {id(eqn) for eqn in needed(loop.equations, loop.finals)}
    off = [eqn for eqn in loop.equations if id(eqn) not in on]
    carried = loop.depends(loop.carried)
    same = loop.given.keys() | {var for eqn in loop.equations for var in eqn.outvars} - loop.depends(
        [*loop.carried, *loop.slices]
    )
    products = [
        product.out
        for product in loop.graph.products.values()
        if any(product.eqn is eqn for eqn in off)
        and product.out in carried
        and any(one.atom in same for one in product.operands)
    ]
    after = loop.depends(products)
    late = [eqn for eqn in off if not after.isdisjoint(eqn.outvars)]
    return late if all(map(is_plain, late)) else []


def _taken_out(loop: ScanLoop, early: Sequence[Var], late: Sequence[JaxprEqn]) -> Match:
    eqn = loop.eqn
    made_late = {var for one in late for var in one.outvars}
    inside = [atom for atom in loop.stacked if atom not in made_late]
    read = [*(var for one in late for var in variables(one.invars)), *(x for x in loop.stacked if x in made_late)]
    # What the late part reads of a turn: slices are stacked already, and what is the same needs no stack.
    wanted = [
        var
        for var in dict.fromkeys(read)
        if var not in made_late and var not in loop.given and var not in loop.slices and var not in early
    ]
    kept = [*dict.fromkeys(inside), *(var for var in wanted if var not in inside)]

    def build(*operands: Any) -> list[Any]:
        slices = {var: operands[i] for var, i in loop.slices.items()}
        before = loop.mapped(needed(loop.equations, early), early, slices, operands) if early else {}
        finals, stacks = loop.scanned(operands, range(loop.carries), loop.finals, kept, before)
        found = dict(zip(kept, stacks, strict=True)) | slices | before
        ends = [atom for atom in dict.fromkeys(loop.stacked) if atom in made_late]
        if late:
            used = [one for one in loop.equations if (made_late | found.keys()).isdisjoint(one.outvars)]
            found |= loop.mapped(needed([*used, *late], ends), ends, found, operands)
        return [*finals, *(found[atom] for atom in loop.stacked)]

    form = "taken out", len(early), len(late), eqn.params["length"]
    return Match(tuple(eqn.outvars), tuple(eqn.invars), build, form)


@dataclass(frozen=True)
class _Sum:
    """A carry that only adds up."""

    carry: int
    products: tuple[ScaledProduct, ...]  # that it adds up
    reduced: tuple[JaxprEqn, ...]  # sums over dims of an array that it adds up


@register("loop_sum", "sum_t (A_t B_t) = [A_1 .. A_n] [B_1; ..; B_n]")
def loop_sum(graph: BodyGraph) -> Iterator[Match]:
    """Carries of a scan that only add up products: their operands are stacked, and multiplied once."""
    for eqn in graph.jaxpr.eqns:
        loop = ScanLoop.of(eqn, graph.devices)
        if loop is None:
            continue
        sums = list(filter(None, (_sum(loop, carry) for carry in range(loop.carries))))
        if any(one.products for one in sums):
            yield _summed_after(loop, sums)


def _sum(loop: ScanLoop, carry: int) -> _Sum | None:
    graph, end, start = loop.graph, loop.finals[carry], loop.carried[carry]
    eqn = graph.maker(end)
    outs = list(graph.jaxpr.outvars)
    if eqn is None or not graph.is_sum(eqn) or outs.count(end) > 1 or start in outs:
        return None
    if graph.readers[eqn.outvars[0]]:
        return None
    atoms = graph.addends(eqn)
    if atoms.count(start) != 1 or len(graph.readers[start]) != 1:
        return None
    products, reduced = list[ScaledProduct](), list[JaxprEqn]()
    for atom in atoms:
        if atom is start:
            continue
        maker, found = graph.maker(atom), graph.scaled_product(atom)
        if found is not None and not found.scales:
            products.append(found)
        elif maker is not None and maker.primitive.name == "reduce_sum" and maker.params.get("out_sharding") is None:
            reduced.append(maker)
        else:
            return None
    return _Sum(carry, tuple(products), tuple(reduced))


def _summed_after(loop: ScanLoop, sums: Sequence[_Sum]) -> Match:
    eqn, turns = loop.eqn, loop.eqn.params["length"]
    kept = [i for i in range(loop.carries) if i not in {one.carry for one in sums}]
    read = [one.atom for s in sums for p in s.products for one in p.product.operands]
    read += [one.invars[0] for s in sums for one in s.reduced]
    new = [
        var for var in dict.fromkeys(read) if isinstance(var, Var) and var not in loop.given and var not in loop.slices
    ]
    stacked = [*loop.stacked, *(var for var in new if var not in loop.stacked)]

    def build(*operands: Any) -> list[Any]:
        finals, stacks = loop.scanned(operands, kept, [loop.finals[i] for i in kept], stacked, {})
        values = dict(zip(stacked, stacks, strict=True)) | {var: operands[i] for var, i in loop.slices.items()}
        results = dict(zip(kept, finals, strict=True))

        def turned(atom: Atom) -> tuple[Any, tuple[str, ...]]:
            if isinstance(atom, Literal):
                return jax.lax.full(aval_of(atom).shape, atom.val, aval_of(atom).dtype), ()
            return (operands[loop.given[atom]], ()) if atom in loop.given else (values[atom], (_TURN,))

        for one in sums:
            total = operands[loop.consts + one.carry]
            for found in one.products:
                total = jax.lax.add(total, _over_turns(found, turned, turns))
            for reduced in one.reduced:
                array, label = turned(reduced.invars[0])
                axes = tuple(axis + len(label) for axis in reduced.params["axes"])
                summed = jnp.sum(array, (0, *axes) if label else axes)
                total = jax.lax.add(total, summed if label else summed * turns)
            results[one.carry] = total
        return [*(results[i] for i in range(loop.carries)), *stacks[: len(loop.stacked)]]

    return Match(tuple(eqn.outvars), tuple(eqn.invars), build, ("summed after", len(sums), turns))


def _over_turns(found: ScaledProduct, turned: Any, turns: int) -> Any:
    """The sum of a product over all turns."""
    product = found.product
    arrays, labels = [], []
    for operand in product.operands:
        array, label = turned(operand.atom)
        arrays.append(array)
        labels.append((*label, *operand.labels))
    several = [_TURN in one for one in labels]
    if several == [True, True]:
        return product.contract(arrays[0], labels[0], arrays[1], labels[1], found.labels)
    for side in range(2):
        if several[side]:
            arrays[side], labels[side] = jnp.sum(arrays[side], 0), labels[side][1:]
    made = product.contract(arrays[0], labels[0], arrays[1], labels[1], found.labels)
    return made if any(several) else made * turns
