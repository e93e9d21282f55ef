"""One operation at two sizes of the batch in; what keeps the added rows out of its results out.

A dim is *padded* if it is larger at the larger size. Its first rows are those of the smaller size, and the others may
hold anything. An operation keeps this up in one of these ways:

- Each row of its result is made of the same row of its operands: the added rows stay added rows. The operation's rule
  says so, since this is what lets a device work on a part of the rows.
- It reduces rows in a way that has a neutral element: the added rows of its operands are set to that (`Mask`).
- It reads the first rows alone, as a slice does.

Anything else is refused, with the user's line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.errors import ArgumentError
from autoshard.jaxprs import JaxprEqn, is_array
from autoshard.program import Equation, Value
from autoshard.program.user_code import source_of
from autoshard.propagation.registry import has_rule, rule_of
from autoshard.propagation.rule import Rule

_SUMS = {"conv_general_dilated", "dot_general", "reduce_sum"}  # what is zero counts for nothing
_NEUTRAL = dict.fromkeys(_SUMS | {"scatter-add"}, "zero") | {
    "argmax": "least",
    "argmin": "greatest",
    "reduce_and": "ones",
    "reduce_max": "least",
    "reduce_min": "greatest",
    "reduce_or": "zero",
    "reduce_prod": "one",
    "reduce_xor": "zero",
}
FROM_FIRST_ROWS = {"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"}  # unless they go backwards
INDEPENDENT_OF_ROWS = {
    "broadcast_in_dim",
    "iota",
}  # of no row: a row of the result does not depend on how many there are
_RANDOM = {"random_bits", "random_split"}
_BY_HAND = {"shard_map"}  # each device may mix the rows of its shard
_UPDATES = 2  # the operand of a scatter that is added


@dataclass(frozen=True)
class Mask:
    """The rows of an operand, from `rows` on along `dim`, that count for nothing, and what they are set to."""

    operand: int
    dim: int
    rows: int
    neutral: str  # "zero", "one", "ones" (of every bit), "least" or "greatest"

    def applied(self, array: Any) -> Any:
        inside = jax.lax.broadcasted_iota(np.int32, array.shape, self.dim) < self.rows
        return jnp.where(inside, array, jnp.full((), _neutral(self.neutral, array.dtype), array.dtype))


@dataclass(frozen=True)
class PaddedOperation:
    """How an operation runs on padded operands."""

    params: Mapping[str, Any]
    masks: tuple[Mask, ...] = ()


def padded_operation(small: JaxprEqn, large: JaxprEqn) -> PaddedOperation:
    """How an equation runs at the larger size, so that the first rows of its results are its results at the smaller.

    Args:
        small: the equation at the smaller size.
        large: the same at the larger size.

    Raises:
        RefusedError: it cannot.
    """
    ends = list(zip([*small.invars, *small.outvars], [*large.invars, *large.outvars], strict=True))
    if not any(shape_of(one) != shape_of(other) for one, other in ends):
        return PaddedOperation(small.params)  # numbers of rows among the parameters are those of the true batch
    primitive = small.primitive.name
    if primitive == "slice":
        return PaddedOperation(_slice_params(small, large))
    if primitive in _RANDOM:
        return _random(small, large)
    if not has_rule(primitive) or primitive in _BY_HAND or large.effects:
        raise RefusedError(small, "is no operation whose rows are known to be apart")
    rule = rule_of(equation_of(large))
    padded = _padded_factors(rule_of(equation_of(small)), rule, small)
    return PaddedOperation(large.params, masks_of(small, rule, padded))


class RefusedError(Exception):
    """An operation would let added rows into its results, or is not known not to."""

    def __init__(self, eqn: JaxprEqn, why: str):
        super().__init__(why)
        self.primitive, self.why = eqn.primitive.name, why
        self.source = source_of(eqn)

    def inside(self, call: JaxprEqn) -> RefusedError:
        """The same, inside a call: JAX keeps no lines of the user's in what it has traced for others, too."""
        self.source = self.source or source_of(call)
        return self

    def named(self, name: str) -> ArgumentError:
        """The error for the user of the step of this name."""
        where = f"{self.primitive} at {self.source or 'unknown line'}"
        return ArgumentError(
            f"pad='batch': the batch of {name} cannot be padded, since {where} {self.why}.\n"
            "Pad the batch yourself, with weights of 0 for the rows that you add, or use a batch that the devices "
            "divide."
        )


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def equation_of(eqn: JaxprEqn) -> Equation:
    """The equation as rules know it."""
    ends = [
        Value(i, shape_of(atom), getattr(atom.aval, "dtype", np.dtype(bool)), 0)
        for i, atom in enumerate([*eqn.invars, *eqn.outvars])
    ]
    inputs = tuple(
        np.asarray(atom.val) if hasattr(atom, "val") and is_array(atom.aval) else value
        for atom, value in zip(eqn.invars, ends, strict=False)
    )
    return Equation(0, eqn.primitive.name, eqn.params, inputs, tuple(ends[len(inputs) :]), source_of(eqn), ())


