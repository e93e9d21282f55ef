"""Two scans in, of which the second reads what the first stacks; out both again, with less of it stacked.

So JAX writes the derivative of a scan: the forward pass stacks its *residuals*, and the backward pass reads a slice of
each in every turn. A residual that is not stacked is computed again in that turn, of what is. No barrier is needed: XLA
does not merge what two loops compute. A residual may be stacked in the memory of hosts: each turn sends its slice there
and fetches one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from autoshard.jaxprs import JaxprEqn, Literal, Var, array_bytes, aval_of, evaluated, written_at
from autoshard.mesh.topology import Topology
from autoshard.program.user_code import source_of
from autoshard.remat.costs import Seconds, moving_seconds
from autoshard.remat.cuts import Cut, ForwardPass
from autoshard.remat.numbering import Atom, NumberedLoop, needed, variables
from autoshard.remat.residuals import Residuals


@dataclass(frozen=True, eq=False)
class LoopPair(Residuals):
    """A forward scan, and the backward scan that reads what it stacks."""

    first: NumberedLoop
    second: NumberedLoop
    early: frozenset[Var]  # what the second loop's body reads from outside that is there before the first loop
    others: frozenset[Var]  # stacks of the first loop that are read by more than the second loop's slices
    seconds: Seconds

    # Which values and equations are the forward pass's.

    @cached_property
    def varying(self) -> frozenset[Var]:
        """What is another value in every turn of the first loop; equations of the second loop join in."""
        found = {*variables(self.first.carried), *variables(self.first.slices)}
        for eqn in self.first.body.equations:
            if not found.isdisjoint(variables(eqn.invars)):
                found.update(eqn.outvars)
        for eqn in self.joining:
            found.update(eqn.outvars)
        return frozenset(found)

    @cached_property
    def made(self) -> frozenset[Var]:
        """All that the first loop has in a turn."""
        made = {var for eqn in self.first.body.equations for var in eqn.outvars}
        return frozenset(made | set(variables(self.first.body.inputs)))

    @cached_property
    def invariant(self) -> tuple[JaxprEqn, ...]:
        """What each body computes that is the same in all turns: there in both passes, of what is outside."""
        found = list[JaxprEqn]()
        changes = {*variables(self.first.carried), *variables(self.first.slices)}
        changes |= {*variables(self.second.carried), *variables(self.second.slices)}
        here = set[Var]()
        for eqn in (*self.first.body.equations, *self.second.body.equations):
            if eqn.effects or not changes.isdisjoint(variables(eqn.invars)):
                changes.update(eqn.outvars)
            elif here.isdisjoint(eqn.outvars):
                found.append(eqn)
                here.update(eqn.outvars)
        return tuple(found)

    @cached_property
    def joining(self) -> tuple[JaxprEqn, ...]:
        """Equations of the second loop that read nothing but the forward pass. They may as well stand in the first."""
        there, same = set(self.made | self.early), {id(eqn) for eqn in self.invariant}
        found = list[JaxprEqn]()
        for eqn in (*self.invariant, *self.second.body.equations):
            if not eqn.effects and there.issuperset(variables(eqn.invars)):
                if id(eqn) not in same and there.isdisjoint(eqn.outvars):
                    found.append(eqn)
                there.update(eqn.outvars)
        return tuple(found)

    @cached_property
    def forward(self) -> tuple[JaxprEqn, ...]:
        """The equations that may run in either loop."""
        same = {id(eqn) for eqn in self.invariant}
        return tuple(eqn for eqn in (*self.first.body.equations, *self.joining) if id(eqn) not in same)

    @cached_property
    def backward(self) -> tuple[JaxprEqn, ...]:
        """The equations that run in the second loop alone."""
        elsewhere = {var for eqn in (*self.forward, *self.invariant) for var in eqn.outvars}
        return tuple(eqn for eqn in self.second.body.equations if elsewhere.isdisjoint(eqn.outvars))

    @cached_property
    def wanted(self) -> tuple[Var, ...]:
        """What the second loop reads of the forward pass."""
        read = [*(atom for eqn in self.backward for atom in eqn.invars), *self.second.body.results]
        return tuple(dict.fromkeys(var for var in variables(read) if var in self.varying))

    @cached_property
    def stacked_anyhow(self) -> Mapping[Var, Var]:
        """What of a turn lies stacked whatever is chosen -> the stack."""
        stacks = zip(self.first.slices, self.first.sliced, strict=True)
        found = {var: stack for var, stack in stacks if isinstance(var, Var) and isinstance(stack, Var)}
        for var, stack in zip(self.first.stacked_inside, self.first.stacks, strict=True):
            if isinstance(var, Var) and stack in self.others:
                found.setdefault(var, stack)
        return found

    # The choice.

    def moving(self, topology: Topology) -> tuple[float, ...]:
        turns = self.first.length
        return tuple(
            moving_seconds(var.aval, turns, topology) if size > 0 else math.inf
            for var, size in zip(self.values, self.forward_pass.bytes, strict=True)
        )

    @cached_property
    def values(self) -> tuple[Var, ...]:
        made = (var for eqn in self.forward for var in eqn.outvars)
        return tuple(dict.fromkeys([*variables(self.first.carried), *variables(self.first.slices), *made]))

    @cached_property
    def forward_pass(self) -> ForwardPass:
        """What can be chosen, for all turns together."""
        place = {var: i for i, var in enumerate(self.values)}
        turns = self.first.length
        return ForwardPass(
            bytes=tuple(0 if var in self.stacked_anyhow else turns * array_bytes(var.aval) for var in self.values),
            makers=tuple(self.makers(self.forward)),
            reads=tuple(tuple(place[var] for var in variables(eqn.invars) if var in place) for eqn in self.forward),
            seconds=tuple(turns * self.seconds(eqn) for eqn in self.forward),
            wanted=tuple(place[var] for var in self.wanted),
        )

    def bytes_again(self, cut: Cut) -> float:
        """Of what the backward pass makes again or fetches and reads, in one turn."""
        again = {var for e in cut.again for var in self.forward[e].outvars}
        return sum(array_bytes(var.aval) for var in {*again.intersection(self.wanted), *self.moved(cut)})

    def line_of(self, var: Var) -> str:
        """The user's line that makes a value."""
        for eqn in self.forward:
            if var in eqn.outvars:
                return str(source_of(eqn) or source_of(self.first.eqn) or "unknown line")
        return f"carry of {source_of(self.first.eqn) or 'a loop'}"

    # The loops.

    def run_first(self, cut: Cut, env: dict[Var, Any]) -> dict[Var, Any]:
        """Runs the forward loop; what it makes, the stacks of what is kept among it."""
        loop, anyhow = self.first, self.stacked_anyhow
        kept = [var for var in self.kept(cut) if var not in anyhow]
        own = [(i, inside) for i, inside in enumerate(loop.stacked_inside) if loop.stacks[i] in self.others]
        ends: list[Atom] = [*loop.body.results[: loop.carries], *(inside for _, inside in own), *kept]
        equations = needed((*self.invariant, *self.forward), ends)
        moved = frozenset(self.moved(cut))
        away = frozenset(i for i, var in enumerate(kept, start=len(ends) - len(kept)) if var in moved)
        made = _scan(loop, env, equations, ends, {stack: var for var, stack in _stacks_of(loop)}, sent=away)
        finals, stacks = made[: loop.carries], made[loop.carries :]
        found: dict[Var, Any] = dict(zip(loop.eqn.outvars[: loop.carries], finals, strict=True))
        found |= {loop.stacks[i]: stack for (i, _), stack in zip(own, stacks, strict=False)}
        return found | {self.stack_of[var]: stack for var, stack in zip(kept, stacks[len(own) :], strict=True)}

    def run_second(self, cut: Cut, env: dict[Var, Any]) -> dict[Var, Any]:
        """Runs the backward loop, which computes again what is not kept."""
        loop = self.second
        again = [self.forward[e] for e in sorted(cut.again)]
        equations = needed((*self.invariant, *again, *self.backward), loop.body.results)
        from_first = set(self.first.stacks)
        slices = {stack: var for var, stack in _stacks_of(loop) if stack not in from_first}
        slices |= {stack: var for var, stack in _stacks_of(self.first)}
        slices |= {self.stacked_anyhow.get(var, self.stack_of[var]): var for var in self.kept(cut)}
        made = _scan(loop, env, equations, loop.body.results, slices, fetched=frozenset(self.moved(cut)))
        return dict(zip(loop.eqn.outvars, made, strict=True))

    @cached_property
    def stack_of(self) -> dict[Var, Var]:
        """A variable for the stack of each value, if it is kept."""
        return {var: Var(var.aval) for var in self.values}


