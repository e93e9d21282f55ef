"""`Replanner`, which a plan keeps: by it the plan is explained, and planned again under another wish."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autoshard.errors import ArgumentError, MeshError, PlanError, SolverError
from autoshard.layout import Layout, MeshShape
from autoshard.mesh.topology import Topology
from autoshard.model.formulation import Formulation
from autoshard.options import Options, options_of
from autoshard.planning import (
    asked_layouts,
    cheapest,
    checked_rules,
    comparison_of,
    described,
    formulated,
    lowered,
    solved,
)
from autoshard.plans.activations import activations_of
from autoshard.program import Program
from autoshard.replanning.explaining import OTHER_LAYOUTS, ArgumentQuestion
from autoshard.replanning.near_choices import agreeing, enough_gap, near
from autoshard.report.explanation import Explanation
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.solve import with_bound
from autoshard.solver.verify import fits
from autoshard.specs import fixed_layouts, patterns_of, wished_layouts
from autoshard.tactics.requests import text_of_tactic
from autoshard.user_plan import Plan, Wish

_SECONDS = 20.0  # that an explanation's search may take, unless the time limit is below
_LISTED_PATHS = 5  # paths that are near one that nothing fits

# The options that are of a machine, or of a search on it. With another mesh or topology, these alone are others.
_OF_MACHINES = (
    "mesh", "topology", "backend", "compiled_for", "given_mesh", "given_topology", "until", "enough", "pinned",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Replanner:
    """What a plan was made of."""

    program: Program
    options: Options
    jit_keywords: Mapping[str, Any] = field(repr=False)
    fixed: Mapping[int, Layout]  # argument -> how the user says that it lies
    patterns: Mapping[int, str]  # the same arguments -> what they were called
    is_given: bool = False  # whether the user wrote the plan, or how all arguments lie, so that nothing is proven of it

    @classmethod
    def of(cls, program: Program, options: Options, jit_keywords: Mapping[str, Any], *, is_given: bool) -> Replanner:
        """That of a plan under these options."""
        wished = wished_layouts(program, dict(options.mesh.shape))
        kept = {i: layout for i, layout in wished.items() if i not in program.ordered_arguments}
        fixed = kept | asked_layouts(program, options)
        return cls(program, options, jit_keywords, fixed, patterns_of(program, options.fixed), is_given)

    def formulation(self, fixed: Mapping[int, Layout]) -> Formulation:
        """The problem in which these arguments lie as the user says."""
        rules = checked_rules(self.program, dict(self.options.mesh.shape))
        return formulated(self.program, rules, self.options, fixed)

    def bound(self, plan: Plan) -> Plan:
        """The plan, which can be asked again."""
        given = self.options.given_topology
        chip = self.options.backend.chip
        machine = given if isinstance(given, str) else chip if given is None else _described(given, chip)
        inside = activations_of(self.program, plan.annotations, dict(plan.mesh.shape))
        return replace(plan, planner=self, machine=machine, activations=inside)

    # Explanations.

    def explain(self, plan: Plan, path: str) -> Explanation:
        """Why the argument of this path lies as it does."""
        found = self.arguments_at(path)
        argument = found[0]
        value = self.program.arguments[argument]
        kept = {i: layout for i, layout in self.fixed.items() if i != argument}
        is_free = argument not in self.fixed and not self.is_given
        question = ArgumentQuestion(self.formulation(kept), plan, argument, plan.bound if is_free else 0.0, cheapest)
        others = question.others(OTHER_LAYOUTS, min(self.options.time_limit, _SECONDS))
        return Explanation(
            argument=(*plan.arguments, *plan.captured)[argument],
            chosen=question.chosen,
            others=others,
            reasons=(*self.reasons_of_user(argument, value.name), *question.reasons(others)),
            axes=tuple(plan.mesh.shape),
            count=len(found),
        )

    def reasons_of_user(self, argument: int, name: str) -> list[str]:
        """What the user says of where an argument lies."""
        reasons = []
        if argument in self.patterns:
            reasons.append(f"The user says so: fixed[{self.patterns[argument]!r}]. The other layouts are without it.")
        elif argument in self.program.wishes and argument in self.fixed:
            reasons.append("The metadata of flax says so; ignore_constraints=True frees it. The others are without it.")
        elif argument in self.fixed and self.options.like is not None:
            reasons.append(
                f"like= says so: it lies as in the plan of {self.options.like.name}. The others are without it."
            )
        elif argument in self.fixed:
            reasons.append("The user says so: in_shardings. The other layouts are without it.")
        if self.options.tactics:
            named = ", ".join(map(text_of_tactic, self.options.tactics))
            reasons.append(f"The plan is within tactics: {named}. So are the other layouts.")
        reasons += [one.remark for one in self.program.rewritten if argument in one.arguments]
        if argument in self.program.ordered_arguments:
            reasons.append("Its type in explicit mode says how it lies; ignore_constraints=True frees it.")
        if argument in self.program.carried:
            result = self.program.result_names[self.program.carried[argument]]
            reasons.append(f"It is carried: the result{f' {result}' if result else ''} takes its place and lies alike.")
        return reasons

    def arguments_at(self, path: str) -> list[int]:
        """The arguments that a path, the end of one, or a glob fits; those with the fewest keys first.

        Raises:
            ArgumentError: it is no text.
            PlanError: there is none; the message names those that are near.
        """
        if not isinstance(path, str):
            raise ArgumentError(f"{path!r} is no path; the text of one is needed, as print(plan) has it")
        names = [value.name for value in self.program.arguments]
        if path in names:
            return [names.index(path)]
        ends = [i for i, name in enumerate(names) if name.endswith(f"/{path}")]
        found = ends or list(patterns_of(self.program, {path: PartitionSpec()}))
        if found:
            fewest = min(names[i].count("/") for i in found)
            return [i for i in found if names[i].count("/") == fewest]
        close = difflib.get_close_matches(path, names, _LISTED_PATHS, cutoff=0.4)
        last = path.rsplit("/", 1)[-1]
        close += [name for name in names if name.rsplit("/", 1)[-1] == last and name not in close]
        listed = ", ".join((close or names)[:_LISTED_PATHS])
        raise PlanError(
            f"no argument of {self.program.name} has the path {path!r}; {'near ones' if close else 'there'} are "
            f"{listed}.\nprint(plan) lists them all; the end of a path or a glob will do."
        )

    # Wishes.

    def what_if(self, plan: Plan, wish: Mapping[str, Any]) -> Plan:
        """The plan under another wish, and what the wish costs."""
        other = self.under(wish)
        moves = any(
            getattr(other.options, name) != getattr(self.options, name) for name in ("topology", "tactics")
        ) or (other.options.mesh.shape != self.options.mesh.shape)
        formulation = other.formulation(other.fixed)
        solution = other.fresh(formulation) if moves else other.from_last(formulation, plan, self)
        made = described(formulation, solution, other.options)
        rules = checked_rules(other.program, dict(other.options.mesh.shape))
        asked = replace(
            Plan.of(made, comparison_of(other.program, rules, other.options, other.fixed)),
            memory=other.options.memory,
            wish=Wish(text_of_wish(wish), plan.predicted),
        )
        return replace(other, is_given=False).bound(lowered(other.program, asked, other.jit_keywords))

    def under(self, wish: Mapping[str, Any]) -> Replanner:
        """The same with a wish on top of what was asked for before.

        Raises:
            ArgumentError: it is none that can be planned with.
        """
        options = self.options_under(wish)
        asked = {path: options.fixed[path] for path in wish.get("fixed") or ()}
        shape = dict(options.mesh.shape)
        fixed = fixed_layouts(self.program, asked, shape)
        kept = {i: layout for i, layout in self.fixed.items() if i not in fixed}
        _check_axes(self.program, kept, shape)
        patterns = {i: one for i, one in self.patterns.items() if i in kept}
        patterns |= patterns_of(self.program, asked)
        return replace(self, options=options, fixed=kept | fixed, patterns=patterns)

    def options_under(self, wish: Mapping[str, Any]) -> Options:
        """The options with a wish on top.

        Raises:
            ArgumentError: the wish is none that can be planned with.
        """
        known = {"fixed", "memory", "mesh", "topology", "time_limit", "tactics"}
        if unknown := sorted(wish.keys() - known):
            raise ArgumentError(f"what_if takes no {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
        old = self.options
        asked = options_of(
            old.given_mesh if wish.get("mesh") is None else wish["mesh"],
            memory=wish.get("memory"),
            topology=_topology_for(wish.get("mesh"), old) if wish.get("topology") is None else wish["topology"],
            fixed=wish.get("fixed"),
            time_limit=old.time_limit if wish.get("time_limit") is None else wish["time_limit"],
            tactics=() if wish.get("tactics") is None else wish["tactics"],
        )
        is_moved = wish.get("mesh") is not None or wish.get("topology") is not None
        if is_moved and self.program.types is not None and dict(asked.mesh.shape) != dict(old.mesh.shape):
            raise MeshError(
                f"{self.program.name} is a program of explicit mode, whose types are for the mesh "
                f"{dict(old.mesh.shape)}.\nPlan it anew on the other mesh, or with ignore_constraints=True."
            )
        place = replace(old, **{name: getattr(asked, name) for name in _OF_MACHINES}) if is_moved else old
        keeps_memory = wish.get("memory") is None and (old.is_memory_given or not is_moved)
        return replace(
            place,
            memory=old.memory if keeps_memory else asked.memory,
            is_memory_given=old.is_memory_given or wish.get("memory") is not None,
            fixed={**old.fixed, **asked.fixed},
            time_limit=asked.time_limit,
            cache=None,
            refine=1,
            tactics=old.tactics if wish.get("tactics") is None else asked.tactics,
        )

    def fresh(self, formulation: Formulation) -> Solution:
        """The cheapest solution, sought among all choices."""
        return solved(self.program, formulation, self.options)

    def from_last(self, formulation: Formulation, plan: Plan, last: Replanner) -> Solution:
        """The cheapest solution found, beginning with the plan's own choice.

        Under a wish that only takes choices away nothing is faster than what was proven of the plan. So a solution near
        the plan that comes as close to that as the planner asks for is enough.
        """
        limit, problem = self.options.memory * self.options.backend.usable, formulation.problem
        only_takes = last.fixed.items() <= self.fixed.items() and self.options.memory <= last.options.memory
        bound = plan.bound if only_takes and not last.is_given else 0.0
        before = agreeing(formulation, plan.annotations)
        moved = {node: list(range(len(problem.costs[node]))) for node, options in before.items() if not options}

        def within(restricted: Problem) -> Solution | None:
            try:
                return cheapest(replace(formulation, problem=restricted), self.options.time_limit / 4)
            except SolverError:
                return None

        best: Solution | None = None
        enough = enough_gap(problem, plan)
        for found in near(formulation, before, moved, within):
            if best is None or found.cost < best.cost:
                best = found
            is_close = best is not None and best.cost - bound <= enough * best.cost
            if is_close or not moved:
                break
        if best is None or best.cost - bound > enough * best.cost:
            found = solved(self.program, formulation, self.options)
            bound = max(bound, found.bound)
            if best is None or found.cost <= best.cost:
                best = found
        assert fits(formulation.accepted_peak(best.choice), limit), "`cheapest` stays within the limit"
        return with_bound(best, bound)


def _described(topology: Topology, chip: str) -> str:
    """A topology that the user made, in words."""
    if topology.machine is None:
        return f"a topology of your own, with {chip}'s compiler"
    return f"a topology made from {topology.machine}"


def _topology_for(mesh: Mesh | AbstractMesh | None, options: Options) -> Topology | str | None:
    """The machine of another mesh, as the user gave it; None: guessed from the mesh."""
    return None if options.given_topology is None and mesh is not None else options.given_topology or options.topology


def _check_axes(program: Program, fixed: Mapping[int, Layout], mesh: MeshShape) -> None:
    """
    Raises:
        MeshError: the mesh has not the axes over which arguments are fixed.
    """
    for i, layout in fixed.items():
        missing = sorted({axis for axes in layout for axis in axes} - mesh.keys())
        pieces = (math.prod(mesh[axis] for axis in axes if axis in mesh) for axes in layout)
        uneven = [size for size, n in zip(program.arguments[i].shape, pieces, strict=True) if size % n]
        if missing or uneven:
            raise MeshError(
                f"{program.arguments[i]} is fixed in a way that the mesh {dict(mesh)} cannot have: "
                f"{', '.join(missing) or uneven}.\nSay with fixed= how it lies there."
            )


def text_of_wish(wish: Mapping[str, Any]) -> str:
    """A wish as it is written."""
    asked = {name: one for name, one in wish.items() if one is not None}
    return ", ".join(f"{name}={_option_text(one)}" for name, one in asked.items()) or "the same again"


def _option_text(option: Any) -> str:
    return str(dict(option.shape)) if isinstance(option, Mesh | AbstractMesh) else repr(option)
