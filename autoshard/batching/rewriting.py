"""A jaxpr in, out the same with each group of equal functions as one of the stack of their arrays."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.batching.functions import ArrayFunction, costly_functions, may_have_costly_functions
from autoshard.jaxprs import ClosedJaxpr, JaxprEqn, Var, aval_of, call_of, equations_of, evaluated
from autoshard.microbatches.inline_calls import opened
from autoshard.program.user_code import source_of
from autoshard.remat.numbering import needed

MOST_ARRAYS = 2.0  # times as many arrays, at most, as a stack is to have so that devices divide it
_SIZES = 2  # how many sizes of a stack are planned


@dataclass(frozen=True, eq=False)
class BatchedFunctions:
    """A jaxpr, and the groups of equal functions in it that do not wait for each other."""

    opened: ClosedJaxpr
    groups: tuple[tuple[ArrayFunction, ...], ...]

    @classmethod
    def of(cls, closed: ClosedJaxpr) -> BatchedFunctions | None:
        """Those of a step; None if it has none."""
        if not may_have_costly_functions(closed.jaxpr):
            return None
        plain = opened(closed)
        alike = defaultdict[Any, list[ArrayFunction]](list)
        for function in costly_functions(plain.jaxpr):
            alike[function.signature].append(function)
        several = sorted((some for some in alike.values() if len(some) > 1), key=_elements, reverse=True)
        found = cls(plain, ())
        for some in several:
            more = cls(plain, (*found.groups, tuple(some)))
            if more.order is not None:
                found = more
        return found if found.groups else None

    def multiples(self, mesh: Mapping[str, int]) -> tuple[int, ...]:
        """Numbers of which stacks may be multiples, so that axes of a mesh divide the largest of them; most first."""
        count, sizes = len(self.groups[0]), list(mesh.values())
        some = {math.prod(part) for n in range(1, len(sizes) + 1) for part in itertools.combinations(sizes, n)} - {1}
        few = [one for one in some if _rounded(count, one) <= MOST_ARRAYS * count]
        return tuple(sorted(few, reverse=True)[:_SIZES])

    def rewritten(self, multiple: int) -> ClosedJaxpr:
        """The jaxpr with stacks of so many arrays, or a multiple of that."""
        assert self.order is not None, "`of` leaves out groups that wait for each other"
        equations = [self.call(self.groups[one], multiple) if isinstance(one, int) else one for one in self.order]
        jaxpr = self.opened.jaxpr
        return ClosedJaxpr(jaxpr.replace(eqns=equations, debug_info=jaxpr.debug_info), self.opened.consts)

    def remark(self, multiple: int) -> str:
        """What is stacked, in words."""
        stacks = [
            f"{len(group)} arrays of {aval_of(group[0].root).str_short(short_dtypes=True)}"
            + (f" in a stack of {_rounded(len(group), multiple)}" * (len(group) % multiple > 0))
            + (f" at {source}" if (source := source_of(group[0].equations[-1])) else "")
            for group in self.groups
        ]
        return f"what is computed of each matrix by itself is computed of stacks of them: {'; '.join(stacks)}."

    def call(self, group: Sequence[ArrayFunction], multiple: int) -> JaxprEqn:
        """One equation that computes what all functions of a group do."""
        first = group[0]
        columns = list(zip(*(function.numbers for function in group), strict=True))
        shared = [column[0] if len(set(column)) == 1 else None for column in columns]
        own = [column for column, one in zip(columns, shared, strict=True) if one is None]
        common = [one for one in shared if one is not None]
        count, size = len(group), _rounded(len(group), multiple)

        def stacked(arrays: Sequence[Any]) -> Any:
            # Arrays that nobody reads fill the stack up; those of the group are as safe to compute with as any.
            return jnp.stack([arrays[i % count] for i in range(size)])

        def batched(*operands: Any) -> list[Any]:
            rest = iter(operands)
            roots = stacked([next(rest) for _ in group])
            stacks = [stacked([next(rest) for _ in group]) for _ in own]
            others = list(rest)

            def one(root: Any, *numbers: Any) -> list[Any]:
                mine, theirs = iter(numbers), iter(others)
                values = [next(mine) if var is None else next(theirs) for var in shared]
                env = dict(zip((first.root, *first.numbers), (root, *values), strict=True))
                return evaluated(first.equations, env, first.results)

            made = jax.vmap(one)(roots, *stacks)
            return [made[k][i] for i in range(count) for k in range(len(first.results))]

        inputs = [function.root for function in group] + [var for column in own for var in column] + common
        avals = map(aval_of, inputs)
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
        results = [var for function in group for var in function.results]
        return call_of(first.equations[-1], jax.make_jaxpr(batched)(*types), inputs, results)

    @cached_property
    def order(self) -> list[JaxprEqn | int] | None:
        """Equations, and indices of groups in the place of theirs, each behind what it reads.

        None if there is no such order: some function of a group is computed of another one's result.
        """
        jaxpr = self.opened.jaxpr
        equations = needed(equations_of(jaxpr), jaxpr.outvars)  # as groups are found: they leave dead ones out
        grouped = {id(eqn): g for g, group in enumerate(self.groups) for one in group for eqn in one.replaced}
        items: list[JaxprEqn | int] = [*range(len(self.groups)), *(eqn for eqn in equations if id(eqn) not in grouped)]
        place = {id(eqn): i for i, eqn in enumerate(equations)}
        reads: list[list[Var]] = [
            [var for one in self.groups[item] for var in (one.root, *one.numbers)]
            if isinstance(item, int)
            else [atom for atom in item.invars if isinstance(atom, Var)]
            for item in items
        ]
        maker: dict[Var, int] = {}
        ranks = list[int]()  # items that may come next come in the order of the jaxpr
        for i, item in enumerate(items):
            members = [eqn for one in self.groups[item] for eqn in one.replaced] if isinstance(item, int) else [item]
            ranks.append(place[id(members[0])])
            made = [var for one in self.groups[item] for var in one.results] if isinstance(item, int) else item.outvars
            maker.update(dict.fromkeys(made, i))
        before = [{maker[var] for var in read if var in maker} for read in reads]
        effects = [i for i, item in enumerate(items) if not isinstance(item, int) and item.effects]
        for first, second in itertools.pairwise(effects):
            before[second].add(first)
        after = defaultdict[int, list[int]](list)
        for i, some in enumerate(before):
            for one in some:
                after[one].append(i)
        waiting, found = list(map(len, before)), list[JaxprEqn | int]()
        ready = [(ranks[i], i) for i, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        while ready:
            _, i = heapq.heappop(ready)
            found.append(items[i])
            for other in after[i]:
                waiting[other] -= 1
                if not waiting[other]:
                    heapq.heappush(ready, (ranks[other], other))
        return found if len(found) == len(items) else None


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _elements(group: Sequence[ArrayFunction]) -> int:
    return len(group) * group[0].elements
