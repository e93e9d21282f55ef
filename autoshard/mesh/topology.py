"""What a machine costs: a link per mesh axis, memory and FLOP rates per device. Plain numbers, SI units.

A `Topology` is written by hand, made by `presets.topology("v5e:4x4")`, guessed from a mesh by `Topology.of`, measured
on one by `Topology.measure`, or read from a file by `Topology.load`.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from autoshard.errors import MeshError
from autoshard.layout import MeshShape

if TYPE_CHECKING:
    from autoshard.mesh.presets import Chip


@dataclass(frozen=True)
class Link:
    """What one mesh axis costs to talk over (the alpha-beta model)."""

    latency: float  # s, per message
    bandwidth: float  # bytes/s one device sends along the axis while it receives as much; both ways round a ring count
    torus: bool = False  # only neighbours are wired (TPU ICI); otherwise every pair is, through a switch
    ring: bool = False  # a dim of a torus that closes on itself; otherwise a line
    shared: bool = False  # the devices share one memory, so that an all_reduce is one pass, as an all_gather is
    parts: tuple[tuple[int, Link], ...] = ()  # (devices, link) of each, if the axis runs over several; see `join`

    def __post_init__(self):
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


@dataclass(frozen=True)
class Cache:
    """What one operation of a device reads and writes fast, before it has to go to memory."""

    bytes: float  # read and written, of one operation
    bandwidth: float  # bytes/s

    def __post_init__(self):
        if not (self.bytes > 0 and self.bandwidth > 0):
            raise MeshError(f"a cache has bytes and bytes/s, more than 0, not {self.bytes!r} and {self.bandwidth!r}")


@dataclass(frozen=True)
class Topology:
    """What the machine under a mesh costs: the links between its devices, and one device.

    >>> topology = Topology(links={"data": Link(latency=1e-6, bandwidth=45e9)}, memory_bytes=16e9,
    ...                     memory_bandwidth=8.1e11, flops={"bfloat16": 1.97e14, "float32": 4.9e13})
    >>> topology.flops_for("float16")
    197000000000000.0
    >>> topology.check({"data": 4, "model": 2})
    Traceback (most recent call last):
        ...
    autoshard.errors.MeshError: mesh axis 'model' (2 devices) has no link; the topology has links for: data
    """

    links: Mapping[str, Link]  # mesh axis -> its link
    memory_bytes: float  # bytes of one device
    memory_bandwidth: float  # bytes/s of one device
    flops: Mapping[str, float]  # dtype name -> FLOP/s of one device
    cache: Cache | None = None  # what the first bytes of an operation go through instead of memory

    def __post_init__(self):
        object.__setattr__(self, "links", dict(self.links))
        object.__setattr__(self, "flops", {dtype: float(rate) for dtype, rate in self.flops.items()})
        numbers = {"memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth}
        numbers |= {f"flops[{dtype!r}]": rate for dtype, rate in self.flops.items()}
        for name, number in numbers.items():
            if not number > 0:
                raise MeshError(f"a topology's {name} must be more than 0, not {number!r}")

    def __hash__(self) -> int:  # the generated one fails on dicts
        return hash(
            (
                frozenset(self.links.items()), self.memory_bytes, self.memory_bandwidth,
                frozenset(self.flops.items()), self.cache,
            )
        )

    def flops_for(self, dtype: Any) -> float:
        """FLOP/s for a dtype or its name; one without a rate of its own runs at that of its nearest kin.

        Floats of 16 bits or less are tried as bfloat16, then everything as float32, then as the slowest rate known.
        """
        name = str(dtype)
        if not self.flops:
            raise MeshError(f"the topology has no FLOP rates, so {name} has none; give flops={{'float32': ...}}")
        half = ("bfloat16", "float16", "float8_", "float6_", "float4_")
        for known in (name, *(["bfloat16"] if name.startswith(half) else []), "float32"):
            if known in self.flops:
                return self.flops[known]
        return min(self.flops.values())

    def check(self, mesh_shape: MeshShape) -> None:
        """Raise MeshError unless every axis of more than one device has a link, and one for as many devices."""
        for axis, size in mesh_shape.items():
            if size == 1:
                continue
            if axis not in self.links:
                have = ", ".join(self.links) or "no axis"
                raise MeshError(f"mesh axis {axis!r} ({size} devices) has no link; the topology has links for: {have}")
            linked = math.prod(devices for devices, _ in self.links[axis].over(size))
            if linked != size:
                raise MeshError(f"mesh axis {axis!r} has {size} devices, its link in the topology {linked}")

    def save(self, path: str | Path) -> None:
        """Writes the topology as JSON, to be committed or loaded again."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Reads what `save` wrote.

        Raises:
            MeshError: the file is no topology.
        """
        try:
            fields = json.loads(Path(path).read_text())
            links = {axis: _link(link) for axis, link in fields["links"].items()}
            cache = Cache(**fields["cache"]) if fields.get("cache") else None
            return cls(**fields | {"links": links, "cache": cache})
        except (OSError, ValueError, LookupError, TypeError, AttributeError, MeshError) as error:
            raise MeshError(
                f"{path} is not a topology that this version of autoshard can read: {error!r}.\n"
                "Write one with Topology.save or Topology.measure(mesh, path=...)."
            ) from error

    @classmethod
    def measure(cls, mesh: Mesh, *, path: str | Path | None = None, progress: bool = True) -> Topology:
        """The machine under a mesh, timed: collectives over each axis, matmuls, passes over memory.

        It takes seconds to a minute, in which nothing else should run. Every process of the mesh has to call it.

        Args:
            mesh: a mesh of devices.
            path: a JSON file to save to. After an interrupt it has the axes that were done.
            progress: show it in one line on stderr, if that is a terminal.

        Returns:
            The topology, the same in every process. What no measurement tells comes from `Topology.of`: which axes run
            over a torus, and the bytes of a device where it does not say.

        Raises:
            MeshError: the mesh has no devices that run here.
        """
        from autoshard.mesh.measure import measure  # it is made of Topology and Link

        return measure(mesh, path=path, progress=progress)

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> Topology:
        """Guess the machine from a `jax.sharding.Mesh` (by its devices) or an `AbstractMesh`.

        TPU devices tell their place in the torus, which may be one to compile for only. An axis that covers whole dims
        of it is on rings, where those dims close, or lines, side by side; one that covers every second chip of a dim
        shares its wires; one that covers anything else is taken for a line. How many chips a dim has is how many the
        mesh has there. Where the slice changes along an axis, it is on the network, too. GPUs and CPUs are on the
        network where the process changes; with one process per GPU, where the host does.

        An AbstractMesh names no devices: lines of TPU v5e are assumed. An unknown device kind is taken for a CPU, with
        a warning.
        """
        from autoshard.mesh import presets  # its rows are made of Topology and Link

        if isinstance(mesh, AbstractMesh):
            chip = presets.CHIPS["v5e"]
            return presets.assemble(chip, {axis: [(size, chip.link)] for axis, size in mesh.shape.items()})
        kind = mesh.devices.flat[0].device_kind
        chip = presets.chip_of(kind)
        if chip is None:
            warnings.warn(f"unknown device kind {kind!r}: costs of a CPU are assumed; pass topology=", stacklevel=2)
            chip = presets.CHIPS["cpu"]
        return presets.assemble(chip, _parts(mesh, chip))


def _link(fields: Mapping[str, Any]) -> Link:
    """A link as `json` reads it."""
    return Link(**fields | {"parts": tuple((devices, _link(part)) for devices, part in fields["parts"])})


def _parts(mesh: Mesh, chip: Chip) -> dict[str, list[tuple[int, Link]]]:
    """(devices, link) of what each axis of a mesh runs over."""
    places = _places(mesh.devices.ravel().tolist(), chip)
    extents = [len(np.unique(column)) for column in places.T]
    # the link along each whole dim of the torus, and between the cores of a chip
    whole = [*(chip.along(ring) for ring in chip.rings(extents[1:-1])), chip.between_cores()]
    grid = places.reshape(*mesh.devices.shape, -1)
    lines = {axis: np.moveaxis(grid, dim, -2) for dim, axis in enumerate(mesh.axis_names)}
    return {axis: _parts_along(lines[axis], extents, whole, chip) for axis in lines}


def _parts_along(
    lines: np.ndarray, extents: Sequence[int], whole: Sequence[Link], chip: Chip
) -> list[tuple[int, Link]]:
    """(devices, link) of what an axis runs over, from the places along it, [..., device, coordinate]."""
    size = lines.shape[-2]
    lines = np.sort(lines.reshape(-1, *lines.shape[-2:]), axis=1)
    counts = 1 + (np.diff(lines, axis=1) != 0).sum(axis=1)  # different values, [line, coordinate]
    slices = int(counts[:, 0].max())
    if size % slices:
        return [(size, chip.network)]
    parts = [(slices, chip.network)]
    if not chip.torus_dims:
        return [*parts, (size // slices, chip.link)]
    if (counts != counts[0]).any() or counts[0].prod() != size:
        return [*parts, (size // slices, chip.along())]
    for dim, link in enumerate(whole, start=1):
        count = int(counts[0, dim])
        if 1 < count < extents[dim]:
            stride = int(np.ptp(lines[0, :, dim])) // (count - 1)
            link = chip.along(link.ring and count * stride == extents[dim], stride)
        parts.append((count, link))
    return parts


def _places(devices: Sequence[Any], chip: Chip) -> np.ndarray:
    """Where devices are, [device, coordinate]: slice, host or process; on a torus then its coordinates and the core."""
    slices = [_slice_index(device) for device in devices]
    if chip.torus_dims:
        inside = [[*getattr(device, "coords", ()), getattr(device, "core_on_chip", 0)] for device in devices]
        return np.array([[index or 0, *place] for index, place in zip(slices, inside, strict=True)])
    processes = [device.process_index for device in devices]
    # a host of GPUs may have a process for each; XLA then gives them one slice_index
    process_per_gpu = len(set(processes)) == len(devices) and chip.kinds != ("cpu",)
    return np.array(slices if process_per_gpu and None not in slices else processes)[:, None]


def _slice_index(device: Any) -> int | None:
    numbers = (getattr(device, name, None) for name in ("slice_index", "partition_index"))
    return next((number for number in numbers if number is not None and number >= 0), None)
