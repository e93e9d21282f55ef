"""`autoshard.ops.EmbeddingTables`: many tables in one array whose leading dim is the devices.

Each device has whole tables, or pieces of rows of those that are too large for one (table- and row-wise). Splitting the
last dim is column-wise, which a plan may do beside. A lookup is one operation with these implementations:

================  ====================================================================================================
`exchanged`       batch and tables are split: all devices get all indices, look up their tables, and an all_to_all
                  brings each row of the batch what it reads (Naumov et al., "Deep learning recommendation model", 2019)
`summed`          tables alone are split: what devices find is summed up
================  ====================================================================================================
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.errors import ArgumentError
from autoshard.errors.kinds import checks_kinds
from autoshard.operations.operation import Operation, operation
from autoshard.operations.split import CallSplit
from autoshard.ops.operands import arrays_of
from autoshard.ops.tables.balancing import balanced

ROLE = "tables"


@dataclass(frozen=True)
class TablePiece:
    """Some rows of one table, on one device."""

    table: int
    first: int  # row of the table
    rows: int
    device: int
    at: int  # row of the device's part at which it begins


@dataclass(frozen=True)
class EmbeddingTables:
    """Where the rows of many tables of one width lie: on which device, and where in its part."""

    rows: tuple[int, ...]  # of each table
    devices: int
    pieces: tuple[TablePiece, ...]

    @classmethod
    @checks_kinds()
    def of(
        cls,
        rows: Sequence[int],
        devices: int,
        *,
        costs: Sequence[float] | None = None,
        most_rows: int | None = None,
    ) -> EmbeddingTables:
        """Tables balanced over devices, by greedy or by differencing, whichever is better.

        Args:
            rows: of each table.
            devices: how many parts there are: a multiple of the devices that split the tables.
            costs: of each table, as its rows times how often they are read; by default its rows.
            most_rows: of one piece. Larger tables are cut, and their cost with them. None: tables stay whole.

        Raises:
            ArgumentError: a size is not positive, or there is not one cost per table.
        """
        rows = list(map(operator.index, rows))
        costs = list(rows if costs is None else costs)
        if devices < 1 or not rows or min(rows) < 1 or (most_rows is not None and most_rows < 1):
            raise ArgumentError(f"tables of {rows} rows on {devices} devices: all have to be positive")
        if len(costs) != len(rows):
            raise ArgumentError(f"{len(costs)} costs for {len(rows)} tables: one a table is needed")
        cut = [
            (table, first, min(most_rows or size, size - first))
            for table, size in enumerate(rows)
            for first in range(0, size, most_rows or size)
        ]
        device_of = balanced([costs[table] * count / rows[table] for table, _, count in cut], devices)
        ends, pieces = [0] * devices, []
        for (table, first, count), device in zip(cut, device_of, strict=True):
            pieces.append(TablePiece(table, first, count, device, ends[device]))
            ends[device] += count
        return cls(tuple(rows), devices, tuple(pieces))

    @property
    def rows_per_device(self) -> int:
        """Of the largest part; the others are padded to it."""
        ends = [piece.at + piece.rows for piece in self.pieces]
        return max(ends)

    @checks_kinds()
    def together(self, tables: Sequence[Any]) -> jax.Array:
        """The tables, each ``[rows, width]``, as one array ``[devices, rows_per_device, width]``.

        Its dtype is the one to which those of the tables are promoted.
        """
        tables = arrays_of(**{f"tables[{i}]": table for i, table in enumerate(tables)})
        shapes = [table.shape for table in tables]
        widths = {shape[1:] for shape in shapes}
        if (
            any(len(shape) != 2 for shape in shapes)
            or len(widths) > 1
            or tuple(rows for rows, _ in shapes) != self.rows
        ):
            raise ArgumentError(f"tables are {shapes}; {list(self.rows)} rows of one width are needed")
        made = jnp.zeros((self.devices, self.rows_per_device, shapes[0][1]), jnp.result_type(*tables))
        for one in self.pieces:
            part = tables[one.table][one.first : one.first + one.rows]
            made = made.at[one.device, one.at : one.at + one.rows].set(part)
        return made

    def apart(self, parts: Any) -> list[jax.Array]:
        """The tables, from the array that `together` makes.

        Raises:
            ArgumentError: it is no such array.
        """
        [parts] = arrays_of(parts=parts)
        if parts.ndim != 3 or parts.shape[:2] != (self.devices, self.rows_per_device):
            raise ArgumentError(
                f"parts is of shape {parts.shape}; [{self.devices}, {self.rows_per_device}, width] is needed"
            )
        found: list[list[jax.Array]] = [[] for _ in self.rows]
        for one in self.pieces:
            found[one.table].append(parts[one.device, one.at : one.at + one.rows])
        return [jnp.concatenate(some) for some in found]

    def lookup(self, parts: Any, indices: Any) -> jax.Array:
        """The sum of the rows that each bag reads of each table; without autoshard plain JAX.

        Args:
            parts: ``[devices, rows_per_device, width]``, as `together` makes it.
            indices: ``[batch, tables, bag]`` integers. An index below 0 or beyond its table reads zeros.

        Returns:
            ``[batch, tables, width]``.

        Raises:
            ArgumentError: shapes do not fit, or indices are no integers.
        """
        parts, indices = arrays_of(parts=parts, indices=indices)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise ArgumentError(f"lookup takes integers as indices, not {indices.dtype}")
        fits = parts.ndim == 3 and parts.shape[:2] == (self.devices, self.rows_per_device)
        if not fits or indices.ndim != 3 or indices.shape[1] != len(self.rows):
            raise ArgumentError(
                f"lookup takes parts [{self.devices}, {self.rows_per_device}, width] and indices [batch, "
                f"{len(self.rows)}, bag], not {parts.shape} and {indices.shape}"
            )
        made: jax.Array = lookup_operation(self)(parts, indices)
        return made

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """``[devices, most pieces, 4]``: table, first row, rows and place; a slot without a piece has no rows."""
        each = [[one for one in self.pieces if one.device == device] for device in range(self.devices)]
        found = np.zeros((self.devices, max(map(len, each)), 4), np.int32)
        for device, some in enumerate(each):
            for slot, one in enumerate(some):
                found[device, slot] = one.table, one.first, one.rows, one.at
        return found


def _found(part: Any, slots: Any, indices: Any) -> jax.Array:
    """What bags read of one part: ``[batch, pieces, width]``."""
    firsts, rows, places = (slots[None, :, i, None] for i in range(1, 4))
    inside = jnp.take(indices, slots[:, 0], axis=1) - firsts
    is_here = (inside >= 0) & (inside < rows)
    read = part[jnp.where(is_here, inside + places, 0)]
    return jnp.where(is_here[..., None], read, 0).sum(2)


def _by_table(pieces: Any, tables: Any, count: int) -> jax.Array:
    """Sums of pieces of the same table."""
    made = jnp.zeros((pieces.shape[0], count, pieces.shape[2]), pieces.dtype)
    return made.at[:, tables].add(pieces)


@functools.lru_cache(maxsize=64)
def lookup_operation(tables: EmbeddingTables) -> Operation:
    """The operation of lookups in tables that lie so."""
    count, slots = len(tables.rows), tables.slots

    def of_parts(parts: Any, slots: Any, indices: Any) -> jax.Array:
        """``[batch, parts * pieces, width]``, of the parts that a device has."""
        each = [_found(parts[i], slots[i], indices) for i in range(parts.shape[0])]
        return jnp.concatenate(each, axis=1)

    @operation("n r d, b t l -> b t d", need_replication="n r t l", name="embedding_lookup")
    def looked_up(parts: Any, indices: Any) -> jax.Array:
        return _by_table(of_parts(parts, slots, indices), slots[:, :, 0].reshape(-1), count)

    def own(split: CallSplit, parts: Any) -> jax.Array:
        first = split.index(ROLE) * parts.shape[0]
        return lax.dynamic_slice_in_dim(jnp.asarray(slots), first, parts.shape[0])

    @looked_up.implementation(splits={ROLE: "n"}, name="summed")
    def summed(split: CallSplit, parts: Any, indices: Any) -> jax.Array:
        here = own(split, parts)
        made = _by_table(of_parts(parts, here, indices), here[:, :, 0].reshape(-1), count)
        total: jax.Array = lax.psum(made, split.axes(ROLE))
        return total

    @looked_up.implementation(splits={ROLE: "n b"}, name="exchanged")
    def exchanged(split: CallSplit, parts: Any, indices: Any) -> jax.Array:
        axes = split.axes(ROLE)
        everyone = lax.all_gather(indices, axes, axis=0, tiled=True)
        made = of_parts(parts, own(split, parts), everyone)
        made = lax.all_to_all(made, axes, split_axis=0, concat_axis=1, tiled=True)
        return _by_table(made, slots[:, :, 0].reshape(-1), count)

    looked_up.identity = str(tables.pieces)
    return looked_up
