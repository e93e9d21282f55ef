"""Machines by name: ``topology("v5e:4x4")``, ``topology("h100:2x8")``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.errors import MeshError
from autoshard.errors.kinds import checks_kinds
from autoshard.layout import MeshShape
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.machines import parse_machine
from autoshard.mesh.placement import parts_of_machine
from autoshard.mesh.topology import Topology


@checks_kinds("axes")
def topology(
    name: str,
    axes: MeshShape | None = None,
    *,
    speeds: Mapping[str, Sequence[float]] | None = None,
    memories: Mapping[str, Sequence[float]] | None = None,
) -> Topology:
    """A machine by name: a chip, and the shape of its torus, or hosts x devices per host.

    Args:
        name: ``"v5e:4x4"``, ``"2x v5e:4x4"`` (2 slices of 4 x 4, joined by the data-center network), ``"h100:2x8"`` (2
            hosts of 8), ``"h100:8"``, ``"cpu:8"``.
        axes: mesh axis -> devices, outermost first; without it the dims of the machine, named x, y, z, w, and before
            them `slice` for the slices of TPUs.
        speeds: mesh axis -> per position a factor of the devices' rates, as ``{"x": (1, 0.6)}`` for hosts of two
            generations; `Topology.with_positions` says more.
        memories: mesh axis -> per position a factor of the devices' memory.

    The outermost axes run over the slices or hosts, on the network. An axis that covers them and some of what is inside
    runs over both links, and its collectives are priced level by level. On a torus the other axes are laid on whole
    dims where their sizes allow, as `jax.make_mesh` does it; one whole dim may close to a ring, and several work side
    by side. Two axes may share a dim: the outer one takes every so many-th chip of it, as in a mesh of devices. An axis
    of any other size is a line laid through the torus.

    Raises:
        MeshError: no machine has this name, the axes have another number of devices, or what is said of positions is
            not one number for each.

    >>> topology("h100:2x8", {"data": 2, "model": 8}).links["data"].bandwidth
    50000000000.0
    >>> topology("v5e:16x16").links["x"].bandwidth
    100000000000.0
    """
    machine = parse_machine(name)
    axes = machine.axes if axes is None else dict(axes)
    have, wanted = math.prod(machine.axes.values()), math.prod(axes.values())
    if have != wanted:
        raise MeshError(f"{name} has {have} devices, the axes {axes} have {wanted}")
    made = replace(Topology.of_chip(CHIPS[machine.chip], parts_of_machine(machine, axes)), machine=name)
    speeds, memories = _positions("speeds", speeds), _positions("memories", memories)
    for axis in dict.fromkeys([*speeds, *memories]):
        made = made.with_positions(axis, speeds=speeds.get(axis, ()), memories=memories.get(axis, ()))
    made.check(axes)
    return made


def _positions(name: str, positions: Any) -> Mapping[str, Sequence[float]]:
    """What a user says of devices along mesh axes.

    Raises:
        MeshError: it is not one number per position of an axis.
    """
    if positions is None:
        return {}
    if not isinstance(positions, Mapping) or not all(_are_numbers(factors) for factors in positions.values()):
        raise MeshError(
            f"{name}={positions!r}; a number for each position of a mesh axis is needed: {name}={{'x': (1, 0.6)}}"
        )
    return positions


def _are_numbers(factors: Any) -> bool:
    return np.ndim(factors) == 1 and all(isinstance(one, int | float | np.number) for one in factors)
