"""What a collective is, and its seconds: kind, mesh axes, bytes and links in, seconds out.

The alpha-beta model of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(IJHPCA 2005), with the ring algorithms that NCCL and XLA run. Every message costs the latency of its link, every byte
the inverse of its bandwidth. An axis has `n` devices, latency `a` and bandwidth `b`. `V` is the bytes of the *whole* of
what is gathered or reduced. Behind a switch:

==================  ====================================================================
all_gather          ``(n - 1) a + V (n - 1)/n / b``
reduce_scatter      the same; `V` is its operand, `n` times its result
all_reduce          reduce_scatter and all_gather: ``2 (n - 1) a + 2 V (n - 1)/n / b``
all_to_all          ``(n - 1) a + v (n - 1)/n / b``, `v` the result on one device
collective_permute  ``a + v / b``
==================  ====================================================================

On a torus messages pass the devices between ("How to Scale Your Model", ch. 3, on the AllGather and the AllToAll). A
line has `n - 1` hops. A ring has `n/2`, since both its ways are used at once, and its `b` is that of both together:

==================  ====================================================================
gather, reduction   as above, with ``n/2 a`` for ``(n - 1) a`` on a ring
all_to_all          ``hops a + v n/4 / b``: so many results pass the middle of a line, or the two of a ring, each way
collective_permute  ``hops a + v n/4 / b``, as if each device sent to one picked at random, since the pairs are not
                    known; but at least ``v / b`` on a line, ``2 v / b`` on a ring: a message goes one way round
==================  ====================================================================

Devices that share one memory read what the others wrote. So an all_reduce, too, reads and writes everything once, and
takes as long as an all_gather of the same result.

Over several links a gather or reduction is hierarchical: one phase per link, the slowest first, while what it moves is
smallest. With equal links behind switches this is exactly one ring over all devices. The dims of a torus count as one
link. Parts of the data go through them in different orders, so that their bandwidths add up (ibid., "What happens when
we AllGather over multiple axes?"). Axes that are laid through the same dims have no more
than the wires of these. An all_to_all or collective_permute uses its links side by side, so the slowest link
bounds it. A message of the latter takes one way through switches, whichever axes it goes along.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard.errors import MeshError
from autoshard.layout import MeshShape
from autoshard.mesh.links import Link

if TYPE_CHECKING:
    from autoshard.mesh.topology import Topology

KINDS = ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter")


@dataclass(frozen=True)
class Collective:
    """One collective of a step, and how often it runs."""

    kind: str  # one of KINDS
    axes: tuple[str, ...]  # mesh axes it runs over, in mesh order
    bytes: int  # its result on one device, times count
    count: int  # runs per step
    source: str  # the user's line, "train.py:41"
    why: str = ""  # what asks for it: "partial sums of dot_general", "state/params/w for dot_general"
    is_per_turn: bool = False  # whether it stands in a loop of unknown length: counted as in a single turn

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise MeshError(f"unknown collective {self.kind!r}; known are {', '.join(KINDS)}")

    def __str__(self) -> str:
        return f"{self.count} x {self.kind} over {','.join(self.axes)}: {self.bytes} bytes ({self.source})"


def seconds(
    kind: str,
    axes: Sequence[str],
    bytes: float,
    mesh_shape: MeshShape,
    topology: Topology,
    among: int | None = None,
) -> float:
    """Time of one run of a collective.

    Args:
        kind: one of KINDS.
        axes: the mesh axes it runs over.
        bytes: its result on one device, one run.
        mesh_shape: devices per axis.
        topology: the links.
        among: how many devices talk to each other, if these are not all along the one axis.

    >>> from autoshard.mesh.topology import Topology
    >>> topology = Topology({"x": Link(1e-6, 100e9)}, memory_bytes=1e9, memory_bandwidth=1e12, flops={"float32": 1e12})
    >>> round(seconds("all_gather", ("x",), 400_000_000, {"x": 4}, topology), 9)
    0.003003
    """
    spans = [span for axis in axes if mesh_shape[axis] > 1 for span in topology.links[axis].over(mesh_shape[axis])]
    if among is not None:
        (axis,) = axes
        spans = [next((span for span in spans if span[0] == among), (among, topology.links[axis]))]
    if not spans:
        return 0.0
    if kind == "all_gather":
        return _gather_seconds(bytes, spans)
    if kind == "reduce_scatter":
        return _gather_seconds(bytes * math.prod(n for n, _ in spans), spans)
    if kind == "all_reduce":
        return (1 if all(link.shared for _, link in spans) else 2) * _gather_seconds(bytes, spans)
    if kind == "all_to_all":
        latency = sum(_hops(n, link) * link.latency for n, link in spans)
        return latency + max(bytes * _all_to_all_share(n, link) / link.bandwidth for n, link in spans)
    if kind == "collective_permute":
        behind_switches = max((link.latency for _, link in spans if not link.torus), default=0.0)
        latency = sum(_hops(n, link) * link.latency for n, link in spans if link.torus) + behind_switches
        return latency + max(bytes * _permute_share(n, link) / link.bandwidth for n, link in spans)
    raise MeshError(f"unknown collective {kind!r}; known are {', '.join(KINDS)}")


def total_seconds(collectives: Iterable[Collective], mesh_shape: MeshShape, topology: Topology) -> float:
    """Time of collectives, with all their runs, one after the other."""
    return sum(
        one.count * seconds(one.kind, one.axes, one.bytes / one.count, mesh_shape, topology)
        for one in collectives
        if one.count
    )


_Span = tuple[int, Link]  # devices, and the link along them


def _gather_seconds(whole: float, spans: Sequence[_Span]) -> float:
    levels = [(n, _hops(n, link) * link.latency, link.bandwidth) for n, link in spans if not link.torus]
    torus = [(n, link) for n, link in spans if link.torus]
    if torus:
        latency = sum(_hops(n, link) * link.latency for n, link in torus)
        levels.append((math.prod(n for n, _ in torus), latency, _joined_bandwidth([link for _, link in torus])))
    gathered = whole / math.prod(n for n, _, _ in levels)
    total = 0.0
    for n, latency, bandwidth in sorted(levels, key=lambda level: level[2]):
        gathered *= n
        total += latency + gathered * (n - 1) / n / bandwidth
    return total


def _joined_bandwidth(links: Sequence[Link]) -> float:
    """Bytes/s of links of a torus side by side; those laid through the same dims have no more than these."""
    by_wires: dict[tuple[str, float] | None, float] = {}
    for link in links:
        by_wires[link.wires] = by_wires.get(link.wires, 0.0) + link.bandwidth
    return sum(total if wires is None else min(total, wires[1]) for wires, total in by_wires.items())


def _hops(n: int, link: Link) -> int:
    """Messages one after the other until all devices have heard of all."""
    return n // 2 if link.ring else n - 1


def _all_to_all_share(n: int, link: Link) -> float:
    """How many times over its result a device's link is used."""
    return n * n // 4 / n if link.torus else (n - 1) / n


def _permute_share(n: int, link: Link) -> float:
    """How many times over its result a device's link is used: at least once, on a ring twice, as one way is used."""
    return max(_all_to_all_share(n, link), 2 if link.ring else 1)
