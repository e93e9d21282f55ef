"""A formulation and tactics in, the same formulation with fewer choices out.

A tactic gives each of its mesh axes an `AxisRule`. Along that axis an option of a node is looked at alone, so rules of
several axes restrict the same options one after the other. Where a rule asks for a split that no option of a node has,
since the axis does not divide the dim or the operation cannot be split so, the node stays whole along the axis. Where
options are left in neither form, the node is left as it is.

Which collectives may run is said of options (sums) and of pairs of options (reshardings). Those of some steps cannot do
with the collectives of the published scheme. They then get others in as few places as were found (`exceptions.py`), and
the plan says where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.errors import ConflictError, SolverError
from autoshard.layout import Layout, spec_of
from autoshard.model.formulation import Formulation
from autoshard.model.groups import Group
from autoshard.model.resharding_memory import ValueReader
from autoshard.model.strategies import ALL_REDUCE, EXCHANGE, REDUCE_SCATTER, Strategy
from autoshard.solver import solve
from autoshard.solver.problem import Edge, ForbiddenError, Problem
from autoshard.tactics.exceptions import exceptions, places_of
from autoshard.tactics.parts import PartRoles
from autoshard.tactics.requests import TacticLike, TacticRequests, ask, text_of_tactic
from autoshard.tactics.roles import Dim, GroupRole, Roles, StateRole
from autoshard.tactics.rules import Payload, Storage
from autoshard.tactics.schemes import Tactic

Restricts = Callable[[Formulation, Sequence[TacticLike], Mapping[str, int]], Formulation]
"""A formulation, tactics, and a mesh: axis -> devices -> the formulation with the choices that the tactics leave."""

_PRODUCTS = (GroupRole.PRODUCT, GroupRole.EXPERT, GroupRole.ATTENTION)  # that a plan names where they stay whole
LISTED_PLACES = 4  # that need other collectives; the rest is counted
_FEASIBILITY_SECONDS = 20.0  # to find any choice at all; what tactics leave is small


def restricted(formulation: Formulation, tactics: Sequence[TacticLike], mesh: Mapping[str, int]) -> Formulation:
    """The formulation with the choices that tactics leave, and what plans say of them.

    Args:
        mesh: axis -> devices, axes of one device included.

    Raises:
        ConflictError: tactics contradict each other or what is fixed, or find nothing in the step to apply to.
        MeshError: a tactic names an axis that the mesh does not have.
    """
    roles = Roles(formulation)
    return restricted_by(formulation, roles, tactic_requests(tactics, roles, mesh), tactics)


def tactic_requests(tactics: Sequence[TacticLike], roles: Roles, mesh: Mapping[str, int]) -> TacticRequests:
    """What tactics ask for; raises as `restricted` does."""
    asked = TacticRequests()
    for tactic in tactics:
        ask(asked, tactic, roles, mesh)
    return asked


def restricted_by(
    formulation: Formulation, roles: Roles | PartRoles, asked: TacticRequests, tactics: Sequence[TacticLike]
) -> Formulation:
    """The formulation with the choices that are left by what tactics ask for, and what plans say of them.

    Args:
        formulation: of a step, or of a part of one.
        roles: of its groups and arguments.
        asked: of the step; layouts are those of the arguments of `formulation`.
        tactics: that ask for it.

    Raises:
        ConflictError: they leave nothing.
    """
    found = _Restriction(formulation, roles, asked)
    named = ", ".join(map(text_of_tactic, tactics))
    everywhere = found.placed()
    remarks = list(found.remarks())
    fitting = _fitting(found, everywhere)
    if fitting is None or fitting[1] is not None:
        again = _fitting(found, found.placed(embeds=True)) if found.splits_features else None
        if again is not None and again[1] is None:
            remarks.append("tactics: what embeds the batch stays whole where no product is its second.")
            fitting = again
    if fitting is None:
        # What an axis does not divide is for the user to say otherwise, so that it is no reason to split less.
        fitting = None if remarks else _fitting(found, found.placed(_PRODUCTS))
        if fitting is None:
            what = (f"{formulation.program.name}: the tactics {named} leave no sharding.", *remarks)
            advice = "Drop one of them, or what fixed=, like= or the step itself says against it; or change the mesh."
            raise ConflictError("\n".join((*what, advice)))
        remarks.append("tactics: between products the step cannot be split wherever the tactics ask for it.")
    problem, where = fitting
    if where is not None:
        remarks.append(f"tactics: the step needs other collectives than the published scheme has{where}.")
    first = f"tactics: {named}. The bound is that of plans within them."
    return replace(formulation, problem=problem, restrictions=(first, *remarks))


def _fitting(restriction: _Restriction, placed: Problem) -> tuple[Problem, str | None] | None:
    """The problem with the scheme's collectives, and where it has others, if it cannot do without; None: no choice."""
    strict = restriction.with_collectives(placed)
    if _is_feasible(strict):
        return strict, None
    return _with_exceptions(restriction.formulation, placed, strict) if _is_feasible(placed) else None


