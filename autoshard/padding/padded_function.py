"""`autoshard(pad="batch")`: a decorated function that pads batches which the devices do not divide."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.arguments import abstract, type_of
from autoshard.decorated import Parameters, Result, ShardedFunction
from autoshard.errors import ArgumentError
from autoshard.options import Options
from autoshard.padding.rewriting import PaddedProgram
from autoshard.program import Program
from autoshard.program.flattening import flattened
from autoshard.program.signature import Arguments, join
from autoshard.program.trees import Box, Tree
from autoshard.user_plan import Plan


@dataclass(frozen=True)
class Batch:
    """The batch of a call: how many rows it has, how many it gets, and which arrays have them."""

    rows: int
    padded: int
    arrays: frozenset[int]

    def pad(self, i: int, leaf: Any) -> Any:
        """An array, with rows of zeros behind its own if it is of the batch."""
        if i not in self.arrays:
            return leaf
        shape = (self.padded, *leaf.shape[1:])
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)
        more = [(0, self.padded - self.rows), *[(0, 0)] * (leaf.ndim - 1)]
        return np.pad(leaf, more) if isinstance(leaf, np.ndarray) else jnp.pad(leaf, more)


class PaddedFunction(ShardedFunction[Parameters, Result]):
    """A function whose batch is padded where the devices do not divide it. Its results are those of the batch."""

    def __init__(
        self, fn: Any, *, options: Options, jit_keywords: Mapping[str, Any], given: Plan | None = None
    ) -> None:
        super().__init__(fn, options=options, jit_keywords=jit_keywords, given=given)
        self._given_keywords = dict(jit_keywords)
        self._padded: dict[Any, tuple[Batch, ShardedFunction[..., Any]] | None] = {}

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        found = self._padding(args, kwargs)
        if found is None:
            return super().__call__(*args, **kwargs)
        made: Result = found[1](*found[0], **found[2])
        return made

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """How the step is sharded for arguments like these, their batch padded."""
        found = self._padding(args, kwargs)
        if found is None:
            return super().plan(*args, **kwargs)
        positional, step, keyword, batch = found
        made = step.plan(*positional, **keyword)
        remark = (
            f"pad='batch': the batch of {batch.rows} rows has {batch.padded}, which the devices divide. Sums and means "
            "leave the added rows out."
        )
        return replace(made, warnings=(*made.warnings, remark))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The annotated step on the padded batch, lowered."""
        found = self._padding(args, kwargs)
        return super().lower(*args, **kwargs) if found is None else found[1].lower(*found[0], **found[2])

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The step's program on the padded batch."""
        found = self._padding(args, kwargs)
        return super().trace(*args, **kwargs) if found is None else found[1].trace(*found[0], **found[2])

    def _padding(self, args: Any, kwargs: Any) -> tuple[tuple, ShardedFunction[..., Any], dict[str, Any], Batch] | None:
        """The padded arguments and the step that takes them; None if the devices divide the batch."""
        static, dynamic = self._static.split(args, kwargs)
        flat = flattened(dynamic)
        if flat.structure.has_modules:
            raise ArgumentError(
                "pad='batch' takes no nnx modules: it would not see what the step changes in them.\n"
                "Split them (nnx.split), and pass their states."
            )
        key = static, tuple(map(type, static)), flat.structure, tuple(map(type_of, flat.arrays))
        if key not in self._padded:
            self._padded[key] = self._made(args, kwargs, static, dynamic, flat.arrays)
        found = self._padded[key]
        if found is None:
            return None
        batch, step = found
        padded = [batch.pad(i, leaf) for i, leaf in enumerate(flat.arrays)]
        positional, keyword = join(static, Tree.of(dynamic).unflattened(padded))
        return positional, step, keyword, batch

    def _made(
        self, args: Any, kwargs: Any, static: tuple, dynamic: Arguments, leaves: Sequence[Any]
    ) -> tuple[Batch, ShardedFunction[..., Any]] | None:
        program = super().trace(*args, **kwargs)
        batch = batch_of(program, [tuple(np.shape(leaf)) for leaf in leaves], self._options.mesh.shape)
        if batch is None:
            return None
        tree = Tree.of(dynamic)
        results: list[Box] = []

        def flat(*arrays: Any) -> list[Any]:
            positional, keyword = join(static, tree.unflattened(list(arrays)))
            results[:] = [Box.of(self._fn(*positional, **keyword))]
            return list(results[0].leaves)

        small = jax.make_jaxpr(flat)(*(abstract(type_of(leaf)) for leaf in leaves))
        sizes = [(leaf, batch.pad(i, abstract(type_of(leaf)))) for i, leaf in enumerate(leaves)]
        large = jax.make_jaxpr(flat)(*(one for _, one in sizes))
        padded, out_tree = PaddedProgram(program.name, small, large), results[0].tree

        @functools.wraps(self._fn)
        def step(*args: Any, **kwargs: Any) -> Any:
            arrays = flattened(self._static.split(args, kwargs)[1]).arrays
            return out_tree.unflattened(padded(*arrays))

        return batch, ShardedFunction(step, options=self._options, jit_keywords=self._given_keywords)


def batch_of(program: Program, shapes: Sequence[tuple[int, ...]], mesh: Mapping[str, int]) -> Batch | None:
    """The batch of a step, if it has to be padded.

    It is in the arguments of which no array is state. Its rows are the first dim that their largest array has; all
    arrays there with so many rows are of the batch.
    """
    count = len(program.own_arguments)
    by_argument: dict[Any, list[int]] = defaultdict(list)
    for i, path in enumerate(program.in_tree.array_paths[:count]):
        by_argument[path[:2]].append(i)
    state = set(program.carried) | set(program.donated)
    arriving = [i for ours in by_argument.values() if not state & set(ours) for i in ours if shapes[i]]
    if not arriving:
        return None
    rows = shapes[max(arriving, key=lambda i: program.arguments[i].bytes)][0]
    padded = padded_rows(rows, mesh)
    if padded == rows:
        return None
    return Batch(rows, padded, frozenset(i for i in arriving if shapes[i][0] == rows))


def padded_rows(rows: int, mesh: Mapping[str, int]) -> int:
    """The rows that a batch gets: as few more as make all devices divide it.

    A batch of fewer rows than there are devices is to be divided by as many as some axes have, and that has rows for.

    >>> [padded_rows(rows, {"data": 4, "model": 2}) for rows in (30, 32, 5, 4, 1)]
    [32, 32, 8, 4, 1]
    """
    axes = [size for size in mesh.values() if size > 1]
    counts = {math.prod(some) for n in range(len(axes) + 1) for some in itertools.combinations(axes, n)}
    devices = max(count for count in counts if count <= max(rows, 1))
    return -(-rows // devices) * devices
