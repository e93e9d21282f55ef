"""Equations that lay whole batches behind each other, or take some of them apart again.

Two views of each sample, chosen and rejected answers, real and made images: ``jnp.concatenate([one, other])`` has two
blocks along one dim, each with all rows of the batch. A microbatch has the same blocks of its own rows, so nothing that
treats rows alone tells them apart. Their sharding rules keep such dims whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autoshard.jaxprs import JaxprEqn, aval_of
from autoshard.microbatches.relations import BatchRows, Relation, scaled_dims
from autoshard.microbatches.rows import Microbatches


def blocks_of(
    eqn: JaxprEqn, small: JaxprEqn, relations: Sequence[Relation], split: Microbatches
) -> list[Relation] | None:
    """The rows of the results of an equation that moves whole blocks of rows; None if it is something else.

    Args:
        eqn: of the whole step.
        small: the same of a microbatch.
        relations: of its operands.
    """
    rows = _laid_behind_each_other(eqn, relations) if eqn.primitive.name == "concatenate" else relations[0]
    if not isinstance(rows, BatchRows):
        return None
    edges, others = _edges(eqn, rows.dim), _edges(small, rows.dim)
    if edges is None or others is None or len(edges) != len(others):
        return None
    inner = rows.inner or 1
    whole, part = split.batch * inner, split.rows * inner
    if any(edge % whole or other != edge // whole * part for edge, other in zip(edges, others, strict=True)):
        return None
    shapes = [(aval_of(out).shape, aval_of(other).shape) for out, other in zip(eqn.outvars, small.outvars, strict=True)]
    if any(scaled_dims(*one, split.parts) != [rows.dim] for one in shapes):
        return None
    return [rows] * len(eqn.outvars)


def _laid_behind_each_other(eqn: JaxprEqn, relations: Sequence[Relation]) -> BatchRows | None:
    """What the result of a concatenation is, if all of its operands have rows along its dim."""
    dim, inner = eqn.params["dimension"], None
    for relation in relations:
        if not isinstance(relation, BatchRows) or relation.dim != dim:
            return None
        if inner is not None and relation.inner not in (None, inner):
            return None
        inner = relation.inner if inner is None else inner
    return BatchRows(dim, inner)


def _edges(eqn: JaxprEqn, dim: int) -> list[int] | None:
    """Where along a dim of its operand or result an equation cuts or joins; None if it does neither, or more."""
    params = eqn.params
    if eqn.primitive.name == "concatenate":
        sizes = [aval_of(operand).shape[dim] for operand in eqn.invars]
        return list(itertools.accumulate(sizes))
    if eqn.primitive.name == "split":
        return list(itertools.accumulate(params["sizes"])) if params["axis"] == dim else None
    if eqn.primitive.name == "slice":
        strides = params["strides"]
        return None if strides and strides[dim] != 1 else [params["start_indices"][dim], params["limit_indices"][dim]]
    if eqn.primitive.name == "pad":
        low, high, interior = params["padding_config"][dim]
        return None if interior or low < 0 or high < 0 else [low, high]
    return None
