"""An array whose dim gets more rows, or loses them again, as an operation: the devices' shards change with it.

====================  =================================================================================================
`parts`               each device keeps its part of the new rows of what it has whole; to lose rows, parts are gathered
`cut`                 the dim is split before and after: rows move to the devices beside
`traded`              another dim is split on the side without the rows, and trades places by an all_to_all
====================  =================================================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.operations.operation import Implementation, Operation
from autoshard.operations.split import CallSplit
from autoshard.ops.convolving.windows import PositionShare, rows_read
from autoshard.propagation.rule import Rule, Shape

OLD, NEW = "old", "new"  # the factors of the dim that is resized


def resized(x: Any, dim: int, size: int) -> jax.Array:
    """An array with so many rows along a dim: the first ones, and zeros behind them if it has fewer."""
    if x.shape[dim] == size:
        return jnp.asarray(x)
    made: jax.Array = resizing(x.ndim, dim, x.shape[dim], size)(x)
    return made


def _plain(x: Any, dim: int, size: int) -> jax.Array:
    if size <= x.shape[dim]:
        return lax.slice_in_dim(x, 0, size, axis=dim)
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, (size - x.shape[dim]) * (i == dim), 0) for i in range(x.ndim)])


@functools.lru_cache(maxsize=1024)
def resizing(rank: int, dim: int, old: int, new: int) -> Operation:
    """The operation for arrays of one rank."""
    grows, others = new > old, [i for i in range(rank) if i != dim]

    def rule_of(operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
        reads = [OLD if i == dim else f"x{i}" for i in range(rank)]
        leaves = [NEW if i == dim else f"y{i}" for i in range(rank)]
        sizes = dict(zip(reads, operands[0], strict=True)) | dict(zip(leaves, results[0], strict=True))
        tensors = [tuple((name,) for name in names) for names in (reads, leaves)]
        return Rule((tensors[0],), (tensors[1],), sizes, frozenset(), frozenset(sizes), frozenset())

    def parts(split: CallSplit, x: Any) -> jax.Array:
        axes, count = split.axes("parts"), split.count("parts")
        if count == 1:
            return _plain(x, dim, new)
        if not grows:
            return _plain(lax.all_gather(x, axes, axis=dim, tiled=True), dim, new)
        each = new // count
        return lax.dynamic_slice_in_dim(_plain(x, dim, new), split.index("parts") * each, each, axis=dim)

    def cut(split: CallSplit, x: Any) -> jax.Array:
        each = new // split.count("cut")
        share = PositionShare(each, 0, each, each, (0, 0))
        return rows_read(x, dim, share, split.axes("cut"), split.count("cut"), is_split=True)

    def traded(split: CallSplit, x: Any, *, other: int) -> jax.Array:
        if grows:
            return lax.all_to_all(_plain(x, dim, new), split.axes("trade"), dim, other, tiled=True)
        return _plain(lax.all_to_all(x, split.axes("trade"), other, dim, tiled=True), dim, new)

    beside = {f"along{i}": (f"x{i}", f"y{i}") for i in others}
    operation = Operation(
        "grown" if grows else "cut_off", lambda x: _plain(x, dim, new), rule_of, identity=f"{dim} {new}"
    )
    operation.implementations += [
        Implementation("parts", parts, {"parts": (NEW if grows else OLD,), **beside}),
        Implementation("cut", cut, {"cut": (OLD, NEW), **beside}, lambda split: split.count("cut") > 1),
        *(
            Implementation(
                f"traded{i}",
                functools.partial(traded, other=i),
                {"trade": (f"x{i}", NEW) if grows else (OLD, f"y{i}")}
                | {name: factors for name, factors in beside.items() if name != f"along{i}"},
                lambda split: split.count("trade") > 1,
            )
            for i in others
        ),
    ]
    return operation
