"""A bound of pipelines with several virtual stages per device: layers are dealt to devices whole.

Device d does nothing before the first microbatch has passed the virtual stages before its own first one, and its last
cotangent goes back through them. Call these seconds passing_d. If it has k of the n layers that take longest, it works
at least as long as the k shortest of these, S_n(k). So a step of T seconds has passing_d + S_n(k) <= T for every layer
that is dealt: at least n of these sums are no more than T, and T is no less than the n-th smallest of them. This is
Graham's bound for identical machines, with machines that start late.

The first layer is on the device of the first virtual stage, whatever the cut, and the last one on that of the last. So
heads of models, which are much unlike other layers, need not be dealt freely: with each way to cut the last few layers,
an `Ending`, their devices are known.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.stage_search.tables import MicrobatchCosts, Numbers, StageSpace, StageTable

Ending = tuple[int, ...]
"""How the last layers are cut. Entry i: how many virtual stages come after that of the layer at i + 1 from the end."""

LAST_LAYERS = 4  # that endings are about: the head and the loss are among these


@dataclass(frozen=True)
class LayerLimit:
    """A step of less than so many seconds has at most these numbers of some layers on the devices."""

    seconds: float
    layers: tuple[int, ...]
    most: tuple[int, ...]  # per device; in all, as many as there are of these layers


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds that each layer adds at least to the device that has it, and to those that wait for it."""

    own: Numbers  # s per step of a device
    passed: Numbers  # s that a microbatch takes through the layer, there and back

    def bound(self, placement: Sequence[int], travel: float, ending: Ending = (0,)) -> float:
        """Seconds that no way to deal the layers to devices is below.

        Args:
            placement: virtual stage -> device.
            travel: s that a microbatch takes from one virtual stage to the next and back, at least.

        >>> ones = np.ones(10)
        >>> LayerSeconds(4 * ones, ones).bound([0, 1], 0.0)  # five each: the second device starts 1 s late
        21.0
        """
        longest = self.own[self._free(ending)]
        return _dealt(np.sort(longest)[::-1], self._busy(placement, travel, ending))

    def limit(self, placement: Sequence[int], travel: float, ending: Ending = (0,)) -> LayerLimit | None:
        """The limit for the most seconds at which the devices have room for some layers, and for none more.

        None if there are no such layers.
        """
        busy, free = self._busy(placement, travel, ending), self._free(ending)
        order = free[np.argsort(-self.own[free], kind="stable")]
        longest = self.own[order]
        found: LayerLimit | None = None
        for count in range(1, len(order) + 1):
            if count < len(order) and longest[count] >= longest[count - 1] * (1 - 1e-9):
                continue  # the next one is alike
            sums = np.add.outer(busy, np.cumsum(longest[count - 1 :: -1]))
            if sums.size == count:
                continue
            seconds = float(np.partition(sums.ravel(), count)[count])
            if found is None or seconds > found.seconds:
                most = tuple((sums < seconds).sum(axis=1).tolist())
                found = LayerLimit(seconds, tuple(sorted(order[:count].tolist())), most)
        return found

    def _free(self, ending: Ending) -> NDArray[np.int64]:
        """Layers whose devices are not known."""
        return np.arange(1, max(1, len(self.own) - len(ending)))

    def _busy(self, placement: Sequence[int], travel: float, ending: Ending) -> Numbers:
        """Seconds per device that pass before and after its own tasks, and with the layers that it has in any case."""
        before = np.concatenate(([0.0], np.cumsum(self.passed)))
        # Each virtual stage has a layer or more.
        first = [placement.index(device) for device in range(max(placement) + 1)]
        busy = np.array([before[min(stage, len(self.passed))] + stage * travel for stage in first])
        busy[placement[0]] += self.own[0]
        for i, earlier in enumerate(ending[: len(self.own) - 1]):
            busy[placement[len(placement) - 1 - earlier]] += self.own[len(self.own) - 1 - i]
        return busy


def endings(layers: int, stages: int, looked_at: int) -> list[Ending]:
    """Every way to cut the last layers, so many of them, where each virtual stage has a layer or more.

    >>> endings(layers=8, stages=3, looked_at=3)
    [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 2)]
    >>> endings(layers=2, stages=2, looked_at=3)
    [(0, 1)]
    """
    known = min(looked_at, layers)
    found = []
    for cuts in itertools.product((0, 1), repeat=known - 1):
        ending = (0, *itertools.accumulate(cuts))
        # The layers before these are for the virtual stages before these, and for that of the first of these.
        first = stages - 1 - ending[-1]
        if 0 <= first <= layers - known or (first == 0 and known == layers):
            found.append(ending)
    return found


def known_stages(layers: int, stages: int, ending: Ending) -> dict[int, int]:
    """Layers whose virtual stages are known, and these: the first one, and those of the ending.

    >>> known_stages(8, 3, (0, 0, 1))
    {0: 0, 7: 2, 6: 2, 5: 1}
    """
    last = {layers - 1 - i: stages - 1 - earlier for i, earlier in enumerate(ending[:layers])}
    return {0: 0} | last


