"""The programs that a step is cut into, in; what the groups and arguments of each are to the whole step, out.

A stage of a pipeline has programs of its own: a forward pass without a batch, a backward pass without weights' updates.
What a dim is there follows from all programs together. So their groups are put in one row, in the order in which the
programs run. What programs hand to each other by name is one value there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.model.formulation import Formulation
from autoshard.model.groups import Group
from autoshard.model.resharding_memory import ValueReader
from autoshard.program import Program, Value
from autoshard.tactics.roles import Dim, GroupRole, Roles, StateRole

_LOOP_STATE = "scan_carry"  # the boundary equation of which roles read what enters a loop


@dataclass(frozen=True, eq=False)
class StepPart:
    """One program of a step, grouped, and what it takes and makes by name."""

    program: Program  # as its compiler runs it
    groups: Sequence[Group]
    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]


@dataclass(frozen=True, eq=False)
class StepInterface:
    """What a whole step takes and makes, by the names that its parts use."""

    program: Program  # the step
    arguments: Mapping[Hashable, int]  # name -> the argument that it is, or that it is some rows of
    constants: Sequence[Hashable]  # arrays that the step closes over
    results: Sequence[Hashable | None]  # per result the name of its first rows; None: it is a number


@dataclass(frozen=True, eq=False)
class StepGroups:
    """The groups of all parts in one row, on values that parts share."""

    program: Program  # the step: its arguments and results are such values, its equations are not those of the groups
    mesh: Mapping[str, int]
    groups: Sequence[Group]
    readers: Mapping[int, Sequence[ValueReader]]
    first_groups: Sequence[int]  # per part, the place of its first group
    values: Sequence[Mapping[int, Value]]  # per part: id there -> the shared value
    arguments: Mapping[Hashable, int]  # name -> the argument of `program` that it is, or that it is some rows of

    @classmethod
    def of(cls, step: StepInterface, parts: Sequence[StepPart], mesh: Mapping[str, int]) -> StepGroups:
        """
        Args:
            parts: in the order in which they run.
            mesh: axis -> devices.
        """
        own = [replace(value, id=i) for i, value in enumerate(step.program.own_arguments)]
        named = {name: own[argument] for name, argument in step.arguments.items()}
        groups, values, firsts, count = list[Group](), list[Mapping[int, Value]](), list[int](), len(own)
        for part in parts:
            found = dict[int, Value]()
            for name, value in zip(part.inputs, part.program.arguments, strict=True):
                if name not in named:
                    named[name], count = replace(value, id=count), count + 1
                found[value.id] = named[name]
            for value in part.program.values:
                if value.id not in found:
                    found[value.id], count = replace(value, id=count), count + 1
            for name, made in zip(part.outputs, part.program.results, strict=True):
                if isinstance(made, Value):
                    named[name] = found[made.id]
            assert all(group.index == i for i, group in enumerate(part.groups)), "groups are numbered in their order"
            firsts.append(len(groups))
            groups += [_shared(group, len(groups) + group.index, found) for group in part.groups]
            values.append(found)
        constants = [name for name in step.constants if name in named]
        results = [np.zeros(()) if name is None else named[name] for name in step.results]
        captured = [named[name] for name in constants]
        whole = replace(step.program, arguments=(*own, *captured), captured=tuple(captured), results=tuple(results))
        known = {**step.arguments, **{name: len(own) + i for i, name in enumerate(constants)}}
        axes = {axis: devices for axis, devices in mesh.items() if devices > 1}
        return cls(whole, axes, groups, _readers(groups), firsts, values, known)


def _shared(group: Group, index: int, values: Mapping[int, Value]) -> Group:
    """A group on the values that parts share."""

    def shared(value: Any) -> Any:
        return values.get(value.id, value) if isinstance(value, Value) else value

    equations = group.equations
    if equations[0].primitive == _LOOP_STATE:
        begin = replace(equations[0], inputs=tuple(map(shared, equations[0].inputs)))
        equations = begin, *equations[1:]
    return replace(
        group,
        index=index,
        equations=equations,
        uses=tuple(replace(use, value=shared(use.value)) for use in group.uses),
        outputs=tuple(replace(made, value=shared(made.value)) for made in group.outputs),
    )


def _readers(groups: Sequence[Group]) -> Mapping[int, Sequence[ValueReader]]:
    found: dict[int, list[ValueReader]] = defaultdict(list)
    for group in groups:
        for use in group.uses:
            found[use.value.id].append(ValueReader(group.index, (), group, use))
    return found


def _are_grouped_alike(part: StepPart, formulation: Formulation) -> bool:
    """Whether a formulation has the groups of a part, on the same values: a constraint on a result is one more."""
    return _form(part.program, part.groups) == _form(formulation.program, formulation.groups)


def _form(program: Program, groups: Sequence[Group]) -> Any:
    """Equal for groups of the same equations on the same values."""
    arguments = [(value.id, value.shape) for value in program.arguments]
    return arguments, [
        (
            group.sizes,
            [equation.primitive for equation in group.equations],
            [(use.value.id, use.dims) for use in group.uses],
            [(made.value.id, made.dims) for made in group.outputs],
        )
        for group in groups
    ]


@dataclass(frozen=True, eq=False)
class PartRoles:
    """What the groups and arguments of one part are, by the roles of the whole step."""

    whole: Roles
    formulation: Formulation  # of the part
    inputs: Sequence[int | None]  # per argument of the part, which of the step it is; None: other parts make it
    part: int

    @classmethod
    def of(
        cls,
        step: StepInterface,
        parts: Sequence[StepPart],
        number: int,
        formulation: Formulation,
        mesh: Mapping[str, int],
        known: Roles | None = None,
    ) -> PartRoles:
        """
        Args:
            parts: all of them, in the order in which they run.
            number: of the part whose formulation this is.
            mesh: axis -> devices.
            known: the roles of these parts: taken where the formulation groups its part as it is grouped here.
        """
        own = parts[number]
        whole = known
        if whole is None or not _are_grouped_alike(own, formulation):
            own = StepPart(formulation.program, formulation.groups, own.inputs, own.outputs)
            whole = Roles(StepGroups.of(step, [*parts[:number], own, *parts[number + 1 :]], mesh))
        assert isinstance(whole.step, StepGroups), "the roles are of parts"
        arguments = whole.step.arguments
        return cls(whole, formulation, [arguments.get(name) for name in own.inputs], number)

    @property
    def _groups(self) -> StepGroups:
        step = self.whole.step
        assert isinstance(step, StepGroups), "the roles are of parts"
        return step

    @property
    def _first(self) -> int:
        return self._groups.first_groups[self.part]

    @property
    def groups(self) -> Sequence[Group]:
        """Every group of the part."""
        return self.formulation.groups

    @cached_property
    def work(self) -> tuple[GroupRole, ...]:
        """What each group of the part is for."""
        return self.whole.work[self._first : self._first + len(self.groups)]

    @property
    def dims(self) -> Mapping[Any, Dim]:
        """Dim of the step -> what it is."""
        return self.whole.dims

    def role(self, group: Group, factor: int) -> Dim:
        """What a factor of a group is."""
        return self.whole.role(self._groups.groups[self._first + group.index], factor)

    @cached_property
    def embedding(self) -> frozenset[int]:
        """The weight products of the part that embed the batch."""
        numbers = range(len(self.groups))
        return frozenset(i for i in numbers if self._first + i in self.whole.embedding)

    @cached_property
    def of_state(self) -> set[int]:
        """Ids of the values of the part that are made of the state alone."""
        shared = self._groups.values[self.part]
        return {own for own, value in shared.items() if value.id in self.whole.of_state}

    @cached_property
    def state(self) -> Mapping[int, StateRole]:
        """Argument of the part that is state of the step -> what it is."""
        found = {i: self.whole.state.get(known) for i, known in enumerate(self.inputs) if known is not None}
        return {i: state for i, state in found.items() if state is not None}

    @cached_property
    def handed(self) -> frozenset[int]:
        """The arguments of the part that other parts make: nothing is said of how they lie."""
        return frozenset(i for i, known in enumerate(self.inputs) if known is None)

    def dims_of_argument(self, argument: int) -> tuple[Dim, ...]:
        """What each dim of an argument is, by all that read it in any part."""
        value = self.formulation.program.arguments[argument]
        return self.whole.dims_of_value(self._groups.values[self.part][value.id])
