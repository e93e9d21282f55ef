"""What a strategy costs and what a resharding costs, in seconds on one device; remembered, since layers repeat."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.layout import Layout, MeshShape, divides, shards
from autoshard.mesh.collectives import seconds as collective_seconds
from autoshard.mesh.compute import flops
from autoshard.mesh.host import host_seconds
from autoshard.mesh.resharding import ReshardingStep, reshard
from autoshard.mesh.topology import Topology
from autoshard.model.equations import compute_dtype
from autoshard.model.groups import Group
from autoshard.model.option_sets.option_set import OptionSet
from autoshard.model.pricing.group_strategies import GroupStrategies
from autoshard.model.pricing.host_moves import moved_bytes
from autoshard.model.pricing.memo import Memo, read_only
from autoshard.model.pricing.resharding_steps import ReshardingSteps, differ, places_among
from autoshard.model.pricing.roofline import GroupWork
from autoshard.model.pricing.sizes import ArraySizes
from autoshard.model.regions.pricing import REGIONS, Region, RegionPrices
from autoshard.model.strategies import ALL_REDUCE, Finish, Strategy
from autoshard.model.xla.backends import CPU, Backend
from autoshard.model.xla.convolutions import TURNS, ImageDims
from autoshard.model.xla.gathers import combined
from autoshard.model.xla.operations import OperationCosts
from autoshard.model.xla.overlap import Overlap
from autoshard.model.xla.rounding import BFLOAT16_BYTES, Itemsizes, Readers
from autoshard.model.xla.scatters import axes_between_slices
from autoshard.model.xla.units.scalar_unit import ValuePlaces
from autoshard.program import Equation, Value

# What an operation of its own costs besides the messages on its links: launch and synchronisation. TPU and GPU
# runtimes need about a microsecond; 8 CPU devices need far more, but in proportion to everything else there.
LAUNCH_SECONDS = 1e-6

# One all_reduce is faster than its halves, a reduce_scatter and an all_gather: on 8 CPU devices these took 1.2 (16 KiB)
# to 3.7 times (16 MiB) as long (`python benchmarks/collectives.py`). The least is taken: halves only where they save.
HALVES_FACTOR = 1.2
_Moved = tuple[tuple[ReshardingStep, ...], float, float]  # a resharding's steps, its seconds, those behind compute


@dataclass(frozen=True)
class GroupSeconds:
    """What one group costs per step under one strategy."""

    compute: float
    communication: float
    hidden: float = 0.0  # of the communication: what can run behind compute

    @property
    def total(self) -> float:
        return self.compute + self.communication - self.hidden


@dataclass(frozen=True)
class PricedStrategies:
    """A group's strategies and their seconds; groups that look alike share one."""

    strategies: tuple[Strategy, ...]
    seconds: tuple[GroupSeconds, ...]
    operand_layouts: tuple[tuple[Layout, ...], ...]  # per use, that of each strategy
    output_layouts: tuple[tuple[Layout, ...], ...]  # per output, that of each strategy

    @cached_property
    def costs(self) -> np.ndarray:
        return np.array([seconds.total for seconds in self.seconds])