def _stacks_of(loop: NumberedLoop) -> Iterable[tuple[Var, Var]]:
    """The slices that a loop reads, with their stacks."""
    for var, stack in zip(loop.slices, loop.sliced, strict=True):
        if isinstance(var, Var) and isinstance(stack, Var):
            yield var, stack


def _scan(
    loop: NumberedLoop,
    env: Mapping[Var, Any],
    equations: Sequence[JaxprEqn],
    ends: Sequence[Atom],
    slices: Mapping[Var, Var],
    sent: frozenset[int] = frozenset(),
    fetched: frozenset[Var] = frozenset(),
) -> list[Any]:
    """A loop of other equations in the place of one, with its number of turns and its order.

    Args:
        slices: stack -> what each turn reads of it.
        sent: which of the ends are stacked in the memory of hosts.
        fetched: slices of such stacks.
    """
    read = {var for eqn in equations for var in variables(eqn.invars)} | set(variables(ends))
    taken = [(stack, var) for stack, var in slices.items() if var in read]
    carried = variables(loop.carried)
    inside = {*carried, *(var for _, var in taken), *(var for eqn in equations for var in eqn.outvars)}
    outside = list(filter((read - inside).__contains__, env))  # in the order in which they are made
    params = loop.eqn.params

    def run(*arrays: Any) -> list[Any]:
        constants = dict(zip(outside, arrays, strict=False))
        rest = arrays[len(outside) :]

        def turn(carry: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
            known = constants | dict(zip(carried, carry, strict=True))
            known |= {
                var: jax.device_put(one, jax.memory.Space.Device) if var in fetched else one
                for (_, var), one in zip(taken, sliced, strict=True)
            }
            made = list(dict.fromkeys(variables(ends)))
            found = dict(zip(made, evaluated(equations, known, made), strict=True))
            results = [found[atom] if isinstance(atom, Var) else _full(atom) for atom in ends]
            for i in sent:
                results[i] = jax.device_put(results[i], jax.memory.Space.Host)
            return results[: loop.carries], results[loop.carries :]

        finals, stacks = jax.lax.scan(
            turn,
            list(rest[: loop.carries]),
            list(rest[loop.carries :]),
            length=loop.length,
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*finals, *stacks]

    starts = [_read(env, atom) for atom in loop.eqn.invars[loop.consts : loop.consts + loop.carries]]
    operands = [*(env[var] for var in outside), *starts, *(env[stack] for stack, _ in taken)]
    return written_at(loop.eqn, run, *operands)


def _read(env: Mapping[Var, Any], atom: Atom) -> Any:
    return _full(atom) if isinstance(atom, Literal) else env[atom]


def _full(atom: Literal) -> Any:
    """A number of the type that the program has it in."""
    return jax.lax.full((), atom.val, aval_of(atom).dtype) if not aval_of(atom).shape else atom.val
