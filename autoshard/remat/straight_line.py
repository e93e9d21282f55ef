"""Equations outside of loops in, out the blocks in which what they make is kept for the backward pass or made again.

What depends on no cotangent is the forward pass. It is cut where few bytes pass from one part to the next, as between
the layers of an unrolled model. What passes there is kept if anything is made again of it, so that one block is made
again at a time. That is done right before its first value is read, behind a barrier that a cotangent passes too, as JAX
lowers `jax.checkpoint`: XLA would otherwise take the values of the forward pass, or make them again too early.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from autoshard.jaxprs import JaxprEqn, Var, array_bytes, evaluated, is_transposed
from autoshard.primitives import FlopRule, facts_of
from autoshard.program.user_code import source_of
from autoshard.remat.costs import Seconds
from autoshard.remat.cuts import Cut, ForwardPass
from autoshard.remat.numbering import LOOPS, needed, variables
from autoshard.remat.residuals import Residuals

_AS_FEW = 1.5  # times the fewest bytes near by, at most, pass where blocks meet
_NEAR_PRODUCTS = 4  # products on either side: more than an attention has between its input and its output


@dataclass(frozen=True, eq=False)
class StraightPasses:
    """The forward and the backward pass of a list of equations."""

    equations: Sequence[JaxprEqn]
    fixed: frozenset[int]  # places of equations that must not run again
    inputs: frozenset[Var]  # there from the beginning to the end
    results: frozenset[Var]  # of the list, there at the end
    seconds: Seconds
    begins: Sequence[int] | None = None  # places where blocks begin; None: where few bytes pass
    apart: frozenset[int] = frozenset()  # places where others begin beside these

    @cached_property
    def late(self) -> frozenset[Var]:
        """What depends on a cotangent."""
        found = set[Var]()
        for eqn in self.equations:
            if is_transposed(eqn) or not found.isdisjoint(variables(eqn.invars)):
                found.update(eqn.outvars)
        return frozenset(found)

    def is_late(self, eqn: JaxprEqn) -> bool:
        return not self.late.isdisjoint(eqn.outvars)

    @cached_property
    def turning_point(self) -> int:
        """The place of the first equation of the backward pass."""
        late = (i for i, eqn in enumerate(self.equations) if self.is_late(eqn))
        return next(late, len(self.equations))

    @cached_property
    def read_late(self) -> Mapping[Var, int]:
        """What the backward pass reads -> the place of the first equation that does."""
        found = dict[Var, int]()
        for i, eqn in enumerate(self.equations):
            if self.is_late(eqn):
                for var in variables(eqn.invars):
                    found.setdefault(var, i)
        return found

    @cached_property
    def made_of_nothing(self) -> frozenset[Var]:
        """What elementwise work makes of numbers alone, as masks and positions: XLA computes it wherever it is read."""
        found = set[Var]()
        for eqn in self.equations:
            facts = facts_of(eqn.primitive.name)
            is_light = facts.work in {FlopRule.NONE, FlopRule.PER_RESULT} and not eqn.effects
            is_light &= eqn.primitive.name not in LOOPS | {"optimization_barrier"}
            if is_light and found.issuperset(variables(eqn.invars)):
                found.update(eqn.outvars)
        return frozenset(found)

    @cached_property
    def passing(self) -> Sequence[int]:
        """Bytes that pass each place of the forward pass, from equations before it to others of the pass behind it."""
        last = dict[Var, int]()
        for i, eqn in enumerate(self.equations[: self.turning_point]):
            last.update((var, i) for var in variables(eqn.invars))
        changes = [0] * (self.turning_point + 1)
        for i, eqn in enumerate(self.equations[: self.turning_point]):
            for var in eqn.outvars:
                if last.get(var, i) > i and var not in self.made_of_nothing:
                    changes[i + 1] += array_bytes(var.aval)
                    changes[last[var] + 1] -= array_bytes(var.aval)
        return list(itertools.accumulate(changes))

    @cached_property
    def borders(self) -> Sequence[int]:
        """The places where blocks begin."""
        begins = self.narrow_places if self.begins is None else self.begins
        apart = (place for place in self.apart if place < self.turning_point)
        return sorted({*begins, *apart}) if self.apart else begins

    @cached_property
    def narrow_places(self) -> Sequence[int]:
        """The places of the forward pass past which few bytes go, and the first one."""
        passing, end = self.passing, self.turning_point
        products = [i for i in range(end) if _is_product(self.equations[i]) or i in self.fixed]
        found = [0]
        for before, after in itertools.pairwise([-1, *products, end]):
            # The place between two products past which the fewest bytes go, the last of those.
            place = min(range(before + 1, after + 1), key=lambda i: (passing[i] if i < end else 0, -i), default=0)
            k = bisect.bisect_left(products, place)
            start = products[k - _NEAR_PRODUCTS] if k >= _NEAR_PRODUCTS else 0
            stop = products[k + _NEAR_PRODUCTS - 1] if k + _NEAR_PRODUCTS <= len(products) else end - 1
            least = min(passing[max(1, start) : stop + 1], default=0)
            if found[-1] < place < end and passing[place] <= _AS_FEW * least:
                found.append(place)
        return found

    def blocks(self, size: int) -> tuple[StraightBlock, ...]:
        """The blocks, so many of the smallest ones taken together."""
        starts = [*self.borders[::size], self.turning_point]
        parts = [list(self.equations[a:b]) for a, b in itertools.pairwise(starts)]
        of = {var: b for b, part in enumerate(parts) for eqn in part for var in eqn.outvars}
        # What the backward pass makes of the forward pass alone may stand in a block, if all it reads is there by then.
        there = {*self.inputs, *(var for eqn in self.equations[: self.turning_point] for var in eqn.outvars)}
        for i, eqn in enumerate(self.equations[self.turning_point :], self.turning_point):
            home = max((of[var] for var in variables(eqn.invars) if var in of), default=None)
            is_read = any(var in self.read_late for var in eqn.outvars)
            if home is None or not is_read or i in self.fixed or eqn.effects or self.is_late(eqn):
                continue
            if there.issuperset(variables(eqn.invars)):
                parts[home].append(eqn)
                of.update((var, home) for var in eqn.outvars)
                there.update(eqn.outvars)
        last = dict[Var, int]()  # the last block that reads a value of an earlier one
        for b, part in enumerate(parts):
            last.update((var, b) for eqn in part for var in variables(eqn.invars) if of.get(var, b) < b)
        wanted: list[list[Var]] = [[] for _ in parts]
        for var in self.read_late:
            if var in of:
                wanted[last.get(var, of[var])].append(var)
        found = (
            StraightBlock(self, tuple(part), tuple(reads), frozenset(last))
            for part, reads in zip(parts, wanted, strict=True)
        )
        return tuple(block for block in found if block.wanted)


@dataclass(frozen=True, eq=False)
class StraightBlock(Residuals):
    """A part of a forward pass, and what the backward pass reads of it."""

    passes: StraightPasses
    forward: tuple[JaxprEqn, ...]
    wanted: tuple[Var, ...]
    passed_on: frozenset[Var]  # what other blocks read, too: kept, if anything is made of it

    @cached_property
    def values(self) -> tuple[Var, ...]:
        made = [var for eqn in self.forward for var in eqn.outvars]
        read = [var for eqn in self.forward for var in variables(eqn.invars)]
        return tuple(dict.fromkeys([*read, *self.wanted, *made]))

    @cached_property
    def forward_pass(self) -> ForwardPass:
        """What can be chosen."""
        place = {var: i for i, var in enumerate(self.values)}
        makers = zip(self.values, self.makers(self.forward), strict=True)
        fixed = {id(self.passes.equations[i]) for i in self.passes.fixed}
        return ForwardPass(
            bytes=tuple(0 if self.is_there(var) else array_bytes(var.aval) for var in self.values),
            makers=tuple(None if var in self.passed_on else maker for var, maker in makers),
            reads=tuple(tuple(place[var] for var in variables(eqn.invars)) for eqn in self.forward),
            seconds=tuple(math.inf if id(eqn) in fixed else self.passes.seconds(eqn) for eqn in self.forward),
            wanted=tuple(place[var] for var in self.wanted),
        )

    def is_there(self, var: Var) -> bool:
        """Whether a value is there for the backward pass anyhow."""
        passes = self.passes
        return var in passes.inputs or var in passes.results or var in passes.made_of_nothing

    def bytes_again(self, cut: Cut) -> float:
        """Of what the backward pass makes again and reads, which is made at once."""
        return sum(self.bytes_of_values[var] for var in self.made_again(cut))

    def line_of(self, var: Var) -> str:
        """The user's line that makes a value."""
        maker = next((eqn for eqn in self.passes.equations if var in eqn.outvars), None)
        return str((maker is not None and source_of(maker)) or "unknown line")

    def made_again(self, cut: Cut) -> list[Var]:
        """What the backward pass reads that is not kept."""
        made = {var for e in cut.again for var in self.forward[e].outvars} - set(self.kept(cut))
        return [var for var in self.wanted if var in made]

    def place(self, cut: Cut) -> int | None:
        """Before which equation values are made again; None if none are."""
        return min((self.passes.read_late[var] for var in self.made_again(cut)), default=None)

    def run_again(self, cut: Cut, env: Mapping[Var, Any]) -> dict[Var, Any]:
        """Makes what is not kept again."""
        made, place = self.made_again(cut), self.place(cut)
        assert place is not None, "something is made again"
        equations = needed([self.forward[e] for e in sorted(cut.again)], made)
        inside = {var for eqn in equations for var in eqn.outvars}
        read = dict.fromkeys(var for eqn in equations for var in variables(eqn.invars) if var not in inside)
        first = self.passes.equations[place]
        cotangents = [var for var in variables(first.invars) if var in self.passes.late][:1]
        operands = list(dict.fromkeys([*read, *cotangents]))

        def again(*arrays: Any) -> list[Any]:
            return evaluated(equations, dict(zip(operands, arrays, strict=True)), made)

        # JAX puts a barrier before a checkpoint of a backward pass alone, which only differentiation makes.
        (call,) = jax.make_jaxpr(jax.checkpoint(again))(*(env[var] for var in operands)).jaxpr.eqns
        call = call.replace(
            params={**call.params, "differentiated": True},
            invars=operands,
            outvars=made,
            source_info=first.source_info,
        )
        return dict(zip(made, evaluated([call], env, made), strict=True))


_PRODUCTS = {FlopRule.ATTENTION, FlopRule.CONTRACTION, FlopRule.FACTORIZATION, FlopRule.FFT, FlopRule.SCALED_PRODUCT}


def _is_product(eqn: JaxprEqn) -> bool:
    return facts_of(eqn.primitive.name).work in _PRODUCTS or eqn.primitive.name in LOOPS
