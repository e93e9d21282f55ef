"""`autoshard(pad="batch")`: a decorated function that pads batches which the devices do not divide."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from autoshard.arrays.ahead_of_time import LoweredCall, LoweredStep
from autoshard.arrays.arguments import abstract, type_of
from autoshard.decorated import Parameters, Result, ShardedFunction
from autoshard.errors import ArgumentError
from autoshard.options import Options
from autoshard.padding.batches import PaddedBatch, batch_of
from autoshard.padding.flat_step import FlatStep, is_traced_for, with_arrays
from autoshard.padding.rewriting import PaddedProgram
from autoshard.program import Program
from autoshard.program.flattening import FlatCall, flattened
from autoshard.program.signature import Arguments
from autoshard.user_plan import Plan
from autoshard.variants.variant import Variant


class StepOnPaddedBatch(ShardedFunction[Parameters, Result]):
    """The step that runs on the padded batch."""

    def _finished(self, program: Program) -> Program:
        departure = "the step runs on a padded batch; pad the batch yourself"
        return replace(super()._finished(program), departure=departure, adds_rows=True)


@dataclass(frozen=True)
class _StepCall:
    """What runs for a call, and the arguments that it gets."""

    step: Any  # called as decorated functions are
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch: PaddedBatch | None = None  # as it is padded; None if it is not


class PaddedFunction(ShardedFunction[Parameters, Result]):
    """A function whose batch is padded where the devices do not divide it. Its results are those of the batch."""

    def __init__(
        self, fn: Any, *, options: Options, jit_keywords: Mapping[str, Any], given: Plan | None = None
    ) -> None:
        super().__init__(fn, options=options, jit_keywords=jit_keywords, given=given)
        self._given_keywords = dict(jit_keywords)
        self._parts = options.microbatches or 1
        self._padded: dict[Any, tuple[PaddedBatch, ShardedFunction[..., Any]] | None] = {}

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        call = self._call_of(args, kwargs)
        made: Result = call.step.__call__(*call.args, **call.kwargs)
        return made

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """How the step is sharded for arguments like these, their batch padded."""
        call = self._call_of(args, kwargs)
        made: Plan = call.step.plan(*call.args, **call.kwargs)
        if call.batch is None:
            return made
        remark = (
            f"pad='batch': the batch of {call.batch.rows} rows has {call.batch.padded}, which the devices divide. Sums "
            "and means leave the added rows out."
        )
        return replace(made, warnings=(*made.warnings, remark))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The annotated step on the padded batch, lowered. What its `.compile()` makes takes the batch as it is."""
        call = self._call_of(args, kwargs)
        lowered: jax.stages.Lowered = call.step.lower(*call.args, **call.kwargs)
        batch = call.batch
        if batch is None:
            return lowered
        given = LoweredCall.of(call.step.plan(*call.args, **call.kwargs), self._static.split(args, kwargs)[1])

        def padded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            flat = given.taken_apart(args, kwargs)
            return with_arrays((), (args, kwargs), flat, [batch.pad(i, leaf) for i, leaf in enumerate(flat.arrays)])

        assert isinstance(lowered, LoweredStep), "that of a decorated function is one"
        return lowered.taking(padded)

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The step's program on the padded batch."""
        call = self._call_of(args, kwargs)
        made: Program = call.step.trace(*call.args, **call.kwargs)
        return made

    @property
    def _unpadded(self) -> Any:
        """What takes a batch that the devices divide: the function as if nothing were to be padded."""
        return super()

    def _call_of(self, args: Any, kwargs: Any) -> _StepCall:
        """The call with the batch padded, or as it is if the devices divide the batch."""
        static, dynamic = self._static.split(args, kwargs)
        flat = flattened(dynamic)
        key = static, tuple(map(type, static)), flat.structure, tuple(map(type_of, flat.arrays))
        if key not in self._padded:
            self._padded[key] = self._made(args, kwargs, static, dynamic, flat)
        found = self._padded[key]
        if found is None:
            return _StepCall(self._unpadded, args, kwargs)
        batch, step = found
        padded = [batch.pad(i, leaf) for i, leaf in enumerate(flat.arrays)]
        return _StepCall(step, *with_arrays(static, dynamic, flat, padded), batch)

    def _made(
        self, args: Any, kwargs: Any, static: tuple, dynamic: Arguments, flat: FlatCall
    ) -> tuple[PaddedBatch, ShardedFunction[..., Any]] | None:
        program = super().variants(*args, **kwargs).program(Variant())
        shapes = [tuple(np.shape(array)) for array in flat.arrays]
        in_modules = () if flat.modules is None else flat.modules.inside
        batch = batch_of(program, shapes, self._options.mesh.shape, in_modules, self._parts)
        if batch is None:
            return None
        as_written = FlatStep(self._fn, self._static, static, dynamic)
        try:
            large = as_written.traced([batch.pad(i, abstract(type_of(array))) for i, array in enumerate(flat.arrays)])
        except Exception as error:  # whatever the step does with more rows
            raise _takes_no_other_batch(program, batch, error) from error
        small = as_written.traced()
        padded = PaddedProgram(program.name, small, large)
        step = as_written.running(functools.partial(_run, as_written, padded, batch))
        return batch, self._on_padded_batch(step)

    def _on_padded_batch(self, step: Any) -> ShardedFunction[..., Any]:
        return StepOnPaddedBatch(step, options=self._options, jit_keywords=self._given_keywords, given=self._given)


def _takes_no_other_batch(program: Program, batch: PaddedBatch, error: Exception) -> ArgumentError:
    """The error that the step cannot be traced with as many rows as it would get."""
    names = [program.arguments[i].name for i in sorted(batch.arrays)]
    more = f" and {len(names) - 3} more arrays" if len(names) > 3 else ""
    lines = str(error).splitlines()
    return ArgumentError(
        f"pad='batch': {program.name} takes a batch of {batch.rows} rows, but not one of {batch.padded}: "
        f"{lines[0] if lines else repr(error)}\nIts batch is taken to be {', '.join(names[:3])}{more}: what no result "
        "replaces. Write the step for any number of rows, pad the batch yourself, or leave pad= out."
    )


def _run(as_written: FlatStep, padded: PaddedProgram, batch: PaddedBatch, *arrays: Any) -> list[Any]:
    """The step on a padded batch, or on a microbatch of it.

    Raises:
        ValueError: the microbatch has one row.
    """
    if not is_traced_for(padded.large, arrays):
        types = [abstract(type_of(array)) for array in arrays]
        padded = PaddedProgram(padded.name, as_written.traced(batch.one_row_less(types)), as_written.traced(types))
    return padded(*arrays)
