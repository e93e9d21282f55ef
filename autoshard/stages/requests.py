"""What a user asks of a pipeline, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from autoshard.errors import ArgumentError
from autoshard.pipeline import ASYNCHRONOUS, SCHEDULES, Schedule, schedule


@dataclass(frozen=True)
class PipelineRequest:
    """`pipeline=dict(...)`: how many stages, and in which order they run."""

    stages: int  # devices of the pipeline, each of which is a part of the mesh
    microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1  # virtual stages per device, for schedules that have several

    @classmethod
    def of(cls, said: Any) -> PipelineRequest | None:
        """
        Raises:
            ArgumentError: an entry is unknown, missing, or of the wrong kind.

        >>> PipelineRequest.of({"stages": 2})
        PipelineRequest(stages=2, microbatches=4, schedule='1f1b', chunks=1)
        """
        if said is None or isinstance(said, PipelineRequest):
            return said
        known = [one.name for one in fields(cls)]
        if not isinstance(said, dict) or "stages" not in said or said.keys() - set(known):
            raise ArgumentError(
                f"pipeline={said!r}; a dict is needed with the number of stages, as in pipeline=dict(stages=4, "
                f"microbatches=16, schedule='1f1b'). It may have {', '.join(known)}."
            )
        for name in ("stages", "microbatches", "chunks"):
            count = said.get(name, 1)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ArgumentError(f"pipeline: {name}={count!r}; how many is needed, 1 or more")
        made = cls(**{"microbatches": 2 * said["stages"], **said})
        if made.schedule in ASYNCHRONOUS:
            raise ArgumentError(
                f"pipeline: schedule={made.schedule!r} changes weights while microbatches are in flight, which changes "
                f"what the step computes. It can be simulated, not run. Use one of {', '.join(SCHEDULES)}."
            )
        made.orders()
        return made

    def orders(self) -> Schedule:
        """The schedule.

        Raises:
            ArgumentError: it is not defined for such numbers.
        """
        return schedule(self.schedule, self.stages, self.microbatches, self.chunks)
