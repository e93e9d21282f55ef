"""What a machine costs: a link per mesh axis, memory and FLOP rates per device. Plain numbers, SI units.

A `Topology` is written by hand, made by `presets.topology("v5e:4x4")`, guessed from a mesh by `Topology.of`, measured
on one by `Topology.measure`, or read from a file by `Topology.load`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from autoshard.errors import ArgumentError, MeshError, warn
from autoshard.errors.kinds import check_fields, checks_kinds
from autoshard.files import write_whole
from autoshard.layout import MeshShape
from autoshard.mesh.chips import CHIPS, Chip, chip_of
from autoshard.mesh.links import Cache, Link, part_of_link
from autoshard.mesh.measure import measure
from autoshard.mesh.placement import Parts, parts_of_mesh
from autoshard.mesh.unevenness import Unevenness


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
    uneven: tuple[Unevenness, ...] = ()  # how devices differ; the figures above are those of the slowest and smallest
    host_bandwidth: float | None = None  # bytes/s of one device to its host's memory, and as much back; None: unknown
    machine: str | None = None  # the name that it was made from, whose compiler counts on a mesh without devices

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "links", dict(self.links))
        object.__setattr__(self, "flops", {dtype: float(rate) for dtype, rate in self.flops.items()})
        numbers = {"memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth}
        numbers |= {f"flops[{dtype!r}]": rate for dtype, rate in self.flops.items()}
        numbers |= {} if self.host_bandwidth is None else {"host_bandwidth": self.host_bandwidth}
        for name, number in numbers.items():
            if not number > 0:
                raise MeshError(f"a topology's {name} must be more than 0, not {number!r}")

    def __hash__(self) -> int:  # the generated one fails on dicts
        return hash(
            (
                frozenset(self.links.items()),
                self.memory_bytes,
                self.memory_bandwidth,
                frozenset(self.flops.items()),
                self.cache,
                self.uneven,
                self.host_bandwidth,
            )
        )

    def flops_for(self, dtype: Any) -> float:
        """FLOP/s for a dtype or its name; a dtype without a rate of its own runs at that of its nearest kin.

        Floats of 16 bits or less are tried as bfloat16, then everything as float32, then as the slowest rate known.

        Raises:
            MeshError: the topology has no rates.
        """
        name = str(dtype)
        if not self.flops:
            raise MeshError(f"the topology has no FLOP rates, so {name} has none; give flops={{'float32': ...}}")
        half = ("bfloat16", "float16", "float8_", "float6_", "float4_")
        for known in (name, *(["bfloat16"] if name.startswith(half) else []), "float32"):
            if known in self.flops:
                return self.flops[known]
        return min(self.flops.values())

    @checks_kinds()
    def with_positions(self, axis: str, *, speeds: Sequence[float] = (), memories: Sequence[float] = ()) -> Topology:
        """The same machine with devices along an axis that are not alike.

        >>> plain = Topology({"x": Link(1e-6, 45e9)}, 16e9, 8.1e11, {"float32": 4.9e13})
        >>> plain.with_positions("x", speeds=(1, 0.5), memories=(1, 0.25)).memory_bytes
        4000000000.0

        Args:
            speeds: per position of the axis, a factor of the FLOP rates and the memory bandwidth.
            memories: per position of the axis, a factor of `memory_bytes`.

        Returns:
            A topology whose figures are those of the slowest and the smallest device; `uneven` has the factors.

        Raises:
            MeshError: a factor is not above 0, or the axis has been described before.
        """
        if axis in {one.axis for one in self.uneven}:
            raise MeshError(f"the topology has the devices along axis {axis!r} already; describe each axis once")
        uneven = Unevenness(axis, tuple(speeds), tuple(memories))
        slowest = uneven.slowest
        cache = self.cache and replace(self.cache, bandwidth=self.cache.bandwidth * slowest)
        return replace(
            self,
            flops={dtype: rate * slowest for dtype, rate in self.flops.items()},
            memory_bandwidth=self.memory_bandwidth * slowest,
            memory_bytes=self.memory_bytes * uneven.smallest,
            cache=cache,
            uneven=(*self.uneven, uneven),
        )

    def part(self, axes: MeshShape, mesh_shape: MeshShape, start: int) -> Topology:
        """The machine with the devices alone of one part of a mesh, and the links inside it.

        >>> plain = Topology({"x": Link(1e-6, 45e9)}, 16e9, 8.1e11, {"float32": 4.9e13})
        >>> uneven = plain.with_positions("x", speeds=(1, 1, 0.5, 0.5))
        >>> uneven.part({"x": 2}, {"x": 4}, start=0) == plain
        True

        Args:
            axes: the devices that the part has along each axis of the mesh.
            mesh_shape: of the whole mesh.
            start: the place of its first device in the mesh.
        """
        first = dict(zip(mesh_shape, np.unravel_index(start, tuple(mesh_shape.values())), strict=True))
        speed, memory, uneven = 1.0, 1.0, []
        for one in self.uneven:
            at = int(first.get(one.axis, 0))
            own = slice(at, at + axes.get(one.axis, 1))
            part = replace(one, speeds=one.speeds[own], memories=one.memories[own])
            speed, memory = speed * part.slowest / one.slowest, memory * part.smallest / one.smallest
            if len(set(part.speeds)) > 1 or len(set(part.memories)) > 1:
                uneven.append(part)
        return replace(
            self,
            links={
                axis: part_of_link(link, mesh_shape[axis], axes[axis]) if axes.get(axis, 1) > 1 else link
                for axis, link in self.links.items()
            },
            flops={dtype: rate * speed for dtype, rate in self.flops.items()},
            memory_bandwidth=self.memory_bandwidth * speed,
            memory_bytes=self.memory_bytes * memory,
            cache=self.cache and replace(self.cache, bandwidth=self.cache.bandwidth * speed),
            uneven=tuple(uneven),
        )

    def room_on(self, part: Topology, memory: float) -> float:
        """Bytes that each device of a part of this machine may use, of so many on the smallest device.

        In proportion to the memory of the part, if `memory` is all that the smallest device has; else a limit for all.
        """
        return memory * part.memory_bytes / self.memory_bytes if memory >= self.memory_bytes else memory

    def computing_in_no_time(self) -> Topology:
        """The same links between devices that do all their own work at once."""
        rates = dict.fromkeys(self.flops, math.inf)
        return replace(self, memory_bandwidth=math.inf, flops=rates, cache=None)

    @checks_kinds()
    def check(self, mesh_shape: MeshShape) -> None:
        """Checks that the topology has what a mesh needs.

        Raises:
            MeshError: an axis of more than one device has no link, or one for another number of devices; or devices
                along an axis are described that the mesh does not have.
        """
        for uneven in self.uneven:
            uneven.check(mesh_shape.get(uneven.axis, 1))
        for axis, size in mesh_shape.items():
            if size == 1:
                continue
            if axis not in self.links:
                have = ", ".join(self.links) or "no axis"
                raise MeshError(f"mesh axis {axis!r} ({size} devices) has no link; the topology has links for: {have}")
            linked = math.prod(devices for devices, _ in self.links[axis].over(size))
            if linked != size:
                raise MeshError(f"mesh axis {axis!r} has {size} devices, its link in the topology {linked}")

    @checks_kinds()
    def save(self, path: str | Path) -> None:
        """Writes the topology as JSON, to be committed or loaded again.

        Raises:
            OSError: it cannot be written; what was there still is.
        """
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    @checks_kinds()
    def load(cls, path: str | Path) -> Topology:
        """Reads what `save` wrote.

        Raises:
            MeshError: the file is no topology.
        """
        try:
            fields = json.loads(Path(path).read_text())
            links = {axis: _link(link) for axis, link in fields["links"].items()}
            cache = Cache(**fields["cache"]) if fields.get("cache") else None
            uneven = tuple(Unevenness(**one) for one in fields.get("uneven", ()))
            return cls(**fields | {"links": links, "cache": cache, "uneven": uneven})
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MeshError) as error:
            raise MeshError(
                f"{path} is not a topology that this version of autoshard can read: {error!r}.\n"
                "Write one with Topology.save or Topology.measure(mesh, path=...)."
            ) from error

    @classmethod
    @checks_kinds("path", "progress")
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
        return measure(mesh, cls.of(mesh), path=path, progress=progress)

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> Topology:
        """Guess the machine from a `jax.sharding.Mesh` (by its devices) or an `AbstractMesh`.

        TPU devices tell their place in the torus, which may be one to compile for only. An axis that covers whole dims
        of the torus is on rings, where those dims close, or on lines, side by side. An axis that covers every second
        chip of a dim shares the wires of the dim. Any other axis is taken for a line. A dim has as many chips as the
        mesh has there. Where the slice changes along an axis, the axis is on the network, too. GPUs and CPUs are on the
        network where the process changes; with one process per GPU, where the host changes.

        An AbstractMesh names no devices: lines of TPU v5e are assumed. An unknown device kind is taken for a CPU, with
        a warning.
        """
        if isinstance(mesh, AbstractMesh):
            chip = CHIPS["v5e"]
            return cls.of_chip(chip, {axis: [(size, chip.link)] for axis, size in mesh.shape.items()})
        if not hasattr(mesh, "devices"):
            raise ArgumentError(f"mesh={mesh!r}; a Mesh or an AbstractMesh is needed, as jax.make_mesh gives")
        kind = mesh.devices.flat[0].device_kind
        known = chip_of(kind)
        if known is None:
            warn(f"unknown device kind {kind!r}: costs of a CPU are assumed; pass topology=")
        chip = CHIPS["cpu"] if known is None else known
        return cls.of_chip(chip, parts_of_mesh(mesh, chip))

    @classmethod
    def of_chip(cls, chip: Chip, parts: Mapping[str, Parts]) -> Topology:
        """Devices of one kind, and what each mesh axis runs over: (devices, link), outermost first."""
        links = {}
        for axis, spans in parts.items():
            spans = [(devices, link) for devices, link in spans if devices > 1]
            links[axis] = Link.join(spans) if spans else chip.link
        return cls(
            links, chip.memory_bytes, chip.memory_bandwidth, chip.flops, chip.cache, host_bandwidth=chip.host_bandwidth
        )


def _link(fields: Mapping[str, Any]) -> Link:
    """A link as `json` reads it."""
    wires = None if fields.get("wires") is None else tuple(fields["wires"])
    parts = tuple((devices, _link(part)) for devices, part in fields["parts"])
    return Link(**{**fields, "wires": wires, "parts": parts})
