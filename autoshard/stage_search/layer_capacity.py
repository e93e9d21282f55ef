"""A bound of pipelines with several virtual stages per device: whole layers have to fit into memory, too.

Each layer of a device is in one of its virtual stages and on one table: it asks for bytes and for seconds. The device
has the bytes that are left beside what one layer works in, and of a step of T seconds those that do not pass before and
after its own tasks. So for every price p of a byte and w of a second, of 0 or more,

    sum over layers of (p bytes + w seconds)  <=  p (memory - working) + w (T - passing)

What the cheapest layers take of the right side says how many there can be at most: a whole number, rounded down. If the
devices can have fewer layers than there are, no step takes T seconds. It is the Lagrangian bound of a knapsack with two
limits. Prices are a grid, with those at which two tables of a layer cost the same; each holds by itself.

Layers are counted, whatever they ask for, so that the bound is near where they are alike. Where several kinds differ,
each kind is counted by itself as well.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.stage_search.chunks import ChunkProblem
from autoshard.stage_search.fractional import fullest_states, least_of_layers
from autoshard.stage_search.tables import Numbers
from autoshard.stage_search.whole_layers import LAST_LAYERS, Ending, WholeLayers, endings, known_stages

# Prices of a device's whole memory and of a scale of seconds.
_GRID = ((1.0, 0.0), (1.0, 0.1), (1.0, 0.5), (1.0, 1.0), (1.0, 2.0), (1.0, 10.0), (0.0, 1.0))
_MOST_PRICES = 24  # of both kinds that are tried for a device: the grid, and the first that trade shapes
_SECONDS_TOLERANCE = 1e-3  # by which share the seconds may be missed
_ROUNDED_COUNT = 1e-9  # layers: what rounding may make of a whole number of them


@dataclass(frozen=True, eq=False)
class _DeviceLimits:
    """What layers ask of one device, at [state of its schedule, pair of prices]."""

    forced: Numbers  # of what it has in any case
    more: Numbers  # of each further layer, at least
    left: Numbers  # what there is, of a step of no seconds, beside what one of the layers that are counted works in
    unused: Numbers  # what there is more if it has none of these
    per_second: Numbers  # what there is more for each second
    forced_count: int  # of what it has in any case, layers that are counted

    def most(self, seconds: float) -> float:
        """How many of the layers that are counted it may have; -inf: not even what it has in any case."""
        some = self.per_second == 0 if math.isinf(seconds) else slice(None)
        there = self.left[some] if math.isinf(seconds) else self.left + seconds * self.per_second
        room = there - self.forced[:, some]
        if (room + self.unused[some] < -_ROUNDED_COUNT).any():
            return -math.inf
        more = float((room / np.maximum(self.more[:, some], _ROUNDED_COUNT)).min())
        return max(0.0, self.forced_count + math.floor(more + _ROUNDED_COUNT))


class RoomForLayers:
    """How many whole layers the devices of one schedule have room for."""

    def __init__(self, problem: ChunkProblem, whole: WholeLayers, in_flight: Sequence[NDArray[np.int64]]) -> None:
        """
        Args:
            in_flight: as `ScheduleFacts.in_flight`.
        """
        self._problem, self._whole, self._in_flight = problem, whole, in_flight
        layers = [
            least_of_layers(table, split=problem.form.has_weight_tasks)
            | {"working": _least_working(table.working_bytes)}
            for table in problem.tables
        ]
        figures = np.concatenate([np.stack(list(least.values())) for least in layers])
        mantissas, exponents = np.frexp(np.where(np.isfinite(figures), figures, -1.0))
        looks = np.round(mantissas, 12) * 2.0**exponents  # figures of runs are sums, and differ by rounding
        _, self._first, kinds = np.unique(looks, axis=1, return_index=True, return_inverse=True)
        self._kind = kinds.reshape(-1)
        self._asked = {id(table): self._of_kinds(least) for table, least in zip(problem.tables, layers, strict=True)}
        own = sum(float(seconds.own.sum()) for seconds, _ in whole.ways)
        self._scale = own / len(whole.ways) / problem.devices or 1.0
        self._asks = functools.cache(self._asks_of)
        self._prices = functools.cache(self._prices_of)
        self._all_limits = functools.cache(self._all_limits_of)

    def bound(self, ending: Ending, below: float) -> float:
        """Seconds that no choice is below whose last layers are cut so; inf if none fits.

        Args:
            below: s; the bound need not be raised above these where some choice fits.
        """
        return max((self._bound_of(counted, ending, below) for counted in self._counted(ending)), default=0.0)

    def is_enough(self) -> bool:
        """Whether memory has room for all layers, whatever they take, in some way to cut the last ones."""
        ways = endings(self._problem.space.layers, len(self._problem.form.placement), LAST_LAYERS)
        return any(all(self._has_room(some, one, math.inf) for some in self._counted(one)) for one in ways)

    def _known(self, ending: Ending) -> dict[int, int]:
        return known_stages(self._problem.space.layers, len(self._problem.form.placement), ending)

    def _counted(self, ending: Ending) -> Iterator[tuple[int, ...]]:
        """Kinds of layers to count together: all whose stage is not known; and each by itself."""
        known = self._known(ending)
        kinds = tuple(sorted({int(kind) for layer, kind in enumerate(self._kind) if layer not in known}))
        if kinds:
            yield kinds
        if len(kinds) > 1:
            yield from ((kind,) for kind in kinds)

    def _bound_of(self, kinds: tuple[int, ...], ending: Ending, below: float) -> float:
        if not self._has_room(kinds, ending, math.inf):
            return math.inf
        low, high = 0.0, min(below, self._scale)
        while not self._has_room(kinds, ending, high):
            low, high = high, min(below, 2 * high)
            if low == below:
                return below
        while high - low > _SECONDS_TOLERANCE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._has_room(kinds, ending, middle) else (middle, high)
        return low

    def _has_room(self, kinds: tuple[int, ...], ending: Ending, seconds: float) -> bool:
        if math.isinf(self._scale):  # some layer fits nowhere
            return False
        count, devices = self._all_limits(kinds, ending)
        return sum(device.most(seconds) for device in devices) >= count

    def _all_limits_of(self, kinds: tuple[int, ...], ending: Ending) -> tuple[int, list[_DeviceLimits]]:
        """How many layers are counted, and what they ask of each device."""
        known = self._known(ending)
        free = [kind for layer, kind in enumerate(self._kind) if layer not in known]
        count = sum(kind in kinds for kind in free)
        counts_all = count == len(free)
        return count, [self._limits(device, kinds, known, counts_all) for device in range(self._problem.devices)]

    def _limits(self, device: int, kinds: Sequence[int], known: dict[int, int], counts_all: bool) -> _DeviceLimits:
        """
        Args:
            counts_all: whether all layers whose stage is not known are of these kinds.
        """
        asks, working = self._asks(device)
        own = [v for v, home in enumerate(self._problem.form.placement) if home == device]
        of_kinds = asks[:, :, list(kinds)].min(axis=2)
        forced, forced_count, working_of_known = np.zeros_like(asks[:, 0, 0]), 0, 0.0
        for i, v in enumerate(own):
            here = [int(self._kind[layer]) for layer, stage in known.items() if stage == v]
            for kind in here:
                forced = forced + asks[:, i, kind]
                working_of_known = max(working_of_known, float(working[kind]))
            if not here and counts_all:  # each virtual stage has a layer or more
                forced, forced_count = forced + of_kinds[:, i], forced_count + 1
        memory, prices, count = self._memory(device), self._prices(device), len(self._whole.ways)
        works_in = max(working_of_known, float(working[list(kinds)].min()))
        unused = 0.0 if forced_count else (works_in - working_of_known) / memory
        passing = np.repeat(self._whole.passing(self._problem.first_stages[device]), len(prices))
        per_second = np.tile(prices[:, 1] / self._scale, count)
        of_bytes = np.tile(prices[:, 0], count)
        left = of_bytes * (1.0 - works_in / memory) - per_second * passing
        return _DeviceLimits(forced, of_kinds.min(axis=1), left, of_bytes * unused, per_second, forced_count)

    def _asks_of(self, device: int) -> tuple[Numbers, Numbers]:
        """What a layer asks of a device, at [state, virtual stage, kind, prices], and the bytes that it works in."""
        memory, prices = self._memory(device), self._prices(device)
        states, found, working = self._states(device), [], []
        for at, is_there in self._here(device):
            held = (at["fixed"] + states[:, :, None] * at["microbatch"])[..., None] / memory * prices[:, 0]
            ways = self._whole.seconds_of(at, self._problem.microbatches)
            asked = [held + seconds[:, None] / self._scale * prices[:, 1] for seconds in ways]
            found.append(np.where(is_there[:, None], np.concatenate(asked, axis=-1), np.inf))
            working.append(np.where(is_there, at["working"], np.inf))
        least = np.min(working, axis=0)
        return np.min(found, axis=0), np.where(np.isfinite(least), least, 0.0)

    def _prices_of(self, device: int) -> Numbers:
        """Pairs of prices, of a device's whole memory and of the scale of seconds."""
        memory, states, found = self._memory(device), self._states(device), list(_GRID)
        for (one, has_one), (other, has_other) in itertools.combinations(self._here(device), 2):
            bytes_less = one["fixed"] - other["fixed"] + states.mean() * (one["microbatch"] - other["microbatch"])
            seconds = (self._whole.seconds_of(at, self._problem.microbatches)[0] for at in (one, other))
            seconds_more = -np.subtract(*seconds)
            for kind in np.flatnonzero(has_one & has_other & (bytes_less * seconds_more > 0)):
                found.append((1.0, float(bytes_less[kind] / memory / seconds_more[kind] * self._scale)))
        return np.array(list(dict.fromkeys(found[:_MOST_PRICES])))

    def _states(self, device: int) -> Numbers:
        """Microbatches in flight at [state, virtual stage]: the states that hold most, and their mean."""
        states = fullest_states(self._in_flight[device]).astype(float)
        return np.concatenate([states, states.mean(axis=0, keepdims=True)])

    def _here(self, device: int) -> list[tuple[dict[str, Numbers], NDArray[np.bool_]]]:
        """Per table of a device, what a layer of each kind takes and holds at least, and which kinds it has."""
        tables = self._problem.table_of(device * self._problem.tables[0].shape.devices)
        return [self._asked[id(table)] for table in tables]

    def _of_kinds(self, layers: Mapping[str, Numbers]) -> tuple[dict[str, Numbers], NDArray[np.bool_]]:
        figures = {name: rows[self._first] for name, rows in layers.items()}
        is_there = np.isfinite(figures["fixed"])
        return {name: np.where(is_there, rows, 0.0) for name, rows in figures.items()}, is_there

    def _memory(self, device: int) -> float:
        return max(
            table.shape.memory_bytes for table in self._problem.table_of(device * self._problem.tables[0].shape.devices)
        )


def _least_working(runs: Numbers) -> Numbers:
    """Per layer, what a run that has it works in at least.

    >>> inf = np.inf
    >>> _least_working(np.array([[inf, 2.0, 5.0], [inf, inf, 3.0], [inf, inf, inf]])).tolist()
    [2.0, 3.0]
    """
    from_first = np.minimum.accumulate(runs, axis=0)
    to_last = np.minimum.accumulate(from_first[:, ::-1], axis=1)[:, ::-1]
    layers = np.arange(len(runs) - 1)
    return np.asarray(to_last[layers, layers + 1])
