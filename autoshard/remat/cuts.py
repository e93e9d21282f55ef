"""What a backward pass reads of a forward pass in, out what is best kept at every price of memory: pure Python.

A value that the backward pass wants is kept, or computed again from values that are kept or computed again themselves.
A value that is kept lies in the memory of devices, or is moved to that of their hosts and back. For a price of memory,
in seconds per byte, the cheapest choice is a minimum cut (as in the min-cut rematerialisation of PyTorch's AOTAutograd;
Goldberg's reduction of project selection). Its value nodes have two halves:

    wanted(v)   v is there in the backward pass
    again(v)    v is computed again there

    wanted(v) and not again(v)     costs  price * bytes(v)       v is kept, or moved if that costs less: moving(v)
    again(v), v made by e          needs  run(e)
    run(e)                         costs  seconds(e)             once for all results of e
    run(e), e reads u              needs  wanted(u)

The choices of all prices are the corners of the lower convex hull of (bytes kept, seconds computed again). They are
found by cutting at the price that joins two neighbours until no new corner shows up (Eisner and Severance 1976).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

CLOSE_CORNERS = 0.05  # of the bytes between the ends of a chain: corners that are closer have nothing put between


@dataclass(frozen=True)
class ForwardPass:
    """The equations that a backward pass may run again, and what it wants of them.

    >>> layer = ForwardPass(  # h = x @ w, a = gelu(h); x comes from the layer before
    ...     bytes=(4.0, 4.0, 4.0), makers=(None, 0, 1), reads=((0,), (1,)), seconds=(1.0, 0.1), wanted=(0, 1, 2)
    ... )
    >>> [(sorted(cut.kept), cut.bytes, cut.seconds) for cut in cuts(layer)]
    [([0, 1, 2], 12.0, 0.0), ([0, 1], 8.0, 0.1), ([0], 4.0, 1.1)]
    """

    bytes: tuple[float, ...]  # per value: of keeping it from the forward to the backward pass; 0 if it is there anyhow
    makers: tuple[int | None, ...]  # per value: its equation; None: it comes from outside and can only be kept
    reads: tuple[tuple[int, ...], ...]  # per equation: values
    seconds: tuple[float, ...]  # per equation, of running it again; infinite: it may not run again
    wanted: tuple[int, ...]  # values that the backward pass reads
    moving: tuple[float, ...] = ()  # per value: seconds of moving it to the host and back; empty: none can be moved

    def moving_seconds(self, v: int) -> float:
        """Of taking a value to the host and back; infinite if it stays on devices."""
        return self.moving[v] if self.moving else math.inf


@dataclass(frozen=True)
class Cut:
    """A choice of what is kept, on devices or their hosts, and what is computed again."""

    kept: frozenset[int]  # values
    again: frozenset[int]  # equations
    bytes: float  # kept on devices
    seconds: float  # of what is computed again, and of moving
    moved: frozenset[int] = frozenset()  # values that are kept on hosts

    @property
    def on_devices(self) -> frozenset[int]:
        """The values that are kept on devices."""
        return self.kept - self.moved


@functools.lru_cache(maxsize=256)  # layers look alike
def cuts(forward: ForwardPass) -> tuple[Cut, ...]:
    """The choices that are cheapest at some price of memory, the one that computes nothing again first.

    Each next one keeps fewer bytes and computes more seconds.
    """
    wanted = frozenset(forward.wanted)
    most = _cut(wanted, frozenset(), frozenset(), forward)
    least = _cheapest(forward, math.inf)
    if least.bytes >= most.bytes:
        return (most,)

    def between(more: Cut, fewer: Cut) -> list[Cut]:
        price = (fewer.seconds - more.seconds) / (more.bytes - fewer.bytes)
        found = _cheapest(forward, price)
        cost, known = found.seconds + price * found.bytes, more.seconds + price * more.bytes
        if cost >= known * (1 - 1e-9) or not fewer.bytes < found.bytes < more.bytes:
            return []
        return [*between(more, found), found, *between(found, fewer)]

    return most, *between(most, least), least


@functools.lru_cache(maxsize=256)
def at_price(forward: ForwardPass, price: float) -> Cut:
    """The last of `cuts` that pays at a price, in seconds per byte, by one minimum cut; infinite: the last of all.

    >>> layer = ForwardPass((4.0, 4.0, 4.0), (None, 0, 1), ((0,), (1,)), (1.0, 0.1), (0, 1, 2))
    >>> [at_price(layer, price).bytes for price in (0.0, 0.02, 0.025, 0.25, math.inf)]
    [12.0, 12.0, 8.0, 4.0, 4.0]
    """
    most = _cut(forward.wanted, frozenset(), frozenset(), forward)
    found = most if price <= 0 else _cheapest(forward, price * (1 + 1e-9))  # of two that cost the same, the later one
    return found if found.bytes < most.bytes else most


@functools.lru_cache(maxsize=256)
def chain(forward: ForwardPass) -> tuple[Cut, ...]:
    """The corners of `cuts`, and choices between them where they are far apart.

    Between two corners, the values that the one keeps and the other does not are added one by one, always the one that
    saves the most seconds per byte. Such a choice may lie above the hull, as where two values are worth the same.
    """
    corners = cuts(forward)
    step = CLOSE_CORNERS * (corners[0].bytes - corners[-1].bytes)
    found = list[Cut]()
    for more, fewer in itertools.pairwise(corners):
        between, at, left = list[Cut](), fewer, more.on_devices - fewer.on_devices
        while more.bytes - at.bytes > step:
            tried = {v: _keeping(at.on_devices | {v}, fewer.moved, forward) for v in left}
            better = {v: cut for v, cut in tried.items() if cut.seconds < at.seconds and cut.bytes > at.bytes}
            if not better:
                break
            v = min(better, key=lambda v: ((better[v].seconds - at.seconds) / (better[v].bytes - at.bytes), v))
            at, left = better[v], left - {v}
            if at.bytes < more.bytes and at.seconds > more.seconds:
                between.append(at)
        found += [more, *reversed(between)]
    return (*found, corners[-1])


def _keeping(kept: frozenset[int], movable: frozenset[int], forward: ForwardPass) -> Cut:
    """These values kept on devices, and beside them only what has to be; of the others, these may be moved."""
    free = tuple(0.0 if v in kept else size for v, size in enumerate(forward.bytes))
    moving = tuple(one if v in movable else math.inf for v, one in enumerate(forward.moving))
    found = _cheapest(replace(forward, bytes=free, moving=moving), math.inf)
    return _cut(found.kept, found.again, found.moved, forward)


def _cut(kept: Iterable[int], again: Iterable[int], moved: Iterable[int], forward: ForwardPass) -> Cut:
    kept, again, moved = frozenset(kept), frozenset(again), frozenset(moved)
    seconds = math.fsum([*(forward.seconds[e] for e in again), *(forward.moving[v] for v in moved)])
    return Cut(kept, again, math.fsum(forward.bytes[v] for v in kept - moved), seconds, moved)


def _cheapest(forward: ForwardPass, price: float) -> Cut:
    """The choice of the least seconds and bytes; at an infinite price, the least bytes come first."""
    if math.isinf(price):  # a byte outweighs all seconds together
        total = math.fsum(one for one in (*forward.seconds, *forward.moving) if math.isfinite(one))
        least = min((one for one in forward.bytes if one > 0), default=1.0)
        price = (1.0 + total) / least

    def keeping(v: int) -> float:
        return min(price * forward.bytes[v], forward.moving_seconds(v))

    network = _Network()
    for v in set(forward.wanted):
        network.add("source", ("wanted", v), math.inf)
    seen, waiting = set(forward.wanted), deque(set(forward.wanted))
    run = set[int]()
    while waiting:
        v = waiting.popleft()
        e = forward.makers[v]
        if e is None or math.isinf(forward.seconds[e]):
            network.add(("wanted", v), "sink", keeping(v))
            continue
        network.add(("wanted", v), ("run", e), keeping(v))
        if e in run:
            continue
        run.add(e)
        network.add(("run", e), "sink", forward.seconds[e])
        for u in forward.reads[e]:
            network.add(("run", e), ("wanted", u), math.inf)
            if u not in seen:
                seen.add(u)
                waiting.append(u)
    return _read(network.source_side(), forward, price)


def _read(side: set, forward: ForwardPass, price: float) -> Cut:
    """The choice that the source's side of a cut is."""
    again = {name[1] for name in side if name[0] == "run"}
    needed = {v for e in again for v in forward.reads[e]} | set(forward.wanted)
    kept = {v for v in needed if forward.makers[v] not in again}
    moved = {v for v in kept if forward.moving_seconds(v) < price * forward.bytes[v]}
    return _cut(kept, again, moved, forward)


