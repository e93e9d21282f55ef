"""`autoshard(mesh="auto")`: a decorated function that chooses the mesh it runs on."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autoshard.decorated import Parameters, Result, ShardedFunction
from autoshard.errors import AutoshardError, ConflictError, MemoryLimitError, MeshError, of_least_need
from autoshard.layout import MeshShape
from autoshard.options import Options, half_of_time
from autoshard.processes import ProcessGroup
from autoshard.processes.agreement import mesh_of_all
from autoshard.program import Program
from autoshard.propagation import rules_for
from autoshard.solver.runtime.cutoff import CutoffEnd
from autoshard.user_plan import Plan
from autoshard.variants.variant import StepVariants, Variant

_PRIMITIVES_WITH_MESHES = (
    "mesh_cast",
    "reshard",
    "shard_map",
    "sharding_constraint",
)  # primitives that may name a mesh
OVERTIME_SHARE = 0.5  # of the time limit, after it: while no mesh is known on which the step fits, others are planned
LEAST_RANKED_MESHES = 2  # of the ranking's first meshes, none is left out because another is faster


@dataclass(frozen=True)
class PlannedMesh:
    """A mesh that the step was planned for, and what a step takes there."""

    shape: MeshShape
    seconds: float  # per step
    peak_bytes: int  # per device

    @property
    def place(self) -> tuple[float, int, int]:
        """What orders meshes: of equally fast ones, those of fewer axes first."""
        return self.seconds, len(self.shape), self.peak_bytes


@dataclass(frozen=True)
class Ranking:
    """Meshes, the fastest first, and those that were not planned for."""

    planned: tuple[PlannedMesh, ...]
    slower: int = 0  # how many are proven to be slower than the first two
    untried: int = 0  # how many were not planned before the time limit ended

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a plan says of the meshes that are not in its table."""
        slow = f"{self.slower} other meshes are proven to be slower than the first two, and were not planned to the end"
        late = f"the time limit ended before {self.untried} other meshes were planned"
        texts = [text for count, text in ((self.slower, slow), (self.untried, late)) if count]
        return tuple(f"mesh='auto': {text}." for text in texts)

    def dumps(self) -> str:
        """The ranking as JSON, for other processes."""
        planned = [[dict(one.shape), one.seconds, one.peak_bytes] for one in self.planned]
        return json.dumps([planned, self.slower, self.untried])

    @classmethod
    def loads(cls, text: str) -> Ranking:
        planned, slower, untried = json.loads(text)
        return cls(tuple(PlannedMesh(*one) for one in planned), slower, untried)


