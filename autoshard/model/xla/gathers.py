"""Gathers: what compilers make of all_gathers, and when they run.

XLA's CPU compiler runs first what waits for the least (`cpu/breadth_first.py`): arguments are gathered at the start,
and all gathered copies are held at once. `tests/model/test_turned_copies.py` compiles a stack of layers.

The TPU compiler makes one all_gather of several, and an all_reduce of one over many devices.

All_gathers of several dims that follow each other become one, over the axes of all. One over all of many devices
becomes an all_reduce of zeros and the own piece: of 16 MiB at most on v5e, of any size on v5p. What a step returns is
gathered into a temporary, and copied from there into the result's buffer. Source: compiled programs.
`tests/mesh/test_targets.py` compiles gathers on either side of these limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.layout import MeshShape, ordered_axes, shards

# Devices of a slice from which XLA for TPU may make an all_reduce of a gather over all of them. On fewer devices, too,
# several dims may be gathered at once. Such gathers are priced one after the other, which is nearer to what they take.
LEAST_DEVICES_SUMMED = 64


@dataclass(frozen=True)
class Gathers:
    """What all_gathers become."""

    several_dims_at_once: bool = False  # several dims, one after the other, in one all_gather over the axes of all
    copies_results: bool = False  # what is gathered for a result is copied into its buffer
    summed_up_to_bytes: float = 0.0  # of the largest gather over all of many devices that becomes an all_reduce

    def sent_as(self, kind: str, devices: int, everywhere: int, size: int) -> str:
        """The collective that XLA makes of one.

        Args:
            kind: what it is.
            devices: how many talk to each other.
            everywhere: the devices of a slice.
            size: bytes of its result on one device.

        >>> Gathers(summed_up_to_bytes=2**24).sent_as("all_gather", 64, 64, 2**20)
        'all_reduce'
        """
        if kind != "all_gather" or size > self.summed_up_to_bytes:
            return kind
        return "all_reduce" if LEAST_DEVICES_SUMMED <= devices == everywhere else kind


def combined(
    steps: Iterable[tuple[str, tuple[str, ...], int]], mesh: MeshShape, gathers: Gathers
) -> list[tuple[str, tuple[str, ...], int, bool]]:
    """Collectives (kind, axes, what tells their size), and of each whether it gathers several dims.

    Given are such as gather one dim each; those that follow each other become one where the compiler does that.
    """
    sent: list[tuple[str, tuple[str, ...], int, bool]] = []
    for kind, axes, size in steps:
        several = False
        if gathers.several_dims_at_once and sent and kind == sent[-1][0] == "all_gather":
            all_axes = ordered_axes({*axes, *sent[-1][1]}, mesh)
            if shards(all_axes, mesh) >= LEAST_DEVICES_SUMMED:
                axes, several = all_axes, True
                sent.pop()
        sent.append((kind, axes, size, several))
    return sent
