"""A formulation in, the figures of the parallelism that people write by hand out: what a plan is compared with.

*State* is what the step carries over: arguments whose place a result takes. All other arguments are the *batch*; it is
split along dim 0, over all axes of the mesh or as many as divide that of its largest array.

===================  ==============================================================================================
data parallel        state whole on every device, and read whole; batch split
FSDP                 every weight split along its largest dim that all axes divide, and gathered whole where it meets
                     activations; moments and biases as they are cheapest beside it; batch split
tensor parallel      every state array of two or more dims split along one dim, and neither it nor what elementwise
                     operations make of it (a cast, a transpose) is ever gathered: activations move; batch whole
===================  ==============================================================================================

In all three the mesh is one row of devices: an operation splits one of its dims, over as many axes as divide it.
Everything that this leaves open is chosen as the same formulation is cheapest, without a memory limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from autoshard.errors import SolverError
from autoshard.layout import Layout, replicated, shards
from autoshard.plans import Prediction, prediction_of
from autoshard.program import Value
from autoshard.solver import solve
from autoshard.solver.formulate import Formulation, Kept
from autoshard.solver.groups import Group, made_of_state
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.strategies import Strategy

_TIME_LIMIT = 10.0  # s, per alternative; the few choices that are left rarely take one

Allowed = Mapping[int, list[int]]  # node -> options


def alternatives_of(formulation: Formulation) -> dict[str, Prediction | None]:
    """Alternative -> what a step costs under it; None where no such sharding exists."""
    return {
        name: None if solution is None else prediction_of(formulation, solution.choice)
        for name, solution in solutions_of(formulation).items()
    }


def solutions_of(formulation: Formulation) -> dict[str, Solution | None]:
    """Alternative -> its cheapest solution; None where no such sharding exists."""
    problems = _Problems(formulation)
    return {
        "data parallel": _solved(problems.data_parallel()),
        "FSDP": _solved(problems.fully_sharded()),
        "tensor parallel": _solved(problems.tensor_parallel()),
    }


def _solved(problem: Problem | None) -> Solution | None:
    if problem is None:
        return None
    try:
        return solve(problem, time_limit=_TIME_LIMIT)
    except SolverError:
        return None


class _Problems:
    """The problem of each alternative; None where it leaves a node without an option, or splits nothing."""

    def __init__(self, formulation: Formulation):
        self.formulation, self.mesh = formulation, formulation.mesh
        program = formulation.program
        self.state = sorted(program.carried)
        self.batch = [i for i in range(len(program.arguments)) if i not in program.carried]
        self.of_state = made_of_state(program, formulation.groups)
        self.making = [  # the groups that make them
            group for group in formulation.groups if any(made.value.id in self.of_state for made in group.made)
        ]

    def data_parallel(self) -> Problem | None:
        batch = self.split_batch()
        if not batch:
            return None
        whole = {i: replicated(len(self.value(i).shape)) for i in self.state}
        return self.restricted(self.homes(batch | whole), self.reading_whole(self.formulation.groups))

    def fully_sharded(self) -> Problem | None:
        batch = self.split_batch()
        split = {i: self.split_largest(i) for i in self.state if self.can_be_gathered(i)}
        if not batch or not any(any(layout) for layout in split.values()):
            return None
        meeting = [group for group in self.formulation.groups if not group.fuses and not self.reads_only_state(group)]
        return self.restricted(self.homes(batch | split), self.reading_whole(meeting))

    def tensor_parallel(self) -> Problem | None:
        homes = self.homes({i: replicated(len(self.value(i).shape)) for i in self.batch})
        finest = 1
        for i in self.state:
            bare = [o for o, kept in enumerate(self.options(i)) if kept.home == kept.copy and self.in_a_row(kept.home)]
            if len(self.value(i).shape) > 1:
                pieces = {o: _pieces(self.options(i)[o].home, self.mesh) for o in bare}
                bare = [o for o in bare if pieces[o] == max(pieces.values())]
                finest = max(finest, *pieces.values())
            homes[i] = bare
        return self.without_gathers(self.restricted(homes)) if finest > 1 else None

    # Arguments.

    def value(self, argument: int) -> Value:
        return self.formulation.program.arguments[argument]

    def options(self, argument: int) -> tuple[Kept, ...]:
        return self.formulation.arguments[argument]

    def homes(self, homes: Mapping[int, Layout]) -> dict[int, list[int]]:
        """The options of these arguments that have these homes."""
        return {i: [o for o, kept in enumerate(self.options(i)) if kept.home == home] for i, home in homes.items()}

    def can_be_gathered(self, argument: int) -> bool:
        return any(kept.home != kept.copy for kept in self.options(argument))

    def split_batch(self) -> dict[int, Layout]:
        arrays = [i for i in self.batch if self.value(i).shape]
        if not arrays:
            return {}
        largest = max(arrays, key=lambda i: self.value(i).bytes)
        axes = self.finest(self.value(largest).shape[0])
        shapes = {i: self.value(i).shape for i in arrays}
        return {
            i: (axes, *replicated(len(shape) - 1))
            for i, shape in shapes.items()
            if axes and shape[0] % shards(axes, self.mesh) == 0
        }

    def split_largest(self, argument: int) -> Layout:
        shape, axes = self.value(argument).shape, tuple(self.mesh)
        dims = [dim for dim, size in enumerate(shape) if size % shards(axes, self.mesh) == 0]
        largest = max(dims, key=lambda dim: shape[dim], default=None)
        return tuple(axes if dim == largest else () for dim in range(len(shape)))

    # Operations.

    def reads_only_state(self, group: Group) -> bool:
        return self.of_state.issuperset(use.value.id for use in group.uses)

    def reading_whole(self, groups: Iterable[Group]) -> Allowed:
        """The strategies of these groups that want whole what is made of state alone."""
        allowed = {}
        for group in groups:
            of_state = [i for i, use in enumerate(group.uses) if use.value.id in self.of_state]
            strategies = self.formulation.priced[group.index].strategies
            allowed[self.formulation.group_node(group)] = [
                o for o, strategy in enumerate(strategies) if not any(any(strategy.wants[i]) for i in of_state)
            ]
        return allowed

    # The mesh as a row.

    @cache  # noqa: B019  the instance goes with its one caller
    def finest(self, size: int) -> tuple[str, ...]:
        """The axes, in mesh order, that split a dim of this size into the most pieces."""
        subsets = (axes for n in range(len(self.mesh) + 1) for axes in itertools.combinations(self.mesh, n))
        dividing = (axes for axes in subsets if size % shards(axes, self.mesh) == 0)
        return max(dividing, key=lambda axes: shards(axes, self.mesh))

    def in_a_row(self, layout: Layout) -> bool:
        return sum(map(bool, layout)) <= 1

    def row_strategies(self, group: Group) -> list[int]:
        def fits(strategy: Strategy) -> bool:
            finest = all(axes == self.finest(group.sizes[factor]) for factor, axes in strategy.assignment)
            return finest and len(strategy.assignment) <= 1 and all(map(self.in_a_row, strategy.leaves))

        return [o for o, strategy in enumerate(self.formulation.priced[group.index].strategies) if fits(strategy)]

    # Problems.

    def restricted(self, *allowed: Allowed) -> Problem | None:
        """The problem with these options only, and without its memory limit."""
        together = {self.formulation.group_node(group): self.row_strategies(group) for group in self.formulation.groups}
        for node, options in (item for some in allowed for item in some.items()):
            together[node] = [o for o in options if o in set(together.get(node, options))]
        if not all(together.values()):
            return None
        return replace(self.formulation.problem, limit=None, lives=()).restrict(together)

    def without_gathers(self, problem: Problem | None) -> Problem | None:
        """The problem without collectives on what is made of the state alone."""
        if problem is None:
            return None
        values = self.formulation.program.values
        trips = {self.formulation.group_node(group): group.trips for group in self.making}
        trips |= {
            shared.node: values[value].trips
            for value, shared in self.formulation.shared.items()
            if value in self.of_state
        }
        sliced = {node: self.formulation.prices.backend.shortest * count for node, count in trips.items()}
        edges = tuple(
            replace(edge, costs=np.where(edge.costs > sliced[edge.i], np.inf, edge.costs)) if edge.i in sliced else edge
            for edge in problem.edges
        )
        return replace(problem, edges=edges)


def _pieces(layout: Layout, mesh: Mapping[str, int]) -> int:
    return shards([axis for dim in layout for axis in dim], mesh)
