"""Equations of a step in microbatches to what pipelines ask of them: forward or backward, cheap or not, their work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from autoshard.jaxprs import (
    CUSTOM,
    REMAT,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    array_bytes,
    aval_of,
    called_jaxpr,
    equations_of,
    is_array,
    scan_counts,
)
from autoshard.mesh.compute import flops
from autoshard.microbatches.loop import MicrobatchedStep
from autoshard.microbatches.proof import equation_of
from autoshard.microbatches.relations import BatchRows, PartialResult
from autoshard.primitives import FlopRule, facts_of

# What costs memory bandwidth alone, so that the backward pass may do it again.
_CHEAP_WORK = frozenset({FlopRule.NONE, FlopRule.PER_RESULT, FlopRule.REDUCTION})
_LOOPS = frozenset({"cond", "scan", "while"})
_NOT_AGAIN = frozenset({"gather", "scatter", "shard_map"})


def variables(atoms: Iterable[Any]) -> list[Var]:
    """Those of the atoms that are no literals, each once."""
    return list(dict.fromkeys(atom for atom in atoms if isinstance(atom, Var)))


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation is elementwise work, a reduction or a move, which may as well be done twice."""
    name = eqn.primitive.name
    if eqn.effects or name in _LOOPS | REMAT | _NOT_AGAIN:
        return False
    if (called := called_jaxpr(eqn)) is not None:
        return all(map(is_cheap, equations_of(called.jaxpr)))
    return name not in CUSTOM and facts_of(name).work in _CHEAP_WORK


def work(eqn: JaxprEqn) -> float:
    """FLOPs of an equation, those inside of loops and calls included; a loop of unknown length turns once."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return float(params["length"]) * total_work(params["jaxpr"].jaxpr)
    if name == "while":
        return total_work(params["body_jaxpr"].jaxpr)
    if name == "cond":
        return max(total_work(branch.jaxpr) for branch in params["branches"])
    if (called := called_jaxpr(eqn)) is not None:
        return total_work(called.jaxpr)
    inner = [one for one in params.values() if isinstance(one, Jaxpr | ClosedJaxpr)]
    if inner or not all(is_array(aval_of(x)) for x in (*eqn.invars, *eqn.outvars)):
        return 0.0
    return flops(equation_of(eqn))


def total_work(jaxpr: Jaxpr) -> float:
    return sum(map(work, equations_of(jaxpr)))


def bytes_of(var: Any) -> int:
    """Bytes of a variable's array."""
    return array_bytes(aval_of(var))


