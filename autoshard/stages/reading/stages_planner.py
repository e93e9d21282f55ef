"""`StagesPlanner`, which a plan with stages keeps: by it the plan is explained, and planned again under another wish.

An argument is explained by the programs of the stages that read it. Other layouts of it are ranked by the program that
decides how it lies. With the best of them, all programs of these stages are planned again, once with everything else
as the plan has it and once with the rest left open, and the step is predicted with what is faster.

Under a wish the cuts and the schedule stay, and every program is planned again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.errors import MeshError, PlanError, SolverError
from autoshard.layout import Layout, spec_text, without_axes
from autoshard.options import Options
from autoshard.planning import asked_layouts, cheapest, checked_rules, formulated
from autoshard.plans.plan import PlacedArray
from autoshard.plans.prediction import Prediction
from autoshard.program import Program
from autoshard.replanning.explaining import OTHER_LAYOUTS, ArgumentQuestion
from autoshard.replanning.planner import Replanner, text_of_wish
from autoshard.report.explanation import Explanation, PricedLayout
from autoshard.report.units import bytes_text
from autoshard.solver.verify import OPTIMAL_GAP
from autoshard.specs import patterns_of
from autoshard.stages.planning import StagePlanner
from autoshard.stages.programs import Key, StageProgram, StagePrograms
from autoshard.stages.stage_layouts import PLANNING_ORDER, StageLayouts, in_planning_order
from autoshard.user_plan import Plan, Wish

_NAMED_READERS = 4  # of a stack of layers, and as many of its rows


@dataclass(frozen=True, eq=False)
class StagesPlanner:
    """The stages of a plan, and how to plan them again."""

    program: Program  # the step as it is written
    options: Options  # for the whole mesh
    jit_keywords: Mapping[str, Any] = field(repr=False)
    programs: StagePrograms = field(repr=False)
    plans: tuple[Plan, ...] = field(repr=False)  # in the order of `StagePrograms.programs`
    meshes: tuple[Any, ...]  # per stage
    predicted: Callable[[Sequence[Plan]], Prediction] = field(repr=False)  # plans of all programs -> the whole step
    under: Callable[[Options], Plan] = field(repr=False)  # the same stages planned under other options
    stacked_over: tuple[str, ...] = ()  # mesh axes over which the plan has the trips of stacks
    starts: tuple[int, ...] = ()  # per stage, the place of its first device in the whole mesh; () where all are alike
    # Plans of all programs -> bytes that the smallest device has to have; None: the predicted peak.
    needed: Callable[[Sequence[Plan]], float] | None = field(repr=False, default=None)
    _known: dict[Any, Plan] = field(default_factory=dict, repr=False)  # of programs that are alike

    # Wishes.

    def what_if(self, plan: Plan, wish: Mapping[str, Any]) -> Plan:
        """The same stages under another wish, and what the wish costs.

        Raises:
            MeshError: the stages do not divide the other mesh.
            MemoryLimitError: a stage does not fit.
        """
        options = self._asker(self.options).options_under(wish)
        made = self.under(options)
        return replace(made, wish=Wish(text_of_wish(wish), plan.predicted))

    def _asker(self, options: Options) -> Replanner:
        """Who knows the arguments of the whole step."""
        return Replanner(self.program, options, self.jit_keywords, {}, patterns_of(self.program, options.fixed))

    # Explanations.

    def explain(self, plan: Plan, path: str) -> Explanation:
        """Why the argument of this path lies as it does on its stage.

        Raises:
            PlanError: no argument has this path.
        """
        found = self._asker(self.options).arguments_at(path)
        argument = found[0]
        if argument >= len(plan.arguments):
            raise PlanError(
                f"{self.program.arguments[argument].name} is closed over by {self.program.name}; each stage that reads "
                "it has it as a constant.\nPass it as an argument to have it planned and explained."
            )
        placed = plan.arguments[argument]
        chosen = self._priced(placed.layout, self.plans, plan, plan.bound)
        others, reasons = self._answer(plan, argument, placed)
        return Explanation(placed, chosen, others, reasons, tuple(plan.mesh.shape), len(found))

    def _answer(
        self, plan: Plan, argument: int, placed: PlacedArray
    ) -> tuple[tuple[PricedLayout, ...], tuple[str, ...]]:
        """The best other layouts, and what forced this one."""
        keys = self._keys_of(argument)
        readers = [one for key in keys for one in self.programs.readers.get(key, ())]
        if not readers:
            return (), ("No stage reads it.",)
        home = self.programs.homes[keys[0]]
        first = min(
            self.programs.readers.get(keys[0], readers),
            key=lambda one: (one.stage != home, PLANNING_ORDER[one.kind]),
        )
        here = replace(self.options, mesh=self.meshes[first.stage])
        user = asked_layouts(self.program, here)
        asker = replace(self._asker(here), fixed=user, is_given=True)
        question = self._question(first, keys[0], {i: layout for i, layout in user.items() if i != argument})
        layouts = dict.fromkeys(self._of_whole(layout, keys) for layout in self._ranked(question))
        layouts.pop(placed.layout, None)
        held = {i: self._of_stage(one.layout) for i, one in enumerate(plan.arguments) if i != argument}
        free = {i: layout for i, layout in user.items() if i != argument}
        stages = sorted({one.stage for one in readers})
        priced, refused = list[PricedLayout](), list[Layout]()
        for layout in layouts:
            figures = [
                self._priced(layout, plans, plan, 0.0)
                for fixed in (held, free)
                if (plans := self._replanned(stages, {**fixed, argument: self._of_stage(layout)})) is not None
            ]
            if figures:
                priced.append(min(figures, key=lambda one: one.step_seconds))
            else:
                refused.append(layout)
        others = tuple(sorted(priced, key=lambda one: (not one.fits, one.step_seconds)))
        reasons = [
            self._keepers(keys, readers),
            *asker.reasons_of_user(argument, placed.name),
            *self._of_question(question, first),
            *(f"{spec_text(layout)}: a program of its stage does not fit." for layout in refused),
            *_ties(others, plan.predicted.step_seconds),
        ]
        return others, tuple(reasons)

    def _keys_of(self, argument: int) -> tuple[Key, ...]:
        """What stages call an argument: by its pieces, if it is a stack of layers of several stages."""
        pieces = tuple(Key("piece", n) for n, one in enumerate(self.programs.pieces) if one.argument == argument)
        return pieces or (Key("argument", argument),)

    def _of_stage(self, layout: Layout) -> Layout:
        return without_axes(layout, self.stacked_over)

    def _of_whole(self, layout: Layout, keys: Sequence[Key]) -> Layout:
        """As the plan has it: the trips of a stack are those of its stages, and never split otherwise."""
        return (self.stacked_over, *layout[1:]) if keys[0].kind == "piece" else layout

    def _question(self, program: StageProgram, key: Key, fixed: Mapping[int, Layout]) -> ArgumentQuestion:
        """The argument as the program sees it that decides how it lies."""
        at = next(n for n, one in enumerate(self.programs.programs) if one is program)
        mesh, layouts = self.meshes[program.stage], StageLayouts(self.programs, self.program.donated)
        for n, other in in_planning_order(self.programs, program.stage):
            if other is program:
                break
            layouts.add(other, self.plans[n])
        made = layouts.program(program, mesh, self.plans[at].fingerprint)
        planner = self._planner(fixed)
        options, asked = planner.options_for(program, mesh, self._start(program.stage)), planner.asked()
        pinned = {i: asked[one] for i, one in enumerate(program.inputs) if one in asked}
        rules = checked_rules(made, dict(options.mesh.shape))
        formulation = formulated(made, rules, options, pinned)
        return ArgumentQuestion(formulation, self.plans[at], program.inputs.index(key), 0.0, cheapest)

    def _ranked(self, question: ArgumentQuestion) -> list[Layout]:
        try:
            return question.best_homes(OTHER_LAYOUTS)
        except SolverError:
            return []

    def _of_question(self, question: ArgumentQuestion, program: StageProgram) -> list[str]:
        """Who reads it and how, and which axes do not divide it."""
        try:
            found = [f"In {program.name}, {one}" for one in question.reader_reasons()]
        except SolverError:  # the plan's choice is none of the program alone
            found = []
        return [*found, *question.indivisible()]

    def _planner(self, fixed: Mapping[int, Layout]) -> StagePlanner:
        return StagePlanner(
            self.programs, self.program, self.options, fixed, self.program.donated, self.jit_keywords, known=self._known
        )

    def _replanned(self, stages: Sequence[int], fixed: Mapping[int, Layout]) -> list[Plan] | None:
        """The plans if some stages are planned again with arguments lying so; None if one fits in no way."""
        plans, planner = list(self.plans), self._planner(fixed)
        try:
            for stage in stages:
                for n, plan in planner.of_stage(stage, self.meshes[stage], self._start(stage)).items():
                    plans[n] = plan
        except (SolverError, MeshError):
            return None
        return plans

    def _start(self, stage: int) -> int:
        return self.starts[stage] if self.starts else 0

    def _priced(self, layout: Layout, plans: Sequence[Plan], plan: Plan, bound: float) -> PricedLayout:
        """
        Args:
            plans: of all programs, with the argument lying so.
        """
        predicted = self.predicted(plans)
        needed = predicted.peak_bytes if self.needed is None else self.needed(plans)
        limit = math.inf if plan.memory is None else plan.memory * self.options.backend.usable
        return PricedLayout(layout, predicted, bound, needed <= limit)

    def _keepers(self, keys: Sequence[Key], readers: Sequence[StageProgram]) -> str:
        """Which stages have it, and which programs read it."""
        names = ", ".join(dict.fromkeys(one.name for one in readers[:_NAMED_READERS]))
        more = " and others" * (len(readers) > _NAMED_READERS)
        if keys[0].kind == "piece":
            pieces = [self.programs.pieces[key.number] for key in keys]
            rows = ", ".join(
                f"rows {one.start} to {one.stop - 1} on stage {self.programs.homes[key]}"
                for key, one in zip(keys[:_NAMED_READERS], pieces, strict=False)
            )
            return f"It is a stack of layers: {rows}{', ...' * (len(keys) > _NAMED_READERS)}. {names}{more} read it."
        home = self.programs.homes[keys[0]]
        size = bytes_text(self.programs.bytes_of(keys[0]))
        away = sorted({one.stage for one in readers} - {home})
        sent = f" It is sent to stage {', '.join(map(str, away))} in every step ({size})." if away else ""
        return f"Stage {home} keeps it; {names}{more} read it.{sent}"


def _ties(others: Sequence[PricedLayout], chosen: float) -> Iterator[str]:
    """Layouts that are as good, or better."""
    for other in (one for one in others if one.fits):
        if abs(other.step_seconds - chosen) <= OPTIMAL_GAP * chosen:
            yield f"{spec_text(other.layout)} takes as long: nothing forces one of the two."
        elif other.step_seconds < chosen:
            yield f"{spec_text(other.layout)} is found to be faster: the programs of a stage are planned one by one."
