"""Partial sums of a local function in, each device's part of the sum out.

`jax.lax.psum_scatter` over all devices, or of anything but rows of a wide matrix, is an all_reduce of the whole in a
TPU program. So local functions scatter what they sum up by `scattered_sum`, in stages that all compilers run as they
are. Several axes are two stages, the minor ones first: those are the faster links of a machine in levels.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.layout import MeshShape, shards
from autoshard.operations.reduce_scatter import reduce_scatter

IndexGroups = tuple[tuple[int, ...], ...]  # places along one mesh axis, [group, member]
Stages = tuple[tuple[tuple[str, ...], IndexGroups | None], ...]  # reduce_scatters, minor axes first: axes and groups

_FEW_DEVICES = 4  # of a program: all compilers have one reduce_scatter over so many


def wide(x: jax.Array) -> Any:
    """The type in which a device adds up floating-point numbers: float32 or, of float64, that."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32  # float8 has no promotion


def scattered_sum(x: jax.Array, axes: tuple[str, ...], dim: int, mesh: MeshShape) -> jax.Array:
    """This device's slice, along a dim, of the sum over some mesh axes."""
    everywhere = math.prod(mesh.values())
    in_two = len(axes) > 1 or shards(axes, mesh) == everywhere > _FEW_DEVICES
    return reduce_scatter(x, dim, two_stages(axes, mesh) if in_two else ((axes, None),), ())


def two_stages(axes: tuple[str, ...], mesh: MeshShape) -> Stages:
    """A reduce_scatter as two, one inside the other; of a prime number of devices it stays one.

    >>> two_stages(("x", "y"), {"x": 16, "y": 4})
    ((('y',), None), (('x',), None))
    >>> two_stages(("x",), {"x": 4})
    ((('x',), ((0, 1), (2, 3))), (('x',), ((0, 2), (1, 3))))
    """
    if len(axes) > 1:
        return (axes[1:], None), (axes[:1], None)
    count = shards(axes, mesh)
    rows = max(part for part in range(1, math.isqrt(count) + 1) if count % part == 0)
    if rows == 1:
        return ((axes, None),)
    columns = count // rows
    places = [tuple(range(row * columns, (row + 1) * columns)) for row in range(rows)]
    return (axes, tuple(places)), (axes, tuple(zip(*places, strict=True)))