def _with_exceptions(formulation: Formulation, placed: Problem, strict: Problem) -> tuple[Problem, str]:
    """The problem with the scheme's collectives, and as few others as were found; and where these are."""
    try:
        found = exceptions(placed, strict)
    except SolverError:
        return placed, ": only where arrays lie and what is split is as the tactics say"
    places = places_of(formulation, found.nodes)
    more = f" and {len(places) - LISTED_PLACES} more lines" if len(places) > LISTED_PLACES else ""
    return found.problem, f" at {', '.join(places[:LISTED_PLACES])}{more}"


def _is_feasible(problem: Problem) -> bool:
    """Whether the problem has a choice, however much memory it takes."""
    free = Problem(
        tuple(np.where(np.isinf(costs), np.inf, 0.0) for costs in problem.costs),
        tuple(
            Edge(edge.i, edge.j, np.where(np.isinf(edge.costs), np.inf, 0.0))
            for edge in problem.edges
            if np.isinf(edge.costs).any()
        ),
        (),
        None,
    )
    try:
        solve(free, time_limit=_FEASIBILITY_SECONDS)
    except ForbiddenError:
        return False
    return True


class _Restriction:
    """The choices that are left of a formulation."""

    def __init__(self, formulation: Formulation, roles: Roles | PartRoles, asked: TacticRequests):
        self.roles, self.asked, self.formulation = roles, asked, formulation
        self.rules = {axis: asked.rule(axis) for axis in asked.requests if axis in self.formulation.mesh}
        self.whole: dict[str, Counter[str]] = {axis: Counter() for axis in self.rules}  # what an axis could not split
        self.has_sequence = any(kind & Dim.SEQUENCE for kind in roles.dims.values())
        self.tables: dict[tuple[Any, ...], np.ndarray] = {}

    @property
    def splits_features(self) -> bool:
        """Whether all that the tactics say of weights is that they are split along features."""
        kinds = {rule.state.get(StateRole.WEIGHT, Storage.OPEN) for rule in self.rules.values()}
        return kinds <= {Storage.FEATURES, Storage.OPEN} and Storage.FEATURES in kinds

    def remarks(self) -> Iterator[str]:
        """What could not be split as it was asked for."""
        for axis, names in self.whole.items():
            if names:
                listed = ", ".join(list(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                tactic, devices = self.asked.speaker(axis), self.formulation.mesh[axis]
                yield f"tactics: {axis!r} ({devices} devices) divides no dim that {tactic} splits of {listed}."

    # Where arrays lie, and what is split.

    def placed(self, required: Container[GroupRole] = frozenset(GroupRole), *, embeds: bool = False) -> Problem:
        """The problem with the layouts and splits that are asked for.

        Args:
            required: other work may be split as asked, or stay whole.
            embeds: products that embed the batch may stay whole, too.
        """
        whole = self.roles.embedding if embeds else frozenset[int]()
        program = self.formulation.program
        allowed: dict[int, list[int]] = {}
        for i, value in enumerate(program.arguments):
            options = list(range(len(self.formulation.arguments[i])))
            homes = [option.home for option in self.formulation.arguments[i]]
            options = self._as_functions_say(i, options, homes)
            for axis in self.rules:
                wanted = self._wanted_dims(i, axis)
                if wanted is not None and self.splits_features and self._is_read_by(i, whole):
                    wanted = wanted | {-1}
                if wanted is None or (-1 not in wanted and not self._can_be_gathered(i, axis)):
                    continue
                dims = _dims_over(tuple(homes), axis)
                kept = [o for o in options if int(dims[o]) in wanted]
                if not kept and -1 not in wanted:
                    kept = [o for o in options if dims[o] < 0]
                    self.whole[axis].update([value.name] if value.shape else [])
                if not kept:
                    raise ConflictError(
                        f"{self._speaker(axis, i)} wants {value} to be {_wish(wanted)} along {axis!r}; "
                        f"{_left_by(options, homes)}"
                    )
                options = kept
            allowed[i] = options
        for group, work in zip(self.roles.groups, self.roles.work, strict=True):
            may_stay_whole = group.index in whole or work not in required
            allowed[self.formulation.group_node(group)] = self._strategies_left(group, work, may_stay_whole)
        return self.formulation.problem.restrict(allowed)

    def _is_read_by(self, argument: int, groups: Container[int]) -> bool:
        """Whether some of these groups read an argument, or what is made of the state alone with it."""
        waiting = [self.formulation.program.arguments[argument].id]
        seen = set(waiting)
        while waiting:
            readers = [one.group for one in self.formulation.readers[waiting.pop()] if one.group is not None]
            if any(reader.index in groups for reader in readers):
                return True
            made = {one.value.id for reader in readers for one in reader.outputs} & self.roles.of_state
            waiting.extend(made - seen)
            seen |= made
        return False

    def _can_be_gathered(self, argument: int, axis: str) -> bool:
        """Whether an argument may be split along the axis, but read whole; it may if only updates and casts read it.

        Of what is read elementwise, as a token that is put before others, the planner makes no copies.
        """
        value = self.formulation.program.arguments[argument]
        readers = [r.group for r in self.formulation.readers[value.id] if r.group is not None]
        if self.roles.state.get(argument) is None or all(self.roles.work[r.index] is GroupRole.UPDATE for r in readers):
            return True
        options = self.formulation.arguments[argument]
        homes, copies = (_dims_over(tuple(one), axis) for one in zip(*((o.home, o.copy) for o in options), strict=True))
        return bool(((homes >= 0) & (copies < 0)).any()) or not (homes >= 0).any()

    def _as_functions_say(self, argument: int, options: list[int], homes: Sequence[Layout]) -> list[int]:
        value = self.formulation.program.arguments[argument]
        if argument not in self.asked.layouts:
            return options
        layout, requested_by = self.asked.layouts[argument]
        kept = [o for o in options if homes[o] == layout]
        if not kept:
            raise ConflictError(f"{requested_by} wants {value} to be {spec_of(layout)}; {_left_by(options, homes)}")
        return kept

    def _wanted_dims(self, argument: int, axis: str) -> set[int] | None:
        """The dims that the axis may split of an argument, -1 for none of them; None: any."""
        if argument in self.roles.handed:
            return None
        rule, devices = self.rules[axis], self.formulation.mesh[axis]
        dims, shape = self.roles.dims_of_argument(argument), self.formulation.program.arguments[argument].shape
        state = self.roles.state.get(argument)
        if state is None or state is StateRole.CACHE:
            if rule.batch is None:
                return None
            return {i for i, dim in enumerate(dims) if dim & self._rows(rule.batch)} or {-1}
        match rule.state.get(state, Storage.OPEN):
            case Storage.WHOLE:
                return {-1}
            case Storage.SPLIT:  # one dim for each axis, if they are to split no dim together
                is_too_few = 0 < sum(size % devices == 0 for size in shape) <= len(rule.apart_from)
                return None if is_too_few else set(range(len(dims)))
            case Storage.FEATURES:
                return {i for i, dim in enumerate(dims) if dim & Dim.FEATURE} or {-1}
            case Storage.EXPERTS:
                return {i for i, dim in enumerate(dims) if dim & Dim.EXPERT} or {-1}
            case Storage.OPEN:
                return None

    def _speaker(self, axis: str, argument: int) -> Tactic:
        """The tactic that says how an argument lies along an axis."""
        state = self.roles.state.get(argument)
        if state is None or state is StateRole.CACHE:
            return self.asked.speaker(axis, lambda rule: rule.batch is not None)
        return self.asked.speaker(axis, lambda rule: state in rule.state)

    def _rows(self, kinds: Dim) -> Dim:
        """The kinds, with the batch for a sequence that the step does not have."""
        return kinds | Dim.BATCH if kinds & Dim.SEQUENCE and not self.has_sequence else kinds

    def _strategies_left(self, group: Group, work: GroupRole, may_stay_whole: bool) -> list[int]:
        strategies = self.formulation.priced[group.index].strategies
        options = list(range(len(strategies)))
        for axis, rule in self.rules.items():
            split = rule.splits.get(work)
            if split is None or split.dims is None:
                continue
            factors = {f for f in group.sizes if self.roles.role(group, f) & self._rows(split.dims)}
            over = [_factor_over(strategies[o], axis) for o in options]
            on = [o for o, factor in zip(options, over, strict=True) if factor in factors]
            off = [o for o, factor in zip(options, over, strict=True) if factor is None]
            if split.is_required and factors and not on and work in _PRODUCTS:
                equation = group.equations[0]
                self.whole[axis].update([f"{equation.primitive} at {equation.source or 'unknown line'}"])
            kept = on if on and split.is_required and not may_stay_whole else on + off
            options = sorted(kept) or options
            if work in (GroupRole.PRODUCT, GroupRole.EXPERT, GroupRole.GRADIENT) and rule.apart_from:
                options = [o for o in options if not _shares_dim(strategies[o], axis, rule.apart_from)] or options
        return options

    # What may be communicated.

    def with_collectives(self, problem: Problem) -> Problem:
        """The problem with the collectives alone that the rules name."""
        sums = {
            self.formulation.group_node(group): self._with_sums(group, work, problem)
            for group, work in zip(self.roles.groups, self.roles.work, strict=True)
        }
        problem = problem.restrict(sums)
        copies = {i: self._with_copies(i) for i in range(len(self.formulation.arguments))}
        problem = _restricted_further(problem, copies)
        return replace(problem, edges=(*problem.edges, *self._forbidden_reshardings()), checked=True)

    def _with_sums(self, group: Group, work: GroupRole, problem: Problem) -> list[int]:
        strategies = self.formulation.priced[group.index].strategies
        costs = problem.costs[self.formulation.group_node(group)]
        options = [o for o in range(len(strategies)) if np.isfinite(costs[o])]
        for axis, rule in self.rules.items():
            kinds = rule.sums.get(work)
            if kinds is None or not group.reduction:
                continue
            kept = [o for o in options if _sums_over(strategies[o], axis) <= kinds | {"all_gather"}]
            if work in rule.scatters:
                over = {o: _sums_over(strategies[o], axis) for o in kept}
                scattered = {_place(strategies[o], axis) for o in kept if REDUCE_SCATTER in over[o]}
                kept = [o for o in kept if ALL_REDUCE not in over[o] or _place(strategies[o], axis) not in scattered]
            options = kept or options
        return options

    def _with_copies(self, argument: int) -> list[int]:
        options, moved = self.formulation.arguments[argument], self._moved_of_argument(argument)
        value = self.formulation.program.arguments[argument]
        if any(map(_is_sliced_per_turn, self.formulation.readers[value.id])):
            moved = _of_stacks(moved)
        homes, copies = tuple(one.home for one in options), tuple(one.copy for one in options)
        bad = np.zeros(len(options), bool)
        for axis, rule in self.rules.items():
            if (kinds := rule.reshardings.get(moved)) is not None:
                bad |= _is_forbidden(_dims_over(homes, axis), _dims_over(copies, axis), kinds)
        return [o for o in range(len(options)) if not bad[o]]

    def _forbidden_reshardings(self) -> Iterator[Edge]:
        """Edges that forbid what may not be resharded."""
        formulation, program = self.formulation, self.formulation.program
        for i, value in enumerate(program.arguments):
            copies = tuple(option.copy for option in formulation.arguments[i])
            moved = self._moved_of_argument(i)
            for reader in formulation.readers[value.id]:
                yield from self._edge(i, copies, reader, moved)
        for group, work in zip(self.roles.groups, self.roles.work, strict=True):
            node = formulation.group_node(group)
            for k, made in enumerate(group.outputs):
                moved = self._moved(made.value.id, work)
                readers = formulation.readers[made.value.id]
                shared = formulation.shared.get(made.value.id)
                leaves = formulation.priced[group.index].output_layouts[k]
                if shared is None:
                    for reader in readers:
                        yield from self._edge(node, leaves, reader, moved)
                    continue
                to_shared = _of_stacks(moved) if all(map(_is_sliced_per_turn, readers)) else moved
                yield from self._edge(node, leaves, ValueReader(shared.node, shared.layouts), to_shared)
                for reader in readers:
                    yield from self._edge(shared.node, shared.layouts, reader, moved)

    def _moved_of_argument(self, argument: int) -> Payload:
        if argument not in self.roles.handed:
            is_active = self.roles.state.get(argument) in (None, StateRole.CACHE)
            return Payload.ACTIVATIONS if is_active else Payload.PARAMETERS
        if self.formulation.program.arguments[argument].id in self.roles.of_state:
            return Payload.PARAMETERS
        has_rows = any(dim & (Dim.BATCH | Dim.SLOT) for dim in self.roles.dims_of_argument(argument))
        return Payload.ACTIVATIONS if has_rows else Payload.UPDATES

    def _moved(self, value: int, work: GroupRole) -> Payload:
        if value in self.roles.of_state:
            return Payload.PARAMETERS
        return Payload.UPDATES if work in (GroupRole.UPDATE, GroupRole.GRADIENT, GroupRole.SUM) else Payload.ACTIVATIONS

    def _edge(self, i: int, left: tuple[Layout, ...], reader: ValueReader, moved: Payload) -> Iterator[Edge]:
        if i == reader.node:
            return
        wanted, moved = reader.wants, _of_stacks(moved) if _is_sliced_per_turn(reader) else moved
        key = left, wanted, moved
        if key not in self.tables:
            bad = np.zeros((len(left), len(wanted)), bool)
            for axis, rule in self.rules.items():
                if (kinds := rule.reshardings.get(moved)) is not None:
                    before, after = _dims_over(left, axis), _dims_over(wanted, axis)
                    bad |= _is_forbidden(before[:, None], after[None, :], kinds)
            self.tables[key] = np.where(bad, np.inf, 0.0)
        table = self.tables[key]
        if table.any():
            yield Edge(i, reader.node, table)


def _is_sliced_per_turn(reader: ValueReader) -> bool:
    """Whether a loop goes through what is read, a slice in each turn."""
    return reader.group is not None and reader.group.equations[0].primitive == "scan_slice"


def _of_stacks(moved: Payload) -> Payload:
    return Payload.STACKS if moved is Payload.PARAMETERS else moved


def _restricted_further(problem: Problem, allowed: Mapping[int, Iterable[int]]) -> Problem:
    """The problem with these options, of those that it still has; a node that would have none keeps all."""
    left = {}
    for node, options in allowed.items():
        kept = [o for o in options if np.isfinite(problem.costs[node][o])]
        if kept:
            left[node] = kept
    return problem.restrict(left)


def _dims_over(layouts: tuple[Layout, ...], axis: str) -> np.ndarray:
    """The dim of each layout that the axis splits; -1 for none."""
    return np.array([next((i for i, axes in enumerate(layout) if axis in axes), -1) for layout in layouts], int)


def _is_forbidden(before: np.ndarray, after: np.ndarray, kinds: frozenset[str]) -> np.ndarray:
    """Where a resharding along one axis is none of these kinds."""
    moves = (before >= 0) & (after >= 0) & (before != after)
    gathers = (before >= 0) & (after < 0)
    forbidden: np.ndarray = (moves & ("all_to_all" not in kinds)) | (gathers & ("all_gather" not in kinds))
    return forbidden


def _factor_over(strategy: Strategy, axis: str) -> int | None:
    """The factor that the axis splits."""
    return next((factor for factor, axes in strategy.assignment if axis in axes), None)


def _shares_dim(strategy: Strategy, axis: str, others: frozenset[str]) -> bool:
    """Whether the axis splits a factor together with another one."""
    return any(axis in axes and others.intersection(axes) - {axis} for _, axes in strategy.assignment)


def _sums_over(strategy: Strategy, axis: str) -> set[str]:
    """The kinds of collectives that finish a result along the axis; the exchange of padded slices is part of theirs."""
    return {finish.kind for finish in strategy.finishes if axis in finish.axes} - {EXCHANGE}


def _place(strategy: Strategy, axis: str) -> tuple[Any, ...]:
    """What is left of a strategy along the other axes, and which factor this one splits."""
    return _factor_over(strategy, axis), tuple(
        (factor, tuple(one for one in axes if one != axis)) for factor, axes in strategy.assignment
    )


def _left_by(options: Sequence[int], homes: Sequence[Layout]) -> str:
    """What else restricts an argument, and to which layouts; the end of a message."""
    left = ", ".join(sorted({str(spec_of(homes[o])) for o in options}))
    return f"what fixed=, like= or another tactic says leaves {left}.\nDrop one of them."


def _wish(wanted: set[int]) -> str:
    return "whole" if wanted == {-1} else f"split along dim {' or '.join(map(str, sorted(wanted - {-1})))}"