class MeshChoosingFunction(ShardedFunction[Parameters, Result]):
    """A function that runs on the fastest of several meshes.

    The mesh is chosen when arguments first come, and stays: the state lies on it. All else is done by a
    `ShardedFunction` for this mesh.
    """

    def __init__(
        self,
        fn: Any,
        *,
        options: Sequence[Options],
        jit_keywords: Mapping[str, Any],
        kind: type[ShardedFunction[..., Any]] = ShardedFunction,
    ) -> None:
        """
        Args:
            options: those for each mesh, in the order in which meshes are tried.
            kind: of the functions that run on a mesh.
        """
        super().__init__(fn, options=options[0], jit_keywords=jit_keywords)
        self._options_of_meshes, self._kind, self._all_keywords = tuple(options), kind, dict(jit_keywords)
        self._chosen: ShardedFunction[..., Any] | None = None
        self._ranking = Ranking(())

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        result: Result = self._on_best(args, kwargs, runs=True)(*args, **kwargs)
        return result

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """How the step is sharded for arguments like these, on the mesh that was chosen."""
        made = self._on_best(args, kwargs).plan(*args, **kwargs)
        meshes = tuple((dict(one.shape), one.seconds, one.peak_bytes) for one in self._ranking.planned)
        return replace(made, meshes=meshes, warnings=(*made.warnings, *self._ranking.remarks))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The annotated step on the mesh that was chosen, lowered."""
        return self._on_best(args, kwargs).lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The step's program on the mesh that was chosen; on the first one, if none has been chosen yet."""
        chosen = self._chosen or self._on(self._options_of_meshes[0])
        return chosen.trace(*args, **kwargs)

    def _on_best(self, args: Any, kwargs: Any, *, runs: bool = False) -> ShardedFunction[..., Any]:
        """The function on the best mesh for these arguments, or on the one that was chosen before."""
        if self._chosen is not None:
            return self._chosen
        with self._lock if self._group is None else self._group.joined(runs=runs):
            if self._chosen is None:
                if self._group is None:
                    self._ranking, best = self._ranked(args, kwargs)
                else:
                    text = self._ranking_of_all(self._group, args, kwargs)
                    self._ranking, best = Ranking.loads(text), None
                self._chosen = best or self._on(self._options_for(self._ranking.planned[0].shape))
            return self._chosen

    def _ranking_of_all(self, group: ProcessGroup, args: Any, kwargs: Any) -> str:
        """The leader's ranking, as a text."""
        name = getattr(self._fn, "__name__", "step")
        fingerprint = self._fingerprint(args, kwargs)
        return mesh_of_all(
            group, name, fingerprint, self._options_of_meshes, lambda: self._ranked(args, kwargs)[0].dumps()
        )

    def _fingerprint(self, args: Any, kwargs: Any) -> str:
        """That of the step on the first mesh with the axes that it names; empty if it can be traced on none."""
        for options in self._options_of_meshes:
            try:
                return self._on(replace(options, is_alone=True)).trace(*args, **kwargs).fingerprint
            except AutoshardError:
                continue
            except ValueError as error:
                if not _names_other_axes(error):
                    raise
        return ""

    def _on(self, options: Options) -> ShardedFunction[..., Any]:
        return self._kind(self._fn, options=options, jit_keywords=self._all_keywords)

    def _options_for(self, shape: MeshShape) -> Options:
        return next(one for one in self._options_of_meshes if dict(one.mesh.shape) == dict(shape))

    def _ranked(self, args: Any, kwargs: Any) -> tuple[Ranking, ShardedFunction[..., Any]]:
        """The meshes in order, and the function on the first of them.

        A mesh whose bound is above the second best found so far is left. The time limit is that of all meshes together:
        until a plan is known, each gets half of what is left of it, and once it has ended no other is planned.

        Raises:
            AutoshardError: there is no plan on any mesh.
        """
        found: list[tuple[PlannedMesh, ShardedFunction[..., Any]]] = []
        errors: list[AutoshardError] = []
        slower = untried = 0
        shared: StepVariants | None = None
        limit = self._options_of_meshes[0].time_limit
        until: float | None = None  # it begins once the step is traced

        def enough() -> float:
            return found[LEAST_RANKED_MESHES - 1][0].seconds if len(found) >= LEAST_RANKED_MESHES else math.inf

        for number, options in enumerate(self._options_of_meshes):
            if until is not None and time.monotonic() > until + (0.0 if found else OVERTIME_SHARE * limit):
                untried = len(self._options_of_meshes) - number
                break
            options = replace(options, enough=enough, refine=1, is_memory_given=False, is_alone=True)
            try:
                if until is None:
                    shared = self._traced_for_all(self._on(options), args, kwargs)
                    until = time.monotonic() + limit
                step = self._on(replace(options, until=until if found else half_of_time(until)))
                if shared is not None:
                    vars(step)["_traced"] = functools.partial(_already_traced, shared)
                made = step.plan(*args, **kwargs)
            except CutoffEnd:
                slower += 1
                continue
            except (MemoryLimitError, ConflictError, MeshError) as error:
                errors.append(error)
                continue
            except ValueError as error:
                if not _names_other_axes(error):
                    raise
                shape = _text(options.mesh.shape)
                errors.append(MeshError(f"the step names axes that no mesh here has, as {shape}: {error}"))
                continue
            predicted = made.predicted
            one = PlannedMesh(dict(options.mesh.shape), predicted.step_seconds, predicted.peak_bytes)
            found = sorted([*found, (one, step)], key=lambda pair: pair[0].place)
        if not found:
            refused = [error for error in errors if isinstance(error, MemoryLimitError)]
            raise of_least_need(refused) if refused else errors[0]
        ranking = Ranking(tuple(one for one, _ in found), slower, untried)
        best, options = found[0][1], self._options_for(found[0][0].shape)
        fastest = self._on(options)
        if options.refine == 1:
            fastest._planned_before = best._planned_before
        return ranking, fastest

    def _traced_for_all(self, step: ShardedFunction[..., Any], args: Any, kwargs: Any) -> StepVariants | None:
        """The step traced, if it is the same on every mesh."""
        if self._kind is not ShardedFunction:
            return None
        traced = step.variants(*args, **kwargs)
        return traced if _is_same_on_every_mesh(traced.program(Variant())) else None


def _names_other_axes(error: ValueError) -> bool:
    """Whether JAX refuses a step that names axes of another mesh."""
    return "not found in mesh" in str(error)


def _already_traced(traced: StepVariants, *call: Any) -> StepVariants:
    return traced


def _is_same_on_every_mesh(program: Program) -> bool:
    """Whether nothing in the step names axes of a mesh."""
    if program.ordered_arguments or program.wishes or program.types is not None or program.closes_over_tracers:
        return False
    if any(equation.primitive in _PRIMITIVES_WITH_MESHES for equation in program.equations):
        return False
    return not any(rule.given or rule.open_axes for rule in rules_for(program))


def _text(shape: MeshShape) -> str:
    return "(" + ", ".join(f"{axis}={size}" for axis, size in shape.items()) + ")"
