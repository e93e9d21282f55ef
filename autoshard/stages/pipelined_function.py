"""`autoshard(pipeline=dict(...))`: a decorated function that runs in the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from autoshard.arrays.arguments import is_deleted
from autoshard.decorated import Parameters, Result, ShardedFunction
from autoshard.errors import ArgumentError, MeshError, StageError
from autoshard.options import Options
from autoshard.program import Program, context
from autoshard.program.closures import HeldConstants
from autoshard.program.flattening import FlatCall, flattened
from autoshard.program.signature import Arguments
from autoshard.stages.planned_pipeline import AskedStages, PlannedPipeline
from autoshard.stages.requests import PipelineRequest
from autoshard.stages.running.runtime import PipelineRuntime
from autoshard.variants.variant import StepVariants, Variant


class PipelinedFunction(ShardedFunction[Parameters, Result]):
    """A function that runs in the stages of a pipeline. Its results are those of the function as it is written."""

    def __init__(self, fn: Any, *, options: Options, jit_keywords: Mapping[str, Any], request: PipelineRequest) -> None:
        if request.microbatches < 1 or options.microbatches != 1:
            raise ArgumentError(
                "pipeline= and microbatches= both say in how many parts the batch runs.\n"
                "Leave microbatches= out, and write pipeline=dict(stages=..., microbatches=...)."
            )
        # What a step says of layouts is said of the whole mesh, which no stage has.
        super().__init__(fn, options=replace(options, ignore_constraints=True), jit_keywords=jit_keywords)
        self._request = request
        self._pipelines: dict[Any, PlannedPipeline] = {}
        self._held: dict[Any, HeldConstants] = {}  # by the same keys
        self._contexts: dict[int, Any] = {}  # of tracing
        self._runtimes: dict[int, PipelineRuntime] = {}

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        static, dynamic = self._static.split(args, kwargs)
        flat = flattened(dynamic)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in flat.arrays):
            inner: Result = self._fn(*args, **kwargs)
            return inner
        # Threads that call the step first plan it once; processes that share its mesh know of each other.
        with self._lock if self._group is None else self._group.joined(runs=True):
            planned = self._pipeline(static, dynamic, flat)
            runtime = self._runtime(planned)
        program = planned.program
        for i, leaf in enumerate(flat.arrays):
            if is_deleted(leaf):
                raise ArgumentError(
                    f"{program.arguments[i].name} has been deleted, most likely since it was donated to an earlier "
                    "call.\nGo on with what that call returned, or do not donate it."
                )
        results = runtime(flat.arrays, program.donated)
        changes = program.changes
        made: Result = (
            program.out_tree.unflattened(results) if changes is None else flat.result_of(changes, flat.arrays, results)
        )
        return made

    def pipeline(self, *args: Any, **kwargs: Any) -> PlannedPipeline:
        """The stages for arguments like these: arrays or ShapeDtypeStructs."""
        static, dynamic = self._static.split(args, kwargs)
        return self._pipeline(static, dynamic, flattened(dynamic))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """
        Raises:
            StageError: always, since a pipeline is no single program.
        """
        raise StageError(
            "a step in stages is several programs, and lower() has one.\n"
            "pipeline(...).plans has a plan per program, each with its own lowering()."
        )

    def _runtime(self, planned: PlannedPipeline) -> PipelineRuntime:
        if not all(isinstance(mesh, Mesh) for mesh in planned.meshes):
            raise MeshError(
                f"{self._options.mesh} has no devices, so the step can be planned but not run.\n"
                "Give autoshard a mesh of devices (jax.make_mesh) to run it."
            )
        with self._lock:
            if id(planned) not in self._runtimes:
                made = PipelineRuntime(planned.programs, planned.plans, planned.schedule, planned.meshes, self._group)
                self._runtimes[id(planned)] = made
            return self._runtimes[id(planned)]

    def _pipeline(self, static: tuple[Any, ...], dynamic: Arguments, flat: FlatCall) -> PlannedPipeline:
        key = self._key(static, dynamic, flat)
        with self._lock:
            if key not in self._pipelines:
                self._pipelines[key] = self._pipeline_of(static, dynamic, key[-1])
            planned = self._pipelines[key]
            if key not in self._held:
                self._held[key] = HeldConstants.of(planned.program)
            self._held[key].check(flat.structure.static, planned.program.name)
            return planned

    def _key(self, static: tuple[Any, ...], dynamic: Arguments, flat: FlatCall) -> tuple[Any, ...]:
        """Equal for calls that run in the same stages; the types of their arrays come last.

        Raises:
            ArgumentError: a static argument cannot be hashed.
        """
        types = self._types(flat.arrays, static, dynamic)
        now = context()
        self._contexts[id(now)] = now  # kept, so that no other context gets its address
        key = static, tuple(type(value) for _, value in static), flat.structure, id(now), types
        try:
            hash(key)
        except (TypeError, ValueError) as error:
            raise self._unhashable(static, dynamic, error) from error
        return key

    def _pipeline_of(self, static: tuple[Any, ...], dynamic: Arguments, types: tuple[Any, ...]) -> PlannedPipeline:
        traced = self._traced(static, dynamic, types)
        return self._planned_stages(traced, traced.program(Variant()))

    def _planned_stages(self, traced: StepVariants, program: Program, until: float = math.inf) -> PlannedPipeline:
        """The stages of a traced step, planned.

        Args:
            program: the step as it is written.
            until: when planning ends, if not earlier by the time limit.
        """
        return self._asked(traced, program, until).planned()

    def _asked(self, traced: StepVariants, program: Program, until: float = math.inf) -> AskedStages:
        """The stages that the user asks for, of a traced step; planned until then, or within the time limit."""
        how = self._request, self._options, self._jit_keywords, until
        return AskedStages.of(traced.step, traced.mesh, program, *how)
