"""How a value of the whole step follows from the values of its microbatches, and how equations hand that on.

A microbatch is every M-th row of the batch. The step is traced twice, for the whole batch and for the rows of one
microbatch. Equation by equation, the two traces are the same but for shapes.

========================  ==============================================================================================
relation                  the whole value is
========================  ==============================================================================================
`Invariant.ZERO`          zeros
`Invariant.BEFORE`        the same in every microbatch, and known before the first one
`Invariant.AFTER`         known once the last microbatch has run
`Invariant.OWN`           another one in every microbatch: a statistic of its rows, and what is made of it
`Invariant.OWN_BACKWARD`  the same of the backward pass
`Invariant.IN_TURN`       what a state is that every microbatch changes by such statistics, one after the other
`BatchRows(dim, inner)`   the rows of all microbatches, along `dim`; each has `inner` elements next to each other there
`PartialResult(op)`       what `op` makes of the values of all microbatches: their sum, or their maximum
========================  ==============================================================================================

For a batch of 16 rows, x[16, 32] is `BatchRows(0, 1)`. The same as x.reshape(512) is `BatchRows(0, 32)`. The product
x.T @ x is `PartialResult("add")`, and x.max() is `PartialResult("max")`. A row of zeros that is broadcast to [512] is
`BatchRows(0, None)`: any number of elements may belong to one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import jax.numpy as jnp

from autoshard.jaxprs import JaxprEqn, aval_of
from autoshard.propagation.rule import Rule

Shape = tuple[int, ...]

# How partial results of a reduced factor become one.
REDUCTIONS: Mapping[str, str] = {
    "conv_general_dilated": "add",
    "dot_general": "add",
    "ragged_dot_general": "add",
    "reduce_and": "and",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "or",
    "reduce_sum": "add",
    "scatter-add": "add",
}
# f(a + b) = f(a) + f(b), for one operand or for all of them at once.
_LINEAR = frozenset({
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "cumsum",
    "device_put", "imag", "neg", "optimization_barrier", "pad", "real", "reduce_precision",
    "reduce_sum", "reshape", "rev", "sharding_constraint", "slice", "split", "squeeze", "sub", "transpose",
})  # fmt: skip
# The operands in which f is linear while all others are known.
_LINEAR_IN: Mapping[str, frozenset[int]] = {
    "conv_general_dilated": frozenset({0, 1}),
    "div": frozenset({0}),
    "dot_general": frozenset({0, 1}),
    "dynamic_slice": frozenset({0}),
    "dynamic_update_slice": frozenset({0, 1}),
    "gather": frozenset({0}),
    "mul": frozenset({0, 1}),
    "scatter-add": frozenset({0, 2}),
    "select_n": frozenset(range(1, 1000)),
}
_TOGETHER = frozenset(
    {"dynamic_update_slice", "scatter-add", "select_n"}
)  # linear in all of these at once, not in each

_SUMMED_ON = frozenset({"add_any", "convert_element_type", "copy", "reshape", "sharding_constraint", "transpose"})


class Invariant(Enum):
    """A value without rows of the batch, which is no part of a sum."""

    ZERO = auto()
    BEFORE = auto()
    AFTER = auto()
    OWN = auto()
    OWN_BACKWARD = auto()
    IN_TURN = auto()


@dataclass(frozen=True)
class BatchRows:
    """A value that has rows of the batch along a dim."""

    dim: int
    inner: int | None  # elements of one row next to each other in that dim; None: any number


@dataclass(frozen=True)
class PartialResult:
    """A value of which each microbatch makes a part."""

    op: str  # "add", "max", "min", "and", "or"
    sums: frozenset[Any] = field(default=frozenset(), compare=False)  # variables that are sums over rows: it is of them


Relation = Invariant | BatchRows | PartialResult
OWN = frozenset({Invariant.OWN, Invariant.OWN_BACKWARD})


def sums_of(relations: Iterable[Relation]) -> frozenset[Any]:
    """The variables that are sums over rows of which parts of sums are made."""
    return frozenset().union(*(one.sums for one in relations if isinstance(one, PartialResult)))


def joined(one: Relation, other: Relation) -> Relation | None:
    """What a value is that is one of these or the other, as a carry is; None if no relation says that."""
    if isinstance(one, PartialResult) and one == other:
        return PartialResult(one.op, sums_of([one, other]))
    if one == other:
        return one
    pair = {one, other}
    if not OWN.isdisjoint(pair) and pair <= {Invariant.ZERO, Invariant.BEFORE, *OWN}:
        return Invariant.OWN_BACKWARD if Invariant.OWN_BACKWARD in pair else Invariant.OWN
    if Invariant.ZERO in pair:
        rest = other if one is Invariant.ZERO else one
        if rest in (Invariant.BEFORE, PartialResult("add")):
            return rest
    if (
        isinstance(one, BatchRows)
        and isinstance(other, BatchRows)
        and one.dim == other.dim
        and None in (one.inner, other.inner)
    ):
        return other if one.inner is None else one
    return None


def linear(primitive: str, relations: Sequence[Relation], *, pads_with: int | None = None) -> bool:
    """Whether a sum over microbatches may be taken after an equation instead of before it.

    Args:
        relations: of its operands, none of which has rows of the batch.
        pads_with: the operand that is the number to pad with, if there is one.
    """
    parts = {i for i, relation in enumerate(relations) if relation == PartialResult("add")}
    if len(parts) < sum(isinstance(relation, PartialResult) for relation in relations):
        return False
    if primitive in _LINEAR:
        if pads_with is not None and relations[pads_with] is not Invariant.ZERO:
            return False
        return all(i in parts or relation is Invariant.ZERO for i, relation in enumerate(relations))
    allowed = _LINEAR_IN.get(primitive, frozenset())
    if not parts <= allowed:
        return False
    others = [relation for i, relation in enumerate(relations) if i not in parts and (i in allowed)]
    if primitive in _TOGETHER:
        return all(relation is Invariant.ZERO for relation in others)
    return len(parts) == 1


def rounds(eqn: JaxprEqn) -> bool:
    """Whether an equation makes whole numbers of others, so that it matters whether it comes before a sum or after."""
    if eqn.primitive.name != "convert_element_type":
        return False
    operand, result = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
    to_bool, to_whole = jnp.issubdtype(result, jnp.bool_), not jnp.issubdtype(result, jnp.inexact)
    return to_bool or (to_whole and jnp.issubdtype(operand, jnp.inexact))


def widens(eqn: JaxprEqn) -> bool:
    """Whether a sum may as well be taken in the type of the result."""
    if eqn.primitive.name != "convert_element_type":
        return True
    operand, result = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    return not rounds(eqn) and bool(operand.dtype.itemsize < result.dtype.itemsize)


def keeps_zero(primitive: str, relations: Sequence[Relation]) -> bool:
    """Whether the result is zeros, if no operand differs between microbatches."""
    if primitive == "mul":
        return Invariant.ZERO in relations
    if primitive in {"dynamic_slice", "gather"}:
        return relations[0] is Invariant.ZERO
    return primitive in _LINEAR and bool(relations) and all(relation is Invariant.ZERO for relation in relations)


@dataclass(frozen=True)
class BatchFactor:
    """Where the rows of the batch are in an equation: a factor of its rule, and elements per row in that factor."""

    name: str
    inner: int | None


def batch_factor(rule: Rule, relations: Sequence[Relation], batch: int) -> BatchFactor | str:
    """The one factor of a rule that holds the rows of `batch`, or why there is none."""
    found: dict[str, int | None] = {}
    for dims, relation in zip(rule.operands, relations, strict=True):
        if not isinstance(relation, BatchRows):
            continue
        factor = _factor_at(dims[relation.dim], rule.sizes, relation.inner, batch)
        if factor is None:
            return "takes the dim of the batch apart"
        if found.get(factor.name) is not None and factor.inner not in (None, found[factor.name]):
            return "pairs rows of the batch with other rows"
        if factor.inner is not None or factor.name not in found:
            found[factor.name] = factor.inner
    if len(found) != 1:
        return "pairs rows of the batch with other rows"
    return BatchFactor(*next(iter(found.items())))


def _factor_at(factors: Sequence[str], sizes: Mapping[str, int], inner: int | None, batch: int) -> BatchFactor | None:
    if inner is None:
        return BatchFactor(factors[0], None) if len(factors) == 1 else None
    minor = 1
    for name in reversed(factors):
        size = sizes[name]
        if inner % minor == 0 and minor * size % (inner * batch) == 0:
            return BatchFactor(name, inner // minor)
        minor *= size
    return None


def handed_on(rule: Rule, factor: BatchFactor, result: int) -> BatchRows | None:
    """The rows of a result; None if it has none, so that they are reduced."""
    for dim, factors in enumerate(rule.results[result]):
        if factor.name in factors:
            minor = math.prod(rule.sizes[name] for name in factors[factors.index(factor.name) + 1 :])
            return BatchRows(dim, None if factor.inner is None else factor.inner * minor)
    return None


def scaled_dims(whole: Shape, part: Shape, count: int) -> list[int] | None:
    """The dims that are `count` times as long in the whole as in the part; None if others differ, too."""
    if len(whole) != len(part):
        return None
    pairs = list(zip(whole, part, strict=True))
    found = [dim for dim, (long, short) in enumerate(pairs) if long != short]
    return found if all(pairs[dim][0] == count * pairs[dim][1] for dim in found) else None


def same_carries(ones: Sequence[Relation], others: Sequence[Relation]) -> bool:
    return list(ones) == list(others) and all(
        sums_of([one]) == sums_of([other]) for one, other in zip(ones, others, strict=True)
    )


def moves_only(name: str) -> bool:
    return name in {"broadcast_in_dim", "copy", "reshape", "rev", "slice", "squeeze", "transpose"}


def may_run_in_loop(eqn: JaxprEqn, relations: Sequence[Relation]) -> bool:
    """Whether an equation without rows makes a value before the loop, or a sum that is as well taken of its result."""
    if Invariant.AFTER in relations:
        return False
    if not any(isinstance(relation, PartialResult) for relation in relations):
        return True
    return eqn.primitive.name in _SUMMED_ON and widens(eqn) and linear(eqn.primitive.name, relations)


def is_part(eqn: JaxprEqn, relations: Sequence[Relation]) -> bool:
    """Whether an equation without rows makes a part of a sum, of such parts, or reads none."""
    if Invariant.AFTER in relations:
        return False
    is_linear = linear(eqn.primitive.name, relations, pads_with=1 if eqn.primitive.name == "pad" else None)
    return (is_linear and not rounds(eqn)) or not any(isinstance(relation, PartialResult) for relation in relations)


def moved(relation: Relation, by: int) -> Relation:
    return BatchRows(relation.dim + by, relation.inner) if isinstance(relation, BatchRows) else relation