def _dealt(longest: Numbers, busy: Numbers) -> float:
    """The bound for layers in the order of their seconds, longest first, on devices that are busy for some already."""
    found = float(busy.max())
    for count in range(1, len(longest) + 1):
        sums = np.add.outer(busy, np.cumsum(longest[count - 1 :: -1])).ravel()
        found = max(found, float(np.partition(sums, count - 1)[count - 1]))
    return found


@dataclass(frozen=True)
class WholeLayers:
    """Layers dealt to equal sub-meshes, with or without tasks for the gradients of weights."""

    ways: tuple[tuple[LayerSeconds, float], ...]  # each that holds, with the seconds that a microbatch is sent for
    kinds: tuple[str, ...]  # of tasks that count, in each way

    @classmethod
    def of(
        cls, space: StageSpace, microbatches: int, tables: Sequence[StageTable], *, has_weight_tasks: bool
    ) -> WholeLayers:
        """Where gradients of weights are tasks, a device may end with them, and nobody waits for these.

        So either the way back does not count, or these tasks do not.
        """
        found, kinds = [], []
        for counts_weight, counts_back in [(True, False), (False, True)] if has_weight_tasks else [(True, True)]:
            own, passed = [], []
            for table in tables:
                allowed = table.fits
                back = table.backward if has_weight_tasks else table.backward + table.weight
                work = table.work if counts_weight else table.forward + table.backward
                own.append(np.where(allowed, microbatches * work + table.after, np.inf))
                passed.append(np.where(allowed, table.forward + back if counts_back else table.forward, np.inf))
            seconds = LayerSeconds(least_per_layer(np.min(own, axis=0)), least_per_layer(np.min(passed, axis=0)))
            devices = tables[0].shape.devices
            travel = least_travel(space, space.costs[microbatches], devices, counts_back=counts_back)
            found.append((seconds, travel))
            kinds.append("FBW" if has_weight_tasks and counts_weight else "FB")
        return cls(tuple(found), tuple(kinds))

    def bound(self, placement: Sequence[int], ending: Ending = (0,)) -> float:
        """As `LayerSeconds.bound`, in the way that gives most."""
        return max(seconds.bound(placement, travel, ending) for seconds, travel in self.ways)

    def limit(self, placement: Sequence[int], ending: Ending = (0,)) -> LayerLimit | None:
        """As `LayerSeconds.limit`, in the way that gives most seconds."""
        found = [seconds.limit(placement, travel, ending) for seconds, travel in self.ways]
        return max((one for one in found if one is not None), key=lambda one: one.seconds, default=None)

    def passing(self, stage: int) -> list[float]:
        """In each way, the seconds that pass in the virtual stages before one."""
        return [float(seconds.passed[:stage].sum()) + stage * travel for seconds, travel in self.ways]

    def seconds_of(self, layers: Mapping[str, Numbers], microbatches: int) -> list[Numbers]:
        """In each way, what layers of these figures add to a device: seconds per step.

        Args:
            layers: as `least_of_layers` has them, of one table.
        """
        return [microbatches * sum(layers[kind] for kind in kinds) + layers["after"] for kinds in self.kinds]

    def estimate(self, devices: int, chunks: int) -> float:
        """About what equal virtual stages take."""
        found = 0.0
        for seconds, travel in self.ways:
            passing = float(seconds.passed.sum()) / (devices * chunks) + travel
            found = max(found, float(seconds.own.sum()) / devices + (devices - 1) * passing)
        return found


def least_per_layer(runs: Numbers) -> Numbers:
    """Per layer, what it adds at least to any run; inf where no run has it.

    Runs may take less than their layers one by one. Then every layer counts as little as makes the bound hold for the
    run that saves the most.

    >>> inf = np.inf
    >>> least_per_layer(np.array([[inf, 2.0, 3.0], [inf, inf, 2.0], [inf, inf, inf]])).tolist()
    [1.5, 1.5]
    """
    layers = len(runs) - 1
    alone = runs[np.arange(layers), np.arange(1, layers + 1)]
    for layer in np.flatnonzero(~np.isfinite(alone)):
        alone[layer] = 0.0 if np.isfinite(runs[: layer + 1, layer + 1 :]).any() else np.inf
    if not np.isfinite(alone).all():
        return alone
    total = np.concatenate(([0.0], np.cumsum(alone)))
    sums = total[None, :] - total[:, None]
    some = np.isfinite(runs) & (sums > 0)
    return alone * (min(1.0, float((runs[some] / sums[some]).min())) if some.any() else 1.0)


def least_travel(space: StageSpace, costs: MicrobatchCosts, devices: int, *, counts_back: bool) -> float:
    """Seconds between two virtual stages of so many devices each, there and back, at least."""
    if space.layers == 1 or space.row.devices <= devices:
        return 0.0
    joints = [space.row.channel(at - 1, at) for at in range(devices, space.row.devices, devices)]
    found = 0.0
    for sent in [costs.sent_forward, costs.sent_backward] if counts_back else [costs.sent_forward]:
        size = float(sent[1:-1].min())
        if size > 0:
            found += min(one.latency + size / (one.bandwidth * devices) for one in joints)
    return found
