"""A formulation and its solution in, what the plan says out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from jax.sharding import AbstractMesh, Mesh

from autoshard.layout import Layout, without_idle_axes
from autoshard.model.formulation import Formulation
from autoshard.plans.chosen_options import ChosenOptions, prediction_of
from autoshard.plans.limited_overlap import at_limited_overlap
from autoshard.plans.memory_use import memory_use
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.program import Program
from autoshard.solver.problem import Solution


def make_plan(
    formulation: Formulation,
    solution: Solution,
    mesh: Mesh | AbstractMesh,
    warnings: tuple[str, ...] = (),
) -> PlanData:
    """The plan that `solution` describes."""
    program = formulation.program
    choice = ChosenOptions(formulation, solution.choice)
    annotations, predicted = choice.annotations(), prediction_of(formulation, solution.choice)
    solution = at_limited_overlap(solution, predicted)
    placed = _typed(program, [choice.placed(value, value.name) for value in program.arguments], mesh, "arguments")
    count = len(program.own_arguments)
    return PlanData(
        name=program.name,
        mesh=mesh,
        fingerprint=formulation.traced.fingerprint,
        arguments=placed[:count],
        results=_typed(program, [choice.placed_result(i) for i in range(len(program.results))], mesh, "results"),
        carried=program.carried,
        predicted=predicted,
        status=solution.status,
        bound=solution.bound,
        cost=solution.cost,
        memory=formulation.problem.limit,
        warnings=warnings,
        annotations=annotations,
        argument_tree=program.in_tree,
        result_tree=program.out_tree,
        axis_types=None if program.types is None else program.types.mesh.axis_types,
        captured=placed[count:],
        memory_use=memory_use(formulation, solution.choice),
        rewrites=tuple((one.name, one.places) for one in program.rewritten),
        state_on_hosts=program.state_on_hosts,
        is_late=formulation.is_late,
    )


def _typed(
    program: Program, placed: Sequence[PlacedArray], mesh: Mesh | AbstractMesh, side: Literal["arguments", "results"]
) -> tuple[PlacedArray, ...]:
    """Arguments or results with the types that they have in explicit mode, axes of one device included."""
    if program.types is None:
        return tuple(placed)
    on_types = program.typed_arguments if side == "arguments" else program.typed_results
    several = {axis: size for axis, size in mesh.shape.items() if size > 1}

    def typed(one: PlacedArray, layout: Layout | None) -> PlacedArray:
        same = layout is not None and without_idle_axes(layout, several) == without_idle_axes(one.layout, several)
        return replace(one, typed=True, layout=layout if layout is not None and same else one.layout)

    pairs = zip(placed, getattr(program.types, side), strict=True)
    return tuple(typed(one, layout) if i in on_types else one for i, (one, layout) in enumerate(pairs))
