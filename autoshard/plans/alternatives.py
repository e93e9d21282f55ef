"""A formulation in, the figures of the parallelism that people write by hand out: what a plan is compared with.

Its figures are those of the program that `jax.jit` makes of the arguments so laid out (`model/partitioner/`), since
that is what people run. Where the same arguments with inner layouts of our own are faster, these have a second row.

*State* is what the step carries over: arguments whose place a result takes. All other arguments are the *batch*; it is
split along dim 0, or the first dim that no loop goes through, over all axes of the mesh or as many as divide that of
its largest array. Arrays of the batch that have no such dim, or one of another size, are split or whole.

===================  ==============================================================================================
data parallel        state whole on every device, and read whole; batch split
FSDP                 every weight split along its largest dim that all axes divide, and what is made of it alone, a
                     cast say, gathered whole where it meets activations; state of a weight's shape, its moments, split
                     alike, if the optimizer can work on that; what else is state as it is cheapest; batch split
tensor parallel      every state array of two or more dims split along one dim, and neither it nor what elementwise
                     operations make of it (a cast, a transpose) is ever gathered: activations move; batch whole
===================  ==============================================================================================

*Weights* are the state that meets activations in something else than elementwise work. In all three the mesh is one row
of devices: an operation splits one of its dims, over as many axes as divide it; what the step itself says of shardings
stands. Everything that this leaves open is chosen as the same formulation is cheapest, without a memory limit.

A search that the clock ends may still hold the first options that it tried. Data parallelism leaves few options open,
so that its cheapest choice is found in half a second. It is the plan then, where it fits and costs less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial

import numpy as np

from autoshard.errors import SolverError
from autoshard.layout import Layout, finest_axes, replicated, shards
from autoshard.model.formulation import Formulation
from autoshard.model.groups import Group
from autoshard.model.partitioner.as_jitted import as_jitted
from autoshard.model.pricing.cost_tables import ArgumentOption
from autoshard.model.search_policy import CLOSE_GAP
from autoshard.model.strategies import Strategy
from autoshard.plans.chosen_options import prediction_of
from autoshard.plans.limited_overlap import at_limited_overlap, with_limited_overlap
from autoshard.plans.prediction import Prediction
from autoshard.program import Value
from autoshard.solver import solve
from autoshard.solver.problem import ForbiddenError, Problem, Solution, UndecidedError
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.solve import with_bound
from autoshard.solver.verify import fits
from autoshard.tactics.roles import batch_dim

PLANNED_ROW = "inner layouts planned"  # the second row of an alternative has its name and this
_EQUAL_SHARE = 0.001  # of the step's seconds; two alternatives that differ by less count as equally fast
_WORK_PAST_LIMIT = 4.0  # s of work for the search for data parallelism past the time limit; 5,000 nodes take 1.4
_SECONDS_PAST_LIMIT = 10.0  # s, which a busy machine may take for this work
_SECONDS_PER_ROW = 10.0  # s, the limit of the search of one alternative; few choices remain, so it rarely takes 1 s

Allowed = Mapping[int, list[int]]  # node -> options


class _AbsentError(Exception):
    """There is no such sharding, or it was not found; says why in a few words."""


def alternatives_of(formulation: Formulation) -> dict[str, Prediction | str]:
    """Alternative -> what a step costs under it, or why there are no figures."""
    found: dict[str, Prediction | str] = {}
    for name, one in _found(formulation).items():
        found |= {name: one} if isinstance(one, str) else _both_ways(name, formulation, one)
    return found


def with_inner_layouts_planned(by_jit: Prediction, formulation: Formulation) -> dict[str, Prediction | str]:
    """What a step under `jax.jit` is compared with: the same arguments, where that is faster, and the alternatives.

    Args:
        by_jit: what the step costs under `jax.jit`.
        formulation: the step with its arguments laid out so.
    """
    free = replace(formulation, problem=replace(formulation.problem, limit=None, lives=()))
    try:
        planned = _with_limited_overlap(free)
    except SolverError:
        return alternatives_of(formulation)
    ours = prediction_of(formulation, planned.choice)
    return ({PLANNED_ROW: ours} if _is_faster(ours, by_jit) else {}) | alternatives_of(formulation)


def _both_ways(name: str, formulation: Formulation, solution: Solution) -> dict[str, Prediction | str]:
    """An alternative as `jax.jit` runs it, and with the inner layouts that a solution has where these are faster."""
    program, prices = formulation.traced, formulation.prices  # whose equations the rules are of
    ours = prediction_of(formulation, solution.choice)
    homes = {i: options[solution.choice[i]].home for i, options in enumerate(formulation.arguments)}
    jitted, choice = as_jitted(program, formulation.rules, formulation.mesh, prices.topology, prices.backend, homes, {})
    by_jit = prediction_of(jitted, choice.choice)
    if _is_faster(ours, by_jit):
        return {name: by_jit, f"{name}, {PLANNED_ROW}": ours}
    return {name: ours}  # they are the same, but for what the problem counts too often of one of them


def _is_faster(ours: Prediction, by_jit: Prediction) -> bool:
    return ours.step_seconds < by_jit.step_seconds * (1 - _EQUAL_SHARE)


def solutions_of(formulation: Formulation) -> dict[str, Solution]:
    """Alternative -> its cheapest solution, of those that there are."""
    return {name: found for name, found in _found(formulation).items() if isinstance(found, Solution)}


def no_dearer_than_data_parallel(
    formulation: Formulation, search: Callable[[], Solution], limit: float, gap: float = 0.0
) -> Solution:
    """What a search finds, or the cheapest data parallel choice, if that costs less and fits.

    Args:
        search: returns a solution at its price.
        limit: the most bytes that a choice may hold, reshardings included.
        gap: relative, at which the search is to end. A solution so near its bound is taken as it is.

    Raises:
        UndecidedError: the search found nothing in time, and no data parallel choice fits.
    """
    try:
        found = search()
    except UndecidedError as late:
        if (plain := _data_parallel(formulation, limit)) is None:
            raise
        return with_bound(plain, late.bound)
    if found.gap <= max(gap, CLOSE_GAP):
        return found
    plain = _data_parallel(formulation, limit)
    return found if plain is None or plain.cost >= found.cost else with_bound(plain, found.bound)


def _found(formulation: Formulation) -> dict[str, Solution | str]:
    problems = _AlternativeProblems(formulation)
    if not formulation.mesh:
        return dict.fromkeys(("data parallel", "FSDP", "tensor parallel"), "there is one device")
    return {
        "data parallel": _solved(formulation, problems.data_parallel),
        "FSDP": _solved(formulation, problems.fully_sharded, problems.with_weights_sharded),
        "tensor parallel": _solved(formulation, problems.tensor_parallel),
    }


def _solved(formulation: Formulation, *problems: Callable[[], Problem]) -> Solution | str:
    """The solution of the first problem that has one; else why the last has none."""
    why = ""
    for problem in problems:
        try:
            return _with_limited_overlap(replace(formulation, problem=problem()))
        except _AbsentError as error:
            why = str(error)
        except ForbiddenError:
            why = "its operations do not fit together"
        except SolverError:
            return f"not found in {_SECONDS_PER_ROW:g} s"
    return why


def _with_limited_overlap(formulation: Formulation) -> Solution:
    def search(problem: Problem, budget: Budget) -> Solution:
        return solve(problem, time_limit=budget.seconds, budget=budget)

    first = solve(formulation.problem, time_limit=_SECONDS_PER_ROW)
    return with_limited_overlap(formulation, first, search, Budget.of(_SECONDS_PER_ROW))


class _AlternativeProblems:
    """The problem of each alternative."""

    def __init__(self, formulation: Formulation):
        self.formulation, self.mesh = formulation, formulation.mesh
        self.finest = cache(partial(finest_axes, self.mesh))  # not a method, or what is cached keeps itself alive
        program = formulation.program
        self.state = list(program.state)
        self.batch = sorted(set(range(len(program.arguments))).difference(self.state))
        self.of_state = _of_state(formulation)
        self.making = [  # the groups that make values of `of_state`
            group for group in formulation.groups if any(made.value.id in self.of_state for made in group.outputs)
        ]
        self.meeting = [  # the groups in which weights meet activations
            group
            for group in formulation.groups
            if not group.fuses and not group.is_boundary and not self.reads_only_state(group)
        ]

    def data_parallel(self) -> Problem:
        whole = {i: [replicated(len(self.value(i).shape))] for i in self.state}
        return self.restricted(self.homes(self.split_batch() | whole), self.reading_whole(self.formulation.groups))

    def fully_sharded(self) -> Problem:
        return self.sharded(lambda value, shapes: value.shape in shapes)

    def with_weights_sharded(self) -> Problem:
        """FSDP whose optimizer works on other pieces than those that the weights lie in."""
        weights = {self.value(i).id for i in self.weights()}
        return self.sharded(lambda value, _: value.id in weights)

    def sharded(self, is_split: Callable[[Value, set[tuple[int, ...]]], bool]) -> Problem:
        shapes = {self.value(i).shape for i in self.weights()}
        split = {i: [self.split_largest(i)] for i in self.state if is_split(self.value(i), shapes)}
        batch = self.split_batch()
        if not any(any(layout) for (layout,) in split.values()):
            raise _AbsentError(f"{shards(tuple(self.mesh), self.mesh)} divides no dim of a weight")
        return self.restricted(self.homes(batch | split), self.reading_whole(self.meeting))

    def tensor_parallel(self) -> Problem:
        homes = self.homes({i: [replicated(len(self.value(i).shape))] for i in self.batch})
        finest = 1
        for i in self.state:
            bare = [o for o, kept in enumerate(self.options(i)) if kept.home == kept.copy and self.in_a_row(kept.home)]
            if len(self.value(i).shape) > 1 and bare:
                pieces = {o: _pieces(self.options(i)[o].home, self.mesh) for o in bare}
                bare = [o for o in bare if pieces[o] == max(pieces.values())]
                finest = max(finest, *pieces.values())
            homes[i] = bare
        if finest == 1:
            raise _AbsentError("no axis divides a weight")
        return self.without_gathers(self.restricted(homes))

    # Arguments.

    def value(self, argument: int) -> Value:
        return self.formulation.program.arguments[argument]

    def options(self, argument: int) -> tuple[ArgumentOption, ...]:
        return self.formulation.arguments[argument]

    def homes(self, homes: Mapping[int, list[Layout]]) -> dict[int, list[int]]:
        """The options of these arguments that have one of these homes."""
        return {i: [o for o, kept in enumerate(self.options(i)) if kept.home in some] for i, some in homes.items()}

    def weights(self) -> list[int]:
        """The state that meets activations, as it is or as what is made of it alone."""
        read = {use.value.id for group in self.meeting for use in group.uses} & self.of_state
        for group in reversed(self.making):
            if any(made.value.id in read for made in group.outputs):
                read.update(use.value.id for use in group.uses)
        return [i for i in self.state if self.value(i).id in read]

    def split_batch(self) -> dict[int, list[Layout]]:
        """The homes of the batch: split, or whole where an array has no row for each of the batch.

        Raises:
            _AbsentError: nothing splits it.
        """
        dims = {i: dim for i in self.batch if (dim := self.batch_dim(i)) is not None}
        if not dims:
            raise _AbsentError("all arguments are state")
        largest = max(dims, key=lambda i: self.value(i).bytes)
        size = self.value(largest).shape[dims[largest]]
        axes = self.finest(size)
        if not axes:
            raise _AbsentError(f"a batch of {size} splits over no axis")
        homes = {}
        for i, dim in dims.items():
            shape = self.value(i).shape
            whole = replicated(len(shape))
            if shape[dim] % shards(axes, self.mesh) == 0:
                split = (*whole[:dim], axes, *whole[dim + 1 :])
                homes[i] = [split] if shape[dim] == size else [split, whole]
        return homes

    def batch_dim(self, argument: int) -> int | None:
        """The first dim that no loop goes through."""
        return batch_dim(self.formulation, argument)

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
            if not group.given:
                allowed[self.formulation.group_node(group)] = [
                    o
                    for o, strategy in enumerate(strategies)
                    if not any(any(strategy.operand_layouts[i]) for i in of_state)
                ]
        return allowed

    # The mesh as a row.

    def in_a_row(self, layout: Layout) -> bool:
        return sum(map(bool, layout)) <= 1

    def row_strategies(self, group: Group) -> list[int]:
        def fits(strategy: Strategy) -> bool:
            finest = all(axes == self.finest(group.sizes[factor]) for factor, axes in strategy.assignment)
            return finest and len(strategy.assignment) <= 1 and all(map(self.in_a_row, strategy.output_layouts))

        strategies = self.formulation.priced[group.index].strategies
        return [o for o, strategy in enumerate(strategies) if group.given or fits(strategy)]

    # Problems.

    def restricted(self, *allowed: Allowed) -> Problem:
        """The problem with these options only, and without its memory limit.

        Raises:
            _AbsentError: that leaves something without an option.
        """
        together = {self.formulation.group_node(group): self.row_strategies(group) for group in self.formulation.groups}
        for node, options in (item for some in allowed for item in some.items()):
            together[node] = [o for o in options if o in set(together.get(node, options))]
        for node, options in together.items():
            if not options:
                raise _AbsentError(self.why_not(node))
        return replace(self.formulation.problem, limit=None, lives=()).restrict(together)

    def why_not(self, node: int) -> str:
        """Why a node has no option."""
        if node < len(self.formulation.arguments):
            return f"{self.value(node).name} does not lie so: it is fixed, or not divided"
        equation = self.formulation.groups[node - len(self.formulation.arguments)].equations[-1]
        return f"{equation.primitive} at {equation.source or 'unknown line'} cannot be split so"

    def without_gathers(self, problem: Problem) -> Problem:
        """The problem without collectives on what is made of the state alone."""
        values = self.formulation.program.values
        trips = {self.formulation.group_node(group): group.trips for group in self.making}
        trips |= {
            shared.node: values[value].trips
            for value, shared in self.formulation.shared.items()
            if value in self.of_state
        }
        sliced = {
            node: self.formulation.prices.backend.operations.least_seconds * count for node, count in trips.items()
        }
        edges = tuple(
            replace(edge, costs=np.where(edge.costs > sliced[edge.i], np.inf, edge.costs)) if edge.i in sliced else edge
            for edge in problem.edges
        )
        return replace(problem, edges=edges)


def _data_parallel(formulation: Formulation, limit: float) -> Solution | None:
    """The cheapest data parallel choice with nothing proven of others; None if none is found that fits."""
    if not formulation.mesh:
        return None
    try:
        problem = _AlternativeProblems(formulation).data_parallel()
        small, options = _allowed(problem.restrict(_copies_in_a_row(formulation)))
        budget = Budget(_WORK_PAST_LIMIT, time.monotonic() + _SECONDS_PAST_LIMIT)
        solution = solve(small, time_limit=_SECONDS_PAST_LIMIT, budget=budget)
    except (_AbsentError, SolverError):
        return None
    choice = tuple(int(kept[option]) for kept, option in zip(options, solution.choice, strict=True))
    if not fits(formulation.accepted_peak(choice), limit):
        return None
    return at_limited_overlap(with_bound(replace(solution, choice=choice), 0.0), prediction_of(formulation, choice))


def _copies_in_a_row(formulation: Formulation) -> dict[int, list[int]]:
    """Node of a copy that several groups read -> its options that split one dim at most, over axes in mesh order.

    Data parallel work reads and makes no other. Of all options in the problem most are such copies.
    """
    order = {axis: i for i, axis in enumerate(formulation.mesh)}

    def in_a_row(layout: Layout) -> bool:
        split = [axes for axes in layout if axes]
        return not split or (len(split) == 1 and split[0] == tuple(sorted(split[0], key=order.__getitem__)))

    return {
        shared.node: [option for option, layout in enumerate(shared.layouts) if in_a_row(layout)]
        for shared in formulation.shared.values()
    }


def _allowed(problem: Problem) -> tuple[Problem, list[np.ndarray]]:
    """The problem without memory and forbidden options, and the number that each option left has in the whole.

    Raises:
        _AbsentError: a node has no option left.
    """
    options = [np.flatnonzero(np.isfinite(costs)) for costs in problem.costs]
    if not all(map(len, options)):
        raise _AbsentError("what is asked for is not data parallel")
    costs = tuple(costs[kept] for costs, kept in zip(problem.costs, options, strict=True))
    edges = tuple(replace(edge, costs=edge.costs[np.ix_(options[edge.i], options[edge.j])]) for edge in problem.edges)
    return replace(problem, costs=costs, edges=edges, lives=(), limit=None, checked=True), options


def _of_state(formulation: Formulation) -> set[int]:
    """The arguments that stay from step to step, and the values that are made of these alone, also in each turn of a
    loop that updates them.
    """
    program = formulation.program
    found = {program.arguments[i].id for i in program.state}
    for group in formulation.groups:
        first = group.equations[0]
        if first.primitive == "scan_carry":
            is_state = isinstance(first.inputs[0], Value) and first.inputs[0].id in found
        else:
            is_state = bool(group.uses) and not group.reduction and found.issuperset(use.value.id for use in group.uses)
        if is_state:
            found.update(made.value.id for made in group.outputs)
    return found


def _pieces(layout: Layout, mesh: Mapping[str, int]) -> int:
    return shards([axis for dim in layout for axis in dim], mesh)
