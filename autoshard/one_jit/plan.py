"""`OneJitPlan`: how a step in equal stages lies and what its one program is predicted to take; files and answers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.errors import MemoryLimitError, PlanError
from autoshard.layout import Layout, shards
from autoshard.mesh.collectives import Collective
from autoshard.mesh.links import Link
from autoshard.one_jit.equal_stages import UniformStages
from autoshard.one_jit.lockstep import Lockstep
from autoshard.options import Options
from autoshard.plans.annotations import Annotations
from autoshard.plans.files import from_json, to_json, to_text
from autoshard.plans.nodes import Node
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.plans.prediction import Prediction
from autoshard.program import Program
from autoshard.report.explanation import Explanation
from autoshard.report.units import bytes_text
from autoshard.specs import fixed_layouts
from autoshard.stage_planning.planned_stage import stage_memory
from autoshard.stages.planning import StagePlanner
from autoshard.stages.programs import LOOP, Key, StageProgram
from autoshard.stages.reading.stages_planner import StagesPlanner
from autoshard.stages.requests import PipelineRequest
from autoshard.stages.saved_pipeline import content_of, restored_plans
from autoshard.stages.stage_layouts import PLANNING_ORDER
from autoshard.stages.sub_meshes import stage_axis
from autoshard.user_plan import Plan

ONE_JIT = "one_jit"  # the field of a file that other plans do not have


@dataclass(frozen=True, eq=False, repr=False)
class OneJitPlan(Plan):
    """How a step in equal stages lies, and what its program is predicted to take."""

    asked: PipelineRequest = field(default_factory=lambda: PipelineRequest(2, 2, backend="one_jit"))
    programs: tuple[Any, ...] = field(repr=False, default=())  # plans of the programs of stages, as JSON has them

    @property
    def choices(self) -> Mapping[str, str]:
        """Stages and microbatches."""
        return {"stages in lockstep": str(self.asked.stages), "microbatches": str(self.asked.microbatches)}

    def dumps(self) -> str:
        """The plan as JSON: what `save` writes."""
        return to_text(
            to_json(self, None) | {ONE_JIT: [self.asked.stages, self.asked.microbatches, list(self.programs)]}
        )

    @classmethod
    def reads(cls, content: Any) -> bool:
        """Whether a file is that of such a plan."""
        return isinstance(content, dict) and ONE_JIT in content

    @classmethod
    def of_content(cls, content: Any, mesh: Mesh | AbstractMesh, where: str) -> Plan:
        """The plan in a file, not bound to a step."""
        rest = dict(content)
        stages, microbatches, programs = Node(rest.pop(ONE_JIT), ONE_JIT).parts(3)
        asked = PipelineRequest(stages.count(), microbatches.count(), backend="one_jit")
        return of_data(from_json(rest, mesh, where).plan, asked, tuple(one.value for one in programs.parts()))


def of_data(data: PlanData, asked: PipelineRequest, programs: tuple[Any, ...]) -> OneJitPlan:
    """The plan that `data` says, of so many stages and microbatches.

    Args:
        programs: plans of the programs of stages, as JSON has them.
    """
    values = {one.name: getattr(data, one.name) for one in fields(PlanData)}
    axis = list(data.mesh.shape)[stage_axis(data.mesh, asked.stages)]
    remark = (
        f"{asked.stages} stages run in lockstep over {axis!r}: {asked.microbatches} microbatches take "
        f"{asked.microbatches + 2 * (asked.stages - 1)} ticks, each of one forward and one backward pass."
    )
    return OneJitPlan(**values, remark=remark, asked=asked, programs=programs)


@dataclass(frozen=True, eq=False)
class StagesOnMesh:
    """Equal stages along one axis of a mesh, to be planned."""

    stages: UniformStages
    program: Program  # the step as it is written
    options: Options
    axis: str  # of the mesh, over which the stages lie
    jit_keywords: Mapping[str, Any]
    known: tuple[Any, ...] = ()  # plans of the programs of stages, as JSON has them; empty: they are to be made

    @functools.cached_property
    def part(self) -> AbstractMesh:
        """The mesh of one stage: the other axes."""
        sizes = {name: 1 if name == self.axis else size for name, size in self.options.mesh.shape.items()}
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

    @functools.cached_property
    def plans(self) -> tuple[Plan, ...]:
        """Of the programs of all stages, in the order of `StagePrograms.programs`."""
        if self.known:
            return self._restored()
        programs, fixed = self.stages.programs, fixed_layouts(self.program, self.options.fixed, dict(self.part.shape))
        own = {i: layout for i, layout in fixed.items() if i < len(self.program.own_arguments)}
        planner = StagePlanner(programs, self.program, self.options, own, self.program.donated, self.jit_keywords)
        return planner.plans([self.part] * programs.stages)

    def _restored(self) -> tuple[Plan, ...]:
        """
        Raises:
            PlanError: the plans are those of other programs.
        """
        programs = self.stages.programs
        if len(self.known) != len(programs.programs):
            raise PlanError(
                f"the plan has {len(self.known)} programs of stages, and {self.program.name} has "
                f"{len(programs.programs)}.\nPlan the step anew."
            )
        meshes = [self.part] * programs.stages
        return restored_plans(programs, self.program.donated, self.known, meshes, self.jit_keywords, "the plan")

    @property
    def by_program(self) -> dict[StageProgram, Plan]:
        """The same by program."""
        return dict(zip(self.stages.programs.programs, self.plans, strict=True))

    def predicted(self, plans: Sequence[Plan]) -> Prediction:
        """What the whole program takes by the plans of the programs of its stages."""
        return _predicted(self.stages, plans, self.axis, self.options.topology.links[self.axis])

    def plan(self) -> OneJitPlan:
        """How arrays lie, by the plans of the programs of each stage on the other axes, and what the ticks take.

        Raises:
            MemoryLimitError: that is more than the memory limit.
        """
        stages, program, options, axis = self.stages, self.program, self.options, self.axis
        programs, sizes, plans = stages.programs, dict(options.mesh.shape), self.plans
        laid: dict[Key, Layout] = {}
        pairs = zip(programs.programs, plans, strict=True)
        for one, plan in sorted(pairs, key=lambda pair: PLANNING_ORDER[pair[0].kind]):
            arrays = zip((*one.inputs, *one.outputs), (*plan.arguments, *plan.results), strict=True)
            for key, array in arrays:
                laid.setdefault(key, array.layout)
        piece_of = {piece.argument: Key("piece", n) for n, piece in reversed(list(enumerate(programs.pieces)))}

        def placed(name: str, value: Any, key: Key | None, is_stack: bool) -> PlacedArray:
            layout = laid.get(key, ((),) * len(value.shape)) if key is not None else ((),) * len(value.shape)
            if is_stack:
                layout = ((axis,), *layout[1:])
            parts = math.prod(shards(axes, sizes) for axes in layout)
            return PlacedArray(name, tuple(value.shape), str(value.dtype), layout, value.bytes // parts)

        arguments = tuple(
            placed(value.name, value, piece_of.get(i, Key("argument", i)), i in piece_of)
            for i, value in enumerate(program.own_arguments)
        )
        captured = tuple(placed(value.name, value, None, False) for value in program.arguments[len(arguments) :])
        taken = {result: argument for argument, result in program.carried.items()}

        def result(number: int, name: str, value: Any) -> PlacedArray:
            if number in taken:
                return replace(arguments[taken[number]], name=name)
            keys = programs.results[number]
            keys = keys if isinstance(keys, tuple) else ()
            return placed(name, value, keys[0] if keys else None, len(keys) == stages.count)

        named = zip(program.result_names, program.results, strict=True)
        predicted = self.predicted(plans)
        data = PlanData(
            name=program.name,
            mesh=options.mesh,
            fingerprint=program.fingerprint,
            arguments=arguments,
            results=tuple(result(number, name, value) for number, (name, value) in enumerate(named)),
            carried=program.carried,
            predicted=predicted,
            status="feasible",
            bound=0.0,
            cost=predicted.step_seconds,
            memory=options.memory,
            warnings=tuple(filter(None, [programs.own_statistics])),
            annotations=Annotations({}, {}, {}),
            argument_tree=program.in_tree,
            result_tree=program.out_tree,
            captured=captured,
        )
        usable = options.memory * options.backend.usable
        if predicted.peak_bytes > usable:
            raise MemoryLimitError(
                f"pipeline: {program.name} is predicted to hold {bytes_text(predicted.peak_bytes)} per device, "
                f"and {bytes_text(usable)} of {bytes_text(options.memory)} are usable.\n"
                "Use more stages or more memory.",
                budget=options.memory,
                needed=predicted.peak_bytes / options.backend.usable,
            )
        asked = PipelineRequest(stages.count, programs.microbatches, backend="one_jit")
        return of_data(data, asked, tuple(map(content_of, plans)))


@dataclass(frozen=True, eq=False)
class OneJitPlanner:
    """By which a plan is explained, and its stages planned again. The stages are planned when one asks."""

    here: StagesOnMesh
    under: Callable[[Options], Plan]  # the same stages under other options

    def explain(self, plan: Plan, path: str) -> Explanation:
        """See `Plan.explain`."""
        return self._stages.explain(plan, path)

    def what_if(self, plan: Plan, wish: Mapping[str, Any]) -> Plan:
        """See `Plan.what_if`."""
        return self._stages.what_if(plan, wish)

    @functools.cached_property
    def _stages(self) -> StagesPlanner:
        here, programs = self.here, self.here.stages.programs
        return StagesPlanner(
            here.program,
            here.options,
            here.jit_keywords,
            programs,
            here.plans,
            (here.part,) * programs.stages,
            here.predicted,
            self.under,
            stacked_over=(here.axis,),
        )


def _predicted(stages: UniformStages, plans: Sequence[Plan], axis: str, link: Link) -> Prediction:
    """What the program takes: ticks of one F and one B of a stage in the middle and of both ends, and what comes once.

    Of stages 1 to S, which work at a time, the first stands for all.
    """
    programs, counted = stages.programs, {stages.first, 1, stages.last}
    ticks = programs.microbatches + 2 * (stages.count - 1)
    own = [
        (ticks if one.kind in LOOP else 1, plan.predicted)
        for one, plan in zip(programs.programs, plans, strict=True)
        if one.stage in counted
    ]
    memory = {stage: stage_memory(programs, plans, stage) for stage in counted}
    held = sum(one.fixed for one in memory.values()) + max(one.working for one in memory.values())
    held += (2 * stages.count - 1) * (memory[1].microbatch + memory[stages.first].microbatch)
    # Every tick sends what stages hand to each other; XLA runs that before the next tick.
    by_program = dict(zip(programs.programs, plans, strict=True))
    ports = Lockstep(stages, axis, by_program).passed
    sizes = [
        by_program[programs.loop[kind, 1]].results[port.number].local_bytes
        for kind in ("F", "B")
        for port in ports[kind]
    ]
    sent = ticks * sum((link.latency + size / link.one_way() for size in sizes), 0.0)
    permutes = tuple(
        Collective("collective_permute", (axis,), ticks * size, ticks, "", "what stages hand on") for size in sizes
    )
    return Prediction(
        step_seconds=sum(count * one.step_seconds for count, one in own) + sent,
        compute_seconds=sum(count * one.compute_seconds for count, one in own),
        communication_seconds=sum(count * one.communication_seconds for count, one in own) + sent,
        exposed_seconds=sum(count * one.exposed_seconds for count, one in own) + sent,
        peak_bytes=math.ceil(held),
        collectives=permutes
        + tuple(
            replace(found, count=found.count * count, bytes=found.bytes * count)
            for count, one in own
            for found in one.collectives
        ),
    )
