"""One equation and the dims of it that are padded in, how it runs on padded operands out.

The first rows of its results are those of the equation as written; the others may hold anything. What cannot be run so
is `None`: it runs on operands without added rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.jaxprs import JaxprEqn, aval_of, run
from autoshard.padding.operations import (
    FROM_FIRST_ROWS,
    INDEPENDENT_OF_ROWS,
    Mask,
    RefusedError,
    equation_of,
    masks_of,
    shape_of,
)
from autoshard.propagation.registry import has_rule, rule_of
from autoshard.propagation.rule import Rule

Shape = tuple[int, ...]
_INDEXED = {"gather", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul"}
_LAYOUTS = {"sharding_constraint", "reshard"}
_NEVER = {"random_bits", "random_split", "shard_map", "while", "cond"}
# Primitive -> the parameter that is the shape of its result, or the extent that it takes of each dim of its operand.
_RESULT_SHAPES = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}
_TAKEN_EXTENTS = {"slice": "limit_indices", "dynamic_slice": "slice_sizes", "gather": "slice_sizes"}


@dataclass(frozen=True)
class PaddedEquation:
    """How an equation runs on padded operands."""

    params: dict[str, Any]
    masks: tuple[Mask, ...]
    bounded: tuple[tuple[int, int], ...] = ()  # of a gather or scatter: component of the indices -> its largest value

    def run(self, eqn: JaxprEqn, *operands: Any) -> list[Any]:
        arrays = list(operands)
        for component, largest in self.bounded:
            arrays[1] = _within(arrays[1], component, largest, clips=_clips(eqn))
        return run(eqn.replace(params=self.params), arrays)


def padded_equation(eqn: JaxprEqn, operands: Sequence[Shape], results: Sequence[Shape]) -> PaddedEquation | None:
    """How it runs on operands of these shapes to results of these; None if it cannot.

    Args:
        operands, results: padded shapes.
    """
    name = eqn.primitive.name
    if name in _NEVER or eqn.effects or not has_rule(name):
        return None
    rule = rule_of(equation_of(eqn))
    padded = _padded_factors(eqn, rule, operands, results)
    if padded is None:
        return None
    bounded = _bounded(eqn, operands) if name in _INDEXED else ()
    try:
        masks = masks_of(eqn, rule, padded - _indexed_factors(rule, bounded, eqn))
    except RefusedError:
        return None
    found = PaddedEquation({**eqn.params, **_params(eqn, operands, results)}, masks, bounded)
    return found if _makes(eqn, found, operands, results) else None


def _padded_factors(eqn: JaxprEqn, rule: Rule, operands: Sequence[Shape], results: Sequence[Shape]) -> set[str] | None:
    """The factors that have more rows; None if these would stand between others, or get into other rows."""
    pairs = [
        *zip(eqn.invars, rule.operands, operands, strict=True),
        *zip(eqn.outvars, rule.results, results, strict=True),
    ]
    padded: set[str] = set()
    for atom, dims, shape in pairs:
        for dim, (size, more) in enumerate(zip(shape_of(atom), shape, strict=True)):
            if size != more:
                if not dims[dim]:
                    return None
                padded.add(dims[dim][0])
    for atom, dims, shape in pairs:
        for dim, factors in enumerate(dims):
            is_padded = shape[dim] != shape_of(atom)[dim]
            if padded.intersection(factors[1:]) or (factors[:1] and (factors[0] in padded) != is_padded):
                return None
    read = {factor for dims in rule.operands for dim in dims for factor in dim}
    mixed = rule.need_replication | rule.permutation | rule.summed | rule.exchanged
    if padded & mixed and not (eqn.primitive.name in FROM_FIRST_ROWS and not eqn.params.get("reverse")):
        return None
    if padded - read and eqn.primitive.name not in INDEPENDENT_OF_ROWS:
        return None
    return padded


def _params(eqn: JaxprEqn, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    """The parameters in which sizes stand, for these shapes. What takes all of a dim takes its added rows, too."""
    name = eqn.primitive.name
    if name in _RESULT_SHAPES:
        return {_RESULT_SHAPES[name]: results[0]}
    if name in _TAKEN_EXTENTS:
        parameter = _TAKEN_EXTENTS[name]
        extents = zip(eqn.params[parameter], shape_of(eqn.invars[0]), operands[0], strict=True)
        return {parameter: tuple(padded if taken == size else taken for taken, size, padded in extents)}
    return {}


def _bounded(eqn: JaxprEqn, operands: Sequence[Shape]) -> tuple[tuple[int, int], ...]:
    """Indices into padded dims must not reach the added rows, which a gather would read."""
    numbers, shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    if eqn.primitive.name == "gather":
        indexed, taken = numbers.start_index_map, eqn.params["slice_sizes"]
    else:
        indexed, taken = numbers.scatter_dims_to_operand_dims, (1,) * len(shape)
    return tuple(
        (component, shape[dim] - taken[dim]) for component, dim in enumerate(indexed) if shape[dim] != operands[0][dim]
    )


def _indexed_factors(rule: Rule, bounded: Sequence[tuple[int, int]], eqn: JaxprEqn) -> set[str]:
    """The factors of padded dims that indices pick from: no index gets to the added rows."""
    if eqn.primitive.name != "gather":
        return set()
    return {
        rule.operands[0][dim][0] for dim in eqn.params["dimension_numbers"].start_index_map if rule.operands[0][dim]
    }


def _clips(eqn: JaxprEqn) -> bool:
    """Whether indices beyond the array count as its last one, as XLA has it in a gather whose indices are promised."""
    modes = jax.lax.GatherScatterMode
    promised = eqn.primitive.name == "gather" and eqn.params["mode"] == modes.PROMISE_IN_BOUNDS
    return bool(promised or eqn.params["mode"] == modes.CLIP)


def _within(indices: Any, component: int, largest: int, *, clips: bool) -> jax.Array:
    """Indices of which one component is beyond `largest` either nowhere, or so far that all arrays end before it."""
    one = indices[..., component]
    beyond = largest if clips else jnp.iinfo(indices.dtype).max
    return indices.at[..., component].set(jnp.where(one > largest, jnp.asarray(beyond, indices.dtype), one))


def _makes(eqn: JaxprEqn, found: PaddedEquation, operands: Sequence[Shape], results: Sequence[Shape]) -> bool:
    """Whether it can be run on operands of these shapes, and makes results of these."""
    types = [jax.ShapeDtypeStruct(shape, aval_of(atom).dtype) for shape, atom in zip(operands, eqn.invars, strict=True)]
    function: Callable[..., Any] = lambda *arrays: found.run(eqn, *arrays)  # noqa: E731
    try:
        made = jax.eval_shape(function, *types)
    except (TypeError, ValueError):
        return False
    return [one.shape for one in made] == list(map(tuple, results))
