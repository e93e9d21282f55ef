"""What a backward pass reads of a forward pass, whichever form both have, with the bytes of each value."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

from autoshard.jaxprs import JaxprEqn, Var
from autoshard.mesh.topology import Topology
from autoshard.remat.cuts import Cut, ForwardPass


class Residuals(ABC):
    """Values of a forward pass, by the variables that they have in a jaxpr."""

    @property
    @abstractmethod
    def values(self) -> tuple[Var, ...]:
        """What can be kept, in the order of the forward pass's own numbers."""

    @property
    @abstractmethod
    def forward_pass(self) -> ForwardPass:
        """What can be chosen."""

    def makers(self, forward: Sequence[JaxprEqn]) -> list[int | None]:
        """Per value, which of these equations makes it; None: none."""
        makers = {var: e for e, eqn in enumerate(forward) for var in eqn.outvars}
        return [makers.get(var) for var in self.values]

    def moving(self, topology: Topology) -> tuple[float, ...]:
        """Per value, seconds of taking it to the host and back on one device, or infinite; empty: all stay."""
        return ()

    def kept(self, cut: Cut) -> list[Var]:
        """What a cut keeps, on devices or their hosts."""
        return [self.values[v] for v in sorted(cut.kept)]

    def moved(self, cut: Cut) -> list[Var]:
        """What of that lies on hosts."""
        return [self.values[v] for v in sorted(cut.moved)]

    def moved_bytes(self, cut: Cut) -> float:
        """Of what a cut keeps on hosts."""
        return math.fsum(self.forward_pass.bytes[v] for v in cut.moved)

    @cached_property
    def bytes_of_values(self) -> dict[Var, float]:
        """Of each value, if it is kept."""
        return dict(zip(self.values, self.forward_pass.bytes, strict=True))

    @cached_property
    def bytes_read(self) -> float:
        """Of all that the backward pass reads."""
        return sum(self.forward_pass.bytes[v] for v in self.forward_pass.wanted)