@dataclass(frozen=True, eq=False)
class PipelineRoles:
    """What the equations of the loop over microbatches are to a pipeline.

    Numbers of equations are indices into `step.equations`. The smaller trace, of one microbatch, has the same.
    """

    step: MicrobatchedStep
    held: frozenset[int] = frozenset()  # equations that one stage alone computes, however cheap they are

    @cached_property
    def loop(self) -> tuple[int, ...]:
        """The equations of every microbatch that something reads, in their order."""
        return self.step.needs.looped

    @cached_property
    def makers(self) -> Mapping[Var, int]:
        """Variable -> the loop equation that makes it."""
        return {var: i for i in self.loop for var in self.step.equations[i].outvars if self.step.in_loop(var)}

    def inputs(self, i: int) -> list[Var]:
        return variables(self.step.equations[i].invars)

    def made_in_loop(self, i: int) -> list[Var]:
        """The operands of an equation that the loop makes."""
        return [var for var in self.inputs(i) if var in self.makers]

    @cached_property
    def readers(self) -> Mapping[Var, tuple[int, ...]]:
        """Variable -> the loop equations that read it."""
        found: dict[Var, list[int]] = {}
        for i in self.loop:
            for var in self.inputs(i):
                found.setdefault(var, []).append(i)
        return {var: tuple(several) for var, several in found.items()}

    @cached_property
    def backward(self) -> frozenset[int]:
        """Equations of the backward pass: JAX says so in their names, or they read what one of these makes."""
        found: set[int] = set()
        for i in self.loop:
            named = "transpose(" in str(self.step.equations[i].source_info.name_stack)
            if named or any(self.makers[var] in found for var in self.made_in_loop(i)):
                found.add(i)
        return frozenset(found)

    @cached_property
    def cheap(self) -> frozenset[int]:
        """Equations that may be computed twice."""
        return frozenset(i for i in self.loop if i not in self.held and is_cheap(self.step.equations[i]))

    @cached_property
    def parameters(self) -> frozenset[Var]:
        """What is known before the first microbatch and made of state: arguments without rows of some size, floats."""
        step = self.step
        found: set[Var] = set()
        for i, var in enumerate(step.whole.invars):
            aval = aval_of(var)
            if i not in step.split.dims and is_array(aval) and aval.shape and _is_float(aval):
                found.add(var)
        for i, eqn in enumerate(step.equations):
            if any(var in found for var in self.inputs(i)):
                found |= {var for var in eqn.outvars if not step.in_loop(var) and aval_of(var).shape}
        return frozenset(found)

    @cached_property
    def free(self) -> frozenset[int]:
        """Cheap equations on no parameters: every stage that reads them computes them itself.

        They are of the forward pass, or read only what such equations make and numbers that are known before the loop,
        as zeros of the backward pass and the cotangent of a loss beside another.
        """
        found: set[int] = set()
        for i in self.loop:
            inputs = self.inputs(i)
            if i in self.held or any(var in self.parameters for var in inputs):
                continue
            known = (self.makers[var] in found if var in self.makers else not aval_of(var).shape for var in inputs)
            if i in self.backward and not all(known):
                continue
            eqn = self.step.equations[i]
            may = is_cheap(eqn) or (i,) in self.step.proof.drawn
            if may and all(self.makers[var] in found for var in self.made_in_loop(i)):
                found.add(i)
        return frozenset(found - self._of_sums)

    @cached_property
    def _of_sums(self) -> frozenset[int]:
        """Equations that make sums over microbatches, or rows that are read after the last: only one stage has them."""
        handed = {*self.step.needs.sums, *self.step.needs.rows}
        return frozenset(i for i in self.loop if not handed.isdisjoint(self.step.equations[i].outvars))

    @cached_property
    def added(self) -> frozenset[int]:
        """Equations that only add sums over microbatches to each other: they may as well run after the last one."""
        found: set[int] = set()
        for i in self.loop:
            relations = [self.step.proof.relations[var] for var in self.inputs(i)]
            if any(isinstance(one, BatchRows) for one in relations):
                continue
            parts = [var for var, one in zip(self.inputs(i), relations, strict=True) if isinstance(one, PartialResult)]
            if len(parts) > 1 or any(self.makers.get(var) in found for var in parts):
                found.add(i)
        return frozenset(found)

    # Loops over layers.

    @cached_property
    def stacks(self) -> Mapping[int, int]:
        """Scan over layers, forward or backward -> the forward scan over the same layers."""
        owner: dict[Var, int] = {}  # stacked array -> its forward scan
        found: dict[int, int] = {}
        for i in self.loop:
            eqn = self.step.equations[i]
            if eqn.primitive.name != "scan":
                for out in eqn.outvars:
                    stacked = [
                        v for v in self.inputs(i) if v in owner and aval_of(v).shape[:1] == aval_of(out).shape[:1]
                    ]
                    if stacked and aval_of(out).shape:
                        owner[out] = owner[stacked[0]]
                continue
            consts, carries = scan_counts(eqn)
            stacked = variables(eqn.invars[consts + carries :])
            length = eqn.params["length"]
            known = [owner[var] for var in stacked if var in owner]
            known = [one for one in known if self.step.equations[one].params["length"] == length]
            if not known and (i in self.backward or not any(var in self.parameters for var in stacked)):
                continue
            found[i] = max(set(known), key=known.count) if known else i
            owner |= dict.fromkeys((*stacked, *eqn.outvars[carries:]), found[i])
        return found


def _is_float(aval: Any) -> bool:
    return bool(jax.dtypes.issubdtype(aval.dtype, np.inexact))
