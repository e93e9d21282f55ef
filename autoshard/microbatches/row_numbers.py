"""Indices that count the rows of the batch, as in ``logits[jnp.arange(n), labels]``.

A gather or scatter at them treats rows apart, though its sharding rule cannot know. A microbatch has other numbers for
its rows: row m + jM of a group is its row j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.jaxprs import JaxprEqn, Literal, Var, aval_of
from autoshard.microbatches.relations import BatchRows, Relation
from autoshard.microbatches.rows import Microbatches

_PASS_ON = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze"})


def row_column(
    eqn: JaxprEqn,
    relations: Sequence[Relation],
    makers: Mapping[Var, JaxprEqn],
    drawn: Mapping[Var, BatchRows],
    split: Microbatches,
) -> int | None:
    """The column of a gather's or scatter's indices that counts the rows of its first operand; None if there is none.

    Args:
        relations: of its operands.
        makers: the equations that make variables, as far as they are in the same jaxpr.
        drawn: the rows of variables that are made of nothing.
    """
    name = eqn.primitive.name
    if name != "gather" and not name.startswith("scatter"):
        return None
    array, indices = relations[0], eqn.invars[1]
    if not isinstance(array, BatchRows) or aval_of(eqn.invars[0]).shape[array.dim] != split.batch:
        return None
    numbers = eqn.params["dimension_numbers"]
    indexed = numbers.start_index_map if name == "gather" else numbers.scatter_dims_to_operand_dims
    maker = makers.get(indices) if isinstance(indices, Var) else None
    if array.dim not in indexed or maker is None or maker.primitive.name != "concatenate":
        return None
    last = aval_of(indices).ndim - 1
    if maker.params["dimension"] != last or any(aval_of(piece).shape[last] != 1 for piece in maker.invars):
        return None
    column = tuple(indexed).index(array.dim)
    return column if _counts_rows(maker.invars[column], makers, drawn) else None


def _counts_rows(atom: Any, makers: Mapping[Var, JaxprEqn], drawn: Mapping[Var, BatchRows]) -> bool:
    """Whether a value is 0, 1, 2, ... over the batch, also after what JAX does with indices that may be negative."""
    maker = makers.get(atom) if isinstance(atom, Var) else None
    if maker is None:
        return False
    name, params = maker.primitive.name, maker.params
    if name == "iota":
        return drawn.get(maker.outvars[0]) == BatchRows(params["dimension"], 1)
    if name in _PASS_ON:
        return _counts_rows(maker.invars[0], makers, drawn)
    if name != "select_n":
        return False
    is_negative = makers.get(maker.invars[0]) if isinstance(maker.invars[0], Var) else None
    return (
        is_negative is not None
        and is_negative.primitive.name == "lt"
        and isinstance(is_negative.invars[1], Literal)
        and is_negative.invars[1].val == 0
        and _counts_rows(is_negative.invars[0], makers, drawn)
        and _counts_rows(maker.invars[1], makers, drawn)
    )


def renumbered(indices: Any, column: int, split: Microbatches) -> Any:
    """Indices into the whole batch as indices into the rows of a microbatch."""
    rows = indices[..., column] % (split.batch // split.groups) // split.count
    return indices.at[..., column].set(rows)


def reads_positions(eqn: JaxprEqn, relations: Sequence[Relation]) -> str | None:
    """Why an equation needs the numbers of rows in the whole batch, if it does."""
    name, relation = eqn.primitive.name, relations[0] if relations else None
    if not isinstance(relation, BatchRows):
        return None
    positions: Sequence[int] = ()
    if name == "gather":
        positions = eqn.params["dimension_numbers"].start_index_map
    elif name.startswith("scatter"):
        positions = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    elif name == "dynamic_update_slice":
        array, written = aval_of(eqn.invars[0]).shape, aval_of(eqn.invars[1]).shape
        positions = [dim for dim, (long, short) in enumerate(zip(array, written, strict=True)) if long != short]
    return "reads or writes rows of the batch by their number" if relation.dim in positions else None
