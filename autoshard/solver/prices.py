"""What a strategy costs and what a resharding costs, in seconds on one device; remembered, since layers repeat."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.layout import Layout, MeshShape, local_shape, shards
from autoshard.mesh.backends import CPU, Backend, padded_size
from autoshard.mesh.collectives import seconds as collective_seconds
from autoshard.mesh.compute import compute_seconds, flops
from autoshard.mesh.resharding import Step, reshard
from autoshard.mesh.topology import Topology
from autoshard.program import Equation, Value
from autoshard.solver.groups import Group, Use
from autoshard.solver.strategies import ALL_REDUCE, Finish, Strategy, strategies_of
from autoshard.solver.widths import Widths, itemsize

# What an operation of its own costs besides the messages on its links: launch and synchronisation. TPU and GPU
# runtimes need about a microsecond; 8 CPU devices need far more, but in proportion to everything else there.
LAUNCH_SECONDS = 1e-6

# One all_reduce moves the bytes of a reduce_scatter and an all_gather, but never takes as long as the two: on 8 CPU
# devices they took 1.2 (16 KiB) to 3.7 times (16 MiB) as long (`python benchmarks/collectives.py`). We take the least,
# so that they are chosen where they save something, and one all_reduce where they don't.
HALF_PENALTY = 1.2

Readers = Collection[Group] | None  # of a resharded copy; None: all that do not compute on the shards as they lie

_CROSSINGS = frozenset({"scan_const", "scan_carry", "branch_const", "branch_join"})  # no work: the same buffer
_READS_PART = frozenset({"dynamic_slice", "gather", "slice", "scan_slice"})  # touch as much as they return
# Touch as much as they insert, which is this operand.
_WRITES_PART = {"dynamic_update_slice": 1, "scan_stack": 0, "scatter": 2, "scatter-add": 2, "scatter-max": 2,
                "scatter-min": 2, "scatter-mul": 2, "scatter-sub": 2}  # fmt: skip


@dataclass(frozen=True)
class Seconds:
    """What one group costs per step under one strategy."""

    compute: float
    communication: float
    hidden: float = 0.0  # of the communication: what can run behind compute

    @property
    def total(self) -> float:
        return self.compute + self.communication - self.hidden


@dataclass(frozen=True)
class Priced:
    """A group's strategies and their seconds; groups that look alike share one."""

    strategies: tuple[Strategy, ...]
    seconds: tuple[Seconds, ...]

    @cached_property
    def costs(self) -> np.ndarray:
        return np.array([seconds.total for seconds in self.seconds])


