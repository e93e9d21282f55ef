"""The programs of one stage as one problem: arguments lie alike in all, and so does what one leaves for another.

A stage runs its loop programs once per microbatch and the others once per step, so that their costs count so often.
What a forward task leaves for its backward task is held as often as the schedule has microbatches in flight: that is
how often its bytes count. What the stage keeps between steps is held in all of its programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.layout import Layout
from autoshard.model.formulation import Formulation
from autoshard.program import Value
from autoshard.solver.problem import Edge, Live, Problem
from autoshard.stages.programs import LOOP, Key, StageProgram
from autoshard.together.joint_problem import JointProblem, joint_problem


@dataclass(frozen=True)
class ValuePlace:
    """Where a named value stands in one program: the node that decides how it lies, and its layout per option."""

    program: int
    node: int  # of the joint problem
    layouts: tuple[Layout, ...]
    usage: np.ndarray  # bytes per device, per option


@dataclass(frozen=True, eq=False)
class JointStage:
    """The programs of one stage with their formulations, for one sub-mesh."""

    programs: Sequence[StageProgram]
    formulations: Sequence[Formulation]
    microbatches: int
    kept: frozenset[Key]  # what a forward task leaves for its backward task
    between: frozenset[Key]  # what the stage keeps between steps

    @property
    def weights(self) -> list[float]:
        """How often each program runs per step."""
        return [float(self.microbatches) if one.kind in LOOP else 1.0 for one in self.programs]

    @cached_property
    def plain(self) -> JointProblem:
        """The programs side by side, nothing tied."""
        problems = [formulation.problem for formulation in self.formulations]
        return joint_problem(self.formulations, problems, self.weights, (), None)

    @cached_property
    def places(self) -> Mapping[Key, list[ValuePlace]]:
        """Where every named value stands."""
        found: dict[Key, list[ValuePlace]] = {}
        for number, (program, formulation) in enumerate(zip(self.programs, self.formulations, strict=True)):
            first = self.plain.first_nodes[number]
            for i, key in enumerate(program.inputs):
                found.setdefault(key, []).append(_of_argument(formulation, number, first, i))
            for i, key in enumerate(program.outputs):
                place = None if key in program.inputs else _of_result(formulation, number, first, i)
                if place is not None:
                    found.setdefault(key, []).append(place)
        return found

    @cached_property
    def held(self) -> Mapping[Key, ValuePlace]:
        """What is held whichever program runs: what is kept between steps and tasks, and sums."""
        return {
            key: places[0]
            for key, places in self.places.items()
            if key in self.kept or key in self.between or key.kind in ("sum", "early")
        }

    def times(self, key: Key, in_flight: float) -> float:
        """How often a value is held."""
        return in_flight if key in self.kept else 1.0

    def problem(self, limit: float | None, in_flight: float, copies: float = 1.0) -> JointProblem:
        """The problem of the whole stage.

        Args:
            limit: bytes per device.
            in_flight: microbatches.
            copies: how many such stages a device has, each of which holds as much, and one of which works.
        """
        plain = self.plain.problem
        edges = [*plain.edges, *self._ties()]
        lives = [*plain.lives, *self._beside(in_flight, copies)]
        tied = Problem(plain.costs, tuple(edges), tuple(lives), limit, plain.names, checked=True)
        return JointProblem(tied, self.plain.first_nodes)

    def _ties(self) -> Iterator[Edge]:
        """What has one name lies one way."""
        for places in self.places.values():
            first, *others = places
            for other in others:
                if other.node != first.node:
                    alike = [[0.0 if a == b else np.inf for b in other.layouts] for a in first.layouts]
                    yield Edge(first.node, other.node, np.array(alike))

    def _beside(self, in_flight: float, copies: float) -> Iterator[Live]:
        """What programs hold beside their own arguments and results."""
        start = 0
        for number, formulation in enumerate(self.formulations):
            end = start + len(formulation.program.equations) + 2
            for key, place in self.held.items():
                own = any(other.program == number for other in self.places[key])
                times = copies * self.times(key, in_flight) - own
                if self.programs[number].kind == "after" and key in self.kept:
                    times = 0.0
                if times > 0:
                    yield Live(place.node, start, end - 1, place.usage * times)
            start = end


def _of_argument(formulation: Formulation, program: int, first: int, index: int) -> ValuePlace:
    options, value = formulation.arguments[index], formulation.program.arguments[index]
    layouts = tuple(option.home for option in options)
    return ValuePlace(program, first + index, layouts, _sizes(formulation, value, layouts))


def _of_result(formulation: Formulation, program: int, first: int, index: int) -> ValuePlace | None:
    """None: a number, which lies nowhere."""
    value = formulation.program.results[index]
    if not isinstance(value, Value):
        return None
    if value.id in formulation.argument_index:
        return _of_argument(formulation, program, first, formulation.argument_index[value.id])
    for group, priced in zip(formulation.groups, formulation.priced, strict=True):
        for i, made in enumerate(group.outputs):
            if made.value.id == value.id:
                layouts = priced.output_layouts[i]
                return ValuePlace(
                    program, first + formulation.group_node(group), layouts, _sizes(formulation, value, layouts)
                )
    return None


def _sizes(formulation: Formulation, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
    known: dict[Layout, float] = {}
    for layout in layouts:
        if layout not in known:
            known[layout] = float(formulation.prices.arrays.shard_bytes(value, layout))
    return np.array([known[layout] for layout in layouts])
