"""`topology=` in, the devices that a step may run on and how they are wired out; from axes to a mesh over them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from autoshard.errors import ArgumentError, MeshError
from autoshard.layout import MeshShape
from autoshard.mesh.chips import CHIPS, chip_of
from autoshard.mesh.collectives import KINDS, seconds
from autoshard.mesh.machines import parse_machine
from autoshard.mesh.placement import dims_of_devices
from autoshard.mesh.presets import topology as preset
from autoshard.mesh.targets import placed
from autoshard.mesh.topology import Topology
from autoshard.meshes.candidates import MachineDims, aligned_sizes, named_meshes

_MANY_BYTES = 1e15  # beside which latency is nothing
_ROUNDED_SECONDS = 1e-9  # relative: what rounding may make of seconds that are equal


@dataclass(frozen=True)
class DevicePlace:
    """Where a step may run: devices and their wires."""

    dims: MachineDims
    machine: str | None  # by name, as `topology=` takes it; None: guessed from the mesh
    devices: tuple[jax.Device, ...] = ()  # those at hand; empty if they are not there

    @classmethod
    def of(cls, topology: Any) -> DevicePlace:
        """The place that `topology=` means.

        Args:
            topology: the name of a machine, which is planned for; a number of devices; or None for the devices at hand.
                If there are as many devices at hand, the step runs on these.

        Raises:
            ArgumentError: it is of another kind, or has the links of one mesh alone.
        """
        if isinstance(topology, Topology):
            raise ArgumentError(
                "mesh='auto' compares meshes, and a Topology has the links of one mesh.\n"
                "Name the machine, as in topology='v5e:4x4', or give the mesh that the topology was made for."
            )
        there = tuple(jax.devices())
        if isinstance(topology, str):
            machine = parse_machine(topology)
            is_torus = CHIPS[machine.chip].torus_dims > 0
            inner = machine.dims if not is_torus else (*machine.dims, CHIPS[machine.chip].cores)
            dims = MachineDims(machine.slices, tuple(size for size in inner if size > 1) or (1,))
            return cls(dims, topology, there if len(there) == dims.devices else ())
        if topology is None:
            return cls(MachineDims(*dims_of_devices(there)), None, there)
        if isinstance(topology, bool) or not isinstance(topology, int) or topology < 1:
            raise ArgumentError(
                f"topology={topology!r}; with mesh='auto' the name of a machine, a number of devices or None is needed"
            )
        if topology == len(there):
            return cls.of(None)
        return cls(MachineDims(1, (topology,)), None)

    def mesh(self, shape: Mapping[str, int]) -> Mesh | AbstractMesh:
        """The mesh of these axes over the devices; without devices if they are not there.

        Raises:
            MeshError: the axes have another number of devices.
        """
        names, sizes = tuple(shape), tuple(shape.values())
        types = (AxisType.Auto,) * len(names)
        if math.prod(sizes) != self.dims.devices:
            raise MeshError(f"there are {self.dims.devices} devices, and the mesh {dict(shape)} has {math.prod(sizes)}")
        if not self.devices:
            return AbstractMesh(sizes, names, axis_types=types)
        chip = chip_of(self.devices[0].device_kind)
        on_torus = chip is not None and chip.torus_dims > 0
        grid = placed(self.devices, sizes, self.dims.groups) if on_torus else np.array(self.devices).reshape(sizes)
        return Mesh(grid, names, axis_types=types)

    def meshes(self, named: Sequence[str]) -> list[Mesh | AbstractMesh]:
        """The meshes that are worth a plan.

        Of two meshes of the same axes in another order, one is left out if no collective is faster on it. Where the
        user's names tell axes apart, none is.

        Args:
            named: axes that every mesh has to have.

        Raises:
            MeshError: there is none.
        """
        shapes = named_meshes(aligned_sizes(self.dims), named)
        if not shapes:
            raise MeshError(
                f"no mesh over {self.dims.devices} devices has the axes {', '.join(named)}, which fixed= or tactics= "
                "name.\n"
                "Name fewer axes, or give the mesh."
            )
        meshes = list(map(self.mesh, shapes))
        if named:
            return meshes
        machines = [(dict(mesh.shape), self.topology(mesh)) for mesh in meshes]

        def is_needed(i: int) -> bool:
            others = (j for j in range(len(meshes)) if j != i and is_as_fast(*machines[j], *machines[i]))
            return all(j > i and is_as_fast(*machines[i], *machines[j]) for j in others)

        return [mesh for i, mesh in enumerate(meshes) if is_needed(i)]

    def topology(self, mesh: Mesh | AbstractMesh) -> Topology:
        """What the machine costs under a mesh."""
        return Topology.of(mesh) if self.machine is None else preset(self.machine, dict(mesh.shape))


def is_as_fast(shape: MeshShape, machine: Topology, other: MeshShape, than: Topology) -> bool:
    """Whether the axes of a mesh can stand for those of another, so that no collective over any of them is slower.

    Seconds of a collective are a latency, and a share that grows with the bytes.

    >>> shape, other = {"a": 8, "b": 2}, {"a": 2, "b": 8}
    >>> line, cut = preset("v5e:4x4", {"a": 4, "b": 4}), {"a": 4, "b": 4}
    >>> is_as_fast(cut, line, cut, line), is_as_fast(shape, preset("v5e:4x4", shape), other, preset("v5e:4x4", other))
    (True, False)
    """
    if sorted(shape.values()) != sorted(other.values()):
        return False
    axes = list(shape)
    subsets = [one for count in range(1, len(axes) + 1) for one in itertools.combinations(range(len(axes)), count)]

    def is_slower(order: Sequence[str], subset: Sequence[int], kind: str, size: float) -> bool:
        ours, theirs = [axes[i] for i in subset], [order[i] for i in subset]
        return seconds(kind, ours, size, shape, machine) > seconds(kind, theirs, size, other, than) * (
            1 + _ROUNDED_SECONDS
        )

    cases = list(itertools.product(subsets, KINDS, (0.0, _MANY_BYTES)))
    orders = (order for order in itertools.permutations(other) if [other[a] for a in order] == [*shape.values()])
    return any(not any(is_slower(order, *case) for case in cases) for order in orders)


def axes_in(fixed: Any, tactics: Any = ()) -> list[str]:
    """The mesh axes that `fixed=` and `tactics=` name, in the order in which they do.

    >>> from jax.sharding import PartitionSpec as P
    >>> axes_in({"up": P("x", ("y", "z")), "down": P(None, "x")})
    ['x', 'y', 'z']
    """
    listed = tactics if isinstance(tactics, list | tuple) else [tactics]
    specs = [spec for spec in fixed.values() if isinstance(spec, PartitionSpec)] if isinstance(fixed, Mapping) else []
    entries = [entry for spec in specs for entry in spec]
    named = [axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,))]
    named += [axis for tactic in listed for axis in getattr(tactic, "axes", ())]
    return list(dict.fromkeys(axis for axis in named if isinstance(axis, str)))
