"""What a machine costs: a link per mesh axis, memory and FLOP rates per device. Plain numbers, SI units.

A `Topology` is written by hand, made by `presets.topology("v5e:4x4")`, or guessed from a mesh by `Topology.of`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from autoshard.errors import MeshError
from autoshard.layout import MeshShape


@dataclass(frozen=True)
class Link:
    """What one mesh axis costs to talk over (the alpha-beta model)."""

    latency: float  # s, per message
    bandwidth: float  # bytes/s one device sends along the axis while it receives as much; both ways round a ring count
    torus: bool = False  # only neighbours are wired (TPU ICI); otherwise every pair is, through a switch

    def __post_init__(self):
        if not self.latency >= 0:
            raise MeshError(f"a link's latency is seconds, at least 0, not {self.latency!r}")
        if not self.bandwidth > 0:
            raise MeshError(f"a link's bandwidth is bytes/s, more than 0, not {self.bandwidth!r}")


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

    def __post_init__(self):
        object.__setattr__(self, "links", dict(self.links))
        object.__setattr__(self, "flops", {dtype: float(rate) for dtype, rate in self.flops.items()})
        numbers = {"memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth}
        numbers |= {f"flops[{dtype!r}]": rate for dtype, rate in self.flops.items()}
        for name, number in numbers.items():
            if not number > 0:
                raise MeshError(f"a topology's {name} must be more than 0, not {number!r}")

    def __hash__(self) -> int:  # the generated one fails on dicts
        return hash((frozenset(self.links.items()), self.memory_bytes, self.memory_bandwidth,
                     frozenset(self.flops.items())))

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
        """Raise MeshError unless every axis of more than one device has a link."""
        for axis, size in mesh_shape.items():
            if size > 1 and axis not in self.links:
                have = ", ".join(self.links) or "no axis"
                raise MeshError(f"mesh axis {axis!r} ({size} devices) has no link; the topology has links for: {have}")

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> Topology:
        """Guess the machine from a `jax.sharding.Mesh` (by its device kind) or an `AbstractMesh`.

        Axes inside one process or TPU slice are on the fast link; an axis along which the process (on GPU) or slice
        (on TPU) changes is on the network. An AbstractMesh names no devices: TPU v5e is assumed. An unknown device
        kind is taken for a CPU, with a warning.
        """
        from autoshard.mesh import presets  # its rows are made of Topology and Link

        axes = dict(mesh.shape)
        if isinstance(mesh, AbstractMesh):
            return presets.assemble(presets.CHIPS["v5e"], axes, network=())
        kind = mesh.devices.flat[0].device_kind
        chip = presets.chip_of(kind)
        if chip is None:
            warnings.warn(f"unknown device kind {kind!r}: costs of a CPU are assumed; pass topology=", stacklevel=2)
            chip = presets.CHIPS["cpu"]
        return presets.assemble(chip, axes, network=_axes_between_hosts(mesh, chip.link.torus))


def _axes_between_hosts(mesh: Mesh, torus: bool) -> tuple[str, ...]:
    """Mesh axes along which the process, or on a torus the slice, changes."""
    def host(device):
        return getattr(device, "slice_index", 0) if torus else device.process_index

    crossing = []
    for dim, axis in enumerate(mesh.axis_names):
        first = mesh.devices.take([0], axis=dim)
        others = (mesh.devices.take([i], axis=dim) for i in range(1, mesh.devices.shape[dim]))
        if any(host(a) != host(b) for other in others for a, b in zip(first.flat, other.flat, strict=True)):
            crossing.append(axis)
    return tuple(crossing)
