"""What stages cost, as arrays: per layer, and per run of consecutive layers on one sub-mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import ArgumentError
from autoshard.stage_search.machine import DeviceRow, SubMesh, check_fits_row

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StageTable:
    """What a stage of layers i to k - 1 costs on one sub-mesh, at entry [i, k] of every array, i < k.

    An entry is inf where there is no such stage. Seconds and bytes are those of every device of the sub-mesh.
    """

    shape: SubMesh
    variant: str  # what else was chosen: "" or "remat"
    forward: Numbers  # s per microbatch
    backward: Numbers  # s per microbatch, without the gradients of weights
    weight: Numbers  # s per microbatch, of the gradients of weights
    after: Numbers  # s, once per step: the optimizer
    fixed_bytes: Numbers  # bytes: weights, their gradients' sums, the state of the optimizer
    microbatch_bytes: Numbers  # bytes that a forward task leaves for its backward task
    working_bytes: Numbers  # bytes that one task holds beside

    @property
    def layers(self) -> int:
        """How many there are in all."""
        return len(self.forward) - 1

    @cached_property
    def work(self) -> Numbers:
        """Seconds per microbatch."""
        return self.forward + self.backward + self.weight

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """Which stages fit with one microbatch in flight."""
        return is_within_memory(self, 1.0)


def is_within_memory(table: StageTable, in_flight: float) -> NDArray[np.bool_]:
    """Which stages fit with so many microbatches in flight, at [first layer, layer after the last]."""
    held = table.fixed_bytes + table.working_bytes + in_flight * table.microbatch_bytes
    return np.asarray(held <= table.shape.memory_bytes)


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """What each layer costs on one sub-mesh. Costs of a stage are the sums over its layers, working bytes the largest.

    Measured on plans of 1 to 8 equal layers: bytes are sums exactly, seconds within 3%. A stage of several layers may
    work in more than one of them does, since a loop over layers copies what a turn of it takes and makes.
    """

    forward: Numbers  # s per microbatch, per layer
    backward: Numbers
    weight: Numbers
    after: Numbers  # s per step
    fixed_bytes: Numbers
    microbatch_bytes: Numbers
    working_bytes: Numbers
    loop_bytes: float = 0.0  # that a stage of several layers of a loop works in beside these
    in_loop: NDArray[np.bool_] | None = None  # which layers the loop has; None: all

    def table(self, shape: SubMesh, variant: str = "") -> StageTable:
        """The table of all runs of these layers.

        >>> ones = np.ones(3)
        >>> costs = LayerCosts(ones, 2 * ones, 0 * ones, 0 * ones, 5 * ones, ones, np.array([1.0, 3.0, 2.0]))
        >>> table = costs.table(SubMesh.anywhere("1", 1, 3, 1e9))
        >>> [float(one) for one in (table.backward[0, 2], table.working_bytes[0, 1], table.forward[2, 2])]
        [4.0, 1.0, inf]
        """
        names = ("forward", "backward", "weight", "after", "fixed_bytes", "microbatch_bytes")
        sums = {name: _run_sums(getattr(self, name)) for name in names}
        working = _run_maxima(self.working_bytes)
        looped = np.ones(len(self.forward)) if self.in_loop is None else self.in_loop.astype(float)
        working[np.isfinite(working) & (_run_sums(looped) >= 2)] += self.loop_bytes
        return StageTable(shape, variant, **sums, working_bytes=working)


def _run_sums(values: Numbers) -> Numbers:
    total = np.concatenate(([0.0], np.cumsum(values)))
    return np.where(_is_run(len(values)), total[None, :] - total[:, None], np.inf)


def _run_maxima(values: Numbers) -> Numbers:
    found = np.full((len(values) + 1, len(values) + 1), np.inf)
    for first in range(len(values)):
        found[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return found


def _is_run(layers: int) -> NDArray[np.bool_]:
    index = np.arange(layers + 1)
    return index[:, None] < index[None, :]


@dataclass(frozen=True, eq=False)
class MicrobatchCosts:
    """What a step costs in one number of microbatches."""

    tables: tuple[StageTable, ...]
    sent_forward: Numbers  # bytes per microbatch that cross the cut before layer k, at entry k; 0 at both ends
    sent_backward: Numbers  # bytes of cotangents that come back over it


@dataclass(frozen=True, eq=False)
class StageSpace:
    """What the search chooses from. Invariant: all tables have the same layers, and fit the row of devices."""

    row: DeviceRow
    costs: Mapping[int, MicrobatchCosts]  # number of microbatches -> costs
    schedules: Sequence[tuple[str, int]] = (("1f1b", 1),)  # name, chunks
    least_task_seconds: float = 0.0  # s: a task takes no less, since it has to be dispatched
    most_stages: int = 64  # of a pipeline

    def __post_init__(self) -> None:
        sizes = {table.layers for costs in self.costs.values() for table in costs.tables}
        if len(sizes) != 1:
            raise ArgumentError(f"tables of stages are for {sorted(sizes)} layers; the same number is needed in all")
        check_fits_row(self.row, [table.shape for costs in self.costs.values() for table in costs.tables])

    @property
    def layers(self) -> int:
        """How many there are in the step."""
        return next(iter(self.costs.values())).tables[0].layers
