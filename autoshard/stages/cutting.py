"""A traced step and boundaries of its forward pass in, the programs of every stage out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from autoshard.errors import StageError
from autoshard.jaxprs import ClosedJaxpr, Literal, Var, aval_of, is_array, scan_counts, with_live_equations
from autoshard.microbatches.batch import traced_in_part
from autoshard.microbatches.inline_calls import opened
from autoshard.microbatches.loop import MicrobatchedStep
from autoshard.microbatches.proof import Proof, proof
from autoshard.microbatches.relations import BatchRows, Invariant
from autoshard.microbatches.rows import Microbatches
from autoshard.microbatches.statistics import in_pieces
from autoshard.program.tracing import TracedStep
from autoshard.stages.building import Builder, VariableKeys
from autoshard.stages.placement.assignment import stages_of
from autoshard.stages.placement.post_loop import PostLoopPlacement, post_loop_placement
from autoshard.stages.placement.recomputing import ApartStep, CutChoice
from autoshard.stages.placement.residuals import kept_values
from autoshard.stages.programs import ArgumentPiece, Key, StagePrograms
from autoshard.stages.roles import PipelineRoles, bytes_of, variables
from autoshard.stages.stacks import Bounds, EquationOrigin, taken_apart
from autoshard.stages.units import Units, units_of


@dataclass(frozen=True, eq=False)
class CuttableStep:
    """A step that is proven to run in microbatches, ready to be cut in any places."""

    name: str
    whole: ClosedJaxpr  # calls opened
    part: ClosedJaxpr  # the same for one microbatch
    split: Microbatches
    carried: Mapping[int, int]  # argument -> the result that takes its place
    held: frozenset[int] = frozenset()  # equations that one stage alone computes, however cheap they are

    @classmethod
    def of(cls, traced: TracedStep, count: int, carried: Mapping[int, int], name: str = "step") -> CuttableStep:
        """
        Raises:
            MicrobatchError: microbatches would change what the step computes, with the line.
        """
        part, split = traced_in_part(traced, count)
        whole, part = (opened(with_live_equations(one)) for one in (traced.closed, part))
        return cls(name, whole, part, split, carried)

    @cached_property
    def roles(self) -> PipelineRoles:
        """
        Raises:
            StageError: a microbatch would have to wait for all of the one before.
        """
        found = _proof(self.whole, self.part, self.split)
        return PipelineRoles(MicrobatchedStep(self.whole.jaxpr, self.part.jaxpr, self.split, found), self.held)

    def units(self, least: int = 1) -> Units:
        """Where the forward pass may be cut: into `least` units or more, if it has so much work apart."""
        return units_of(self.roles, least)


Pins = Callable[[PipelineRoles, Sequence[EquationOrigin]], Mapping[int, int]]
"""The equations of a step and where they come from -> the stage of backward equations, of those where that is said."""


def cut(
    step: CuttableStep,
    boundaries: Sequence[EquationOrigin],
    *,
    weight_programs: bool = False,
    pins: Pins | None = None,
    are_alike: bool = False,
    keeps: CutChoice | None = None,
) -> StagePrograms:
    """The programs of the stages between boundaries.

    Args:
        boundaries: where stages begin, all but the first, as `Units.boundaries` gives them.
        weight_programs: whether to make W programs, of what no earlier stage waits for. If not, B is all of the
            backward pass.
        pins: says of backward equations where they run; by default where the fewest bytes cross.
        are_alike: whether parts of one loop hand on the same carries, whether or not anybody reads those of the last.
        keeps: says what stages keep for their backward passes; by default as the step is written.

    Raises:
        StageError: an early stage would wait for a late one.
        MicrobatchError: a microbatch would keep something else than the whole batch.
    """
    bounds = _bounds(step.roles, boundaries)
    whole, part = taken_apart(step.whole, bounds), taken_apart(step.part, bounds).closed
    again = None if keeps is None else ApartStep(whole, part, boundaries, keeps.topology).recomputed(keeps)
    if again is not None:
        whole, part = again.whole, again.part
    roles, held = step.roles, frozenset(i for i, one in enumerate(whole.origins) if one.equation in step.held)
    if bounds or again is not None:
        found = _proof(whole.closed, part, step.split)
        roles = PipelineRoles(MicrobatchedStep(whole.closed.jaxpr, part.jaxpr, step.split, found), held)
    stages = stages_of(roles, whole.origins, boundaries, pins(roles, whole.origins) if pins is not None else None)
    late = _settle_sums(roles, stages)
    if late:
        places = [Invariant.AFTER if i in late else place for i, place in enumerate(roles.step.proof.places)]
        found = replace(roles.step.proof, places=places)
        roles = PipelineRoles(MicrobatchedStep(whole.closed.jaxpr, part.jaxpr, step.split, found), held)
        stages = {i: stages[i] for i in roles.loop if i in stages}
    made = _Cut(step, whole, roles, stages, boundaries, weight_programs, are_alike).programs()
    return made if again is None else replace(made, recomputed=again.summary)


def _proof(whole: ClosedJaxpr, part: ClosedJaxpr, split: Microbatches) -> Proof:
    """
    Raises:
        StageError: a microbatch would have to wait for all of the one before.
    """
    found = proof(whole, part, split)
    if found.handed_on:
        raise StageError(
            f"statistics='microbatch': {len(found.handed_on)} arrays of state are changed by every microbatch and "
            "read by the next, in a loop or in the forward pass, which stages of a pipeline do not do.\n"
            "Write the layers one after the other, or use microbatches= without pipeline=."
        )
    return found


def _bounds(roles: PipelineRoles, boundaries: Sequence[EquationOrigin]) -> dict[int, Bounds]:
    """Scan -> where it is taken apart."""
    inside: dict[int, list[int]] = {}
    for boundary in boundaries:
        if boundary.trip:
            inside.setdefault(boundary.equation, []).append(boundary.trip)
    lengths = {i: roles.step.equations[i].params["length"] for i in roles.stacks}
    return {i: (0, *sorted(inside[first]), lengths[i]) for i, first in roles.stacks.items() if first in inside}


def _settle_sums(roles: PipelineRoles, stages: dict[int, int]) -> frozenset[int]:
    """Gives stages to equations that add up sums of one stage. The others run after the last microbatch."""
    late: set[int] = set()
    for i in roles.loop:
        if i not in roles.added:
            continue
        makers = {roles.makers[var] for var in roles.made_in_loop(i)}
        found = {stages.get(maker) for maker in makers}
        if len(found) == 1 and None not in found and makers.isdisjoint(late):
            stages[i] = next(stage for stage in found if stage is not None)
        else:
            late.add(i)
    return frozenset(late)


class _Cut:
    """One cut of a step."""

    def __init__(
        self,
        step: CuttableStep,
        whole: Any,
        roles: PipelineRoles,
        stages: Mapping[int, int],
        boundaries: Sequence[EquationOrigin],
        has_weights: bool,
        are_alike: bool,
    ):
        self.source, self.apart, self.roles, self.step = step, whole, roles, roles.step
        self.stages, self.boundaries, self.has_weights = stages, tuple(boundaries), has_weights
        self.are_alike = are_alike
        self.count = len(boundaries) + 1
        self.jaxpr = whole.closed.jaxpr
        self.pieces = tuple(whole.slices)
        known = self.step.proof.running
        if in_turn := {piece: made for piece, made in self.carried_pairs() if self.argument_of(piece) in known.results}:
            self.step.proof = replace(self.step.proof, running=in_pieces(known, in_turn))
        self.names = VariableKeys.of(self.jaxpr, self.pieces, self.step.equations)
        self.outside = set(self.names.outside)
        self.builder = Builder(self.step, self.names, roles, self.sliced() if are_alike else frozenset())

    def argument_of(self, piece: Var) -> Var:
        return self.apart.slices[piece].argument if piece in self.apart.slices else piece

    # What each loop program computes.

    @cached_property
    def sent(self) -> frozenset[Var]:
        """Values that another stage reads, or would read if it were like the others."""
        found = {
            var
            for i, stage in self.stages.items()
            for var in self.operands(i)
            if self.stages[self.roles.makers[var]] != stage
        }
        return frozenset(found | self.carried_on(found)) if self.are_alike else frozenset(found)

    def sliced(self) -> frozenset[int]:
        """Equations that take the trips of one stage out of what all stages have, as their keys or numbers."""
        scans = {self.apart.origins[i].equation for i in self.roles.stacks}
        apart = ((i, one) for i, one in enumerate(self.apart.origins) if one.equation in scans)
        return frozenset(i for i, _ in apart if self.step.equations[i].primitive.name != "scan")

    def carried_on(self, sent: set[Var]) -> set[Var]:
        """The carries of all parts of a loop of which one part sends the like."""
        parts: dict[int, list[int]] = {}
        for i in self.stages:
            if i in self.roles.stacks:
                parts.setdefault(self.apart.origins[i].equation, []).append(i)
        found: set[Var] = set()
        for several in parts.values():
            made = [self.step.equations[i].outvars[: scan_counts(self.step.equations[i])[1]] for i in several]
            for alike in zip(*made, strict=True):
                if not sent.isdisjoint(alike):
                    found |= set(alike)
        return found

    def operands(self, i: int) -> list[Var]:
        """What an equation reads of stages, through equations that every stage computes itself."""
        return _made_by_stages(self.roles, self.roles.inputs(i))

    def equations(self, stage: int, *, backward: bool) -> list[int]:
        return [i for i, other in self.stages.items() if other == stage and (i in self.roles.backward) == backward]

    def backward_parts(self, stage: int) -> tuple[list[int], list[int]]:
        """The equations of B and W: earlier stages wait for the first, if there are W programs."""
        own = self.equations(stage, backward=True)
        if not self.has_weights:
            return sorted(own), []
        inside = set(own)
        todo = [self.roles.makers[var] for var in self.sent if self.roles.makers[var] in inside]
        needed: set[int] = set()
        while todo:
            i = todo.pop()
            if i not in needed:
                needed.add(i)
                todo += [self.roles.makers[var] for var in self.operands(i) if self.roles.makers[var] in inside]
        return sorted(needed), sorted(inside - needed)

    def loop_programs(self, stage: int) -> list[tuple[str, list[int], set[Var], list[int]]]:
        """Kind, equations, what others read of them, and equations of before that run again."""
        roles, makers = self.roles, self.roles.makers
        forward = sorted(self.equations(stage, backward=False))
        b, w = self.backward_parts(stage)
        here = {var: makers[var] for i in (*forward, *b) for var in self.step.equations[i].outvars if var in makers}
        size = {var: float(bytes_of(self.step.twins[var])) for var in makers}
        wanted_b = self.read_by(b, set(b))
        kept_b = kept_values(wanted_b, here, self.operands, roles.cheap & set(forward), size.__getitem__)
        for var in kept_b:
            size[var] /= 8  # W gets what B gets anyhow
        wanted_w = self.read_by(w, set(w))
        kept_w = kept_values(wanted_w, here, self.operands, roles.cheap & {*forward, *b}, size.__getitem__)
        handed = kept_b | kept_w | self.sent
        found = [("F", forward, handed, list[int]())]
        found.append(("B", b, handed, self.again(wanted_b, kept_b, here)))
        found.append(("W", w, handed, self.again(wanted_w, kept_w, here)))
        return found

    def read_by(self, equations: Sequence[int], own: set[int]) -> set[Var]:
        return {var for i in equations for var in self.operands(i) if self.roles.makers[var] not in own}

    def again(self, wanted: set[Var], kept: set[Var], here: Mapping[Var, int]) -> list[int]:
        """The equations that make what is wanted of what is kept."""
        found: set[int] = set()
        todo = list(wanted - kept)
        while todo:
            i = here[todo.pop()]
            if i not in found:
                found.add(i)
                todo += [var for var in self.operands(i) if var not in kept]
        return sorted(found)

    # All programs.

    def programs(self) -> StagePrograms:
        loop, before = {}, {}
        for stage in range(self.count):
            for kind, own, handed, again in self.loop_programs(stage):
                program = self.builder.loop_program(kind, stage, own, handed, again)
                if program is not None:
                    loop[kind, stage] = program
            early = self.builder.before_program(stage, [one for one in loop.values() if one.stage == stage])
            if early is not None:
                before[stage] = early
        after, placed = self.after()
        homes = {self.names.outside[var]: stage for var, stage in placed.homes.items()} | self.batch_homes()
        types = self.builder.types
        for var, key in self.names.outside.items():
            types.setdefault(key, _struct(aval_of(var)))
        pieces = tuple(
            ArgumentPiece(self.jaxpr.invars.index(one.argument), one.start, one.stop)
            for one in self.apart.slices.values()
        )
        made = StagePrograms(
            self.source.name,
            self.count,
            self.step.split.count,
            self.has_weights,
            before,
            loop,
            after,
            types,
            pieces,
            homes,
            tuple(self.result(atom) for atom in self.jaxpr.outvars),
            tuple(self.apart.closed.consts),
            {self.key(var): self.key(result) for var, result in self.carried_pairs()},
            {self.names.key("sum", var): self.step.op(var) for var in self.step.needs.sums},
            frozenset(self.step.split.dims),
            self.boundaries,
            own_statistics=self.step.proof.remark,
        )
        made.check()
        return made

    def result(self, atom: Any) -> tuple[Key, ...] | Any:
        if isinstance(atom, Literal):
            return atom.val
        return tuple(map(self.key, self.apart.joined.get(atom, (atom,))))

    def key(self, var: Var) -> Key:
        """Of an argument or piece, or of what an `after` program makes."""
        return self.names.outside.get(var) or self.names.late(var)

    def after(self) -> tuple[tuple[Any, ...], PostLoopPlacement]:
        step, equations = self.step, self.step.equations
        results = [part for atom in variables(self.jaxpr.outvars) for part in self.apart.joined.get(atom, (atom,))]
        loop = {*step.needs.sums, *step.needs.rows}
        chosen: set[int] = set()
        todo = [*results, *(var for i, eqn in enumerate(equations) if self.is_late_effect(i) for var in eqn.invars)]
        chosen |= {i for i in range(len(equations)) if self.is_late_effect(i)}
        while todo:
            var = todo.pop()
            i = step.makers.get(var) if isinstance(var, Var) else None
            if i is None or i in chosen or var in loop or var in self.outside:
                continue
            chosen.add(i)
            todo += variables(equations[i].invars)
        located = {var: self.stages[self.roles.makers[var]] for var in loop}
        located |= self.parameter_homes()
        placed = post_loop_placement(
            {i: equations[i] for i in sorted(chosen)}, located, self.carried_pairs(), self.outside, self.count - 1
        )
        return self.builder.after_programs(placed, results, located), placed

    def is_late_effect(self, i: int) -> bool:
        return bool(self.step.equations[i].effects) and self.step.proof.places[i] is Invariant.AFTER

    def parameter_homes(self) -> dict[Var, int]:
        """Arguments and pieces -> the first stage whose loop programs read them."""
        found: dict[Var, int] = {}
        for i, stage in sorted(self.stages.items()):
            for var in self.builder.sources_before_loop(self.roles.inputs(i)):
                is_rows = isinstance(self.step.proof.relations[var], BatchRows)
                if not is_rows and aval_of(var).shape:
                    found[var] = min(stage, found.get(var, stage))
        return found

    def batch_homes(self) -> dict[Key, int]:
        """Arguments with rows of the batch -> the first stage whose loop programs read them."""
        taken = {var for var, _ in self.carried_pairs()}
        found: dict[Key, int] = {}
        for i, stage in self.stages.items():
            for var in self.builder.sources_before_loop(self.roles.inputs(i)):
                if isinstance(self.step.proof.relations[var], BatchRows) and var not in taken:
                    key = self.names.outside[var]
                    found[key] = min(stage, found.get(key, stage))
        return found

    def carried_pairs(self) -> list[tuple[Var, Var]]:
        """An argument or its piece, and the value that takes its place."""
        by_argument: dict[Var, list[Var]] = {}
        for var, one in self.apart.slices.items():
            by_argument.setdefault(one.argument, []).append(var)
        found = []
        for argument, result in self.source.carried.items():
            var, atom = self.jaxpr.invars[argument], self.jaxpr.outvars[result]
            if not isinstance(atom, Var):
                continue
            parts = self.apart.joined.get(atom)
            pieces = by_argument.get(var, [])
            if parts is not None and len(parts) == len(pieces):
                found += list(zip(pieces, parts, strict=True))
            else:
                found.append((var, atom))
        return found


def _made_by_stages(roles: PipelineRoles, variables: Sequence[Var]) -> list[Var]:
    """Values that stages make, behind equations that every stage computes itself: free ones read no such values."""
    return [var for var in variables if var in roles.makers and roles.makers[var] not in roles.free]


def _struct(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) if is_array(aval) else aval
