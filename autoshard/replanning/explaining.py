"""A formulation, a plan and one of its arguments in; why the argument lies as it does out.

The argument's other layouts are ranked by the cheapest steps near the plan in which it lies so, memory left aside. The
best of them are solved within the memory limit: first near the plan, then, unless that comes within the planner's own
gap of what is proven of the plan, among all choices.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.errors import SolverError
from autoshard.jaxprs import CONSTRAINTS
from autoshard.layout import Layout, MeshShape, shards, spec_text, without_idle_axes
from autoshard.model.formulation import Formulation
from autoshard.model.resharding_memory import ValueReader
from autoshard.model.search_policy import goal_of, solve_for_plan
from autoshard.plans.chosen_options import prediction_of
from autoshard.plans.limited_overlap import at_limited_overlap, with_limited_overlap
from autoshard.plans.plan import PlanData
from autoshard.program import Program, Value
from autoshard.replanning.near_choices import EDGE_DISTANCES, agreeing, enough_gap, is_small, near
from autoshard.report.explanation import PricedLayout
from autoshard.report.units import bytes_text, change_text, seconds_text
from autoshard.solver import solve
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.verify import OPTIMAL_GAP, fits

_WHOLE_STEP_SECONDS = 5.0  # s, for the whole step, memory left aside
OTHER_LAYOUTS = 4  # that an explanation shows beside the one that was chosen
_MOST_NAMED_READERS = 4  # reasons that name readers, at most
_NEAR_PLAN_SECONDS = 1.0  # s, for one layout near the plan, memory left aside

Cheapest = Callable[[Formulation, float], Solution]  # within the memory limit, and so many seconds


@dataclass(frozen=True, eq=False)
class ArgumentQuestion:
    """Why one argument of a plan lies as it does."""

    formulation: Formulation  # in which the argument is free
    plan: PlanData
    argument: int
    bound: float  # proven: no step takes fewer seconds, wherever the argument lies
    cheapest: Cheapest

    @property
    def program(self) -> Program:
        return self.formulation.program

    @property
    def value(self) -> Value:
        return self.program.arguments[self.argument]

    @property
    def limit(self) -> float:
        """Bytes per device up to which predictions are relied on."""
        limit = self.formulation.problem.limit
        return math.inf if limit is None else limit * self.formulation.prices.backend.usable

    @cached_property
    def home(self) -> Layout:
        """How it lies in the plan."""
        placed = (*self.plan.arguments, *self.plan.captured)[self.argument]
        return without_idle_axes(placed.layout, self.formulation.mesh)

    @cached_property
    def before(self) -> Mapping[int, list[int]]:
        """Per node the options that are the plan's; none where it leaves a value to XLA."""
        return agreeing(self.formulation, self.plan.annotations)

    @cached_property
    def choice(self) -> tuple[int, ...]:
        """The plan, as a choice."""
        held = self.options_of(self.home) | {node: options for node, options in self.before.items() if options}
        return _quick(self.formulation.problem.restrict(held)).choice

    @cached_property
    def chosen(self) -> PricedLayout:
        """How it lies in the plan, at what the plan costs."""
        predicted = self.plan.predicted
        is_within = self.plan.memory is None or predicted.peak_bytes <= self.plan.memory
        return PricedLayout(self.home, predicted, self.plan.bound, is_within)

    def options_of(self, home: Layout) -> dict[int, list[int]]:
        """What is left to choose of if the argument lies so."""
        options = self.formulation.arguments[self.argument]
        return {self.argument: [o for o, kept in enumerate(options) if kept.home == home]}

    def others(self, how_many: int, time_limit: float) -> tuple[PricedLayout, ...]:
        """The next best layouts, best first."""
        best = self.best_homes(how_many)
        priced = filter(None, (self.priced(home, time_limit / len(best)) for home in best))
        return tuple(sorted(priced, key=lambda one: (not one.fits, one.step_seconds)))

    def best_homes(self, how_many: int) -> list[Layout]:
        """Other layouts, by the cheapest steps near the plan, memory left aside."""
        homes = dict.fromkeys(option.home for option in self.formulation.arguments[self.argument])
        ranked = sorted((rank, home) for home in homes if home != self.home and (rank := self.rank(home)) < math.inf)
        return [home for _, home in ranked[:how_many]]

    def rank(self, home: Layout) -> float:
        """Seconds of the cheapest step near the plan in which the argument lies so, memory left aside."""

        def quick(problem: Problem) -> Solution | None:
            try:
                return _quick(problem)
            except SolverError:
                return None

        found = next(near(self.formulation, self.before, self.options_of(home), quick), None)
        return math.inf if found is None else found.cost

    def priced(self, home: Layout, time_limit: float) -> PricedLayout | None:
        """The cheapest step in which the argument lies so, within the memory limit if any is."""
        best, enough = None, enough_gap(self.formulation.problem, self.plan)
        for solution in self.attempts(home, time_limit):
            if best is None or solution.cost < best.cost:
                best = solution
            if best.cost - self.bound <= enough * best.cost:
                break
        if best is not None:
            bound = min(best.cost, max(best.bound, self.bound))
            return PricedLayout(home, prediction_of(self.formulation, best.choice), bound, fits=True)
        with contextlib.suppress(SolverError):
            free = self.solved_freely(self.formulation.problem.restrict(self.options_of(home)))
            return PricedLayout(home, prediction_of(self.formulation, free.choice), free.bound, fits=False)
        return None

    def attempts(self, home: Layout, time_limit: float) -> Iterator[Solution]:
        """Solutions within the memory limit, of ever more nodes that may choose anew. Only the last proves a bound."""
        allowed, seconds = self.options_of(home), time_limit / (1 + len(EDGE_DISTANCES))

        def within(problem: Problem) -> Solution | None:
            try:
                return self.cheapest(replace(self.formulation, problem=problem), seconds)
            except SolverError:
                return None

        if not is_small(self.formulation.problem):
            for found in near(self.formulation, self.before, allowed, within):
                yield replace(found, bound=0.0)
        whole = within(self.formulation.problem.restrict(allowed))
        if whole is not None:
            yield whole

    @cached_property
    def without_limit(self) -> Solution | None:
        """The cheapest solution if there were no memory limit; None if it was not found."""
        with contextlib.suppress(SolverError):
            return self.solved_freely(self.formulation.problem)
        return None

    def solved_freely(self, problem: Problem) -> Solution:
        """The cheapest solution of a problem without its memory limit."""
        free = replace(self.formulation, problem=replace(problem, limit=None, checked=True))
        found = _unlimited(free.problem, Budget.of(_WHOLE_STEP_SECONDS))
        limited = with_limited_overlap(free, found, _unlimited, Budget.of(_WHOLE_STEP_SECONDS))
        return at_limited_overlap(limited, prediction_of(free, limited.choice))

    # Reasons.

    def reasons(self, others: Sequence[PricedLayout]) -> list[str]:
        """What forced the layout, as far as nobody said so."""
        return [
            *self.constraint_reasons(),
            *self.memory_reasons(),
            *self.reader_reasons(),
            *self.indivisible(),
            *self.tie_reasons(others),
        ]

    def constraint_reasons(self) -> Iterator[str]:
        """Constraints of the step that are put on it."""
        for equation in self.program.equations:
            if equation.primitive in CONSTRAINTS and any(x is self.value for x in equation.inputs):
                yield f"{equation.primitive} at {equation.source or 'unknown line'} says how it lies there."

    def memory_reasons(self) -> Iterator[str]:
        """Whether it would lie otherwise if there were more memory."""
        free = self.without_limit
        if math.isinf(self.limit) or free is None:
            return
        bytes_in_use = self.formulation.accepted_bytes_in_use(free.choice)
        point = int(bytes_in_use.argmax())
        peak, allowed = bytes_text(bytes_in_use[point]), bytes_text(self.limit)
        home = self.formulation.arguments[self.argument][free.choice[self.argument]].home
        if fits(bytes_in_use[point], self.limit):
            yield f"Memory forces nothing: the fastest step holds {peak} of the {allowed} that a plan may fill."
            return
        where = point_text(self.program, point)
        seconds = seconds_text(prediction_of(self.formulation, free.choice).step_seconds)
        over = f"the fastest step, {seconds}, holds {peak} {where}, and a plan may fill {allowed}"
        if home == self.home:
            yield f"Memory binds the plan but not this layout: {over}. The argument lies so in that step, too."
        else:
            yield f"Memory forces it: {over}. There the argument lies as {spec_text(home)}."

    def reader_reasons(self) -> Iterator[str]:
        """How those who read it want it, and what that takes."""
        reasons: dict[str, None] = {}
        for reader in self.formulation.readers[self.value.id]:
            if reader.group is not None:
                reasons[self.reader_reason(reader)] = None
        yield from itertools.islice(reasons, _MOST_NAMED_READERS)

    def reader_reason(self, reader: ValueReader) -> str:
        group, prices = reader.group, self.formulation.prices
        assert group is not None, "the caller looks"
        want = reader.wants[self.choice[reader.node]]
        equation = reader.use.equation if reader.use else group.equations[0]
        who = f"{equation.primitive} at {equation.source or 'unknown line'}"
        if want != self.home:
            steps = prices.steps(self.value, self.home, want, reader.copied_for)
            moved = " and ".join(f"{step.kind} over {', '.join(step.axes)}" for step in steps) or "a slice"
            taken = seconds_text(prices.resharding(self.value, self.home, want, reader.copied_for) * self.value.trips)
            return f"{who} reads it as {spec_text(want)}, which takes {moved} ({taken})."
        index = self.formulation.argument_index
        beside = [use.value for use in group.uses if use.value is not self.value and use.value.id in index]
        alike = [one.name for one in beside if one.shape == self.value.shape and self._home(one) == self.home]
        with_others = f", beside {' and '.join(alike[:2])}, which lie{'s' * (len(alike) == 1)} alike" if alike else ""
        return f"{who} reads it as it lies{with_others}."

    def _home(self, value: Value) -> Layout | None:
        return self.plan.annotations.homes.get(value.id)

    def indivisible(self) -> Iterator[str]:
        """Dims that some axis does not divide."""
        yield from indivisible_dims(self.value, self.formulation.mesh)

    def tie_reasons(self, others: Sequence[PricedLayout]) -> Iterator[str]:
        """Layouts that are as good, or better."""
        chosen = self.chosen.step_seconds
        for other in (one for one in others if one.fits):
            spec = spec_text(other.layout)
            if abs(other.step_seconds - chosen) <= OPTIMAL_GAP * chosen:
                yield f"{spec} takes as long: nothing forces one of the two."
            elif other.step_seconds < chosen:
                gap, more = f"{self.plan.gap:.2%}", change_text(other.step_seconds, chosen)
                yield f"{spec} is found to be faster ({more}): the plan is proven to be within {gap} of the best only."