def _padded_factors(small: Rule, large: Rule, eqn: JaxprEqn) -> set[str]:
    """The factors that are larger at the larger size.

    Raises:
        RefusedError: the added rows do not stand behind all others, or the operation mixes rows.
    """
    tensors = [(*rule.operands, *rule.results) for rule in (small, large)]
    if tensors[0] != tensors[1]:
        raise RefusedError(eqn, "treats rows in another way at another number of rows")
    padded = {factor for factor, size in large.sizes.items() if small.sizes.get(factor) != size}
    if any(factor in padded for dims in tensors[0] for dim in dims for factor in dim[1:]):
        raise RefusedError(
            eqn, "takes rows apart, or puts them together, so that added rows would stand between others"
        )
    read = {factor for dims in large.operands for dim in dims for factor in dim}
    for factor in padded:
        if factor not in read and eqn.primitive.name not in INDEPENDENT_OF_ROWS:
            raise RefusedError(eqn, "makes rows that may depend on how many there are")
        mixes = factor in large.need_replication | large.permutation | large.summed or factor in large.exchanged
        if mixes and not (eqn.primitive.name in FROM_FIRST_ROWS and not eqn.params.get("reverse")):
            raise RefusedError(eqn, "makes rows of its result of other rows")
    return padded


def masks_of(eqn: JaxprEqn, rule: Rule, padded: set[str]) -> tuple[Mask, ...]:
    made = {factor for dims in rule.results for dim in dims for factor in dim}
    lost = {factor for factor in padded if factor in rule.reduction or factor not in made}
    if not lost:
        return ()
    primitive = eqn.primitive.name
    neutral = _NEUTRAL.get(primitive)
    masks = []
    for operand, dims in enumerate(rule.operands):
        for dim, factors in enumerate(dims):
            if not factors or factors[0] not in lost:
                continue
            if primitive == "gather" and _stays_inside(eqn):
                continue
            if primitive == "scatter-add" and operand != _UPDATES:
                if operand == 0:
                    raise RefusedError(eqn, "adds to rows by their numbers")
                continue
            if neutral is None:
                raise RefusedError(eqn, "combines rows in a way that has no neutral element")
            masks.append(Mask(operand, dim, shape_of(eqn.invars[operand])[dim], neutral))
    return tuple(masks)


def _stays_inside(eqn: JaxprEqn) -> bool:
    return eqn.params["mode"] == jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS


def _slice_params(small: JaxprEqn, large: JaxprEqn) -> dict[str, Any]:
    """A slice of the first rows; a dim that is no longer padded keeps the bounds of the true batch."""
    starts, limits = list(large.params["start_indices"]), list(large.params["limit_indices"])
    for dim, (size, padded) in enumerate(zip(shape_of(small.outvars[0]), shape_of(large.outvars[0]), strict=True)):
        if size == padded:
            starts[dim], limits[dim] = small.params["start_indices"][dim], small.params["limit_indices"][dim]
        elif starts[dim] != small.params["start_indices"][dim]:
            raise RefusedError(small, "counts rows from the last one")
    return {**large.params, "start_indices": tuple(starts), "limit_indices": tuple(limits)}


def _random(small: JaxprEqn, large: JaxprEqn) -> PaddedOperation:
    """Bits for more rows are those for fewer, and more, if rows come first and each number is made by itself."""
    shapes = [tuple(eqn.params["shape"]) for eqn in (small, large)]
    keys = [shape_of(eqn.invars[0]) for eqn in (small, large)]
    key = str(getattr(small.invars[0].aval, "dtype", ""))
    alone = keys[0] == keys[1] == () and shapes[0][1:] == shapes[1][1:]
    if shapes[0] == shapes[1] or (alone and large.ctx.threefry_partitionable and key == "key<fry>"):
        return PaddedOperation(large.params)
    raise RefusedError(small, "makes other random numbers for another number of rows")


def _neutral(kind: str, dtype: Any) -> Any:
    if kind in ("zero", "one"):
        return int(kind == "one")
    if kind == "ones":
        return ~np.zeros((), dtype)
    if dtype == np.bool_:
        return kind == "greatest"
    if jnp.issubdtype(dtype, jnp.inexact):
        infinite = jnp.inf if kind == "greatest" else -jnp.inf
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return complex(infinite, infinite)
        if np.isinf(np.asarray(infinite, dtype)):
            return infinite
    bounds = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    return bounds.max if kind == "greatest" else bounds.min
