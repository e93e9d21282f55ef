"""Seconds of moving an array between the memory of a device and that of its host."""

from __future__ import annotations

from autoshard.mesh.topology import Topology

# Of one transfer, however small: a descriptor and an interrupt. [guess]: ten messages on a link of a torus.
LATENCY = 1e-5  # s


def host_seconds(size: float, topology: Topology) -> float:
    """Seconds in which a device sends so many bytes to its host's memory, or receives them.

    Each device has a link of its own, and both ways work side by side. Where nothing is known of the link, a transfer
    takes no time.

    >>> from autoshard.mesh.links import Link
    >>> machine = Topology({}, 16e9, 8.1e11, {"bfloat16": 1.97e14}, host_bandwidth=15e9)
    >>> host_seconds(15e6, machine)
    0.00101
    """
    if topology.host_bandwidth is None:
        return 0.0
    return LATENCY + size / topology.host_bandwidth
