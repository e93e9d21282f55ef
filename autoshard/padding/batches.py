"""A program and a mesh in, which of the program's arguments are its batch, and how many rows devices divide, out."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.program import Program


@dataclass(frozen=True)
class PaddedBatch:
    """The batch of a call: how many rows it has, how many it gets, and which arrays have them."""

    rows: int
    padded: int
    arrays: frozenset[int]

    def pad(self, i: int, leaf: Any) -> Any:
        """An array, with rows of zeros behind its own if it is of the batch."""
        if i not in self.arrays:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return _of_rows(leaf, self.padded)
        arrays: Any = np if isinstance(leaf, np.ndarray) else jnp
        more = arrays.zeros((self.padded - self.rows, *leaf.shape[1:]), leaf.dtype)  # keys of random numbers, too
        return arrays.concatenate([leaf, more])

    def one_row_less(self, types: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """The types of arguments whose batch has a row less, by which a trace shows where rows are counted.

        Raises:
            ValueError: there is one row only.
        """
        if any(types[i].shape[0] < 2 for i in self.arrays):
            raise ValueError("a padded batch needs two rows")
        return [_of_rows(one, one.shape[0] - 1) if i in self.arrays else one for i, one in enumerate(types)]


def _of_rows(type_: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *type_.shape[1:]), type_.dtype, weak_type=type_.weak_type)


def batch_of(
    program: Program,
    shapes: Sequence[tuple[int, ...]],
    mesh: Mapping[str, int],
    in_modules: Collection[int] = (),
    parts: int = 1,
) -> PaddedBatch | None:
    """The batch of a step, if the devices do not divide it.

    It is an argument whose arrays all have as many rows, and none of which is state. Of several the largest counts, and
    all arrays of such arguments that have as many rows are of the batch.

    Args:
        program: the step's.
        shapes: of its flat arguments.
        mesh: axis name -> devices.
        in_modules: flat arguments that stand in nnx modules, which are state even where the step leaves them alone.
        parts: microbatches, each of which the devices are to divide.
    """
    by_argument: dict[Any, list[int]] = defaultdict(list)
    for i, path in enumerate(program.in_tree.array_paths[: len(program.own_arguments)]):
        by_argument[path[:2]].append(i)
    state = {*program.carried, *program.donated, *in_modules}

    def padded(rows: int) -> int:
        return parts * padded_rows(-(-rows // parts), mesh)

    found: dict[int, list[int]] = defaultdict(list)  # rows -> arrays
    for ours in by_argument.values():
        arrays = [i for i in ours if shapes[i]]
        counts = {shapes[i][0] for i in arrays}
        if len(counts) == 1 and not state & set(ours) and padded(min(counts)) not in counts:
            found[min(counts)] += arrays
    if not found:
        return None
    rows = max(found, key=lambda count: sum(program.arguments[i].bytes for i in found[count]))
    return PaddedBatch(rows, padded(rows), frozenset(found[rows]))


def padded_rows(rows: int, mesh: Mapping[str, int]) -> int:
    """The rows that a batch gets: as few more as leave a device the fewest rows, and fewer more than it has.

    A batch of few rows is divided by as many devices as some axes have.

    >>> [padded_rows(rows, {"data": 4, "model": 2}) for rows in (30, 32, 5, 4, 1)]
    [32, 32, 8, 4, 1]
    >>> [padded_rows(rows, {"data": 8}) for rows in (7, 4)]
    [8, 4]
    """
    axes = [size for size in mesh.values() if size > 1]
    counts = {math.prod(some) for n in range(len(axes) + 1) for some in itertools.combinations(axes, n)}
    on_a_device = {count: -(-rows // count) for count in counts if -(-rows // count) * count < 2 * rows}
    return min(((own, own * count) for count, own in on_a_device.items()), default=(rows, rows))[1]


def uneven_batch(
    program: Program, mesh: Mapping[str, int], apart: Collection[Sequence[Sequence[str]]] = ()
) -> tuple[str, ...]:
    """A remark if the devices do not divide the batch; none otherwise.

    A small argument beside a larger one is no batch that is worth a remark. Neither is one that all devices split along
    other dims, where they need not talk: more rows would only add work.

    Args:
        program: the step's.
        mesh: axis name -> devices.
        apart: the layout of every argument in a plan without communication; empty otherwise.
    """
    batch = batch_of(program, [value.shape for value in program.own_arguments], mesh)
    state = set(program.state)
    arriving = [value for i, value in enumerate(program.own_arguments) if i not in state]
    largest = max(arriving, key=lambda value: value.bytes, default=None)
    if batch is None or largest not in [program.arguments[i] for i in batch.arrays]:
        return ()
    assert largest is not None, "it is of the batch"
    layouts = (layout for value, layout in zip(program.own_arguments, apart, strict=False) if value is largest)
    if math.prod(mesh[axis] for axes in next(layouts, ()) for axis in axes) == math.prod(mesh.values()):
        return ()
    return (
        f"the batch has {batch.rows} rows ({largest.name}), which not all {math.prod(mesh.values())} devices divide. "
        f"{batch.padded} rows would split further: pad='batch' adds them where sums and means allow.",
    )
