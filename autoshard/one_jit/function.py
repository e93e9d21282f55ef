"""`autoshard(pipeline=dict(..., backend="one_jit"))`: the step in equal stages as one jitted program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from autoshard.decorated import Parameters, PlannedStep, Result, ShardedFunction
from autoshard.errors import ArgumentError, MeshError
from autoshard.jaxprs import as_function
from autoshard.lower import JittedStep, Lowering
from autoshard.one_jit.equal_stages import uniform_stages
from autoshard.one_jit.plan import OneJitPlan, OneJitPlanner, StagesOnMesh, of_data
from autoshard.one_jit.whole_step import WholeStep
from autoshard.options import Options
from autoshard.planning import bound_plan
from autoshard.plans.plan import PlanData
from autoshard.processes.agreement import Claims, check_alike
from autoshard.program import Program, context
from autoshard.program.closures import HeldConstants
from autoshard.replanning.planner import Replanner
from autoshard.stages.cutting import CuttableStep
from autoshard.stages.reading.plan_source import PlanSource
from autoshard.stages.requests import PipelineRequest
from autoshard.stages.sub_meshes import stage_axis
from autoshard.user_plan import Plan
from autoshard.variants.variant import StepVariants, Variant


class OneJitStep(JittedStep):
    """The step in equal stages under `jax.jit`."""

    def __init__(self, program: Program, plan: PlanData, whole: WholeStep, **jit_keywords: Any):
        self._program, self._plan = program, plan
        count = len(plan.arguments)

        def run(*leaves: Any) -> tuple[Any, ...]:
            return tuple(whole(plan.mesh, leaves[:count]))

        self.flat = jax.jit(
            run,
            in_shardings=(*plan.flat_in_shardings, *plan.captured_shardings),
            out_shardings=plan.flat_out_shardings,
            donate_argnums=tuple(sorted(program.donated)),
            **jit_keywords,
        )

    @functools.cached_property
    def transformed(self) -> Callable[..., tuple[Any, ...]]:
        """As it is written: under a transformation the step has no stages."""
        function = as_function(self._program.jaxpr)
        return jax.jit(lambda *leaves: tuple(function(*leaves)))


@dataclass(frozen=True, eq=False)
class OneJitLowering(Lowering):
    """The step in equal stages and its plan; called, it lowers them."""

    whole: WholeStep = field(kw_only=True)

    @functools.cached_property
    def step(self) -> JittedStep:
        return OneJitStep(self.program, self.plan, self.whole, **self.jit_keywords)

    def __call__(self, mesh: Mesh | AbstractMesh | None = None) -> jax.stages.Lowered:
        if mesh is not None and mesh is not self.plan.mesh:
            return replace(self, plan=self.plan.on(mesh))()
        return super().__call__()


class OneJitFunction(ShardedFunction[Parameters, Result]):
    """A function that runs in equal stages, in lockstep, as one program."""

    def __init__(
        self,
        fn: Any,
        *,
        options: Options,
        jit_keywords: Mapping[str, Any],
        request: PipelineRequest,
        given: OneJitPlan | None = None,
    ) -> None:
        """
        Args:
            given: the plan to run by.
        """
        if options.microbatches != 1:
            raise ArgumentError(
                "pipeline= and microbatches= both say in how many parts the batch runs.\n"
                "Leave microbatches= out, and write pipeline=dict(stages=..., microbatches=...)."
            )
        # What a step says of layouts is said of the whole mesh, which no stage has.
        super().__init__(fn, options=replace(options, ignore_constraints=True), jit_keywords=jit_keywords)
        self._request, self._given_stages = request, given
        self._axis = _axis_of(options.mesh, request.stages)
        self._offers: dict[str, tuple[Claims, Plan]] = {}  # by fingerprints of programs: what processes agree on

    def _fastest(self, traced: StepVariants, options: Options) -> PlannedStep:
        program, request = traced.program(Variant()), self._request
        if self._given_stages is not None:
            self._given_stages.bound_to(program)  # before it is cut: another step may have no such stages
        with jax.sharding.use_abstract_mesh(traced.mesh):
            step = CuttableStep.of(traced.step, request.microbatches, program.carried, program.name)
            stages = uniform_stages(step, request.stages)
        here = StagesOnMesh(stages, program, options, self._axis, self._jit_keywords)

        def bound(plan: Plan) -> Plan:
            assert isinstance(plan, OneJitPlan), "its key says what was asked for"
            made = bound_plan(plan, program, options)
            return of_data(made, plan.asked, plan.programs)

        source = PlanSource(options, self._jit_keywords, self._group, self._given_stages)
        plan, claims = source.plan(program, f"{request}", here.plan, bound)
        if claims is not None:
            self._offers[program.fingerprint] = claims, plan
        return PlannedStep(
            self._lowered(plan, here),
            program,
            context(),
            Replanner.of(program, options, self._jit_keywords, is_given=True),
            HeldConstants.of(program),
        )

    def _lowered(self, plan: Plan, here: StagesOnMesh) -> Plan:
        """The plan, which can be run and asked."""

        def under(options: Options) -> Plan:
            other = replace(here, options=options, axis=_axis_of(options.mesh, here.stages.count), known=())
            return self._lowered(other.plan(), other)

        assert isinstance(plan, OneJitPlan), "its key says what was asked for"
        here = replace(here, known=plan.programs)
        whole = WholeStep(here.stages, here.axis, here.by_program)
        lowering = OneJitLowering(here.program, plan, self._jit_keywords, whole=whole)
        return replace(plan, lowering=lowering, planner=OneJitPlanner(here, under))

    def _checked(self, compiled: PlannedStep) -> PlannedStep:
        """As it is: the compiler's own account is in `plan.verify()`. Processes are held against each other first."""
        if self._group is not None:
            check_alike(self._group, *self._offers[compiled.program.fingerprint])
            self._group.round += 1
        made = replace(compiled, is_checked=True)
        for key in [key for key, one in self._compiled.items() if one is compiled]:
            self._compiled[key] = made
        return made


def _axis_of(mesh: Mesh | AbstractMesh, stages: int) -> str:
    """The mesh axis that has a device per stage.

    Raises:
        MeshError: there is none.
    """
    axis, size = list(mesh.shape.items())[stage_axis(mesh, stages)]
    if size != stages:
        raise MeshError(
            f"pipeline: backend='one_jit' has a stage per device along a mesh axis; stages={stages}, and "
            f"{axis!r} has {size} devices.\nUse stages={size}, or a mesh with an axis of {stages}."
        )
    return axis
