"""`largest_batch`: a step in, the most rows of its batch that fit out, by bisection."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import PyTreeDef

from autoshard.errors import ArgumentError, MemoryLimitError, SolverError
from autoshard.errors.kinds import checks_kinds
from autoshard.frontiers.traced_step import FrontierStep
from autoshard.frontiers.traced_variants import FrontierVariants
from autoshard.mesh.topology import Topology
from autoshard.model.memory_limit import ANY_GAP
from autoshard.options import half_of_time, is_whole_number
from autoshard.program import Program
from autoshard.program.flattening import flattened
from autoshard.program.signature import Arguments, ArgumentSelection, join
from autoshard.program.user_code import shows_users_lines
from autoshard.report.units import bytes_text
from autoshard.tactics.roles import Roles, batch_dim
from autoshard.user_plan import Plan

QUESTION_SHARE = 0.125  # of the time limit: the work that may be spent on whether one number of rows fits


@dataclass(frozen=True)
class LargestBatch:
    """The most rows that fit, and the plan of the step on these.

    Attributes:
        rows: of the whole batch, over all devices.
        plan: of the step on so many rows.
        refused: the fewest rows that were tried and do not fit; None where none was refused.
        undecided: the fewest rows that were tried, or to be tried next, and of which it was not found in time whether
            they fit; None where that is known of all.
    """

    rows: int
    plan: Plan
    refused: int | None
    undecided: int | None = None

    def __str__(self) -> str:
        more = "more were not asked for" if self.refused is None else f"{self.refused} do not fit"
        if self.undecided is not None:
            more = f"whether {self.undecided} do was not found in time"
        seconds = self.plan.predicted.step_seconds
        return (
            f"{self.plan.name}: {self.rows} rows fit in {bytes_text(self.plan.memory or 0.0)} per device, {more}. "
            f"{self.rows / seconds:.4g} rows/s."
        )


@shows_users_lines
@checks_kinds("kwargs")
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
    they do not fit, then bisected: of each number it is asked whether some plan fits, and the best is sought for the
    most. It is taken for granted that fewer rows hold no more.

    >>> found = largest_batch(train_step, state, batch, mesh=mesh, topology="v5e:4x4")  # doctest: +SKIP
    >>> found.rows, found.plan.predicted.peak_bytes  # doctest: +SKIP

    Args:
        fn: any function that `jax.jit` takes.
        *args: its positional arguments, with a batch of any size that it can be traced with: pytrees of arrays or
            ShapeDtypeStructs.
        mesh: the devices, as for `autoshard`.
        topology: what the machine costs, as for `autoshard`.
        multiple: what the rows are a multiple of; by default of the number of devices and of microbatches.
        most: rows, beyond which nothing is tried.
        kwargs: keyword arguments of `fn`, whose batch is resized, too.
        **options: `fixed`, `time_limit`, `ignore_constraints`, `trips`, `microbatches` (a number), `remat`, `tactics`,
            `search` and `memory`, as for `autoshard`, and keywords of `jax.jit`. `memory` is the limit, by default the
            machine's; `time_limit` is that of all plans together, the first of which is made in any case. If it ends
            before the best plan is sought, the one that is returned is any that fits.

    Raises:
        MemoryLimitError: not even `multiple` rows fit.
        SolverError: whether these fit was not found in time. More rows of which it was not found count as too many.
        ArgumentError: the step has no batch, or an option is of the wrong kind.
    """

    _check_rows(multiple, most)
    given = FrontierStep.of(fn, args, kwargs or {}, mesh, topology, options)
    static, dynamic = ArgumentSelection.of(fn, options, "static").split(args, dict(kwargs or {}))
    batch = _BatchRows.of(given, dynamic)
    devices = math.prod(given.options.mesh.shape.values())
    step = multiple if multiple is not None else math.lcm(devices, given.options.microbatches or 1)
    _check_rows(step, most)
    until, seconds = given.options.timed().ends, given.options.time_limit

    def plan(count: int, gap: float = ANY_GAP) -> Plan | MemoryLimitError | SolverError:
        """A plan on so many multiples, or why there is none: any that fits, if no other gap is said."""
        args, kwargs = join(static, batch.resized(count * step))
        try:
            sized = FrontierVariants.of(fn, args, kwargs, mesh, topology, options)
        except (TypeError, ValueError) as error:  # JAX's, for shapes that do not go together
            raise batch.refusal(given.program, count * step, error) from error
        share = QUESTION_SHARE if gap == ANY_GAP else 1.0
        try:
            return sized.timed(half_of_time(until), share * seconds).within(sized.options.memory, gap).plan
        except (MemoryLimitError, SolverError) as error:
            return error

    fits, limit = 1, most // step
    best = plan(1)
    if not isinstance(best, Plan):
        raise best
    failed: dict[int, MemoryLimitError | SolverError] = {}
    while fits < (end := min(failed, default=limit + 1)) - 1:
        tried = (fits + end) // 2 if failed else min(2 * fits, limit)
        if time.monotonic() > until:
            failed[tried] = SolverError(f"the time limit ended before {tried * step} rows were tried")
            break
        found = plan(tried)
        if isinstance(found, Plan):
            fits, best = tried, found
        else:
            failed[tried] = found

    if time.monotonic() <= until and isinstance(found := plan(fits, gap=0.0), Plan):
        best = found

    def fewest(kind: type[Exception]) -> int | None:
        return min((count * step for count, error in failed.items() if isinstance(error, kind)), default=None)

    return LargestBatch(fits * step, best, fewest(MemoryLimitError), fewest(SolverError))


