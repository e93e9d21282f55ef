"""The machine as a pipeline sees it: devices in a row, what joins neighbours, and the sub-meshes of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.errors import ArgumentError


@dataclass(frozen=True)
class Channel:
    """What one device sends to its counterpart in the next stage over."""

    latency: float  # s
    bandwidth: float  # bytes/s per device, one way


@dataclass(frozen=True)
class DeviceRow:
    """Devices in the order in which stages take them: consecutive stages have consecutive devices.

    >>> row = DeviceRow.of_hosts(2, 4, inside=Channel(0.0, 4e9), between=Channel(0.0, 1e9))
    >>> row.devices, row.seconds(8e9, 0, 4, 4, 4), row.seconds(8e9, 0, 2, 2, 2)
    (8, 2.0, 1.0)
    """

    channels: tuple[Channel, ...]  # entry p joins devices p and p + 1

    @classmethod
    def of_hosts(cls, hosts: int, devices: int, *, inside: Channel, between: Channel) -> DeviceRow:
        """Hosts, or slices, of so many devices each."""
        within_one = (inside,) * (devices - 1)
        return cls((*within_one, *(between, *within_one) * (hosts - 1)))

    @property
    def devices(self) -> int:
        """How many there are."""
        return len(self.channels) + 1

    @cached_property
    def _is_uniform(self) -> bool:
        return len(set(self.channels)) <= 1

    def channel(self, first: int, second: int) -> Channel:
        """The slowest of what joins two devices."""
        low, high = sorted((first, second))
        between = self.channels[low:high]
        if not between:
            return Channel(0.0, float("inf"))
        if self._is_uniform:
            return between[0]
        return Channel(max(one.latency for one in between), min(one.bandwidth for one in between))

    def seconds(self, size: float, start: int, devices: int, other_start: int, other_devices: int) -> float:
        """Seconds in which `size` bytes go from the devices of one stage to those of another.

        Every pair of counterparts sends its part at the same time; there are as many pairs as the smaller stage has
        devices. A stage after the other begins where the slowest channel on the way is crossed.
        """
        if start == other_start or size == 0:
            return 0.0
        low, high = sorted((start, other_start))
        before = devices if start < other_start else other_devices
        channel = self.channel(min(low + before, high) - 1, high)
        return channel.latency + size / (channel.bandwidth * min(devices, other_devices))


@dataclass(frozen=True)
class SubMesh:
    """Devices that one stage may have: a shape, a machine it lies on, and where in the row it may begin."""

    name: str  # "2x4"
    devices: int
    starts: tuple[int, ...]  # positions of its first device in the row
    memory_bytes: float  # bytes per device that a stage may use

    @classmethod
    def anywhere(cls, name: str, devices: int, row: int, memory_bytes: float, aligned: int | None = None) -> SubMesh:
        """One that may begin at every multiple of `aligned` devices, of its own number by default.

        >>> SubMesh.anywhere("2", 2, 8, 1e9).starts
        (0, 2, 4, 6)
        """
        step = devices if aligned is None else aligned
        return cls(name, devices, tuple(range(0, row - devices + 1, step)), memory_bytes)


def check_fits_row(row: DeviceRow, shapes: Sequence[SubMesh]) -> None:
    """
    Raises:
        ArgumentError: a sub-mesh has no devices, or sticks out of the row.
    """
    for shape in shapes:
        if shape.devices < 1 or any(start < 0 or start + shape.devices > row.devices for start in shape.starts):
            raise ArgumentError(
                f"sub-mesh {shape.name!r} of {shape.devices} devices starts at {shape.starts}, and the row has "
                f"{row.devices} devices"
            )
