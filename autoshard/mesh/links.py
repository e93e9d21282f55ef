"""What one mesh axis costs to talk over, and what a device's cache gives: parts of a `Topology` and of chips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.errors import MeshError
from autoshard.errors.kinds import check_fields


@dataclass(frozen=True)
class Link:
    """What one mesh axis costs to talk over (the alpha-beta model)."""

    latency: float  # s, per message
    bandwidth: float  # bytes/s one device sends along the axis while it receives as much; both ways round a ring count
    torus: bool = False  # only neighbours are wired (TPU ICI); otherwise every pair is, through a switch
    ring: bool = False  # a dim of a torus that closes on itself; otherwise a line
    shared: bool = False  # the devices share one memory, so that an all_reduce is one pass, as an all_gather is
    wires: tuple[str, float] | None = None  # dims of a torus that several axes are laid through, and their bytes/s
    parts: tuple[tuple[int, Link], ...] = ()  # (devices, link) of each, if the axis runs over several; see `join`

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.latency >= 0:
            raise MeshError(f"a link's latency is seconds, at least 0, not {self.latency!r}")
        if not self.bandwidth > 0:
            raise MeshError(f"a link's bandwidth is bytes/s, more than 0, not {self.bandwidth!r}")
        if self.ring and not self.torus:
            raise MeshError("a link that is a ring is a dim of a torus: give torus=True as well")

    @classmethod
    def join(cls, parts: Sequence[tuple[int, Link]]) -> Link:
        """The link of an axis that runs over several, given the devices along each: two slices, and chips inside them.

        Collectives are priced part by part. The latency and bandwidth of the whole sum it up: the dims of a torus send
        side by side, and the slowest part bounds the others.

        >>> Link.join([(2, Link(1e-5, 3e9)), (4, Link(1e-6, 5e10, torus=True))]).bandwidth
        3000000000.0
        """
        if len(parts) == 1:
            return parts[0][1]
        links = [link for _, link in parts]
        joined = sum(link.bandwidth for link in links if link.torus)
        slowest = min([link.bandwidth for link in links if not link.torus] + ([joined] if joined else []))
        latency, torus = max(link.latency for link in links), all(link.torus for link in links)
        return cls(latency, slowest, torus, shared=all(link.shared for link in links), parts=tuple(parts))

    def over(self, devices: int) -> tuple[tuple[int, Link], ...]:
        """(devices, link) of every part of an axis of `devices`; the link itself where it is one."""
        return self.parts or ((devices, self),)

    def one_way(self) -> float:
        """Bytes/s from a device to one neighbour."""
        return self.bandwidth / 2 if self.ring else self.bandwidth


def part_of_link(link: Link, whole: int, part: int) -> Link:
    """What neighbouring devices of an axis talk over: some of its inner links, and no ring that they do not close.

    Devices that no inner links divide, as 6 on hosts of 8, talk as fast as the slowest link between them.

    >>> part_of_link(Link(1e-6, 1e11, torus=True, ring=True), 16, 4)
    Link(latency=1e-06, bandwidth=50000000000.0, torus=True, ring=False, shared=False, wires=None, parts=())
    """
    if part == whole:
        return link
    if not link.parts:
        # Both ways round the ring count in its bandwidth; a line has one.
        return replace(link, ring=False, bandwidth=link.one_way())
    found: list[tuple[int, Link]] = []
    left = part
    for devices, inner in reversed(link.parts):
        taken = math.gcd(left, devices)
        if taken > 1:
            found.append((taken, part_of_link(inner, devices, taken)))
        left //= taken
        if taken < devices:
            break
    if left == 1:
        return Link.join(found[::-1])
    slowest = min([link.bandwidth, *(inner.one_way() for _, inner in link.parts)])
    return replace(link, ring=False, bandwidth=slowest, parts=())


@dataclass(frozen=True)
class Cache:
    """What one operation of a device reads and writes fast, before it has to go to memory."""

    bytes: float  # read and written, of one operation
    bandwidth: float  # bytes/s

    def __post_init__(self) -> None:
        check_fields(self)
        if not (self.bytes > 0 and self.bandwidth > 0):
            raise MeshError(f"a cache has bytes and bytes/s, more than 0, not {self.bytes!r} and {self.bandwidth!r}")
