"""What a user asks of a pipeline, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from autoshard.errors import ArgumentError
from autoshard.options import is_whole_number
from autoshard.pipeline import ASYNCHRONOUS, SCHEDULES, Schedule, schedule

BACKENDS = ("programs", "one_jit")


@dataclass(frozen=True)
class PipelineRequest:
    """`pipeline=dict(...)`: how many stages, and in which order they run."""

    stages: int  # devices of the pipeline, each of which is a part of the mesh
    microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1  # virtual stages per device, for schedules that have several
    backend: str = "programs"  # or "one_jit": all stages in one jitted program, in lockstep

    @classmethod
    def of(cls, request: Any) -> PipelineRequest | None:
        """
        Raises:
            ArgumentError: an entry is unknown, missing, or of the wrong kind.

        >>> PipelineRequest.of({"stages": 2})
        PipelineRequest(stages=2, microbatches=4, schedule='1f1b', chunks=1, backend='programs')
        """
        if request is None or isinstance(request, PipelineRequest):
            return request
        known = [one.name for one in fields(cls)]
        if not isinstance(request, dict) or "stages" not in request or request.keys() - set(known):
            raise ArgumentError(
                f"pipeline={request!r}; a dict is needed with the number of stages, as in pipeline=dict(stages=4, "
                f"microbatches=16, schedule='1f1b'). It may have {', '.join(known)}."
            )
        for name in ("stages", "microbatches", "chunks"):
            count = request.get(name, 1)
            if not is_whole_number(count) or count < 1:
                raise ArgumentError(f"pipeline: {name}={count!r}; how many is needed, 1 or more")
            if name in request:
                request = {**request, name: int(count)}
        if request.get("microbatches", 2) < 2:
            raise ArgumentError(
                "pipeline: microbatches=1; stages take 2 or more, since one alone keeps a single stage at work.\n"
                "Use a number that divides the batch, two per stage or more, or leave pipeline= out."
            )
        made = cls(**{"microbatches": 2 * request["stages"], **request})
        if made.schedule in ASYNCHRONOUS:
            raise ArgumentError(
                f"pipeline: schedule={made.schedule!r} changes weights while microbatches are in flight, which changes "
                f"what the step computes. It can be simulated, not run. Use one of {', '.join(SCHEDULES)}."
            )
        if made.backend not in BACKENDS:
            raise ArgumentError(f"pipeline: backend={made.backend!r}; {' or '.join(map(repr, BACKENDS))} is needed")
        if made.backend == "one_jit" and (made.schedule, made.chunks) != ("1f1b", 1):
            raise ArgumentError(
                "pipeline: backend='one_jit' runs one F and one B per stage in lockstep, so it takes no "
                f"schedule={made.schedule!r} and no chunks={made.chunks}.\nLeave them out, or leave backend= out."
            )
        if made.backend == "one_jit" and made.stages < 2:
            raise ArgumentError(
                "pipeline: stages=1; backend='one_jit' takes 2 stages or more.\n"
                "Leave pipeline= out, and write microbatches= if the batch is to run in parts."
            )
        made.orders()
        return made

    def orders(self) -> Schedule:
        """The schedule.

        Raises:
            ArgumentError: it is not defined for such numbers.
        """
        return schedule(self.schedule, self.stages, self.microbatches, self.chunks)
