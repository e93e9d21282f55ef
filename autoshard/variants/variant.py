"""`Variant`, one way to run a step, and the programs of a traced step in each of its variants."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from autoshard.batching.boundary import result_or_none
from autoshard.batching.rewriting import BatchedFunctions
from autoshard.jaxprs import ClosedJaxpr, array_bytes
from autoshard.mesh.topology import Topology
from autoshard.microbatches.batch import in_microbatches
from autoshard.program import Program
from autoshard.program.tracing import TracedStep
from autoshard.remat.costs import moving_seconds
from autoshard.remat.host_state import HostState
from autoshard.remat.recomputation import Recomputation
from autoshard.trips.rewriting import ShareableLoops

_DEPARTURE = "autoshard chose what the backward pass keeps, or what lies on hosts (remat=)"


@dataclass(frozen=True)
class Variant:
    """One way to run a step. All variants of a step compute the same numbers, in other seconds and bytes."""

    microbatches: int = 1  # parts of the batch, one after the other
    groups: int = 1  # of rows, side by side in every microbatch, and summed up after the last
    level: int | None = None  # of recomputation; None: as the user wrote it
    state_on_hosts: bool = False  # whether state that the passes do not read lies on hosts between steps
    shares_trips: bool = False  # whether devices may share out the trips of loops
    stacked: int | None = None  # functions of one array in stacks of a multiple of so many; None: as the user wrote it


class StepVariants:
    """The programs of one traced step. The step is traced once, and once more for each size of a microbatch."""

    def __init__(
        self,
        traced: TracedStep,
        mesh: AbstractMesh,
        types: tuple[Any, ...],
        topology: Topology,
        finish: Callable[[Program], Program] | None,
        recomputes: bool = False,
    ):
        """
        Args:
            mesh: under which the step was traced; it is traced again under the same.
            types: of its arguments, as they were traced.
            topology: of which recomputation is priced.
            finish: what a program becomes before it is planned; None: it stays as it is.
            recomputes: whether programs say so where there is nothing to choose that is computed again.
        """
        self._recomputes = recomputes
        self.types, self.mesh, self._topology, self._finish = types, mesh, topology, finish
        self._traced = replace(traced, again=functools.cache(lambda types: traced.again(types)))
        self._written: dict[Variant, tuple[ClosedJaxpr, str]] = {}  # as `_as_written` gives it
        self._recomputations: dict[Variant, Recomputation] = {}
        self._programs: dict[Variant, Program] = {}
        self._batched: dict[Variant, BatchedFunctions | None] = {}
        self._shareable: dict[Variant, ShareableLoops | None] = {}

    @property
    def closes_over_tracers(self) -> bool:
        """Whether the step is part of a function that is being traced, and means nothing after that."""
        return any(isinstance(const, jax.core.Tracer) for const in self._traced.closed.consts)

    @property
    def step(self) -> TracedStep:
        """The trace."""
        return self._traced

    def of(self, step: TracedStep) -> StepVariants:
        """The variants of another step in its place, of the same arguments."""
        return StepVariants(step, self.mesh, self.types, self._topology, self._finish, self._recomputes)

    def program(self, variant: Variant) -> Program:
        """The program of one variant.

        Raises:
            MicrobatchError: the batch cannot be split so.
        """
        if variant not in self._programs:
            with jax.sharding.use_abstract_mesh(self.mesh):
                closed, remark = self._rewritten(variant)
                read = result_or_none("stacking", lambda: self._stacked(variant)) or self._traced.read(closed)
                read = replace(
                    read,
                    microbatches=variant.microbatches,
                    own_statistics=self._as_written(variant)[1],
                    recomputed=remark,
                    state_on_hosts=variant.state_on_hosts,
                    shared_trips=self._trips_remark(variant),
                    departure=_DEPARTURE if variant.level is not None or variant.state_on_hosts else read.departure,
                )
            self._programs[variant] = read if self._finish is None else self._finish(read)
        return self._programs[variant]

    def variant_of(self, program: Program) -> Variant:
        """The variant that a program of this step is."""
        return next(variant for variant, one in self._programs.items() if one is program)

    def batched(self, variant: Variant) -> BatchedFunctions | None:
        """What a variant computes of several arrays of one shape, each by itself; None if it does not."""
        alone = replace(variant, stacked=None)
        if alone not in self._batched:
            with jax.sharding.use_abstract_mesh(self.mesh):
                closed, _ = self._rewritten(alone)
                self._batched[alone] = result_or_none("looking for stacks", lambda: BatchedFunctions.of(closed))
        return self._batched[alone]

    def _stacked(self, variant: Variant) -> Program | None:
        """The program of a variant with stacks; None if it has none."""
        found = None if variant.stacked is None else self.batched(variant)
        if found is None or variant.stacked is None:
            return None
        return replace(self._traced.read(found.rewritten(variant.stacked)), stacked=found.remark(variant.stacked))

    def shareable(self, variant: Variant) -> ShareableLoops | None:
        """The loops of a variant whose trips devices can share out; None if it has none."""
        alone = replace(variant, stacked=None, shares_trips=False)
        if AxisType.Explicit in self.mesh.axis_types:  # the user says how arrays lie, also in loops
            return None
        if alone not in self._shareable:
            with jax.sharding.use_abstract_mesh(self.mesh):
                closed, _ = self._rewritten(alone)
                self._shareable[alone] = result_or_none(
                    "looking for independent trips", lambda: ShareableLoops.of(closed, self._topology)
                )
        return self._shareable[alone]

    def _trips_remark(self, variant: Variant) -> str:
        """What devices may share out in a variant, in words."""
        found = self.shareable(variant) if variant.shares_trips else None
        return "" if found is None else found.remark

    def _rewritten(self, variant: Variant) -> tuple[ClosedJaxpr, str]:
        """The jaxpr of a variant less its stacks, and what is said of what it computes again or has on hosts."""
        closed, remark = self._with_state(variant)
        loops = self.shareable(variant) if variant.shares_trips else None
        return (closed if loops is None else loops.rewritten), remark

    def _with_state(self, variant: Variant) -> tuple[ClosedJaxpr, str]:
        """The jaxpr in so many microbatches, at a level of recomputation, with state on hosts; what is said of it."""
        closed, remark = self._at_level(variant)
        if not variant.state_on_hosts:
            return closed, remark
        state = HostState.of(closed, self._traced.carried)
        return state.rewritten(), f"{remark} {state.remark}".strip()

    def _at_level(self, variant: Variant) -> tuple[ClosedJaxpr, str]:
        """The jaxpr in so many microbatches and at a level of recomputation, and what is said of the latter."""
        if variant.level is None:
            return self._as_written(variant)[0], self.recomputation(variant).why_none if self._recomputes else ""
        found = self.recomputation(variant)
        level = found.levels[variant.level]
        return found.rewritten(level), found.remark(level)

    def recomputation(self, variant: Variant) -> Recomputation:
        """What of a variant can be computed again instead of kept, whatever its level.

        Raises:
            MicrobatchError: the batch cannot be split so.
        """
        as_written = Variant(variant.microbatches, variant.groups)
        if as_written not in self._recomputations:
            with jax.sharding.use_abstract_mesh(self.mesh):
                closed, _ = self._as_written(variant)
                self._recomputations[as_written] = Recomputation.of(closed, self._topology)
        return self._recomputations[as_written]

    def least_bytes(self, variant: Variant) -> float:
        """Bytes that all devices together cannot do without: the state, and what is kept for the backward pass."""
        assert variant.level is not None, "what the user wrote keeps may be computed again by XLA"
        found = self.recomputation(variant)
        away = self.movable_state.movable if variant.state_on_hosts else ()
        state = (self._traced.closed.in_avals[i] for i in self._traced.carried if i not in away)
        return sum(map(array_bytes, state)) + found.held_bytes(found.levels[variant.level])

    @functools.cached_property
    def movable_state(self) -> HostState:
        """The step as it was traced, with what of its state can lie on hosts."""
        return HostState.of(self._traced.closed, self._traced.carried)

    @functools.cached_property
    def seconds_of_moving_state(self) -> float:
        """Seconds of taking all state that can lie on hosts there and back, on one device that has all of it."""
        state = self.movable_state
        moved = (state.closed.in_avals[i] for i in state.movable)
        return math.fsum(moving_seconds(aval, 1, self._topology) for aval in moved)

    def _as_written(self, variant: Variant) -> tuple[ClosedJaxpr, str]:
        """The step in microbatches, as the user wrote it otherwise; what is said of statistics that each has."""
        if variant.microbatches == 1:
            return self._traced.closed, ""
        as_written = Variant(variant.microbatches, variant.groups)
        if as_written not in self._written:
            self._written[as_written] = in_microbatches(self._traced, variant.microbatches, variant.groups)
        return self._written[as_written]