class _Network:
    """A flow network with float capacities; its maximum flow by shortest augmenting paths in levels (Dinic 1970)."""

    def __init__(self) -> None:
        self.out: dict[object, list[int]] = {"source": [], "sink": []}
        self.ends: list[object] = []
        self.room: list[float] = []

    def add(self, start: object, end: object, capacity: float) -> None:
        for one, other, room in ((start, end, capacity), (end, start, 0.0)):
            self.out.setdefault(one, []).append(len(self.ends))
            self.ends.append(other)
            self.room.append(room)

    def source_side(self) -> set:
        """The nodes that the source still reaches once the flow is largest: the smallest of the minimum cuts."""
        while "sink" in (levels := self.levels()):
            used = dict.fromkeys(self.out, 0)
            while self.pushed(levels, used):
                pass
        return set(levels) - {"source"}

    def levels(self) -> dict:
        found: dict[object, int] = {"source": 0}
        waiting = deque[object](["source"])
        while waiting:
            node = waiting.popleft()
            for edge in self.out[node]:
                if self.room[edge] > 0 and self.ends[edge] not in found:
                    found[self.ends[edge]] = found[node] + 1
                    waiting.append(self.ends[edge])
        return found

    def pushed(self, levels: Mapping[object, int], used: dict[object, int]) -> bool:
        """Whether one more path to the sink was found, and filled."""
        path: list[int] = []
        node: object = "source"
        while node != "sink":
            edges = self.out[node]
            while used[node] < len(edges):
                edge = edges[used[node]]
                if self.room[edge] > 0 and levels.get(self.ends[edge]) == levels[node] + 1:
                    break
                used[node] += 1
            if used[node] < len(edges):
                path.append(edges[used[node]])
                node = self.ends[path[-1]]
            elif path:  # a dead end
                node = self.ends[path.pop() ^ 1]
                used[node] += 1
            else:
                return False
        flow = min(self.room[edge] for edge in path)
        for edge in path:
            self.room[edge] -= flow
            self.room[edge ^ 1] += flow
        return True