def indivisible_dims(value: Value, mesh: MeshShape) -> Iterator[str]:
    """A reason for every dim that some axis does not divide, with the nearest sizes that it does divide."""
    for dim, size in enumerate(value.shape):
        undivided = {axis: devices for axis, devices in mesh.items() if devices > 1 and size % devices}
        if size <= 1 or not undivided:
            continue
        nearest = []
        for axis, devices in undivided.items():
            below, above = size // devices * devices, -(-size // devices) * devices
            sizes = f"{below} and {above}" if below else f"{above}"
            nearest.append(f"{axis!r} ({devices} devices) does not divide it, but divides {sizes}")
        yield f"Dim {dim} has {size} elements: {'; '.join(nearest)}."
        every = shards(tuple(mesh), mesh)
        if len(mesh) > 1 and size > every and size % every:
            yield f"All axes together divide {size // every * every} and {-(-size // every) * every}."


def point_text(program: Program, point: int) -> str:
    """A point of the program, as the user knows it."""
    if point >= len(program.equations):
        return "at the end of the step"
    equation = program.equations[point]
    return f"at {equation.source or 'unknown line'} ({equation.primitive})"


def _quick(problem: Problem) -> Solution:
    """The cheapest solution, whatever it holds."""
    goal = replace(goal_of(problem), prefers_lean=False)
    return solve(replace(problem, limit=None, lives=(), checked=True), time_limit=_NEAR_PLAN_SECONDS, goal=goal)


def _unlimited(problem: Problem, budget: Budget) -> Solution:
    return solve_for_plan(replace(problem, limit=None, checked=True), time_limit=budget.seconds, budget=budget)
