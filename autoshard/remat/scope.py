"""A jaxpr in, out where it keeps values for a backward pass, and the jaxpr with other ones kept."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from autoshard.jaxprs import ClosedJaxpr, JaxprEqn, Literal, Var, aval_of, evaluated, is_transposed
from autoshard.remat.costs import Seconds
from autoshard.remat.cuts import Cut
from autoshard.remat.loops import LoopPair
from autoshard.remat.numbering import Atom, NumberedBody, Numbering, needed, variables
from autoshard.remat.straight_line import StraightBlock, StraightPasses

Block = LoopPair | StraightBlock

SIZES = (1, 2, 4)  # so many of the smallest blocks outside of loops are taken together

_BODIES = {"scan": "jaxpr", "while": "body_jaxpr"}  # loop -> the parameter that holds its body


@dataclass(frozen=True, eq=False)
class Scope:
    """The jaxpr of a step, or of a loop around forward and backward passes, as one over microbatches."""

    closed: ClosedJaxpr
    seconds: Seconds
    turns: int = 1  # how often it runs per step
    like: Scope | None = None  # of the same step for another batch: blocks begin where those of that scope do
    apart: frozenset[int] = frozenset()  # equations at which blocks begin, too
    watched: int = 0  # so many of its last results are none of the step's: `rewritten_and_watched` says where they are
    there: frozenset[int] = frozenset()  # which of these are there for the backward pass, as arguments are

    @cached_property
    def numbering(self) -> Numbering:
        return Numbering()

    @cached_property
    def _numbered(self) -> NumberedBody:
        return self.numbering.body(self.closed, [Var(var.aval) for var in self.closed.jaxpr.invars])

    @cached_property
    def body(self) -> NumberedBody:
        """Its equations, with no results but those of the step."""
        found = self._numbered
        return replace(found, results=found.results[: len(found.results) - self.watched])

    @property
    def watched_atoms(self) -> Sequence[Atom]:
        """What its last results are in the variables of its body."""
        found = self._numbered.results
        return found[len(found) - self.watched :]

    @cached_property
    def pairs(self) -> tuple[LoopPair, ...]:
        """Its forward scans, each with the backward scan that reads what it stacks."""
        firsts, taken, found = dict[Var, int](), set[int](), list[LoopPair]()
        equations, readers = self.body.equations, self._readers()
        made_at = dict.fromkeys([*variables(self.body.inputs), *self.numbering.constants], -1)
        made_at |= {var: i for i, eqn in enumerate(equations) for var in eqn.outvars}
        for j, eqn in enumerate(equations):
            loop = self.numbering.loops.get(eqn.outvars[0]) if eqn.primitive.name == "scan" and eqn.outvars else None
            if loop is None:
                continue
            # A forward scan reads stacks of another, too, as each layer of a recurrent network those of the one below.
            read = variables(loop.sliced) if is_transposed(eqn) else []
            sources = {firsts[stack] for stack in read if stack in firsts} - taken
            i = max(sources, default=None)
            if i is not None:
                first = self.numbering.loops[equations[i].outvars[0]]
                if first.length == loop.length:
                    read = [atom for one in loop.body.equations for atom in variables(one.invars)]
                    early = frozenset(var for var in read if made_at.get(var, i) < i)
                    others = frozenset(stack for stack in first.stacks if readers[stack] - {j})
                    found.append(LoopPair(first, loop, early, others, self.seconds))
                    taken |= {i, j}
            firsts.update((stack, j) for stack in loop.stacks)
        return tuple(found)

    def _readers(self) -> Mapping[Var, set[int | None]]:
        """The loops that read a value slice by slice alone; None for whatever else reads it."""
        found = defaultdict[Var, set[int | None]](set)
        for var in variables(self.body.results):
            found[var].add(None)
        for j, eqn in enumerate(self.body.equations):
            loop = self.numbering.loops.get(eqn.outvars[0]) if eqn.primitive.name == "scan" and eqn.outvars else None
            whole = len(eqn.invars) if loop is None else loop.consts + loop.carries
            for n, atom in enumerate(eqn.invars):
                if isinstance(atom, Var):
                    found[atom].add(None if n < whole else j)
        return found

    @cached_property
    def inner(self) -> Mapping[int, Scope]:
        """Place of a loop that is in no pair -> its body, where that has forward and backward passes of its own."""
        paired = {id(loop.eqn) for pair in self.pairs for loop in (pair.first, pair.second)}
        found = dict[int, Scope]()
        for i, eqn in enumerate(self.body.equations):
            name = _BODIES.get(eqn.primitive.name)
            if name is None or id(eqn) in paired:
                continue
            like = None if self.like is None else self.like.inner.get(i)
            scope = Scope(eqn.params[name], self.seconds, self.turns * eqn.params.get("length", 1), like)
            if any(True for _ in scope.blocks()):
                found[i] = scope
        return found

    @cached_property
    def passes(self) -> StraightPasses:
        """What stands outside of its loops."""
        place = {id(eqn): i for i, eqn in enumerate(self.body.equations)}
        chosen_there = {var for pair in self.pairs for var in pair.first.stacks if var not in pair.others}
        watched = self.watched_atoms
        chosen_there |= set(variables([watched[i] for i in self.there]))
        return StraightPasses(
            equations=self.body.equations,
            fixed=frozenset({place[id(pair.first.eqn)] for pair in self.pairs} | self.inner.keys()),
            inputs=frozenset({*variables(self.body.inputs), *self.numbering.constants, *chosen_there}),
            results=frozenset(variables(self.body.results)),
            seconds=self.seconds,
            begins=None if self.like is None else self.like.passes.borders,
            apart=self.apart,
        )

    @cached_property
    def straight(self) -> Mapping[int, tuple[StraightBlock, ...]]:
        """How many of the smallest blocks outside of loops are taken together -> the blocks."""
        return {size: self.passes.blocks(size) for size in SIZES}

    def with_borders(self, apart: frozenset[int]) -> Scope:
        """The same with blocks that begin at these equations, too."""
        found = replace(self, apart=apart)
        # What no border changes is not found again.
        vars(found).update((name, getattr(self, name)) for name in ("numbering", "_numbered", "pairs", "inner"))
        return found

    def blocks(self, size: int = 1) -> Iterator[tuple[Block, int]]:
        """All places where values are kept, and how often per step they are.

        Args:
            size: how many of the smallest blocks outside of loops are taken together.
        """
        here: list[Block] = [*self.pairs, *self.straight[size]]
        yield from ((block, self.turns) for block in here)
        for scope in self.inner.values():
            yield from scope.blocks(size)

    def held_bytes(self, kept: Mapping[Block, float]) -> float:
        """The most bytes that are kept at one time, of these that blocks keep."""
        place = {id(eqn): i for i, eqn in enumerate(self.body.equations)}
        turn = self.passes.turning_point
        blocks = [block for several in self.straight.values() for block in several if block in kept]
        flat = sum(kept[block] for block in blocks)
        changes = [(place[id(pair.first.eqn)], kept[pair]) for pair in self.pairs]
        changes += [(place[id(pair.second.eqn)], -kept[pair]) for pair in self.pairs]
        changes += [(turn - 1, flat), (turn, -flat)]
        held = itertools.accumulate(size for _, size in sorted(changes))
        return max([*held, *(scope.held_bytes(kept) for scope in self.inner.values())], default=0.0)

    def rewritten(self, chosen: Mapping[Block, Cut]) -> ClosedJaxpr:
        """The jaxpr, from the same arguments to the same results, with these values kept."""
        return self.rewritten_and_watched(chosen)[0]

    def rewritten_and_watched(self, chosen: Mapping[Block, Cut]) -> tuple[ClosedJaxpr, dict[int, Any]]:
        """The same, and where in it the results are that are watched, as far as they are made: number -> atom."""
        variables_in = [*self.closed.jaxpr.constvars, *self.closed.jaxpr.invars]
        avals = map(aval_of, variables_in)
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
        there, watched_atoms = list[int](), self.watched_atoms

        def run(*arrays: Any) -> list[Any]:
            env, own = self.run(arrays, chosen), list(self.body.results)
            seen = [i for i, atom in enumerate(watched_atoms) if isinstance(atom, Var) and atom in env]
            there.extend(seen)
            own += [watched_atoms[i] for i in seen]
            return [atom.val if isinstance(atom, Literal) else env[atom] for atom in own]

        made = jax.make_jaxpr(run)(*types)
        consts = len(self.closed.jaxpr.constvars)
        jaxpr = made.jaxpr.replace(
            constvars=[*made.jaxpr.constvars, *made.jaxpr.invars[:consts]],
            invars=made.jaxpr.invars[consts:],
            outvars=made.jaxpr.outvars[: len(self.body.results)],
            debug_info=self.closed.jaxpr.debug_info,
        )
        watched = dict(zip(there, made.jaxpr.outvars[len(self.body.results) :], strict=True))
        return ClosedJaxpr(jaxpr, [*made.consts, *self.closed.consts]), watched

    def run(self, arrays: Any, chosen: Mapping[Block, Cut]) -> dict[Var, Any]:
        """The values of its variables, with these kept."""
        consts = len(self.closed.jaxpr.constvars)
        given = {id(const): array for const, array in zip(self.closed.consts, arrays[:consts], strict=True)}
        env: dict[Var, Any] = dict(zip(variables(self.body.inputs), arrays[consts:], strict=True))
        env |= {var: given.get(id(const), const) for var, const in self.numbering.constants.items()}
        starts = {id(pair.first.eqn): pair for pair in self.pairs}
        ends = {id(pair.second.eqn): pair for pair in self.pairs}
        again = dict[int, list[StraightBlock]]()
        for block in itertools.chain(*self.straight.values()):
            if block in chosen and (place := block.place(chosen[block])) is not None:
                again.setdefault(place, []).append(block)
        late = set[Var]()  # what is made again
        read = dict(env)  # the same values, and those made again instead, which the backward pass reads from then on
        waiting: list[JaxprEqn] = []

        def add(made: Mapping[Var, Any]) -> None:
            env.update(made)
            read.update((var, value) for var, value in made.items() if var not in late)

        def flush() -> None:
            made = [var for eqn in waiting for var in eqn.outvars]
            add(dict(zip(made, evaluated(waiting, read, made), strict=True)))
            waiting.clear()

        for i, eqn in enumerate(self.body.equations):
            if i == self.passes.turning_point:
                flush()
                for block in itertools.chain(*self.straight.values()):
                    if block in chosen:
                        late_kept = [var for var in block.kept(chosen[block]) if var not in env]
                        moved = [one for one in block.forward if not one.effects and one.outvars[0] not in env]
                        waiting += needed(moved, late_kept)
                        flush()
            if eqn.outvars and all(var in env for var in eqn.outvars):  # it was moved to the end of the forward pass
                continue
            if i in again:
                flush()
                for block in again[i]:
                    made_again = block.run_again(chosen[block], read)
                    late.update(made_again)
                    read.update(made_again)
            if id(eqn) in starts or id(eqn) in ends:
                flush()
                pair = starts.get(id(eqn)) or ends[id(eqn)]
                run = pair.run_first if pair.first.eqn is eqn else pair.run_second
                add(run(chosen[pair], read))
            elif (scope := self.inner.get(i)) is not None:
                name = _BODIES[eqn.primitive.name]
                waiting.append(eqn.replace(params={**eqn.params, name: scope.rewritten(chosen)}))
            else:
                waiting.append(eqn)
        flush()
        return env