class Prices:
    """The price list of one mesh and topology."""

    def __init__(
        self,
        mesh: MeshShape,
        topology: Topology,
        widths: Widths | None = None,
        backend: Backend = CPU,
        weights: Collection[int] = (),
        instead: Mapping[int, Sequence[Value]] | None = None,
        images: Mapping[tuple[int, ...], tuple[int, int]] | None = None,
    ):
        topology.check(mesh)
        self.mesh, self.topology, self.widths = dict(mesh), topology, widths or Widths()
        self.backend = backend
        self.weights = frozenset(weights)  # values made of the state alone, which can be gathered ahead of their use
        self.instead = instead or {}  # values that their readers make again -> what they read for it
        self.images = images or {}  # shapes of values that convolutions deal with -> batch and feature dims
        self._sizes: dict[tuple, int] = {}
        self._groups: dict[tuple, Priced] = {}
        self._tables: dict[tuple, np.ndarray] = {}
        self._pairs: dict[tuple, tuple[tuple[Step, ...], float, float]] = {}

    def group(self, group: Group) -> Priced:
        """Every strategy of `group` with its seconds per step."""
        key = self._signature(group)
        if key not in self._groups:
            strategies = tuple(strategies_of(group, self.mesh, self.backend))
            self._groups[key] = Priced(strategies, tuple(self._seconds(group, strategy) for strategy in strategies))
        return self._groups[key]

    def steps(self, value: Value, source: Layout, target: Layout, readers: Readers = None) -> tuple[Step, ...]:
        """The collectives that bring `value` from one layout to the other, for these readers."""
        return self._pair(value.shape, self.widths.moving(value, readers), source, target)[0]

    def resharding(self, value: Value, source: Layout, target: Layout, readers: Readers = None) -> float:
        """Seconds of one resharding of `value`."""
        return self._pair(value.shape, self.widths.moving(value, readers), source, target)[1]

    def hidden(self, value: Value, source: Layout, target: Layout, readers: Readers = None) -> float:
        """How many of these run behind compute."""
        if value.id not in self.weights:
            return 0.0
        return self._pair(value.shape, self.widths.moving(value, readers), source, target)[2]

    def exposed(self, value: Value, source: Layout, target: Layout, readers: Readers = None) -> float:
        """How many of these something waits for. In the host's memory nothing is resharded."""
        if value.on_host and source != target:
            return math.inf
        return self.resharding(value, source, target, readers) - self.hidden(value, source, target, readers)

    def table(
        self, value: Value, sources: Sequence[Layout], targets: Sequence[Layout], readers: Readers = None
    ) -> np.ndarray:
        """Exposed seconds per step of resharding `value` from each of `sources` (rows) to each of `targets`.

        With what it takes to write it, if it is not stored otherwise.
        """
        size = self.widths.moving(value, readers)
        flags = value.on_host, value.id in self.weights, value.id in self.instead
        key = value.shape, size, self.widths.stored(value), flags, tuple(sources), tuple(targets)
        if key not in self._tables:
            seconds = [[self.exposed(value, a, b, readers) for b in targets] for a in sources]
            written = [[self.writing_first(value, a, b) for b in targets] for a in sources]
            self._tables[key] = np.add(seconds, written)
        return self._tables[key] * value.trips

    def writing_first(self, value: Value, source: Layout, target: Layout) -> float:
        """Seconds to write a value that is resharded, if its readers would make it again otherwise."""
        return self.writing(value, source) if value.id in self.instead and source != target else 0.0

    def writing(self, value: Value, layout: Layout) -> float:
        """Seconds to write `value` to memory once."""
        return self.local_bytes(value, layout) / self.topology.memory_bandwidth

    def local_bytes(self, value: Value, layout: Layout) -> int:
        """Bytes of `value` in the memory of one device."""
        return 0 if value.on_host else self._local_size(value, layout) * self.widths.stored(value)

    def shard_bytes(self, value: Value, layout: Layout) -> int:
        """Bytes of the elements of `value` that one device has."""
        return math.prod(local_shape(value.shape, layout, self.mesh)) * itemsize(value)

    def copy_bytes(self, value: Value, layout: Layout, readers: Readers = None) -> int:
        """Bytes of a resharded copy of `value` in the memory of one device."""
        return self._local_size(value, layout) * self.widths.moving(value, readers)

    def _local_size(self, value: Value, layout: Layout) -> int:
        key = local_shape(value.shape, layout, self.mesh), self.images.get(value.shape)
        if key not in self._sizes:
            shape, minor = key
            self._sizes[key] = padded_size(shape, self.backend.tile, minor)
        return self._sizes[key]

    def finish_bytes(self, group: Group, strategy: Strategy) -> list[int]:
        """Bytes of the result of each of the strategy's own collectives, one run."""
        return [finish.elements * self.widths.of(group.made[finish.made].value) for finish in strategy.finishes]

    def _pair(self, shape, size: int, source: Layout, target: Layout) -> tuple[tuple[Step, ...], float, float]:
        """The steps of a resharding, their seconds, and how many of these can run behind compute."""
        if source == target:
            return (), 0.0, 0.0
        key = shape, size, source, target
        if key not in self._pairs:
            steps = reshard(shape, size, source, target, self.mesh)
            costs = [self._collective(step.kind, step.axes, step.bytes) for step in steps]
            behind = sum(cost * self.backend.hides.get(step.kind, 0.0) for step, cost in zip(steps, costs, strict=True))
            self._pairs[key] = steps, sum(costs), behind
        return self._pairs[key]

    def _seconds(self, group: Group, strategy: Strategy) -> Seconds:
        compute = self._compute(group, strategy)
        communication = hidden = 0.0
        for finish, size in zip(strategy.finishes, self.finish_bytes(group, strategy), strict=True):
            cost = self._finish_seconds(finish, size, group) * group.finish_trips(finish.kind)
            communication += cost
            hidden += cost * self.backend.hides.get(finish.kind, 0.0) * (group.ends is not None)
        return Seconds(compute * group.trips, communication, hidden)

    def all_reduce(self, axes: tuple[str, ...], size: int) -> float:
        """Seconds of one all_reduce of `size` bytes."""
        return self._collective(ALL_REDUCE, axes, size)

    def _collective(self, kind: str, axes: tuple[str, ...], size: int, among: int | None = None) -> float:
        """Seconds of one collective that runs as an operation of its own."""
        textbook = collective_seconds(kind, axes, size, self.mesh, self.topology, among)
        return LAUNCH_SECONDS + textbook * (HALF_PENALTY if kind in ("all_gather", "reduce_scatter") else 1.0)

    def _finish_seconds(self, finish: Finish, size: int, group: Group) -> float:
        """XLA combines the all_reduces that nothing waits for, gradient reductions above all: latency is paid once.

        Of products that are added up before they are reduced each pays its part.
        """
        if finish.kind == ALL_REDUCE and group.summands > 1:
            return self._collective(finish.kind, finish.axes, size) / group.summands
        if group.late and finish.kind == ALL_REDUCE:
            whole, latency = (
                collective_seconds(finish.kind, finish.axes, moved, self.mesh, self.topology) for moved in (size, 0)
            )
            return whole - latency
        return self._collective(finish.kind, finish.axes, size, finish.groups and finish.devices(self.mesh))

    def _compute(self, group: Group, strategy: Strategy) -> float:
        """Roofline of the fused group: all its FLOPs, and only what enters and leaves it through memory."""
        if (group.only_moves and not group.sunk) or group.equations[0].primitive in _CROSSINGS:
            return 0.0
        axes = strategy.axes
        pieces = {factor: shards(axes.get(factor, ()), self.mesh) for factor in group.sizes}
        work = sum(flops(e) / math.prod(pieces[factor] for factor in group.factors_of(e)) for e in group.equations)
        if group.equations[0].primitive == "conv_general_dilated":
            work /= self.backend.convolves
        return compute_seconds(work, self._bytes_moved(group, strategy), _dtype(group.equations), self.topology)

    def _signature(self, group: Group) -> tuple:
        """Equal for groups whose strategies and seconds are equal."""

        def sizes(value: Value) -> tuple:
            return value.shape, value.on_host, self.widths.of(value), self.widths.stored(value)

        place = itertools.count()
        places: dict[int, int] = defaultdict(lambda: next(place))  # two operands may be made of the same
        return (
            tuple(
                tuple((places[value.id], *sizes(value)) for value in self._read(use.value)) for use in group.uses
            ),
            tuple((sizes(use.value), use.dims) for use in group.uses),
            tuple((sizes(made.value), made.dims) for made in group.made),
            tuple(group.sizes.items()),
            tuple(sorted(group.splittable)),
            group.reduction,
            tuple(group.given.items()),
            tuple((e.primitive, flops(e), frozenset(group.factors_of(e))) for e in group.equations),
            _dtype(group.equations),
            group.trips,
            group.late,
            group.ends is not None,
            group.summands,
            group.hoisted,
            group.repeated,
            group.sunk,
        )

    def _read(self, value: Value) -> Sequence[Value]:
        """What is in memory of what a reader of `value` reads."""
        return self.instead.get(value.id, (value,))

    def _bytes_moved(self, group: Group, strategy: Strategy) -> float:
        """To and from memory. What its readers make again they read themselves.

        What loops make again is charged as if it were made once, before them: if it were free it would lie anyhow, and
        XLA does make all of it if its readers want it in another layout.
        """
        if group.repeated and not group.sunk:
            return 0
        written = sum(map(self.local_bytes, (made.value for made in group.made), strategy.leaves))
        first = group.equations[0]
        if first.primitive in _READS_PART:
            return 2 * written
        if first.primitive in _WRITES_PART:
            part = first, _WRITES_PART[first.primitive]
            pairs = zip(group.uses, strategy.wants, strict=True)
            inserted = [self._read_bytes([(use, want)]) for use, want in pairs if (use.equation, use.operand) == part]
            return 2 * (sum(inserted) or written)
        return self._read_bytes(zip(group.uses, strategy.wants, strict=True)) + written

    def _read_bytes(self, uses: Iterable[tuple[Use, Layout]]) -> float:
        """Of everything once, however many operands are made of it."""
        read: dict[int, float] = {}
        for use, want in uses:
            local = self.local_bytes(use.value, want)
            whole = math.prod(use.value.shape) * self.widths.stored(use.value)
            for value in self._read(use.value):
                share = math.prod(value.shape) * self.widths.stored(value) / whole if whole else 0.0
                read[value.id] = max(read.get(value.id, 0.0), local * share)
        return sum(read.values())


def _dtype(equations: Sequence[Equation]) -> str:
    """The dtype that the arithmetic runs in: that of the first operand of the first equation that computes."""
    operands = (*equations[0].inputs, *equations[0].outputs)
    return str(operands[0].dtype) if operands else "bool"  # an effect alone
