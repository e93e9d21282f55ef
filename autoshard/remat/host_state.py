"""State that the passes of a step do not read, as moments of an optimizer, in the memory of hosts between steps.

Which arguments these are follows from the equations: a result takes the argument's place, and no equation of a forward
or backward pass depends on it. Such an argument is fetched where the update first reads it, behind a barrier that a
gradient passes too, and what takes its place is sent back as soon as it is made. The update runs result by result, and
an array is fetched once all but one of those before it have been updated. So no more of the state than the update of
two results needs has to be on devices at a time, and both ways of the link to the host are busy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.jaxprs import (
    HOST,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    evaluated,
    has_backward_pass,
    inner_jaxprs,
    is_array,
    is_transposed,
    key_bytes,
    on_host,
)
from autoshard.microbatches.opening import opened
from autoshard.remat.barriers import behind_barrier
from autoshard.remat.costs import bytes_of
from autoshard.remat.numbering import variables
from autoshard.report.units import bytes_text

AT_ONCE = 2  # arrays that are on devices or on their way: as many moments as Adam has of each weight

_NOWHERE = AbstractMesh((1,), ("any",), axis_types=(AxisType.Auto,))


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
    def read_by_passes(self) -> frozenset[Var]:
        """What equations of a backward pass depend on."""
        found = set[Var]()
        for eqn in reversed(self.equations):
            if _is_backward(eqn) or not found.isdisjoint(eqn.outvars):
                found.update(variables(eqn.invars))
        return frozenset(found)

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """The arguments that can lie on hosts; none where the step has no backward pass."""
        inputs, results = self.closed.jaxpr.invars, self.closed.jaxpr.outvars
        if not self.read_by_passes:
            return ()
        return tuple(
            i
            for i, result in sorted(self.carried.items())
            if _is_large_array(inputs[i].aval)
            and inputs[i] not in self.read_by_passes
            and isinstance(results[result], Var)
            and results[result] is not inputs[i]
            and not any(eqn.effects for eqn in self.following([i]))
        )

    @cached_property
    def bytes(self) -> float:
        """Of whole arrays that can lie on hosts."""
        return sum(bytes_of(self.closed.jaxpr.invars[i].aval) for i in self.movable)

    @property
    def remark(self) -> str:
        """What is moved, in words."""
        return (
            f"{len(self.movable)} arrays of the state, {bytes_text(self.bytes)}, lie in the memory of hosts between "
            "steps: only the update reads them."
        )

    def following(self, arguments: Collection[int]) -> list[JaxprEqn]:
        """The equations that depend on these arguments."""
        reached, found = {self.closed.jaxpr.invars[i] for i in arguments}, list[JaxprEqn]()
        for eqn in self.equations:
            if not reached.isdisjoint(variables(eqn.invars)):
                reached.update(eqn.outvars)
                found.append(eqn)
        return found

    def rewritten(self) -> ClosedJaxpr:
        """The step with this state on hosts: it takes it from there, and leaves it there."""
        avals, moved = self.closed.in_avals, frozenset(self.movable)
        types = [
            jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=_host_sharding() if i in moved else None
            )
            for i, aval in enumerate(avals)
        ]
        constants = self.closed.jaxpr.constvars
        consts = [jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype) for var in constants]
        made = jax.make_jaxpr(lambda consts, *arrays: self.run(consts, arrays))(consts, *types)
        jaxpr = made.jaxpr.replace(
            constvars=[*made.jaxpr.constvars, *made.jaxpr.invars[: len(constants)]],
            invars=made.jaxpr.invars[len(constants) :],
            debug_info=self.closed.jaxpr.debug_info,
        )
        return ClosedJaxpr(jaxpr, [*made.consts, *self.closed.consts])

    def run(self, consts: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        jaxpr = self.closed.jaxpr
        env: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= dict(zip(jaxpr.invars, arrays, strict=True))
        passes, update = self.equations[: self.end_of_passes], self.equations[self.end_of_passes :]
        depends = {id(eqn) for eqn in self.following(self.movable)}
        passes = [eqn for eqn in passes if id(eqn) not in depends]
        update = [*(eqn for eqn in self.equations[: self.end_of_passes] if id(eqn) in depends), *update]
        made = list(dict.fromkeys(var for eqn in passes for var in eqn.outvars))
        env.update(zip(made, evaluated(passes, env, made), strict=True))
        run = _Update(self, update, env, frozenset(made))
        return [run.result(atom) for atom in jaxpr.outvars]

    @cached_property
    def end_of_passes(self) -> int:
        """The place behind the last equation that a backward pass is made of."""
        return 1 + max(i for i, eqn in enumerate(self.equations) if _is_backward(eqn))


class _Update:
    """The part of a step that reads state from hosts, run result by result."""

    def __init__(
        self, state: HostState, equations: Sequence[JaxprEqn], env: dict[Var, Any], of_passes: frozenset[Var]
    ) -> None:
        """
        Args:
            equations: of the update, in their order.
            env: what there is before it; `of_passes` of that is made by the passes.
        """
        self.env, self.ends = env, dict[Var, Any]()  # results that lie on hosts
        self.updated = list[Any]()  # these results, before they are sent
        inputs = state.closed.jaxpr.invars
        self.away = {inputs[i] for i in state.movable}
        self.sent = {state.closed.jaxpr.outvars[state.carried[i]] for i in state.movable}
        self.makers = {var: eqn for eqn in equations for var in eqn.outvars}
        self.gradients = self.gradients_of(equations, of_passes)
        for eqn in equations:
            if eqn.effects:
                for var in variables(eqn.invars):
                    self.make(var)
                self.run(eqn)

    def gradients_of(self, equations: Sequence[JaxprEqn], of_passes: frozenset[Var]) -> dict[Var, Var]:
        """Argument -> an array of its shape that the passes make, and that what takes its place is made of."""
        roots = {var: frozenset({var}) for var in self.away}
        gradients = {var: var for var in of_passes}
        found = dict[Var, Var]()
        for eqn in equations:
            read = variables(eqn.invars)
            above = frozenset[Var]().union(*(roots.get(var, frozenset()) for var in read))
            near = [gradients[var] for var in read if var in gradients]
            for var in eqn.outvars:
                roots[var] = above
                alike = next((one for one in near if one.aval.shape == var.aval.shape), None)
                if alike is not None:
                    gradients[var] = alike
            for root in above - found.keys():
                alike = next((one for one in near if one.aval.shape == root.aval.shape), None)
                if alike is not None:
                    found[root] = alike
        return found

    def result(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        self.make(atom)
        return self.ends.get(atom, self.env[atom])

    def make(self, wanted: Var) -> None:
        """Runs what a value needs, and nothing else."""
        waiting = [wanted]
        while waiting:
            eqn = self.makers.get(waiting[-1])
            if eqn is None or waiting[-1] in self.env:
                waiting.pop()
                continue
            missing = [var for var in variables(eqn.invars) if var in self.makers and var not in self.env]
            if missing:
                waiting += reversed(missing)
                continue
            self.run(eqn)

    def run(self, eqn: JaxprEqn) -> None:
        for var in self.away.intersection(variables(eqn.invars)):
            self.fetch(var, eqn)
        made = list(eqn.outvars)
        self.env.update(zip(made, evaluated([eqn], self.env, made), strict=True))
        for var in self.sent.intersection(made):
            self.updated.append(self.env[var])
            self.ends[var] = jax.device_put(self.env[var], jax.memory.Space.Host)

    def fetch(self, var: Var, eqn: JaxprEqn) -> None:
        """Brings an argument to devices, no earlier than its gradient is there and others have been updated."""
        beside = [self.env[self.gradients[var]]] if var in self.gradients else []
        beside += self.updated[-AT_ONCE:][:1] if len(self.updated) >= AT_ONCE else []
        (self.env[var],) = behind_barrier(
            lambda array, *_: [jax.device_put(array, jax.memory.Space.Device)], [self.env[var], *beside], eqn
        )
        self.away.discard(var)


def _is_backward(eqn: JaxprEqn) -> bool:
    return is_transposed(eqn) or any(has_backward_pass(inner.jaxpr) for inner in inner_jaxprs(eqn))


def _is_large_array(aval: Any) -> bool:
    """Whether it is an array of more than numbers in the memory of devices."""
    return bool(is_array(aval) and aval.shape and key_bytes(aval) is None and not on_host(aval))


def _host_sharding() -> NamedSharding:
    return NamedSharding(_NOWHERE, PartitionSpec(), memory_kind=HOST)
