"""A scan as rewrites look at it, and the scan with another body and other things before and after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from autoshard.jaxprs import ClosedJaxpr, JaxprEqn, Var, draws_otherwise_in_vmap, evaluated, inner_jaxprs, scan_counts
from autoshard.microbatches.inline_calls import opened
from autoshard.remat.numbering import needed, variables
from autoshard.rewrites.graph import BodyGraph


@dataclass(frozen=True, eq=False)
class ScanLoop:
    """A scan whose body closes over no arrays, and hands on no plain numbers."""

    eqn: JaxprEqn
    graph: BodyGraph  # of its body
    consts: int
    carries: int

    @classmethod
    def of(cls, eqn: JaxprEqn, devices: int) -> ScanLoop | None:
        """None if the equation is no such scan, or has effects."""
        if eqn.primitive.name != "scan" or eqn.effects:
            return None
        body: ClosedJaxpr = opened(eqn.params["jaxpr"])
        if body.consts or not all(isinstance(atom, Var) for atom in body.jaxpr.outvars):
            return None
        return cls(eqn, BodyGraph(body.jaxpr, devices), *scan_counts(eqn))

    @property
    def equations(self) -> Sequence[JaxprEqn]:
        return self.graph.jaxpr.eqns

    @cached_property
    def given(self) -> Mapping[Var, int]:
        """Variable of the body that is the same in every turn -> the operand of the scan."""
        return {var: i for i, var in enumerate(self.graph.jaxpr.invars[: self.consts])}

    @cached_property
    def carried(self) -> Sequence[Var]:
        """What a turn has of the one before."""
        return self.graph.jaxpr.invars[self.consts : self.consts + self.carries]

    @cached_property
    def slices(self) -> Mapping[Var, int]:
        """Variable of the body that is a slice -> the operand of the scan that is sliced."""
        start = self.consts + self.carries
        return {var: start + i for i, var in enumerate(self.graph.jaxpr.invars[start:])}

    @property
    def finals(self) -> Sequence[Var]:
        """What a turn hands on, per carry."""
        return variables(self.graph.jaxpr.outvars[: self.carries])

    @property
    def stacked(self) -> Sequence[Var]:
        """What a turn adds to the stacks."""
        return variables(self.graph.jaxpr.outvars[self.carries :])

    def depends(self, first: Iterable[Var]) -> set[Var]:
        """These variables of the body, and all that is made of them in one turn."""
        found = set(first)
        for eqn in self.equations:
            if not found.isdisjoint(variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    def scanned(
        self,
        operands: Sequence[Any],
        carries: Sequence[int],
        finals: Sequence[Var],
        stacked: Sequence[Var],
        more: Mapping[Var, Any],
    ) -> tuple[list[Any], list[Any]]:
        """Runs the loop with some of its carries, and other stacks.

        Args:
            operands: of the scan, in its order.
            carries: which of them the loop still has.
            finals: what a turn hands on, for each of these.
            stacked: what a turn adds to the stacks.
            more: variable of the body -> its values in all turns, from outside.

        Returns:
            The last carries, and the stacks.
        """
        ends = [*finals, *stacked]
        known = set(more)
        equations = needed([eqn for eqn in self.equations if known.isdisjoint(eqn.outvars)], ends)
        read = {var for eqn in equations for var in variables(eqn.invars)} | set(ends)
        taken = {var: array for var, array in more.items() if var in read}
        taken |= {var: operands[i] for var, i in self.slices.items() if var in read and var not in taken}
        same = {var: operands[i] for var, i in self.given.items() if var in read}
        held = [self.carried[i] for i in carries]

        def turn(carry: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
            values = same | dict(zip(held, carry, strict=True)) | dict(zip(taken, sliced, strict=True))
            made = list(dict.fromkeys(ends))
            found = dict(zip(made, evaluated(equations, values, made), strict=True))
            results = [found[var] for var in ends]
            return results[: len(finals)], results[len(finals) :]

        starts = [operands[self.consts + i] for i in carries]
        how = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        last, stacks = jax.lax.scan(turn, starts, list(taken.values()), **how)
        return list(last), list(stacks)

    def mapped(
        self, equations: Sequence[JaxprEqn], wanted: Sequence[Var], stacks: Mapping[Var, Any], operands: Sequence[Any]
    ) -> dict[Var, Any]:
        """Equations of the body run for all turns at once.

        Args:
            stacks: variable of the body -> its values in all turns.

        Returns:
            The values of the wanted variables in all turns.
        """
        same = {var: operands[i] for var, i in self.given.items()}

        def one(*slices: Any) -> list[Any]:
            return evaluated(equations, same | dict(zip(stacks, slices, strict=True)), wanted)

        return dict(zip(wanted, jax.vmap(one)(*stacks.values()), strict=True))


def is_plain(eqn: JaxprEqn) -> bool:
    """Whether an equation can be run for all turns at once, to the same numbers.

    It has no effects, holds no loop or branch, and draws no numbers of which others are drawn then.
    """
    is_inner = eqn.primitive.name in {"scan", "while", "cond"} or inner_jaxprs(eqn)
    return not (eqn.effects or is_inner or draws_otherwise_in_vmap(eqn))
