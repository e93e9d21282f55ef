"""A step taken apart at boundaries, in both traces, and what is kept, in; out the same with the rest computed again.

The blocks in which values are kept or computed again lie within stages: a loop over layers is in pieces by now, and
outside of loops a block begins wherever a stage does. So each stage has a price of memory of its own. What the whole
batch keeps and what a microbatch keeps is the same, equation by equation, which is checked.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from autoshard.errors import MicrobatchError, PlanError
from autoshard.jaxprs import REMAT, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Var, inner_jaxprs, with_live_equations
from autoshard.mesh.topology import Topology
from autoshard.remat.costs import Seconds, seconds_again
from autoshard.remat.cuts import Cut, ForwardPass, at_price, chain
from autoshard.remat.recomputation import slopes
from autoshard.remat.same_structure import is_alike
from autoshard.remat.scope import Block, Scope
from autoshard.stages.programs import BlockCut, RecomputedBlocks
from autoshard.stages.stacks import EquationOrigin, Slice, UnstackedStep

# Values of a block of which all choices are made: that takes as many minimum cuts as the square of them. A layer of
# a Llama has 100. Of larger blocks, as of layers that are not told apart, the one that is best at a price is found.
LARGEST_CHAIN = 256


def seconds_in_stages(eqn: JaxprEqn, topology: Topology) -> float:
    """Of running an equation once more; infinite if it must not run again, or makes a number.

    A number is kept for nothing, and may be a sum over the batch, which only all microbatches together make.
    """
    makes_arrays = any(math.prod(getattr(var.aval, "shape", ())) > 1 for var in eqn.outvars)
    return seconds_again(eqn, topology) if makes_arrays else math.inf


def has_marks(jaxpr: Jaxpr) -> bool:
    """Whether the user says somewhere what is computed again."""
    return any(
        eqn.primitive.name in REMAT or any(has_marks(inner.jaxpr) for inner in inner_jaxprs(eqn)) for eqn in jaxpr.eqns
    )


@dataclass(frozen=True)
class StageBlock:
    """A block of the forward pass of one stage."""

    block: Block
    turns: int  # how often it runs per step
    stage: int

    @property
    def look(self) -> tuple[Any, ...]:
        """What can be chosen, whatever the sizes of values: what makes and reads which, and what is read."""
        forward = self.block.forward_pass
        is_held = tuple(size > 0 for size in forward.bytes)
        return type(self.block).__name__, self.turns, self.stage, forward.makers, forward.reads, forward.wanted, is_held


class CutChoice(Protocol):
    """What says what each block keeps."""

    @property
    def topology(self) -> Topology:
        """By which running again is priced."""

    def cuts(self, blocks: Sequence[StageBlock]) -> list[BlockCut]:
        """One per block."""


@dataclass(frozen=True)
class MemoryPrices:
    """What is computed again where that takes less than so many seconds per byte that is not kept, stage by stage."""

    prices: tuple[float, ...]  # s per byte of the whole batch, per stage; 0: all is kept; infinite: the least
    topology: Topology

    def cuts(self, blocks: Sequence[StageBlock]) -> list[BlockCut]:
        return [self.cut(one) for one in blocks]

    def cut(self, one: StageBlock) -> BlockCut:
        price, forward = self.prices[one.stage], one.block.forward_pass
        if math.isinf(price) or len(forward.bytes) > LARGEST_CHAIN:
            chosen = at_price(forward, price / one.turns)
        else:
            choices = chain(forward)
            taken = sum(slope <= price for slope in slopes(choices, one.turns))
            chosen = choices[taken if price > 0 else 0]
        return BlockCut(tuple(sorted(chosen.kept)), tuple(sorted(chosen.again)))


@dataclass(frozen=True)
class PricedStep:
    """Per byte that a step can compute again instead of keep, what it costs, cheapest first."""

    steps: tuple[tuple[float, float, float], ...]  # s per byte of whole arrays; bytes, and seconds on one device

    @classmethod
    def of(cls, whole: ClosedJaxpr, topology: Topology) -> PricedStep:
        """
        Args:
            whole: the step for the whole batch, calls opened.
        """
        scope = Scope(whole, functools.partial(seconds_in_stages, topology=topology))
        found = list[tuple[float, float, float]]()
        for block, turns in scope.blocks():
            choices = chain(block.forward_pass)
            pairs = zip(itertools.pairwise(choices), slopes(choices, turns), strict=True)
            steps = ((one, a.bytes - b.bytes, turns * (b.seconds - a.seconds)) for (a, b), one in pairs)
            found += steps
        return cls(tuple(sorted(found)))

    def prices(self, most: int) -> tuple[float, ...]:
        """Prices of memory, from the one at which nothing is computed again, at which the step keeps ever less.

        >>> PricedStep(((1.0, 8.0, 8.0), (2.0, 1.0, 2.0), (3.0, 7.0, 21.0))).prices(3)
        (0.0, 1.0, inf)

        Args:
            most: how many, two or more.
        """
        if not self.steps:
            return ()
        total = math.fsum(size for _, size, _ in self.steps)
        found, saved = [0.0], 0.0
        for one, several in itertools.groupby(self.steps, key=lambda step: step[0]):
            saved += math.fsum(size for _, size, _ in several)
            if saved < total and saved * (most - 1) >= len(found) * total and one > 0:
                found.append(one)
        return (*found[: most - 1], math.inf)

    def seconds(self, price: float) -> float:
        """Of computing again in one step what a price is for, on one device."""
        return math.fsum(seconds for one, _, seconds in self.steps if price > 0 and one <= price)


@dataclass(frozen=True)
class KnownCuts:
    """What a plan says that each block keeps."""

    known: tuple[BlockCut, ...]
    topology: Topology

    def cuts(self, blocks: Sequence[StageBlock]) -> list[BlockCut]:
        """
        Raises:
            PlanError: they are for other blocks.
        """
        forward = [one.block.forward_pass for one in blocks]
        if len(blocks) != len(self.known) or not all(map(_may_keep, forward, self.known)):
            raise PlanError(
                "the plan says what stages keep for their backward pass, and this step keeps other values.\n"
                "The plan is for another step; plan anew."
            )
        return list(self.known)


def _may_keep(forward: ForwardPass, cut: BlockCut) -> bool:
    """Whether all that is wanted is kept, or made of what is kept by equations that may run again."""
    if not all(v < len(forward.bytes) for v in cut.kept) or not all(e < len(forward.seconds) for e in cut.again):
        return False
    made = {v for v, e in enumerate(forward.makers) if e in cut.again} | set(cut.kept)
    read = {v for e in cut.again for v in forward.reads[e]} | set(forward.wanted)
    return read <= made and all(math.isfinite(forward.seconds[e]) for e in cut.again)


@dataclass(frozen=True)
class LeanTraces:
    """A step taken apart, with values computed again."""

    whole: UnstackedStep
    part: ClosedJaxpr  # of one microbatch
    summary: RecomputedBlocks


@dataclass(frozen=True, eq=False)
class ApartStep:
    """A step taken apart at the boundaries of its stages."""

    whole: UnstackedStep
    part: ClosedJaxpr
    boundaries: Sequence[EquationOrigin]
    topology: Topology  # by which running again is priced

    @cached_property
    def seconds(self) -> Seconds:
        return functools.partial(seconds_in_stages, topology=self.topology)

    @cached_property
    def made(self) -> list[Var]:
        """All that its equations make."""
        return _made(self.whole.closed)

    def scope_of(self, closed: ClosedJaxpr, **keywords: Any) -> Scope:
        """One of both traces. Trips of arguments are there for the backward pass, as arguments are."""
        pieces = frozenset(i for i, var in enumerate(self.made) if var in self.whole.slices)
        made = _made(closed)
        if len(made) != len(self.made):
            raise _refusal()
        return Scope(_watching(closed, made), self.seconds, watched=len(made), there=pieces, **keywords)

    @cached_property
    def origins(self) -> Mapping[Var, EquationOrigin]:
        """Variable -> where it comes from."""
        pairs = zip(self.whole.closed.jaxpr.eqns, self.whole.origins, strict=True)
        return {var: origin for eqn, origin in pairs for var in eqn.outvars}

    @cached_property
    def scope(self) -> Scope:
        """The whole step, with blocks that lie within stages."""
        plain = self.scope_of(self.whole.closed)
        origins, starts, stage = _origins_in(plain, self.made, self.origins), set[int](), 0
        for i, eqn in enumerate(plain.body.equations[: plain.passes.turning_point]):
            at = self.stage_of(eqn, origins)
            if at is not None and at > stage:
                starts.add(i)
                stage = at
        return plain.with_borders(frozenset(starts)) if starts else plain

    def stage_of(self, eqn: JaxprEqn, origins: Mapping[Var, EquationOrigin]) -> int | None:
        """By its place in the line of the forward pass."""
        known = [origins[var] for var in eqn.outvars if var in origins]
        if not known:
            return None
        return bisect.bisect_right(self._starts, min(map(_place, known)))

    @cached_property
    def _starts(self) -> list[tuple[int, int]]:
        """Where stages begin in the line of the forward pass, but for the first."""
        return sorted(map(_place, self.boundaries))

    def blocks(self, scope: Scope, origins: Mapping[Var, EquationOrigin]) -> list[StageBlock]:
        """All blocks, with their stages."""
        place = {id(eqn): i for i, eqn in enumerate(scope.body.equations)}
        stages, stage = list[int](), 0
        for eqn in scope.body.equations:
            found = self.stage_of(eqn, origins)
            stage = stage if found is None else found
            stages.append(stage)
        found_blocks = [StageBlock(pair, scope.turns, stages[place[id(pair.first.eqn)]]) for pair in scope.pairs]
        for block in scope.straight[1]:
            found_blocks.append(StageBlock(block, scope.turns, stages[place[id(block.forward[0])]]))
        for i, inner in scope.inner.items():
            found_blocks += [StageBlock(block, turns, stages[i]) for block, turns in inner.blocks()]
        return found_blocks

    @cached_property
    def own_blocks(self) -> list[StageBlock]:
        """Those of the whole batch."""
        return self.blocks(self.scope, _origins_in(self.scope, self.made, self.origins))

    def recomputed(self, choice: CutChoice) -> LeanTraces:
        """The same step with what is chosen computed again.

        Raises:
            MicrobatchError: a microbatch would keep something else.
        """
        cuts = choice.cuts(self.own_blocks)
        alike = self.scope_of(self.part, like=self.scope)
        pairs = _blocks_of_both(self.own_blocks, alike)
        if pairs is None:
            raise _refusal()
        chosen = {one.block: _cut(one.block.forward_pass, cut) for one, cut in zip(self.own_blocks, cuts, strict=True)}
        there = {other: chosen[one.block] for one, other in pairs}
        closed, watched = self.scope.rewritten_and_watched(chosen)
        part, _ = alike.rewritten_and_watched(there)
        if not is_alike(closed, part):
            raise _refusal()
        seconds = [0.0] * (len(self.boundaries) + 1)
        for one in self.own_blocks:
            seconds[one.stage] += one.turns * chosen[one.block].seconds
        summary = RecomputedBlocks(tuple(cuts), tuple(seconds))
        return LeanTraces(self._apart(closed, watched), with_live_equations(part), summary)

    def _apart(self, closed: ClosedJaxpr, watched: Mapping[int, Any]) -> UnstackedStep:
        """The rewritten step, with all that is known of its variables."""
        before = self.whole.closed.jaxpr
        now: dict[Any, Any] = dict(zip(before.invars, closed.jaxpr.invars, strict=True))
        now |= {self.made[i]: atom for i, atom in watched.items()}
        closed = with_live_equations(closed)
        known: dict[Var, EquationOrigin] = {}
        for var in self.made:
            if isinstance(now.get(var), Var):
                known.setdefault(now[var], self.origins[var])
        origins = []
        for eqn in closed.jaxpr.eqns:
            found = [known[var] for var in eqn.outvars if var in known]
            behind = [known[atom] for atom in eqn.invars if isinstance(atom, Var) and atom in known]
            origin = min(found, key=_place) if found else max(behind, key=_place, default=EquationOrigin(0))
            origins.append(origin)
            for var in eqn.outvars:
                known.setdefault(var, origin)
        made = {var for eqn in closed.jaxpr.eqns for var in eqn.outvars}
        slices = {
            now[var]: Slice(now[one.argument], one.start, one.stop)
            for var, one in self.whole.slices.items()
            if now.get(var) in made
        }
        joined = {
            now[var]: tuple(now.get(atom, atom) for atom in atoms)
            for var, atoms in self.whole.joined.items()
            if now.get(var) in made
        }
        return UnstackedStep(closed, tuple(origins), slices, joined)


def _place(origin: EquationOrigin) -> tuple[int, int]:
    return origin.equation, origin.trip


def _made(closed: ClosedJaxpr) -> list[Var]:
    return [var for eqn in closed.jaxpr.eqns for var in eqn.outvars if not isinstance(var, DropVar)]


def _origins_in(scope: Scope, made: Sequence[Var], origins: Mapping[Var, EquationOrigin]) -> dict[Var, EquationOrigin]:
    """Variable of the scope's body -> where it comes from: where it is made first, if it is made several times."""
    found: dict[Var, EquationOrigin] = {}
    for var, atom in zip(made, scope.watched_atoms, strict=True):
        if isinstance(atom, Var):
            found.setdefault(atom, origins[var])
    return found