class PriceList:
    """The price list of one mesh and topology."""

    def __init__(
        self,
        mesh: MeshShape,
        topology: Topology,
        itemsizes: Itemsizes | None = None,
        backend: Backend = CPU,
        weights: Collection[int] = (),
        waited_for: Collection[int] = (),
        stacked: Mapping[int, int] | None = None,
        kept: Mapping[int, int] | None = None,
        products: Mapping[int, Group] | None = None,
        turns: Mapping[int, int] | None = None,
        rounded: Collection[int] = (),
        places: ValuePlaces | None = None,
        instead: Mapping[int, Sequence[Value]] | None = None,
        images: Mapping[int, ImageDims] | None = None,
        matrices: Mapping[int, tuple[int, ...]] | None = None,
        waits_only: bool = False,
        steps: ReshardingSteps | None = None,
        offered: OptionSet | None = None,
        regions: RegionPrices | None = None,
    ):
        """
        Args:
            regions: what devices run on their own shards; not needed where nothing does.
            steps: of reshardings, as other prices for this mesh and backend know them.
            offered: the strategies and homes that are priced; None: all.
            waits_only: whether communication alone counts: devices compute in no time, and nothing is hidden.
        """
        topology.check(mesh)
        if waits_only:
            backend = replace(backend, overlap=Overlap(), operations=OperationCosts())
        self.device = topology.computing_in_no_time() if waits_only else topology  # the rates of its own work
        self.mesh, self.topology, self.itemsizes = dict(mesh), topology, itemsizes or Itemsizes()
        self.backend, self.offered = backend, offered
        self.weights = frozenset(weights)  # values made of the state alone, which can be gathered ahead of their use
        self.ahead = self.weights.difference(waited_for)  # those that can be behind compute: no loop waits for them
        self.between = axes_between_slices(self.mesh, backend.slices)
        self.stacked = stacked if stacked and self.between else {}  # values made in loops -> bytes that these stack
        self.turns = turns or {}  # what loops read in every turn -> how many these are
        self.rounded = frozenset(rounded)  # arguments that are rounded before loops whose products read them
        self.places = places or ValuePlaces()  # registers, the chip's own memory or outside
        self.instead = instead or {}  # values that their readers make again -> what they read for it
        self.images = images or {}  # values of which convolutions decide how they lie -> batch and feature dims
        self.regions, self.waits_only, self.memo = regions, waits_only, Memo()
        self.ways = GroupStrategies(self.mesh, backend, self.memo, None if regions is None else regions.strategies)
        self.arrays = ArraySizes(self.mesh, self.itemsizes, backend, self.images, self.memo, matrices or {})
        self.work = GroupWork(self.arrays, self.device, self.instead, kept or {}, products or {})
        self._groups: dict[tuple, PricedStrategies] = {}
        self._collectives: dict[tuple, float] = {}
        # bytes of an array, and whether nothing waits for it -> of each step, as `resharding_steps` numbers them: its
        # seconds, the share of these behind compute, those to put pieces in order, and whether that is of several dims
        self._of_step: dict[tuple[float, bool], list[tuple[float, float, float, bool]]] = {}
        self.resharding_steps = ReshardingSteps(self.mesh, backend.gathers) if steps is None else steps

    def group(self, group: Group) -> PricedStrategies:
        """Every strategy of `group` with its seconds per step."""
        key: tuple = self._signature(group)
        if self.offered is not None:
            key = key, self.offered.key(group)
        if key not in self._groups:
            self.memo.tick()
            strategies, wants, makes = self.ways.of(group, self.offered)
            seconds = self._seconds(group, strategies, wants, makes)
            self._groups[key] = PricedStrategies(strategies, seconds, wants, makes)
        return self._groups[key]

    def steps(
        self, value: Value, source: Layout, target: Layout, readers: Readers = None
    ) -> tuple[ReshardingStep, ...]:
        """The collectives that bring `value` from one layout to the other, for these readers."""
        return self._of(value, source, target, readers)[0]

    def resharding(self, value: Value, source: Layout, target: Layout, readers: Readers = None) -> float:
        """Seconds of one resharding of `value`; of one without steps they are compute."""
        return self._of(value, source, target, readers)[1]

    def hidden(self, value: Value, source: Layout, target: Layout, readers: Readers = None) -> float:
        """How many of these run behind compute."""
        return self._of(value, source, target, readers)[2] if value.id in self.ahead else 0.0

    def table(
        self, value: Value, sources: Sequence[Layout], targets: Sequence[Layout], readers: Readers = None
    ) -> np.ndarray:
        """Exposed seconds per step of resharding `value` from each of `sources` (rows) to each of `targets`.

        With what it takes to write it, if it is not stored otherwise. The array is shared, and not to be changed.
        """
        size = self.itemsizes.moving(value, readers)
        late, ahead = value.id in self.weights, value.id in self.ahead
        written = self.itemsizes.stored(value) if value.id in self.instead else None
        clearing, image_dims, turns = self._clearing(value), self.images.get(value.id), self.turns.get(value.id, 0)
        what = value.shape, size, value.on_host, late, ahead, written, image_dims, clearing, turns, value.trips

        def made(sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
            rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
            seconds, behind = self._moved(value.shape, size, rows, columns, late, image_dims)
            table = seconds - behind if ahead else seconds
            moves = differ(rows, columns)
            if value.on_host:
                table = np.where(moves, np.inf, table)
            if written is not None:
                table = table + np.where(moves, np.array([[self.writing(value, a)] for a in rows]), 0.0)
            if clearing:
                table = table + clearing * np.array([[self._leaves_slices(a, b) for b in columns] for a in rows])
            if turns:
                table = table + np.array([[self._fetching(value, a, b, readers) for b in columns] for a in rows])
            return read_only((table * value.trips)[np.ix_(places_among(sources, rows), places_among(targets, columns))])

        return self.memo.once(made, self.memo.one(sources), self.memo.one(targets), of=what)

    def moves(
        self, value: Value, sources: Sequence[Layout], targets: Sequence[Layout], readers: Readers = None
    ) -> np.ndarray:
        """What `table` says of each source with the target that stands in the same place."""
        rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        table = self.table(value, rows, columns, readers)
        return table[places_among(sources, rows), places_among(targets, columns)]

    def stays(self, value: Value, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """[source, target]: whether resharding `value` takes a slice at most: nothing is sent, nor written for it.

        The array is shared, and not to be changed.
        """
        written = value.id in self.instead

        def made(sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
            rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
            moves = self.resharding_steps.steps(rows, columns, self.memo.tick)[..., 0] > 0
            moves |= written & differ(rows, columns)
            return read_only(~moves[np.ix_(places_among(sources, rows), places_among(targets, columns))])

        return self.memo.once(made, self.memo.one(sources), self.memo.one(targets), of=(written,))

    def memory_seconds(self, value: Value, source: Layout, target: Layout, readers: Readers = None) -> float:
        """Seconds in which memory is written and read because a value is resharded.

        Written is the value, if its readers would make it again otherwise; and of each trip of a loop, whose next one
        XLA for TPU starts to bring over from other slices in the one before, its part of clearing what the loop stacks.
        Read is, turn by turn, what a loop could keep in the chip if it were not gathered.
        """
        seconds = self.writing(value, source) if value.id in self.instead and source != target else 0.0
        if clearing := self._clearing(value):
            seconds += clearing * self._leaves_slices(source, target)
        return seconds + self._fetching(value, source, target, readers)

    def _fetching(self, value: Value, source: Layout, target: Layout, readers: Readers) -> float:
        """Seconds in which loops read from memory, in all their turns, what is gathered for them; 0 if it is not."""
        often = self.backend.loop_memory.fetched_share * self.turns.get(value.id, 0)
        if not often or self.arrays.elements(value, target) <= self.arrays.elements(value, source):
            return 0.0
        return often * self.arrays.copy_bytes(value, target, readers) / self.device.memory_bandwidth

    def _clearing(self, value: Value) -> float:
        """Seconds to clear what the loop around `value` stacks, of one trip; 0 if it is not read where that happens."""
        if value.id not in self.stacked or not value.trips:
            return 0.0
        return self.stacked[value.id] / math.prod(self.mesh.values()) / value.trips / self.device.memory_bandwidth

    def _leaves_slices(self, source: Layout, target: Layout) -> bool:
        """Whether slices of TPUs have other parts of some dim before, and not after."""
        return any(
            axis in self.between and axis not in after
            for before, after in zip(source, target, strict=True)
            for axis in before
        )

    def rounding(self, value: Value, layout: Layout) -> float:
        """Seconds to round an argument before the loops whose products read it; 0 if no loop reads it rounded."""
        if value.id not in self.rounded:
            return 0.0
        through = self.arrays.elements(value, layout) * (value.itemsize + BFLOAT16_BYTES)
        bandwidth = self.device.memory_bandwidth * self.backend.loop_memory.rounding_share
        return max(through / bandwidth, self.backend.operations.least_seconds)

    def writing(self, value: Value, layout: Layout) -> float:
        """Seconds to write `value` to memory once."""
        return self.arrays.local_bytes(value, layout) / self.device.memory_bandwidth

    def copying(self, value: Value, layout: Layout, least: float) -> float:
        """Seconds to copy an argument that is returned as it is, and so many to start."""
        if value.on_host or not math.prod(value.shape):
            return 0.0
        return 2 * self.writing(value, layout) + least

    def finish_bytes(self, group: Group, strategy: Strategy, *, after_loop: bool = False) -> list[int]:
        """Bytes of the result of each of its own collectives, one run; after a loop all of them, or the all_reduces."""
        made = [(x, group.reduced(x.output, after_loop=after_loop or x.kind == ALL_REDUCE)) for x in strategy.finishes]
        return [math.ceil(x.elements * self.itemsizes.summed(value)) for x, value in made]

    def halo_bytes(self, group: Group, strategy: Strategy) -> list[int]:
        """Bytes of each halo that a device receives, one run."""
        return [math.ceil(halo.elements * self.itemsizes.of(group.uses[halo.use].value)) for halo in strategy.halos]

    def region(self, group: Group, strategy: Strategy, *, shares: bool = True) -> Region | None:
        """What devices run on their own shards, of a call of an operation or a `shard_map`; None for other groups."""
        if self.regions is None or group.equations[0].primitive not in REGIONS:
            return None
        return self.regions.of(group, strategy.run, shares=shares)

    def unmerged_backward_seconds(self, group: Group, strategy: Strategy) -> GroupSeconds:
        """Seconds of a backward pass whose forward pass runs in another way, so that XLA merges nothing of the two."""
        region = self.region(group, strategy, shares=False)
        assert region is not None, "a call is a region"
        return self._region_seconds(group, region)

    def region_key(self, equation: Equation) -> tuple:
        """Equal for regions that cost the same; empty for other equations."""
        return () if self.regions is None else self.regions.key(equation)

    def _region_seconds(self, group: Group, region: Region) -> GroupSeconds:
        communication = ahead = 0.0
        for one in region.collectives:
            cost = self._collective(one.kind, one.axes, one.bytes, one.devices) * one.runs
            communication += cost
            ahead += cost * one.is_ahead * self.backend.overlap.of("all_gather")
        compute = 0.0 if self.waits_only else region.compute
        return GroupSeconds(compute * group.trips, communication * group.trips, min(ahead, compute) * group.trips)

    def _of(self, value: Value, source: Layout, target: Layout, readers: Readers) -> _Moved:
        itemsize, late = self.itemsizes.moving(value, readers), value.id in self.weights
        pair = value.shape, itemsize, source, target, late, self.images.get(value.id)
        return self.memo.once(lambda: self._pair(*pair), of=pair)

    def _pair(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        source: Layout,
        target: Layout,
        late: bool,
        image_dims: ImageDims | None,
    ) -> _Moved:
        """The steps of a resharding, their seconds, and how many of these can run behind compute.

        Where a slice will do there are no steps, but it may be an operation of its own.
        """
        if source == target:
            return (), 0.0, 0.0
        found = [(step.kind, step.axes, step.bytes) for step in reshard(shape, itemsize, source, target, self.mesh)]
        steps, total, behind = [], 0.0 if found else self.backend.operations.least_seconds, 0.0
        for kind, axes, size, several in combined(found, self.mesh, self.backend.gathers):
            sent, seconds, share = self._sent(kind, axes, size, late)
            if kind == "all_gather" and self._out_of_order(shape, [source], [target])[int(several)].item():
                seconds += self._recopied(size)
            if image_dims is not None and kind == "all_to_all":
                more = self._extra_copies(shape, itemsize, image_dims, [source], [target]).item()
                seconds += self._copied(size) * more
            steps.append(ReshardingStep(sent, axes, size))
            total += seconds
            behind += seconds * share
        return tuple(steps), total, behind

    def _moved(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        sources: list[Layout],
        targets: list[Layout],
        late: bool,
        image_dims: ImageDims | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of resharding from each of `sources` to each of `targets`, and how many can run behind compute."""
        if not all(divides(shape, layout, self.mesh) for layout in {*sources, *targets}):
            every = ((shape, itemsize, a, b, late, image_dims) for a in sources for b in targets)
            pairs = self.memo.in_time(self._pair(*one)[1:] for one in every)
            seconds, behind = np.moveaxis(np.array(pairs).reshape(len(sources), len(targets), 2), -1, 0)
            return seconds, behind
        moves = self.resharding_steps
        steps = moves.steps(sources, targets, self.memo.tick)
        total = math.prod(shape) * itemsize
        of_step = self._of_step.setdefault((total, late), [(0.0, 0.0, 0.0, False)])
        for kind, axes, tiles, several in itertools.islice(moves.known, len(of_step) - 1, None):
            size = math.ceil(total / tiles)
            _, takes, share = self._sent(kind, axes, size, late)
            of_step.append((takes, share, self._recopied(size) * (kind == "all_gather"), several))
        seconds, shares, ordering, several = (column[steps] for column in np.array(of_step).T)
        if self.backend.operations.least_seconds:
            seconds[..., 0] += self.backend.operations.least_seconds * (differ(sources, targets) & (steps[..., 0] == 0))
        if ordering.any():
            one, together = self._out_of_order(shape, sources, targets)[..., np.newaxis]
            seconds = seconds + ordering * np.where(several, together, one)
        if image_dims is not None:
            cut = [self._copied(math.ceil(total / one[2])) * (one[0] == "all_to_all") for one in moves.known]
            more = self._extra_copies(shape, itemsize, image_dims, sources, targets)
            seconds = seconds + np.array([0.0, *cut])[steps] * more[..., np.newaxis]
        return seconds.sum(axis=-1), (seconds * shares).sum(axis=-1)

    def _out_of_order(self, shape: tuple[int, ...], sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """[several, source, target]: whether what is gathered, in one dim or in several, is copied into order."""
        return self.backend.recopies.out_of_order(shape, sources, targets, self.mesh, self.backend.tile)

    def _extra_copies(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        image_dims: ImageDims,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
    ) -> np.ndarray:
        """[source, target]: how many times more often than other values all_to_alls copy images."""
        recopies = self.backend.recopies
        return recopies.extra_of_images(shape, itemsize, image_dims, sources, targets, self.mesh, self.backend.tile)

    def _seconds(self, group: Group, strategies: tuple[Strategy, ...], wants, makes) -> tuple[GroupSeconds, ...]:
        if self.region(group, strategies[0]) is not None:
            regions = self.memo.in_time(self.region(group, strategy) for strategy in strategies)
            return tuple(self._region_seconds(group, region) for region in regions if region is not None)
        found = []
        for strategy, compute in zip(strategies, self.work.seconds(group, strategies, wants, makes), strict=True):
            self.memo.tick()
            communication = hidden = 0.0
            for finish, size in zip(strategy.finishes, self.finish_bytes(group, strategy), strict=True):
                cost = self._finish_seconds(finish, size, group) * group.finish_trips(finish.kind)
                communication += cost
                if group.handed_on_at is not None:
                    hidden += cost * self.backend.overlap.of(finish.kind)
            for halo, size in zip(strategy.halos, self.halo_bytes(group, strategy), strict=True):
                communication += self._collective("collective_permute", halo.axes, size) * group.trips / halo.readers
            if size := moved_bytes(group, strategy, self.arrays):
                cost = host_seconds(size, self.topology) * group.trips
                communication += cost
                hidden += cost * self.backend.overlap.of("host") * (group.trips > 1)
            found.append(GroupSeconds(compute * group.trips, communication, hidden))
        return tuple(found)

    def unhoisted(self, group: Group, value: Value) -> float:
        """Seconds, at most, to reduce in every turn of a loop what is not added up in the layout it is made in."""
        if group.hoisted_all_reduces is None:
            return 0.0
        return self._collective("all_reduce", tuple(self.mesh), value.bytes) * (group.trips - group.hoisted_all_reduces)

    def _sent(self, kind: str, axes: tuple[str, ...], size: int, late: bool) -> tuple[str, float, float]:
        """What XLA sends for a collective, its seconds, and the share of these that can run behind compute.

        For an all_reduce instead of a gather it makes an array of zeros.
        """
        everywhere = math.prod(self.mesh.values()) // self.backend.slices
        sent = self.backend.gathers.sent_as(kind, shards(axes, self.mesh), everywhere, size)
        zeros = LAUNCH_SECONDS + size / self.topology.memory_bandwidth if sent != kind else 0.0
        seconds = self._collective(sent, axes, size, late=late) + zeros
        return sent, seconds, self.backend.overlap.of(sent)

    def _recopied(self, size: int) -> float:
        """Seconds to bring the pieces of so many bytes into another order."""
        return self.backend.recopies.pieces * self._copied(size)

    def _copied(self, size: int) -> float:
        """Seconds to read so many bytes and write them."""
        return 2 * size / self.topology.memory_bandwidth

    def _collective(
        self, kind: str, axes: tuple[str, ...], size: int, among: int | None = None, late: bool = False
    ) -> float:
        """Seconds of one collective.

        XLA combines some kinds of those that nothing waits for, gradient reductions above all, up to so many bytes:
        each pays its part of one launch and latency.

        Args:
            late: whether nothing waits for it.
        """
        combined = late and kind in self.backend.combining.kinds
        key = kind, axes, size, among, combined
        if key not in self._collectives:
            textbook = collective_seconds(kind, axes, size, self.mesh, self.topology, among)
            penalty = HALVES_FACTOR if kind in ("all_gather", "reduce_scatter") else 1.0
            latency = collective_seconds(kind, axes, 0, self.mesh, self.topology, among)
            through = self._recopied(size) if kind == "all_to_all" else 0.0
            share = self.backend.combining.share_of_launch(size) if combined else 1.0
            saved = (1 - share) * latency
            self._collectives[key] = (textbook - saved) * penalty + through + share * LAUNCH_SECONDS
        return self._collectives[key]

    def _finish_seconds(self, finish: Finish, size: int, group: Group) -> float:
        """Of sums that are added up before they are reduced each pays its part."""
        among = finish.devices(self.mesh) if finish.groups else None
        return self._collective(finish.kind, finish.axes, size, among, late=group.feeds_only_results) / group.summands

    def _signature(self, group: Group) -> tuple:
        """Equal for groups whose strategies and seconds are equal."""
        figures, place = self.work.traffic.figures, itertools.count()
        read_instead, before = self.work.traffic.read_instead, group.read_before or ()
        places: dict[int, int] = defaultdict(lambda: next(place))  # two operands may be made of the same
        return (
            tuple(
                tuple((places[value.id], value.id in before, *figures(value)) for value in read_instead(use.value))
                for use in group.uses
            ),
            tuple((figures(use.value), use.dims) for use in group.uses),
            tuple((figures(made.value), made.dims) for made in group.outputs),
            tuple(group.sizes.items()),
            tuple(sorted(group.splittable)),
            group.reduction,
            group.reaches,
            group.batch_factor,
            tuple(group.given.items()),
            group.open_axes,
            tuple((e.primitive, flops(e), frozenset(group.factors_of(e)), self.region_key(e)) for e in group.equations),
            compute_dtype(group.equations),
            group.trips,
            group.feeds_only_results,
            group.handed_on_at is not None,
            group.summands,
            group.hoisted_all_reduces,
            group.is_recomputed,
            group.is_sunk,
            group.is_copy,
            group.is_normalising,
            group.written_by,
            group.passes_before,
            self.work.is_alone(group),
            self.work.products.figures(group),
            group.runs_beside,
            self.backend.operations.seconds(group),
            tuple(map(self.backend.operations.turn_seconds, group.equations)),
            group.equations[0].params.get(TURNS),
        )
