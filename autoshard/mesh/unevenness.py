"""Devices that are not alike along an axis of the mesh: how they differ, and what that costs a step.

XLA runs one program on all devices, on shapes of one size. So the slowest device sets the time of a step and the
smallest memory its limit: a `Topology` has the rates of the slowest, and beside them how the others differ. What shares
in proportion to speed would win follows AccPar (Song et al., HPCA 2020, section 4): position p gets the share
``s_p / sum(s)`` of what is split along the axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.errors import MeshError
from autoshard.errors.kinds import check_fields


@dataclass(frozen=True)
class Unevenness:
    """How the devices along one mesh axis differ, position by position.

    >>> uneven = Unevenness("hosts", speeds=(1.0, 0.6))
    >>> uneven.shares(32)
    (20, 12)
    >>> round(uneven.waiting, 3), round(uneven.saved_by_shares, 3), uneven.fastest_alone
    (0.2, 0.25, None)
    >>> Unevenness("hosts", speeds=(1.0, 0.3)).fastest_alone
    1
    """

    axis: str
    speeds: tuple[float, ...] = ()  # of computing, relative to one another; empty: alike
    memories: tuple[float, ...] = ()  # bytes, relative to one another; empty: alike

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("speeds", "memories"):
            factors = tuple(map(float, getattr(self, name)))
            object.__setattr__(self, name, factors)
            if not all(0 < factor < math.inf for factor in factors):
                raise MeshError(f"{name} along axis {self.axis!r} are {factors}; factors of more than 0 are needed")
        if not (self.speeds or self.memories):
            raise MeshError(f"nothing is said of the devices along axis {self.axis!r}; give speeds= or memories=")

    def check(self, devices: int) -> None:
        """
        Raises:
            MeshError: the axis has another number of devices.
        """
        for name, factors in (("speeds", self.speeds), ("memories", self.memories)):
            if factors and len(factors) != devices:
                raise MeshError(
                    f"mesh axis {self.axis!r} has {devices} devices, the topology has {len(factors)} {name} along it"
                )

    @property
    def slowest(self) -> float:
        """The least of the speeds; 1 if they are alike."""
        return min(self.speeds, default=1.0)

    @property
    def smallest(self) -> float:
        """The least of the memories; 1 if they are alike."""
        return min(self.memories, default=1.0)

    @property
    def waiting(self) -> float:
        """Of the seconds that the slowest computes: how much of it a device waits, on average."""
        waits = [1 - self.slowest / speed for speed in self.speeds]
        return math.fsum(waits) / len(waits) if waits else 0.0

    @property
    def saved_by_shares(self) -> float:
        """Of the seconds that the slowest computes: what shares in proportion to speed would save."""
        return 1 - len(self.speeds) * self.slowest / math.fsum(self.speeds) if self.speeds else 0.0

    @property
    def fastest_alone(self) -> int | None:
        """How many of the fastest positions would compute the whole sooner than all together; None if not any."""
        ranked = sorted(self.speeds, reverse=True)
        seconds = {count: 1 / (count * ranked[count - 1]) for count in range(1, len(ranked) + 1)}
        best = min(seconds, key=lambda count: (seconds[count], -count), default=len(ranked))
        return None if best == len(ranked) else best

    def shares(self, rows: int) -> tuple[int, ...]:
        """So many rows in proportion to speed: whole rows, the largest remainders rounded up."""
        speeds: Sequence[float] = self.speeds
        exact = [rows * speed / math.fsum(speeds) for speed in speeds]
        found = [int(share) for share in exact]
        by_remainder = sorted(range(len(speeds)), key=lambda p: (found[p] - exact[p], p))
        for position in by_remainder[: rows - sum(found)]:
            found[position] += 1
        return tuple(found)
