"""What a collective is, and its seconds: kind, mesh axes, bytes and links in, seconds out.

The alpha-beta model of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(IJHPCA 2005), with the ring algorithms that NCCL and XLA run: every message costs the latency of its link, every byte
the inverse of its bandwidth. With `n` devices along an axis, latency `a`, bandwidth `b`, and `V` the bytes of the
*whole* of what is gathered or reduced:

==================  ====================================================================
all_gather          ``(n - 1) a + V (n - 1)/n / b``
reduce_scatter      the same; `V` is its operand, `n` times its result
all_reduce          reduce_scatter and all_gather: ``2 (n - 1) a + 2 V (n - 1)/n / b``
all_to_all          ``(n - 1) a + v (n - 1)/n / b``, `v` the result on one device; on a torus, where a byte passes
                    the devices between, ``v max(n/4, (n - 1)/n) / b``: `n/4` is what crosses the middle of the ring
collective_permute  ``a + v / b``
==================  ====================================================================

Over several axes a gather or reduction is hierarchical: one phase per axis, the slowest link first, while what it
moves is smallest. With equal links this is exactly one ring over all devices. An all_to_all uses its links side by
side, so the slowest bounds it. (The rings and the `n/4` also in "How to Scale Your Model", ch. 3.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from autoshard.errors import MeshError
from autoshard.layout import MeshShape
from autoshard.mesh.topology import Link, Topology

KINDS = ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter")


@dataclass(frozen=True)
class Collective:
    """One collective of a step, and how often it runs."""

    kind: str  # one of KINDS
    axes: tuple[str, ...]  # mesh axes it runs over, in mesh order
    bytes: int  # its result on one device, times count
    count: int  # runs per step
    source: str  # the user's line, "train.py:41"

    def __post_init__(self):
        if self.kind not in KINDS:
            raise MeshError(f"unknown collective {self.kind!r}; known are {', '.join(KINDS)}")

    def __str__(self) -> str:
        return f"{self.count} x {self.kind} over {','.join(self.axes)}: {self.bytes} bytes ({self.source})"


def has_reduce_scatter(mesh: Mesh | AbstractMesh) -> bool:
    """Whether XLA has one for these devices; on CPU it makes an all_reduce of the whole, and slices."""
    return not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "cpu"


def seconds(kind: str, axes: Sequence[str], bytes: float, mesh_shape: MeshShape, topology: Topology) -> float:
    """Time of one run of a collective.

    Args:
        kind: one of KINDS.
        axes: the mesh axes it runs over.
        bytes: its result on one device, one run.
        mesh_shape: devices per axis.
        topology: the links.

    >>> topology = Topology({"x": Link(1e-6, 100e9)}, memory_bytes=1e9, memory_bandwidth=1e12, flops={"float32": 1e12})
    >>> round(seconds("all_gather", ("x",), 400_000_000, {"x": 4}, topology), 9)
    0.003003
    """
    # (devices, link) of the axes that really hold more than one device
    rings = [(mesh_shape[axis], topology.links[axis]) for axis in axes if mesh_shape[axis] > 1]
    if not rings:
        return 0.0
    if kind == "all_gather":
        return _gather_seconds(bytes, rings)
    if kind == "reduce_scatter":
        return _gather_seconds(bytes * math.prod(n for n, _ in rings), rings)
    if kind == "all_reduce":
        return 2 * _gather_seconds(bytes, rings)
    if kind == "all_to_all":
        latency = sum((n - 1) * link.latency for n, link in rings)
        return latency + max(bytes * _all_to_all_share(n, link) / link.bandwidth for n, link in rings)
    if kind == "collective_permute":
        return sum(link.latency for _, link in rings) + bytes / min(link.bandwidth for _, link in rings)
    raise MeshError(f"unknown collective {kind!r}; known are {', '.join(KINDS)}")


def _gather_seconds(whole: float, rings: list[tuple[int, Link]]) -> float:
    gathered = whole / math.prod(n for n, _ in rings)
    total = 0.0
    for n, link in sorted(rings, key=lambda ring: ring[1].bandwidth):
        gathered *= n
        total += (n - 1) * link.latency + gathered * (n - 1) / n / link.bandwidth
    return total


def _all_to_all_share(n: int, link: Link) -> float:
    """How many times over its result a device's link along one axis is used."""
    return max(n / 4, (n - 1) / n) if link.torus else (n - 1) / n
