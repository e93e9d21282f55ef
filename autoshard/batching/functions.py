"""A jaxpr in, out what it computes of one array alone, as a function; and which of these functions are the same.

An array is made *of* another one if nothing else goes into it but numbers: in the words of compilers, the other one
dominates it. The *root* is the furthest such array, so that the roots of all values are found in one walk. Example: in
`m = b * m + g; a = m @ m.T; u = a @ m`, both `a` and `u` are made of `m`, whose root is `m` itself.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autoshard.jaxprs import (
    CONSTRAINTS,
    HIDDEN_BODIES,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    called_jaxpr,
    draws_otherwise_in_vmap,
    equations_of,
    inner_jaxprs,
    is_array,
    is_kernel,
    on_host,
)
from autoshard.primitives import FlopRule, facts_of, primitives_where
from autoshard.remat.numbering import needed

NUMBERS = 64  # elements: an array of so many counts as numbers, as the coefficients of a polynomial
COSTLY = primitives_where(
    lambda facts: (
        facts.work
        in {FlopRule.CONTRACTION, FlopRule.FACTORIZATION, FlopRule.TRIANGULAR_SOLVE, FlopRule.TRIDIAGONAL_SOLVE}
    )
)
# What says how arrays lie, or is to be computed where it stands.
_STAYS = CONSTRAINTS | HIDDEN_BODIES | {"custom_partitioning", "device_put", "optimization_barrier", "shard_map"}


@dataclass(frozen=True, eq=False)
class ArrayFunction:
    """What a jaxpr computes of one array alone."""

    root: Var
    equations: tuple[JaxprEqn, ...]  # in the order of the jaxpr
    results: tuple[Var, ...]  # what others read
    replaced: tuple[JaxprEqn, ...] = ()  # of its equations those that nothing else needs

    @cached_property
    def made(self) -> frozenset[Var]:
        return frozenset(var for eqn in self.equations for var in eqn.outvars)

    @cached_property
    def numbers(self) -> tuple[Var, ...]:
        """What it reads beside its root, in the order in which it does."""
        read = dict.fromkeys(var for eqn in self.equations for var in _variables(eqn.invars))
        return tuple(var for var in read if var not in self.made and var is not self.root)

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Equal for functions that compute the same of other arrays of the same type."""
        places: dict[Any, int] = {self.root: 0}
        for var in self.numbers:
            places[var] = len(places)
        types = [str(aval_of(var)) for var in places]
        shapes = []
        for eqn in self.equations:
            operands = tuple(_literal(atom) if isinstance(atom, Literal) else places[atom] for atom in eqn.invars)
            shapes.append((eqn.primitive.name, operands, _text(eqn.params)))
            for var in eqn.outvars:
                places[var] = len(places)
        return tuple(types), tuple(shapes), tuple(places[var] for var in self.results)

    @cached_property
    def elements(self) -> int:
        return math.prod(aval_of(self.root).shape)

    def after_views(self) -> ArrayFunction:
        """The function of the array that the first views of the root make, as of a matrix that is transposed first."""
        readers = [eqn for eqn in self.equations if self.root in eqn.invars]
        if len(readers) > 1 or not _is_view(readers[0]):
            return self
        (view,) = readers
        if view.outvars[0] in self.results:
            return self
        return replace(
            self, root=view.outvars[0], equations=tuple(eqn for eqn in self.equations if eqn is not view)
        ).after_views()

    def trimmed(self) -> ArrayFunction:
        """The function less what it does last that needs no matrix product, as to scale its result or to add it up.

        It never has more arrays for results than before.
        """
        found = self._without_numbers_at_the_end()
        readers = Counter(var for eqn in found.equations for var in set(_variables(eqn.invars)))
        equations, results = list[JaxprEqn](), set(found.results)
        for eqn in reversed(found.equations):
            read = found.made.intersection(_variables(eqn.invars))
            after = results.difference(eqn.outvars) | read
            is_last = not any(readers[var] for var in eqn.outvars) and not is_costly(eqn)
            if is_last and sum(map(_is_large, after)) <= sum(map(_is_large, results)):
                results = after
                readers.subtract(read)
            else:
                equations.append(eqn)
        ordered = tuple(var for eqn in equations[::-1] for var in eqn.outvars if var in results)
        return replace(found, equations=tuple(equations[::-1]), results=ordered)

    def _without_numbers_at_the_end(self) -> ArrayFunction:
        """The function less what only makes numbers of its results, as a norm of them."""
        kept, wanted = list[JaxprEqn](), {var for var in self.results if _is_large(var)}
        read = set(self.results)
        for eqn in reversed(self.equations):
            if is_costly(eqn) or not wanted.isdisjoint(eqn.outvars):
                kept.append(eqn)
                wanted.update(_variables(eqn.invars))
            else:
                read.update(_variables(eqn.invars))
        results = tuple(var for eqn in kept[::-1] for var in eqn.outvars if var in read)
        if sum(map(_is_large, results)) > sum(map(_is_large, self.results)):
            return self
        return replace(self, equations=tuple(kept[::-1]), results=results)


def costly_functions(jaxpr: Jaxpr) -> list[ArrayFunction]:
    """The functions of one array in a jaxpr, plain calls opened, that multiply or factorise matrices."""
    return _FunctionWalk(jaxpr).functions()


