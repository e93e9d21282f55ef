"""A jaxpr in, out the same with its loops of independent trips as operations that devices may split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.jaxprs import ClosedJaxpr, Jaxpr, called_jaxpr
from autoshard.mesh.topology import Topology
from autoshard.microbatches.inline_calls import opened
from autoshard.program.user_code import source_of
from autoshard.remat.costs import seconds_again
from autoshard.trips.independent import IndependentTrips

LEAST_SHARE = 0.05  # of a step's work: what has less to gain is not planned for


@dataclass(frozen=True, eq=False)
class ShareableLoops:
    """The loops of a jaxpr whose trips devices can share out."""

    loops: tuple[IndependentTrips, ...]
    rewritten: ClosedJaxpr  # with operations in the place of the loops

    @classmethod
    def of(cls, closed: ClosedJaxpr, topology: Topology) -> ShareableLoops | None:
        """Those that are worth it; None if there are none."""
        if not _has_scans(closed.jaxpr):
            return None
        plain = opened(closed)
        equations = dict(enumerate(plain.jaxpr.eqns))
        found = {i: loop for i, eqn in equations.items() if (loop := IndependentTrips.of(eqn)) is not None}
        if not found:
            return None
        seconds = {i: seconds_again(eqn, topology) for i, eqn in equations.items()}
        least = LEAST_SHARE * math.fsum(filter(math.isfinite, seconds.values()))
        found = {i: loop for i, loop in found.items() if seconds[i] >= least}
        if not found:
            return None
        made = [found[i].call() if i in found else eqn for i, eqn in equations.items()]
        jaxpr = plain.jaxpr.replace(eqns=made, debug_info=plain.jaxpr.debug_info)
        return cls(tuple(found.values()), ClosedJaxpr(jaxpr, plain.consts))

    def are_shareable(self, mesh: Mapping[str, int], memory: float) -> bool:
        """Whether devices can share out the trips of some loop.

        Args:
            mesh: axis -> devices. An axis has to divide the trips.
            memory: bytes per device, into which each loop's arrays have to fit that are whole then.
        """
        fit = all(loop.whole_bytes <= memory for loop in self.loops)
        return fit and any(loop.length % size == 0 for loop in self.loops for size in mesh.values() if size > 1)

    @property
    def remark(self) -> str:
        """What devices may share out, in words."""
        loops = [
            f"{loop.length} trips" + (f" of the loop at {source}" if (source := source_of(loop.eqn)) else "")
            for loop in self.loops
        ]
        return f"trips of a loop need nothing of each other, and devices may share them out: {'; '.join(loops)}."


def _has_scans(jaxpr: Jaxpr) -> bool:
    """Whether a scan stands in a jaxpr, or in a call in it."""
    called = (called_jaxpr(eqn) for eqn in jaxpr.eqns)
    return any(eqn.primitive.name == "scan" for eqn in jaxpr.eqns) or any(
        _has_scans(one.jaxpr) for one in called if one is not None
    )