def _check_rows(multiple: Any, most: Any) -> None:
    """
    Raises:
        ArgumentError: they are no numbers of rows, or no multiple is within the most.
    """
    rows = (most,) if multiple is None else (multiple, most)
    are_numbers = all(map(is_whole_number, rows))
    if not are_numbers or not 1 <= rows[0] <= most:
        raise ArgumentError(f"multiple={multiple!r}, most={most!r}; rows are needed, 1 or more, and no more than most")


@dataclass(frozen=True)
class _BatchRows:
    """Where the rows of a step's batch are among the leaves of its arguments, static arguments aside."""

    leaves: list[Any]
    tree: PyTreeDef
    dims: Mapping[int, int]  # leaf -> its dim that is the batch

    @classmethod
    def of(cls, step: FrontierStep, dynamic: Arguments) -> _BatchRows:
        """That of a step's arguments.

        Raises:
            ArgumentError: there is none, or the step's arrays are not the leaves of its arguments.
        """
        leaves, tree = jax.tree.flatten(dynamic)
        flat = flattened(dynamic)
        static = {i for i, leaf in enumerate(leaves) if not hasattr(leaf, "shape")}
        arrays = [i for i in range(len(leaves)) if i not in (flat.structure.places if flat.modules is None else static)]
        batch = {i: batch_dim(step.formulation, i) for i in Roles(step.formulation).batch}
        if not batch or len(arrays) != len(step.program.own_arguments):
            raise ArgumentError(
                f"{step.program.name}: no argument has rows of a batch, or arrays are shared by several arguments.\n"
                "Pass the batch as arrays with its rows along the first dim."
            )
        return cls(leaves, tree, {arrays[i]: dim for i, dim in batch.items() if dim is not None})

    def refusal(self, program: Program, rows: int, error: Exception) -> ArgumentError:
        """The error that the step cannot be traced with so many rows."""
        shapes = [f"{one.dtype}[{','.join(map(str, one.shape))}]" for one in map(self.leaves.__getitem__, self.dims)]
        lines = str(error).splitlines()
        return ArgumentError(
            f"{program.name}: with {rows} rows of the batch it cannot be traced: {lines[0] if lines else error!r}\n"
            f"Its batch is taken to be {', '.join(shapes)}: what no result replaces. Return the new state where the "
            "step takes the state, and donate it (donate_argnums=0); and write the step for any number of rows."
        )

    def resized(self, rows: int) -> Arguments:
        """The arguments with so many rows of the batch, as types."""
        leaves = list(self.leaves)
        for i, dim in self.dims.items():
            shape = leaves[i].shape
            leaves[i] = jax.ShapeDtypeStruct((*shape[:dim], rows, *shape[dim + 1 :]), leaves[i].dtype)
        resized: Arguments = jax.tree.unflatten(self.tree, leaves)
        return resized
