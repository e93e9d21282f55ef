"""`largest_batch`: a step in, the most rows of its batch that fit out, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from autoshard.errors import ArgumentError, MemoryLimitError
from autoshard.frontiers.traced_step import TracedStep
from autoshard.mesh.topology import Topology
from autoshard.report.units import bytes_text
from autoshard.tactics import Roles, batch_dim
from autoshard.user_plan import Plan


@dataclass(frozen=True)
class LargestBatch:
    """The most rows that fit, and the plan of the step on these.

    Attributes:
        rows: of the whole batch, over all devices.
        plan: of the step on so many rows.
        refused: the fewest rows that were tried and do not fit; None where the most that were asked for fit.
    """

    rows: int
    plan: Plan
    refused: int | None

    def __str__(self) -> str:
        more = "more were not asked for" if self.refused is None else f"{self.refused} do not fit"
        seconds = self.plan.predicted.step_seconds
        return (
            f"{self.plan.name}: {self.rows} rows fit in {bytes_text(self.plan.memory or 0.0)} per device, {more}. "
            f"{self.rows / seconds:.4g} rows/s."
        )


def largest_batch(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | AbstractMesh | None = None,
    topology: Topology | str | None = None,
    multiple: int | None = None,
    most: int = 2**20,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> LargestBatch:
    """The largest batch with which a step fits, and its plan.

    The batch is what the step's arrays begin with that no result replaces, as for tactics. Its rows are doubled until
    they do not fit, then bisected. It is taken for granted that fewer rows hold no more.

    >>> found = largest_batch(train_step, state, batch, mesh=mesh, topology="v5e:4x4")  # doctest: +SKIP
    >>> found.rows, found.plan.predicted.peak_bytes  # doctest: +SKIP

    Args:
        fn: any function that `jax.jit` takes.
        *args: its positional arguments, with a batch of any size: pytrees of arrays or ShapeDtypeStructs.
        mesh: the devices, as for `autoshard`.
        topology: what the machine costs, as for `autoshard`.
        multiple: what the rows are a multiple of; by default the number of devices.
        most: rows, beyond which nothing is tried.
        kwargs: keyword arguments of `fn`, which are not resized.
        **options: those of `autoshard`, and keywords of `jax.jit`. `memory` is the limit; by default the machine's.

    Raises:
        MemoryLimitError: not even `multiple` rows fit.
        ArgumentError: the step has no batch, or an option is of the wrong kind.
    """

    def traced(args: tuple[Any, ...]) -> TracedStep:
        return TracedStep.of(fn, args, kwargs or {}, mesh, topology, options)

    given = traced(args)
    dims = _batch_dims(given, args)
    step = multiple if multiple is not None else math.prod(given.options.mesh.shape.values())
    if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= most:
        raise ArgumentError(f"multiple={multiple!r}, most={most!r}; rows are needed, 1 or more, and no more than most")

    def plan(count: int) -> Plan | None:
        """The plan on so many multiples; None if it does not fit."""
        sized = traced(_resized(args, dims, count * step))
        try:
            solution = sized.solution(sized.options.memory)
        except MemoryLimitError:
            if count == 1:
                raise
            return None
        return sized.plan(solution, sized.options.memory, solution.bound)

    fits, best, refused, limit = 1, plan(1), 0, most // step
    assert best is not None, "what does not fit with one multiple raises"
    while not refused and fits < limit:
        tried = min(2 * fits, limit)
        if (found := plan(tried)) is None:
            refused = tried
        else:
            fits, best = tried, found
    while refused and refused - fits > 1:
        tried = (fits + refused) // 2
        if (found := plan(tried)) is None:
            refused = tried
        else:
            fits, best = tried, found
    return LargestBatch(fits * step, best, refused * step or None)


def _batch_dims(step: TracedStep, args: tuple[Any, ...]) -> dict[int, int]:
    """Leaf of the positional arguments -> its dim that is the batch."""
    batch = Roles(step.formulation).batch
    leaves = [path for path, leaf in jax.tree_util.tree_leaves_with_path(args) if hasattr(leaf, "shape")]
    if not batch or len(leaves) != len(step.program.own_arguments):
        raise ArgumentError(
            f"{step.program.name}: no argument has rows of a batch, or some are keywords.\n"
            "Pass the batch by position, as arrays with its rows along the first dim."
        )
    dims = {i: batch_dim(step.formulation, i) for i in batch}
    return {i: dim for i, dim in dims.items() if dim is not None}


def _resized(args: tuple[Any, ...], dims: Mapping[int, int], rows: int) -> tuple[Any, ...]:
    """The arguments as types, with so many rows of the batch."""
    leaves, tree = jax.tree.flatten(args)
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]
    for argument, dim in dims.items():
        leaf = leaves[arrays[argument]]
        shape = (*leaf.shape[:dim], rows, *leaf.shape[dim + 1 :])
        leaves[arrays[argument]] = jax.ShapeDtypeStruct(shape, leaf.dtype)
    resized: tuple[Any, ...] = jax.tree.unflatten(tree, leaves)
    return resized
