"""`autoshard(pad="batch", pipeline=...)`: a decorated function in stages that pads what the devices do not divide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from autoshard.decorated import Parameters, Result, ShardedFunction
from autoshard.errors import StageError
from autoshard.options import Options
from autoshard.padding.padded_function import PaddedFunction, StepOnPaddedBatch
from autoshard.stage_planning.pipeline_plan import PipelinePlan
from autoshard.stage_planning.staged_function import AutomaticPipeline, StagedFunction
from autoshard.stages.planned_pipeline import PlannedPipeline
from autoshard.stages.requests import PipelineRequest


class _AskedStages(StagedFunction[Parameters, Result], StepOnPaddedBatch[Parameters, Result]):
    """The step that runs on the padded batch in the stages that are asked for."""


class _BestStages(AutomaticPipeline[Parameters, Result], StepOnPaddedBatch[Parameters, Result]):
    """The step that runs on the padded batch in the best stages, or without."""

    _plain_kind = StepOnPaddedBatch


class PaddedStages(PaddedFunction[Parameters, Result]):
    """A function in stages whose batch is padded: each microbatch gets rows that the devices of the mesh divide.

    How many microbatches the best stages have is not known before: their batch gets rows that the devices divide.
    """

    def __init__(
        self,
        fn: Any,
        *,
        options: Options,
        jit_keywords: Mapping[str, Any],
        request: PipelineRequest | None,
        given: PipelinePlan | None = None,
    ) -> None:
        """
        Args:
            request: the stages that are asked for; None: the best.
            given: the plan to run by.
        """
        super().__init__(fn, options=options, jit_keywords=jit_keywords)
        self._request, self._given_stages = request, given
        self._parts = 1 if request is None else request.microbatches
        self._as_it_is = self._staged(fn, AutomaticPipeline, StagedFunction)

    def _staged(self, fn: Any, best: Any, asked: Any) -> Any:
        how: dict[str, Any] = {"options": self._options, "jit_keywords": self._given_keywords}
        return _of_kind(best, asked, fn, self._request, self._given_stages, **how)

    def _on_padded_batch(self, step: Any) -> ShardedFunction[..., Any]:
        made: ShardedFunction[..., Any] = self._staged(step, _BestStages, _AskedStages)
        return made

    @property
    def _unpadded(self) -> Any:
        return self._as_it_is

    def pipeline(self, *args: Any, **kwargs: Any) -> PlannedPipeline:
        """The stages for arguments like these: arrays or ShapeDtypeStructs.

        Raises:
            StageError: the best is to run without stages.
        """
        call = self._call_of(args, kwargs)
        made: PlannedPipeline = call.step.pipeline(*call.args, **call.kwargs)
        return made

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The annotated step, lowered, if it has no stages.

        Raises:
            StageError: it has stages, and so is several programs.
        """
        if isinstance(self.plan(*args, **kwargs), PipelinePlan):
            raise StageError("a step in stages is several programs, and lower() has one.")
        return super().lower(*args, **kwargs)


def staged(
    fn: Callable[Parameters, Result],
    pad: str | None,
    request: PipelineRequest | None,
    given: PipelinePlan | None = None,
    **keywords: Any,
) -> ShardedFunction[Parameters, Result]:
    """A decorated function in stages, its batch padded or not.

    Args:
        pad: as users say it.
        request: the stages that are asked for; None: the best.
        given: the plan to run by.
    """
    if pad is not None:
        return PaddedStages(fn, request=request, given=given, **keywords)
    made: ShardedFunction[Parameters, Result] = _of_kind(
        AutomaticPipeline, StagedFunction, fn, request, given, **keywords
    )
    return made


def _of_kind(
    best: Any, asked: Any, fn: Any, request: PipelineRequest | None, given: PipelinePlan | None, **how: Any
) -> Any:
    """A function in the stages that are asked for, of one class, or in the best ones, of the other."""
    return best(fn, **how) if request is None else asked(fn, request=request, given=given, **how)
