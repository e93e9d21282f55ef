"""Operations that read or write at positions computed at run time.

XLA splits an indexed dim by letting every device look up all indices in its own shard and mask what is elsewhere. A
gather then leaves partial results: all devices but one hold zeros. A scatter writes what falls into the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autoshard.program import Equation, is_number
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import KEPT_RULES, Rule, RuleBuilder, Shape
from autoshard.propagation.rules.elementwise import shapes_of


@rule("dynamic_slice")
def dynamic_slice(equation: Equation) -> Rule:
    """`i j,  -> i k`: dims taken whole pass, cut dims stay whole. One row is a lookup: `i j,  -> 1 j`, reduction i."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    for dim, (size, taken) in enumerate(zip(operands[0], results[0], strict=True)):
        if size == taken:
            builder.factor(size, [(0, dim)], [(0, dim)])
        elif taken == 1 and is_number(equation.inputs[0].dtype):
            builder.factor(size, [(0, dim)], [], "reduction")
        else:
            builder.factor(size, [(0, dim)], [], "need_replication")
            builder.factor(taken, [], [(0, dim)], "need_replication")
    return builder.build()


@rule("dynamic_update_slice")
def dynamic_update_slice(equation: Equation) -> Rule:
    """`i j, i 1,  -> i j`: a slice of size 1 lands in one shard; a longer one may straddle two."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    for dim, (size, written) in enumerate(zip(operands[0], operands[1], strict=True)):
        if size == written:
            builder.factor(size, [(0, dim), (1, dim)], [(0, dim)])
        elif written == 1:
            builder.factor(size, [(0, dim)], [(0, dim)])
        else:
            builder.factor(size, [(0, dim)], [(0, dim)], "need_replication")
            builder.factor(written, [(1, dim)], [], "need_replication")
    return builder.build()


@dataclass(frozen=True)
class _IndexedDims:
    """What the dims of a gather or scatter are to each other, in the terms of both."""

    window: tuple[tuple[int, int], ...]  # (dim of the array, dim of the slices), taken or written as a window
    batch: tuple[tuple[int, int, int | None], ...]  # (dim of the indices, of the slices, of the array if batched too)
    dropped: tuple[int, ...]  # dims of the array that the slices do not have: one position of each per index
    indexed: frozenset[int]  # dims of the array whose position the indices give

    @classmethod
    def of(
        cls,
        array_dims: int,
        slice_dims: int,
        window: Sequence[int],
        dropped: Sequence[int],
        indexed: Sequence[int],
        array_batch: Sequence[int],
        index_batch: Sequence[int],
    ) -> _IndexedDims:
        kept = [dim for dim in range(array_dims) if dim not in dropped and dim not in array_batch]
        outer = [dim for dim in range(slice_dims) if dim not in window]
        batched = dict(zip(index_batch, array_batch, strict=True))
        return cls(
            window=tuple(zip(kept, window, strict=True)),
            batch=tuple((dim, to, batched.get(dim)) for dim, to in enumerate(outer)),
            dropped=tuple(dropped),
            indexed=frozenset(indexed),
        )


@rule("gather")
def gather(equation: Equation) -> Rule:
    """`v d, b 1 -> b d`, reduction v: an embedding lookup."""
    operands, (result,) = shapes_of(equation)
    numbers = equation.params["dimension_numbers"]
    indexing = _IndexedDims.of(
        len(operands[0]),
        len(result),
        numbers.offset_dims,
        numbers.collapsed_slice_dims,
        numbers.start_index_map,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )
    return _gather(operands, result, indexing)


@lru_cache(maxsize=KEPT_RULES)
def _gather(operands: tuple[Shape, ...], result: Shape, indexing: _IndexedDims) -> Rule:
    array, indices = operands
    builder = RuleBuilder(operands, [result])
    for dim, to, array_dim in indexing.batch:
        sources = [(1, dim)] if array_dim is None else [(0, array_dim), (1, dim)]
        builder.factor(indices[dim], sources, [(0, to)])
    for dim, to in indexing.window:
        if array[dim] == result[to]:
            builder.factor(array[dim], [(0, dim)], [(0, to)])
        elif result[to] == 1 and dim in indexing.indexed:
            builder.factor(array[dim], [(0, dim)], [], "reduction")
        else:
            builder.factor(array[dim], [(0, dim)], [], "need_replication")
            builder.factor(result[to], [], [(0, to)], "need_replication")
    for dim in indexing.dropped:
        builder.factor(array[dim], [(0, dim)], [], "reduction" if dim in indexing.indexed else "need_replication")
    if indices[-1] > 1:
        builder.factor(indices[-1], [(1, len(indices) - 1)], [], "need_replication")
    return builder.build()


@rule("scatter-add", "scatter-max", "scatter-min", "scatter-mul")
def accumulating_scatter(equation: Equation) -> Rule:
    """`v d, b 1, b d -> v d`, reduction b: the gradient of an embedding lookup."""
    return _scatter_of(equation, "reduction")


@rule("scatter", "scatter-sub")
def overwriting_scatter(equation: Equation) -> Rule:
    """`v d, b 1, b d -> v d`, b whole: updates overwrite each other, so their partial results cannot be added."""
    return _scatter_of(equation, "need_replication")


def _scatter_of(equation: Equation, kind_of_updates: str) -> Rule:
    operands, results = shapes_of(equation)
    numbers = equation.params["dimension_numbers"]
    indexing = _IndexedDims.of(
        len(operands[0]),
        len(operands[2]),
        numbers.update_window_dims,
        numbers.inserted_window_dims,
        numbers.scatter_dims_to_operand_dims,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
    )
    return _scatter(operands, results, indexing, kind_of_updates)


@lru_cache(maxsize=KEPT_RULES)
def _scatter(
    operands: tuple[Shape, ...], results: tuple[Shape, ...], indexing: _IndexedDims, kind_of_updates: str
) -> Rule:
    array, indices, updates = operands
    builder = RuleBuilder(operands, results)
    for dim, update_dim, array_dim in indexing.batch:
        sources = [(1, dim), (2, update_dim)]
        if array_dim is None:
            builder.factor(indices[dim], sources, [], kind_of_updates)
        else:
            builder.factor(indices[dim], [(0, array_dim), *sources], [(0, array_dim)])
    for dim, update_dim in indexing.window:
        if array[dim] == updates[update_dim]:
            builder.factor(array[dim], [(0, dim), (2, update_dim)], [(0, dim)])
        elif updates[update_dim] == 1 and dim in indexing.indexed:
            builder.factor(array[dim], [(0, dim)], [(0, dim)])
        else:
            builder.factor(array[dim], [(0, dim)], [(0, dim)], "need_replication")
            builder.factor(updates[update_dim], [(2, update_dim)], [], "need_replication")
    for dim in indexing.dropped:
        kind = "" if dim in indexing.indexed else "need_replication"
        builder.factor(array[dim], [(0, dim)], [(0, dim)], kind)
    if indices[-1] > 1:
        builder.factor(indices[-1], [(1, len(indices) - 1)], [], "need_replication")
    return builder.build()
