"""`Variant`, one way to run a step, and the programs of a traced step in each of its variants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh

from autoshard.jaxprs import ClosedJaxpr
from autoshard.microbatches.batch import in_microbatches
from autoshard.program import Program
from autoshard.program.tracing import TracedStep


@dataclass(frozen=True, order=True)
class Variant:
    """One way to run a step. All variants of a step compute the same numbers, in other seconds and bytes."""

    microbatches: int = 1  # parts of the batch, one after the other
    groups: int = 1  # of rows, side by side in every microbatch, and summed up after the last


class StepVariants:
    """The programs of one traced step. The step is traced once, and once more for each size of a microbatch."""

    def __init__(
        self,
        traced: TracedStep,
        mesh: AbstractMesh,
        types: tuple[Any, ...],
        finish: Callable[[Program], Program] | None,
    ):
        """
        Args:
            mesh: under which the step was traced; it is traced again under the same.
            types: of its arguments, as they were traced.
            finish: what a program becomes before it is planned; None: it stays as it is.
        """
        self.types, self.mesh, self._finish = types, mesh, finish
        self._traced = replace(traced, again=functools.cache(lambda types: traced.again(types)))
        self._programs: dict[Variant, Program] = {}

    @property
    def closes_over_tracers(self) -> bool:
        """Whether the step is part of a function that is being traced, and means nothing after that."""
        return any(isinstance(const, jax.core.Tracer) for const in self._traced.closed.consts)

    @property
    def step(self) -> TracedStep:
        """The trace."""
        return self._traced

    def program(self, variant: Variant) -> Program:
        """The program of one variant.

        Raises:
            MicrobatchError: the batch cannot be split so.
        """
        if variant not in self._programs:
            with jax.sharding.use_abstract_mesh(self.mesh):
                read = self._traced.read(self._jaxpr(variant))
            read = replace(read, microbatches=variant.microbatches)
            self._programs[variant] = read if self._finish is None else self._finish(read)
        return self._programs[variant]

    def _jaxpr(self, variant: Variant) -> ClosedJaxpr:
        if variant.microbatches == 1:
            return self._traced.closed
        return in_microbatches(self._traced, variant.microbatches, variant.groups)
