"""How one call of an operation is split: mesh axes per factor, and per role of the implementation that runs it.

A *role* is what a mesh axis does in an implementation. In ring attention the role ``ring`` splits the factors of query
rows and of key rows together, since an axis along which keys travel splits both.

>>> split = CallSplit({"b": ("x",), "ring": ("y",)}, {"b": 8, "q": 64, "k": 64}, {"x": 2, "y": 4})
>>> split.count("ring"), split.count("heads"), split.axes("b")
(4, 1, ('x',))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from autoshard.layout import MeshShape, shards

Axes = tuple[str, ...]


@dataclass(frozen=True)
class CallRun:
    """Which implementation runs one call, and which mesh axes do what in it: the part of a plan about the call."""

    name: str  # of the implementation; "" for the function itself, run by each device on its own shards
    roles: tuple[tuple[str, Axes], ...]  # role of the implementation, or factor that is split -> mesh axes, in order

    def __str__(self) -> str:
        roles = (f"{role} over {','.join(axes)}" for role, axes in self.roles)
        return f"{self.name or 'shards'} ({'; '.join(roles)})"


UNSPLIT_RUN = CallRun("", ())  # on every device, with whole arrays


@dataclass(frozen=True)
class CallSplit:
    """What a local function knows of the call that it computes a device's part of."""

    roles: Mapping[str, Axes]  # role, or factor that no role splits -> the mesh axes of it, in mesh order
    sizes: Mapping[str, int]  # factor -> its size in the whole arrays
    mesh: MeshShape = field(repr=False)  # axis -> devices

    def axes(self, role: str) -> Axes:
        """The mesh axes of a role or factor, as collectives take them; () if none is."""
        return self.roles.get(role, ())

    def count(self, role: str) -> int:
        """Into how many pieces a role or factor is cut."""
        return shards(self.axes(role), self.mesh)

    def index(self, role: str) -> jax.Array | int:
        """Which of the pieces this device has: an int32, known when the program runs."""
        index: Any = np.int32(0)
        inner = 1
        for axis in reversed(self.axes(role)):  # as `lax.axis_index` of several axes, which takes far longer to trace
            index = lax.add(index, lax.mul(lax.axis_index(axis), np.int32(inner)))
            inner *= self.mesh[axis]
        return index if self.axes(role) else 0
