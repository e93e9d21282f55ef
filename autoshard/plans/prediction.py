"""What one step is predicted to cost each device."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.mesh.collectives import Collective


@dataclass(frozen=True)
class Prediction:
    """What one step costs each device."""

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float  # of communication: what does not run behind compute
    peak_bytes: int  # of the device's own memory
    collectives: tuple[Collective, ...]
    host_bytes: int = 0  # in the host's memory: arguments, results that replace none, and what the step moves there
    arrival_seconds: float = 0.0  # of compute: to write arguments that arrive anew, before the compiled program starts

    further_turns_seconds: float = 0.0  # of all turns but one of loops of which no program tells how often they turn

    @property
    def comparable_seconds(self) -> float:
        """Seconds of the compiled program, as the program itself tells: loops of unknown length turn once."""
        return self.program_seconds - self.further_turns_seconds

    @property
    def program_seconds(self) -> float:
        """Seconds of the compiled program, which starts when its arguments are there."""
        return self.step_seconds - self.arrival_seconds
