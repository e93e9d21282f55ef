"""State that the passes of a step do not read, as moments of an optimizer, in the memory of hosts between steps.

Which arguments these are follows from the equations: a result takes the argument's place, no equation of a forward or
backward pass depends on it, and what depends on it works element by element. It has one part per layer of a scanned
model, since it is updated in a loop over these: each turn fetches the part of one layer, and sends back what takes its
place. A loop is what keeps XLA from fetching all of it early. Whole arrays it brings over while the backward pass runs,
whatever barriers say, so that they would be on devices when memory is scarcest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from autoshard.jaxprs import (
    IN_HOST_MEMORY,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    array_bytes,
    aval_of,
    evaluated,
    has_backward_pass,
    inner_jaxprs,
    is_array,
    is_transposed,
    on_host,
)
from autoshard.microbatches.inline_calls import opened
from autoshard.primitives import facts_of
from autoshard.remat.costs import is_movable
from autoshard.remat.numbering import variables
from autoshard.report.units import bytes_text


@dataclass(frozen=True, eq=False)
class HostState:
    """A step, and which of its state can lie on hosts."""

    closed: ClosedJaxpr  # plain calls opened
    carried: Mapping[int, int]  # argument -> the result that takes its place

    @classmethod
    def of(cls, closed: ClosedJaxpr, carried: Mapping[int, int]) -> HostState:
        return cls(opened(closed), carried)

    @property
    def equations(self) -> Sequence[JaxprEqn]:
        equations: Sequence[JaxprEqn] = self.closed.jaxpr.eqns
        return equations

    @cached_property
    def of_passes(self) -> frozenset[Var]:
        """What the backward passes make and depend on."""
        found = set[Var]()
        for eqn in reversed(self.equations):
            if _is_backward(eqn):
                found.update(eqn.outvars)
            if not found.isdisjoint(eqn.outvars):
                found.update(variables(eqn.invars))
        return frozenset(found)

    @cached_property
    def loops(self) -> tuple[UpdateLoop, ...]:
        """The loops in which state on hosts is updated; none share an equation."""
        if not all(is_array(aval) and not on_host(aval) for aval in self.closed.in_avals):
            return ()  # tokens and what the user keeps on hosts are not told apart from what would be moved
        lengths, inputs, results = set(_layers(self.closed.jaxpr)), self.closed.jaxpr.invars, self.closed.jaxpr.outvars
        found = list[UpdateLoop]()
        for i, result in sorted(self.carried.items()):
            var, end = inputs[i], results[result]
            if any(one is var for one in results) or sum(one is end for one in results) > 1:
                continue  # what else it is returned as would lie on hosts, too
            if not _is_whole_array(var.aval) or aval_of(var).shape[0] not in lengths or var in self.of_passes:
                continue
            following = self.following(var)
            is_made = any(end in eqn.outvars for eqn in following)
            if not is_made or not all(_is_pointwise(eqn, aval_of(var).shape) for eqn in following):
                continue
            alike = [one for one in found if one.shares(following)]
            found = [one for one in found if one not in alike]
            found.append(UpdateLoop.of(self, [var, *(var for one in alike for var in one.moved)]))
        # The next call has this state on hosts. It is this step again only if JAX refuses to trace it so.
        return tuple(found) if self.is_refused_on_hosts([var for loop in found for var in loop.moved]) else ()

    def is_refused_on_hosts(self, moved: Sequence[Var]) -> bool:
        """Whether JAX refuses to trace the step with these arguments on hosts: an equation reads others beside them."""
        following = self.following(*moved)
        own = {*moved, *(var for eqn in following for var in eqn.outvars)}
        read = {var for eqn in following for var in variables(eqn.invars)}
        return any(aval_of(var).shape for var in read - own)

    def following(self, *arguments: Var) -> list[JaxprEqn]:
        """The equations that depend on these arguments."""
        reached, found = set(arguments), list[JaxprEqn]()
        for eqn in self.equations:
            if not reached.isdisjoint(variables(eqn.invars)):
                reached.update(eqn.outvars)
                found.append(eqn)
        return found

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """The arguments that can lie on hosts."""
        moved = {var for loop in self.loops for var in loop.moved}
        return tuple(i for i, var in enumerate(self.closed.jaxpr.invars) if var in moved)

    @property
    def bytes(self) -> float:
        """Of whole arrays that can lie on hosts."""
        return sum(array_bytes(self.closed.in_avals[i]) for i in self.movable)

    @property
    def remark(self) -> str:
        """What is moved, in words."""
        return (
            f"{len(self.movable)} arrays of the state, {bytes_text(self.bytes)}, lie in the memory of hosts between "
            "steps: only the update reads them, layer by layer."
        )

    def rewritten(self) -> ClosedJaxpr:
        """The step with this state on hosts: it takes it from there, and leaves it there."""
        moved, constants = frozenset(self.movable), self.closed.jaxpr.constvars
        types = [
            jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=IN_HOST_MEMORY if i in moved else None
            )
            for i, aval in enumerate([*map(aval_of, constants), *self.closed.in_avals], start=-len(constants))
        ]
        made = jax.make_jaxpr(self.run)(*types)
        jaxpr = made.jaxpr.replace(
            constvars=[*made.jaxpr.constvars, *made.jaxpr.invars[: len(constants)]],
            invars=made.jaxpr.invars[len(constants) :],
            debug_info=self.closed.jaxpr.debug_info,
        )
        return ClosedJaxpr(jaxpr, [*made.consts, *self.closed.consts])

    def run(self, *arrays: Any) -> list[Any]:
        jaxpr = self.closed.jaxpr
        env: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], arrays, strict=True))
        inside = {id(eqn) for loop in self.loops for eqn in loop.equations}
        outside = [eqn for eqn in self.equations if id(eqn) not in inside]  # none reads what a loop makes
        made = list(dict.fromkeys(var for eqn in outside for var in eqn.outvars))
        env.update(zip(made, evaluated(outside, env, made), strict=True))
        for loop in self.loops:
            env.update(loop.run(env))
        return [env[atom] if isinstance(atom, Var) else atom.val for atom in jaxpr.outvars]


@dataclass(frozen=True, eq=False)
class UpdateLoop:
    """Equations that work element by element on arrays of one shape, run layer by layer."""

    equations: tuple[JaxprEqn, ...]
    moved: tuple[Var, ...]  # arguments on hosts
    sent: frozenset[Var]  # results on hosts
    replaced: Mapping[Var, Var]  # argument on devices -> the result that is written over it
    results: tuple[Var, ...]  # all other results

    @classmethod
    def of(cls, state: HostState, moved: Sequence[Var]) -> UpdateLoop:
        """The loop that updates these arguments, with what is made for it alone."""
        jaxpr, shape = state.closed.jaxpr, aval_of(moved[0]).shape
        chosen = {id(eqn) for eqn in state.following(*moved)}
        ends, readers = set(variables(jaxpr.outvars)), dict[Var, list[int]]()
        for eqn in state.equations:
            for var in variables(eqn.invars):
                readers.setdefault(var, []).append(id(eqn))
        for eqn in reversed(state.equations):
            is_read_here = all(chosen.issuperset(readers.get(var, ())) and var not in ends for var in eqn.outvars)
            if is_read_here and _is_pointwise(eqn, shape) and state.of_passes.isdisjoint(eqn.outvars):
                chosen.add(id(eqn))
        equations = tuple(eqn for eqn in state.equations if id(eqn) in chosen)
        made = {var for eqn in equations for var in eqn.outvars}
        read = {var for eqn in equations for var in variables(eqn.invars)}
        pairs = {jaxpr.invars[i]: jaxpr.outvars[j] for i, j in state.carried.items()}
        sent = frozenset(pairs[var] for var in moved)
        replaced = {var: end for var, end in pairs.items() if var in read and end in made and end not in sent}
        results = tuple(var for var in dict.fromkeys(variables(jaxpr.outvars)) if var in made)
        others = tuple(var for var in results if var not in replaced.values())
        return cls(equations, tuple(moved), sent, replaced, others)

    def shares(self, equations: Sequence[JaxprEqn]) -> bool:
        """Whether some of these are its own."""
        own = {id(eqn) for eqn in self.equations}
        return any(id(eqn) in own for eqn in equations)

    def run(self, env: Mapping[Var, Any]) -> dict[Var, Any]:
        """What takes the place of all that is updated."""
        layers, *shape = aval_of(self.moved[0]).shape
        made = {var for eqn in self.equations for var in eqn.outvars}
        read = dict.fromkeys(var for eqn in self.equations for var in variables(eqn.invars) if var not in made)
        numbers = [var for var in read if not aval_of(var).shape]
        sliced = [var for var in read if aval_of(var).shape and var not in self.replaced]
        moved, wanted = frozenset(self.moved), [*self.replaced.values(), *self.results]
        equations = [_of_one_layer(eqn, tuple(shape)) for eqn in self.equations]

        def turn(carry: Any, slices: Any) -> tuple[Any, list[Any]]:
            layer, known, written = carry
            there = dict(zip(numbers, known, strict=True))
            there |= {
                var: jax.device_put(one, jax.memory.Space.Device) if var in moved else one
                for var, one in zip(sliced, slices, strict=True)
            }
            parts = (jax.lax.dynamic_index_in_dim(one, layer, keepdims=False) for one in written)
            there |= dict(zip(self.replaced, parts, strict=True))
            found = dict(zip(wanted, evaluated(equations, there, wanted), strict=True))
            written = [
                jax.lax.dynamic_update_index_in_dim(one, found[end], layer, 0)
                for one, end in zip(written, self.replaced.values(), strict=True)
            ]
            ends = [
                jax.device_put(found[var], jax.memory.Space.Host) if var in self.sent else found[var]
                for var in self.results
            ]
            return (layer + 1, known, written), ends

        def loop(numbers: Any, written: Any, arrays: Any) -> list[Any]:
            start = jax.numpy.int32(0), numbers, written
            (_, _, ends), stacks = jax.lax.scan(turn, start, arrays, length=layers)
            return [*ends, *stacks]

        operands = ([env[var] for var in some] for some in (numbers, self.replaced, sliced))
        return dict(zip(wanted, loop(*operands), strict=True))


def _of_one_layer(eqn: JaxprEqn, shape: tuple[int, ...]) -> JaxprEqn:
    """The equation for a part of its arrays."""
    if eqn.primitive.name != "broadcast_in_dim":
        return eqn
    return eqn.replace(params={**eqn.params, "shape": shape, "broadcast_dimensions": ()})


def _layers(jaxpr: Jaxpr) -> Iterator[int]:
    """The lengths of loops of a backward pass."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and is_transposed(eqn):
            yield eqn.params["length"]
        for inner in inner_jaxprs(eqn):
            yield from _layers(inner.jaxpr)


def _is_backward(eqn: JaxprEqn) -> bool:
    return is_transposed(eqn) or any(has_backward_pass(inner.jaxpr) for inner in inner_jaxprs(eqn))


def _is_pointwise(eqn: JaxprEqn, shape: tuple[int, ...]) -> bool:
    """Whether an equation makes arrays of this shape, element by element, of such arrays and numbers."""
    name = eqn.primitive.name
    if eqn.effects or not all(aval_of(var).shape == shape for var in eqn.outvars):
        return False
    if name == "broadcast_in_dim":
        return not aval_of(eqn.invars[0]).shape
    is_pointwise = facts_of(name).is_pointwise or name == "copy"
    return is_pointwise and all(aval_of(atom).shape in (shape, ()) for atom in eqn.invars)


def _is_whole_array(aval: Any) -> bool:
    """Whether it is an array of layers in the memory of devices."""
    return is_movable(aval) and len(aval.shape) > 1