def _blocks_of_both(own: Sequence[StageBlock], other: Scope) -> list[tuple[StageBlock, Block]] | None:
    """The blocks of the whole batch with those of a microbatch; None if they are not alike."""
    there = list(other.blocks())
    if len(there) != len(own):
        return None
    pairs = [(one, StageBlock(block, turns, one.stage)) for one, (block, turns) in zip(own, there, strict=True)]
    return [(one, found.block) for one, found in pairs] if all(a.look == b.look for a, b in pairs) else None


def _cut(forward: ForwardPass, saved: BlockCut) -> Cut:
    kept, again = frozenset(saved.kept), frozenset(saved.again)
    seconds = math.fsum(forward.seconds[e] for e in again)
    return Cut(kept, again, math.fsum(forward.bytes[v] for v in kept), seconds)


def _refusal() -> MicrobatchError:
    return MicrobatchError(
        "remat='auto': the step computes something else for fewer rows, so that nothing says which of its values a "
        "microbatch is to keep.\nLeave remat= out, or use other microbatches."
    )


def _watching(closed: ClosedJaxpr, variables: Iterable[Var]) -> ClosedJaxpr:
    """The same with results behind its own."""
    jaxpr = closed.jaxpr
    return ClosedJaxpr(jaxpr.replace(outvars=[*jaxpr.outvars, *variables], debug_info=jaxpr.debug_info), closed.consts)
