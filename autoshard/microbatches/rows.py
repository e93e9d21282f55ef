"""Where the rows of each microbatch are in an array of the whole batch.

The batch is G groups of rows, one after the other. Microbatch m of M has the rows m, m + M, m + 2M, ... of every group.
So the shard that a device has of the batch has as many rows of every microbatch, and taking one moves nothing.

A dim may have O blocks, one behind the other, each with all rows of the batch.

Where a step treats samples together that lie next to each other in the batch, as the answers to one prompt, each row
is so many samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from autoshard.microbatches.relations import BatchRows


@dataclass(frozen=True)
class Microbatches:
    """What a step is to be split into."""

    count: int  # microbatches, one after the other
    batch: int  # rows of the whole batch
    dims: Mapping[int, int]  # argument index -> its dim of the batch, of those that have one
    groups: int = 1  # of rows, that are run side by side and summed up after the last microbatch
    samples: int = 1  # of each row: entries of the arguments' dims, next to each other
    # Argument -> the result that takes its place, if microbatches may have statistics of their own; None: they may not.
    own_statistics: Mapping[int, int] | None = None

    @property
    def parts(self) -> int:
        """Into so many the batch is split, in time and side by side."""
        return self.count * self.groups

    @property
    def rows(self) -> int:
        """Of one group of one microbatch."""
        return self.batch // self.parts


def stacked(array: Any, rows: BatchRows, split: Microbatches) -> Any:
    """[..., B, ...] -> [M, G, ..., B/MG, ...], or without G if there is one group: all microbatches."""
    apart, dim = _apart(array, rows, split)
    outer = jnp.moveaxis(apart, (dim + 2, dim), (0, 1))
    shape = _sized(array.shape, rows.dim, array.shape[rows.dim] // split.parts)
    return outer.reshape(split.count, *[split.groups] * (split.groups > 1), *shape)


def unstacked(array: Any, rows: BatchRows, split: Microbatches) -> Any:
    """The reverse of `stacked`."""
    inner, shape = rows.inner or 1, array.shape[1 + (split.groups > 1) :]
    before, size, after = shape[: rows.dim], shape[rows.dim], shape[rows.dim + 1 :]
    blocks = _blocks(size // (split.rows * inner))
    apart = array.reshape(split.count, split.groups, *before, *blocks, split.rows, inner, *after)
    dim = rows.dim + len(blocks)
    back = jnp.moveaxis(apart, (0, 1), (dim + 2, dim))
    return back.reshape(_sized(shape, rows.dim, size * split.parts))


class MicrobatchPlace(NamedTuple):
    """Which rows are run."""

    microbatch: Any  # its number
    group: Any  # its number; mapped over, it counts the groups


def taken(array: Any, rows: BatchRows, split: Microbatches, place: MicrobatchPlace) -> Any:
    """[..., B, ...] -> [..., B/MG, ...]: the rows of one group of one microbatch."""
    apart, dim = _apart(array, rows, split)
    of_groups = jax.lax.dynamic_index_in_dim(apart, place.microbatch, dim + 2, keepdims=False)
    shape = _sized(array.shape, rows.dim, array.shape[rows.dim] // split.parts)
    return _of_group(of_groups, dim, place.group).reshape(shape)


def _of_group(array: Any, dim: int, group: Any) -> Any:
    """One group's part along a dim; mapped over all groups it moves that dim, which no gather could do as well."""

    @jax.custom_batching.custom_vmap
    def part(group: Any, array: Any) -> Any:
        return jax.lax.dynamic_index_in_dim(array, group, dim, keepdims=False)

    @part.def_vmap
    def _(size: int, batched: Sequence[bool], group: Any, array: Any) -> tuple[Any, bool]:
        assert list(batched) == [True, False] and size == array.shape[dim], "the array is of all groups"
        return jnp.moveaxis(array, dim, 0), True

    return part(group, array)


def _apart(array: Any, rows: BatchRows, split: Microbatches) -> tuple[Any, int]:
    """[..., O * B * inner, ...] -> [..., O, G, B/MG, M, inner, ...], without O if it is 1; and the dim of G."""
    dim, inner = rows.dim, rows.inner or 1
    blocks = _blocks(array.shape[dim] // (split.batch * inner))
    here = *blocks, split.groups, split.rows, split.count, inner
    return array.reshape(*array.shape[:dim], *here, *array.shape[dim + 1 :]), dim + len(blocks)


def _blocks(count: int) -> tuple[int, ...]:
    return (count,) * (count > 1)


def _sized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