class _FunctionWalk:
    """One walk over a jaxpr, which finds what is made of one array alone.

    A few numbers that come from elsewhere, as the scale that clips all gradients, may go into a function, too. They
    must not be made of what the function computes.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr, self.equations = jaxpr, needed(equations_of(jaxpr), jaxpr.outvars)
        given = [*jaxpr.invars, *jaxpr.constvars]
        self.arrays = set(filter(_is_large, given))  # and what is made of them
        self.numbers: dict[Var, JaxprEqn] = {}  # what is made of numbers alone -> by which equation
        self.roots: dict[Var, Var] = {}
        self.members = defaultdict[Var, list[JaxprEqn]](list)
        self.bits: dict[Var, int] = {}  # root of a costly function -> its bit in what follows
        self.costly = defaultdict[Var, int](int)  # variable -> the costly functions that it is made by
        for eqn in self.equations:
            self.visit(eqn)

    def visit(self, eqn: JaxprEqn) -> None:
        read = [var for var in _variables(eqn.invars) if var in self.arrays]
        if not read and not _stays(eqn):
            self.numbers.update((var, eqn) for var in eqn.outvars)
            return
        self.arrays.update(eqn.outvars)
        mask = functools.reduce(operator.or_, (self.costly.get(var, 0) for var in read), 0)
        found = {self.roots.get(var, var) for var in (list(filter(_is_large, read)) or read)}
        if len(found) == 1 and not _stays(eqn):
            (root,) = found
            others = [var for var in read if self.roots.get(var, var) is not root]
            if not any(self.costly.get(var, 0) & self.bits.get(root, 0) for var in others):
                self.members[root].append(eqn)
                self.roots.update(dict.fromkeys(eqn.outvars, root))
                if is_costly(eqn):
                    self.bits.setdefault(root, 1 << len(self.bits))
                mask |= self.bits.get(root, 0)
        if mask:
            self.costly.update(dict.fromkeys(eqn.outvars, mask))

    def functions(self) -> list[ArrayFunction]:
        readers, order = defaultdict[Var, set[int]](set), {id(eqn): i for i, eqn in enumerate(self.equations)}
        if self.bits:
            for eqn in self.equations:
                for var in _variables(eqn.invars):
                    readers[var].add(id(eqn))
        ends = set(_variables(self.jaxpr.outvars))
        found = []
        for root in self.bits:
            inside = set(map(id, self.members[root]))
            made = [var for eqn in self.members[root] for var in eqn.outvars]
            results = [var for var in made if var in ends or not readers[var] <= inside]
            whole = ArrayFunction(root, tuple(self.members[root]), tuple(results)).trimmed().after_views()
            equations = sorted(self.with_numbers(whole.equations), key=lambda eqn: order[id(eqn)])
            found.append(replace(whole, equations=tuple(equations), replaced=whole.equations))
        return found

    def with_numbers(self, equations: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """These equations, and those that make the numbers that go into them."""
        found, open_ = {id(eqn): eqn for eqn in equations}, list(equations)
        while open_:
            for var in _variables(open_.pop().invars):
                if (maker := self.numbers.get(var)) is not None and id(maker) not in found:
                    found[id(maker)] = maker
                    open_.append(maker)
        return list(found.values())


def is_costly(eqn: JaxprEqn) -> bool:
    """Whether an equation multiplies or factorises matrices, itself or in a loop or branch of its own."""
    if eqn.primitive.name in COSTLY:
        return True
    called = called_jaxpr(eqn)
    inner = [called] if called is not None else inner_jaxprs(eqn)
    return any(is_costly(one) for closed in inner for one in closed.jaxpr.eqns)


def may_have_costly_functions(jaxpr: Jaxpr, known: dict[int, bool] | None = None) -> bool:
    """Whether a jaxpr may have such functions: it factorises a matrix, or multiplies an array with itself."""
    known = {} if known is None else known
    if id(jaxpr) not in known:
        known[id(jaxpr)] = _may_have_costly_functions(jaxpr, known)
    return known[id(jaxpr)]


def _may_have_costly_functions(jaxpr: Jaxpr, known: dict[int, bool]) -> bool:
    viewed: dict[Any, Any] = {}  # an array -> the one that it is a view of
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            left, right = (viewed.get(atom, atom) if isinstance(atom, Var) else None for atom in eqn.invars)
            if left is right and left is not None:
                return True
        elif eqn.primitive.name in COSTLY:
            if facts_of(eqn.primitive.name).work is not FlopRule.CONTRACTION:
                return True
        elif facts_of(eqn.primitive.name).passes_on and isinstance(eqn.invars[0], Var):
            viewed[eqn.outvars[0]] = viewed.get(eqn.invars[0], eqn.invars[0])
        called = called_jaxpr(eqn) if eqn.primitive.name not in HIDDEN_BODIES else None
        inner = [called] if called is not None else inner_jaxprs(eqn)
        if any(may_have_costly_functions(closed.jaxpr, known) for closed in inner):
            return True
    return False


def _is_large(var: Var) -> bool:
    """Whether it is more than numbers."""
    aval = aval_of(var)
    return not is_array(aval) or on_host(aval) or math.prod(aval.shape) > NUMBERS


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var)]


def _stays(eqn: JaxprEqn) -> bool:
    return (
        bool(eqn.effects)
        or eqn.primitive.name in _STAYS
        or is_kernel(eqn)
        or draws_otherwise_in_vmap(eqn)
        or not all(is_array(aval_of(atom)) and not on_host(aval_of(atom)) for atom in (*eqn.invars, *eqn.outvars))
        or any(_stays(one) for closed in inner_jaxprs(eqn) for one in closed.jaxpr.eqns)
    )


def _is_view(eqn: JaxprEqn) -> bool:
    return facts_of(eqn.primitive.name).is_view and len(eqn.invars) == 1


def _literal(atom: Literal) -> tuple[str, str]:
    return str(aval_of(atom)), str(atom.val)


def _text(params: Mapping[str, Any]) -> str:
    return str(sorted((name, str(value)) for name, value in params.items()))
