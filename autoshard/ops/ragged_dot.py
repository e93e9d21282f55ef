"""`autoshard.ops.ragged_dot`: products of rows with their group's matrix, whose groups may lie on several devices.

Rows are sorted by group, as dropless mixtures of experts sort tokens (Gale et al., "MegaBlocks", MLSys 2023). Nothing
is dropped and no group has a capacity. Where devices have groups each, rows come to their groups in one of these ways:

==================  ===========================================================================================
`groups`            every device has all rows; what each makes of the rows of its groups is summed up
`groups_and_rows`   rows are split too: an all_gather before, a reduce_scatter after
==================  ===========================================================================================

Each device's part is one `jax.lax.ragged_dot` of the rows that it has.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.errors import ArgumentError
from autoshard.operations.operation import operation
from autoshard.operations.split import CallSplit
from autoshard.operations.sums import scattered_sum
from autoshard.ops.operands import arrays_of

ROLE = "experts"


def ragged_dot(lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
    """`jax.lax.ragged_dot`, which a plan may split by rows, by either dim of the matrices, and by groups.

    Under autoshard, the planner takes the way that is predicted to be fastest. Without autoshard it is plain JAX.

    Args:
        lhs: ``[M, K]``, rows sorted by group.
        rhs: ``[G, K, N]``, a matrix per group.
        group_sizes: ``[G]`` integers: how many rows each group has. Rows beyond their sum give zeros.

    Returns:
        ``[M, N]``: each row times the matrix of its group.

    Raises:
        ArgumentError: shapes do not fit together.

    >>> ragged_dot(jnp.ones((4, 2)), jnp.ones((2, 2, 3)), jnp.array([1, 3])).shape
    (4, 3)
    """
    lhs, rhs, group_sizes = arrays_of(lhs=lhs, rhs=rhs, group_sizes=group_sizes)
    shapes = f"rows {lhs.shape}, matrices {rhs.shape} and group sizes {group_sizes.shape}"
    if (lhs.ndim, rhs.ndim, group_sizes.ndim) != (2, 3, 1):
        raise ArgumentError(f"ragged_dot takes [M, K], [G, K, N] and [G], not {shapes}")
    if lhs.shape[1] != rhs.shape[1] or rhs.shape[:1] != group_sizes.shape:
        raise ArgumentError(f"{shapes} do not fit: ragged_dot takes [M, K], [G, K, N] and [G]")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ArgumentError(f"group_sizes is {group_sizes.dtype}; integers are needed, one a group")
    made: jax.Array = ragged_operation(lhs, rhs, group_sizes, jnp.arange(lhs.shape[0], dtype=group_sizes.dtype))
    return made


def _sizes_within(sizes: jax.Array, first: Any, count: int, start: Any = 0) -> jax.Array:
    """How many rows of each group are among `count` rows from the `first` on; the first group begins at `start`."""
    ends = start + jnp.cumsum(sizes, dtype=sizes.dtype)
    low, high = (jnp.clip(bounds, first, first + count) for bounds in (ends - sizes, ends))
    return high - low


@operation("m k, g k n, s, m -> m n", reduction="k", need_replication="g s", name="ragged_dot")
def ragged_operation(lhs: Any, rhs: Any, group_sizes: Any, row_numbers: Any) -> jax.Array:
    """Row numbers tell a device that has some of the rows which these are."""
    return lax.ragged_dot(lhs, rhs, _sizes_within(group_sizes, row_numbers[0], lhs.shape[0]))


def _own_groups(split: CallSplit, rhs: Any, group_sizes: Any) -> tuple[jax.Array, jax.Array]:
    """The row at which the groups of this device start, and the groups' sizes."""
    first = split.index(ROLE) * rhs.shape[0]
    starts = jnp.cumsum(group_sizes, dtype=group_sizes.dtype) - group_sizes
    return starts[first], lax.dynamic_slice_in_dim(group_sizes, first, rhs.shape[0])


def _of_own_groups(split: CallSplit, rows: Any, rhs: Any, group_sizes: Any, first_row: Any) -> jax.Array:
    """All rows in, what this device's groups make of theirs, and zeros."""
    start, sizes = _own_groups(split, rhs, group_sizes)
    before = jnp.clip(start - first_row, 0, rows.shape[0])
    here = _sizes_within(sizes, first_row, rows.shape[0], start)
    return jnp.roll(lax.ragged_dot(jnp.roll(rows, -before, 0), rhs, here), before, 0)


def _seconds(split: CallSplit, topology: Any, lhs: Any, rhs: Any, *others: Any, gathers: bool) -> float:
    """Of even groups: a device multiplies the rows of its own groups, and turns all rows round before and after."""
    (count, k), n = lhs.shape, rhs.shape[2]
    rows = count * split.count(ROLE) if gathers else count
    work = 2 * rows / split.count(ROLE) * k * n / topology.flops_for(lhs.dtype)
    moved = (2 * rows * (k + n) + rhs.size) * lhs.dtype.itemsize
    return float(max(work, moved / topology.memory_bandwidth))


@ragged_operation.implementation(splits={ROLE: "g"}, name="groups", seconds=functools.partial(_seconds, gathers=False))
def _by_groups(split: CallSplit, lhs: Any, rhs: Any, group_sizes: Any, row_numbers: Any) -> jax.Array:
    product: jax.Array = lax.psum(_of_own_groups(split, lhs, rhs, group_sizes, row_numbers[0]), split.axes(ROLE))
    return product


@ragged_operation.implementation(
    splits={ROLE: "g m"}, name="groups_and_rows", seconds=functools.partial(_seconds, gathers=True)
)
def _by_groups_and_rows(split: CallSplit, lhs: Any, rhs: Any, group_sizes: Any, row_numbers: Any) -> jax.Array:
    axes, count = split.axes(ROLE), lhs.shape[0]
    rows = lax.all_gather(lhs, axes, axis=0, tiled=True)
    first = row_numbers[0] - split.index(ROLE) * count
    made = _of_own_groups(split, rows, rhs, group_sizes, first)
    return scattered_sum(made, axes, 0, split.mesh)
