"""A step in, out the same with its loops over layers taken apart between trips.

A loop over layers is a `scan` over stacked parameters. Cut before trip t, it becomes two scans: the carry goes from one
to the other, stacked operands are sliced, stacked results are in pieces. Pieces stay pieces as far as each equation
allows it. So what the forward scan stacks and the backward scan slices cancels, and an optimizer updates every piece
apart. Elsewhere pieces are concatenated.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.jaxprs import ClosedJaxpr, DropVar, JaxprEqn, Var, aval_of, called_jaxpr, equations_of, scan_counts
from autoshard.microbatches.proof import equation_of
from autoshard.microbatches.relations import REDUCTIONS
from autoshard.primitives import facts_of
from autoshard.propagation.registry import has_rule, rule_of
from autoshard.propagation.rule import Rule

Bounds = tuple[int, ...]  # along dim 0 where pieces start and end: (0, 2, 4)

# The parameter of a primitive that says the result's shape, dim 0 first.
_SHAPE = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}
# What makes one result of those of pieces.
_JOINS: Mapping[str, Callable[..., Any]] = {
    "add": jax.lax.add,
    "and": jax.lax.bitwise_and,
    "max": jax.lax.max,
    "min": jax.lax.min,
    "or": jax.lax.bitwise_or,
}
_TOLD_BY_SHAPE = frozenset({"limit_indices", "new_sizes", "padding_config", "shape", "sizes", "slice_sizes"})


@dataclass(frozen=True)
class EquationOrigin:
    """Where an equation comes from: an equation of the whole step, and the first trip that it computes there."""

    equation: int
    trip: int = 0


@dataclass(frozen=True)
class Slice:
    """Some trips of a stacked argument."""

    argument: Var
    start: int
    stop: int


@dataclass(frozen=True)
class UnstackedStep:
    """A step whose loops over layers are taken apart."""

    closed: ClosedJaxpr
    origins: tuple[EquationOrigin, ...]  # per equation
    slices: Mapping[Var, Slice]  # variable -> the trips of an argument that it is
    joined: Mapping[Var, tuple[Any, ...]]  # variable -> the pieces that it is concatenated of


@dataclass(frozen=True)
class _Pieces:
    atoms: tuple[Any, ...]
    bounds: Bounds


def taken_apart(closed: ClosedJaxpr, cuts: Mapping[int, Bounds]) -> UnstackedStep:
    """The same step with some scans in pieces.

    Args:
        closed: a step whose calls are opened.
        cuts: index of a scan -> its bounds: the first trip of every piece, and the number of trips.
    """
    if not cuts:
        return UnstackedStep(closed, tuple(map(EquationOrigin, range(len(equations_of(closed.jaxpr))))), {}, {})
    walk = _StackWalk(closed, cuts)
    results = walk.run()
    jaxpr = closed.jaxpr.replace(eqns=walk.equations, outvars=results, debug_info=closed.jaxpr.debug_info)
    arguments = set(closed.jaxpr.invars)
    slices = {
        var: Slice(whole, start, stop)
        for (whole, bounds), parts in walk.sliced.items()
        if whole in arguments
        for var, (start, stop) in zip(parts, itertools.pairwise(bounds), strict=True)
    }
    made = {var: pieces for var, pieces in walk.pieces.items() if var not in arguments}
    joined = {walk.whole[var]: pieces.atoms for var, pieces in made.items() if var in walk.whole}
    return UnstackedStep(ClosedJaxpr(jaxpr, closed.consts), tuple(walk.origins), slices, joined)


class _StackWalk:
    """One walk over a jaxpr that writes it anew."""

    def __init__(self, closed: ClosedJaxpr, cuts: Mapping[int, Bounds]):
        self.jaxpr, self.cuts = closed.jaxpr, cuts
        self.equations: list[JaxprEqn] = []
        self.origins: list[EquationOrigin] = []
        self.pieces: dict[Var, _Pieces] = {}
        self.whole: dict[Var, Any] = {}  # variables that are made otherwise now -> the whole array
        self.sliced: dict[tuple[Var, Bounds], tuple[Any, ...]] = {}
        self.makers: dict[Var, JaxprEqn] = {}
        self.first_trips: dict[jax.ShapeDtypeStruct, JaxprEqn] = {}  # type of an array -> what takes its first trip
        self.at = EquationOrigin(0)

    def run(self) -> list[Any]:
        self.take_arguments_apart()
        for i, eqn in enumerate(equations_of(self.jaxpr)):
            self.at = EquationOrigin(i)
            self.makers |= dict.fromkeys(eqn.outvars, eqn)
            if i in self.cuts:
                self.scan(eqn, self.cuts[i])
            elif not self.in_pieces(eqn):
                inputs = [self.plain(atom, eqn) for atom in eqn.invars]
                self.emit(eqn if inputs == list(eqn.invars) else eqn.replace(invars=inputs))
        self.at = EquationOrigin(len(equations_of(self.jaxpr)))
        return [self.plain(atom, None) for atom in self.jaxpr.outvars]

    def take_arguments_apart(self) -> None:
        """Puts the stacks that these scans read into pieces, for all else that reads them: norms of weights, decay."""
        arguments = set(self.jaxpr.invars)
        for i, bounds in self.cuts.items():
            eqn = equations_of(self.jaxpr)[i]
            for atom in eqn.invars[sum(scan_counts(eqn)) :]:
                if isinstance(atom, Var) and atom in arguments and atom not in self.pieces:
                    self.pieces[atom] = _Pieces(self.cut(atom, bounds, eqn), bounds)
                    self.whole[atom] = atom

    def emit(self, eqn: JaxprEqn, trip: int = 0) -> None:
        self.equations.append(eqn)
        self.origins.append(EquationOrigin(self.at.equation, trip))

    # Between whole arrays and pieces.

    def plain(self, atom: Any, like: JaxprEqn | None) -> Any:
        if not isinstance(atom, Var):
            return atom
        if atom not in self.whole:
            if atom not in self.pieces:
                return atom
            pieces = self.pieces[atom]
            like = self.makers.get(atom, like)
            self.whole[atom] = self.made(lambda *parts: jax.lax.concatenate(parts, 0), pieces.atoms, like)
        return self.whole[atom]

    def cut(self, atom: Any, bounds: Bounds, like: JaxprEqn) -> tuple[Any, ...]:
        """An operand in these pieces."""
        if isinstance(atom, Var) and (found := self.pieces.get(atom)) is not None and found.bounds == bounds:
            return found.atoms
        assert isinstance(atom, Var), "literals are scalars, which have no dim 0"
        if (atom, bounds) not in self.sliced:
            maker = self.makers.get(atom)
            parts = None if maker is None or atom in self.whole else self.made_in_pieces(maker, bounds)
            if parts is None:
                whole = self.plain(atom, like)
                parts = tuple(self.part_of(whole, a, b, like) for a, b in itertools.pairwise(bounds))
            self.sliced[atom, bounds] = parts
        return self.sliced[atom, bounds]

    def made_in_pieces(self, maker: JaxprEqn, bounds: Bounds) -> tuple[Any, ...] | None:
        """A value that was made whole, made again in pieces, if that is elementwise work; None if it is more."""
        if not facts_of(maker.primitive.name).is_pointwise and maker.primitive.name != "broadcast_in_dim":
            return None
        if not _may_be_in_pieces(maker):
            return None
        rule = rule_of(equation_of(maker))
        dims = rule.results[0]
        if not dims or len(dims[0]) != 1:
            return None
        operands = _in_dim_0(rule, dims[0][0])
        return None if operands is None else tuple(self.written(maker, operands, bounds))

    def part_of(self, whole: Any, start: int, stop: int, like: JaxprEqn) -> Var:
        """The trips of an array from one to another."""
        aval = aval_of(whole)
        type_ = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        if type_ not in self.first_trips:  # those of other trips differ in numbers alone
            first = functools.partial(jax.lax.slice_in_dim, start_index=0, limit_index=1)
            (self.first_trips[type_],) = jax.make_jaxpr(first)(type_).jaxpr.eqns
        eqn, out = self.first_trips[type_], Var(aval.update(shape=(stop - start, *aval.shape[1:])))
        starts, ends = (start, *[0] * (len(aval.shape) - 1)), (stop, *aval.shape[1:])
        params = {**eqn.params, "start_indices": starts, "limit_indices": ends}
        self.emit(eqn.replace(invars=[whole], outvars=[out], params=params, source_info=like.source_info), start)
        return out

    def made(self, function: Callable[..., Any], operands: Sequence[Any], like: JaxprEqn | None, trip: int = 0) -> Var:
        """What one equation makes of operands, written where another equation is."""
        types = [jax.ShapeDtypeStruct(aval_of(x).shape, aval_of(x).dtype) for x in operands]
        (eqn,) = jax.make_jaxpr(function)(*types).jaxpr.eqns
        out = Var(eqn.outvars[0].aval)
        source = eqn.source_info if like is None else like.source_info
        self.emit(eqn.replace(invars=list(operands), outvars=[out], source_info=source), trip)
        return out

    def resized(self, eqn: JaxprEqn, inputs: Sequence[Any], length: int, trip: int = 0) -> Any:
        """An equation of one result whose dim 0 is `length` long; the result."""
        (old,) = eqn.outvars
        name, aval = _SHAPE.get(eqn.primitive.name), aval_of(old)
        params = {**eqn.params, name: (length, *eqn.params[name][1:])} if name else eqn.params
        out = Var(aval.update(shape=(length, *aval.shape[1:])))
        self.emit(eqn.replace(invars=list(inputs), outvars=[out], params=params), trip)
        return out

    # Equations.

    def scan(self, eqn: JaxprEqn, bounds: Bounds) -> None:
        """A scan as several, the last trips first where it is reversed."""
        consts, carries = scan_counts(eqn)
        fixed = [self.plain(atom, eqn) for atom in eqn.invars[: consts + carries]]
        fixed, carry = fixed[:consts], fixed[consts:]
        stacks = [self.cut(atom, bounds, eqn) for atom in eqn.invars[consts + carries :]]
        made: dict[int, list[Any]] = {}
        spans = list(enumerate(itertools.pairwise(bounds)))
        for k, (start, stop) in reversed(spans) if eqn.params["reverse"] else spans:
            outs = [Var(var.aval) for var in eqn.outvars[:carries]]
            stacked = [
                Var(aval.update(shape=(stop - start, *aval.shape[1:]))) for aval in map(aval_of, eqn.outvars[carries:])
            ]
            inputs = [*fixed, *carry, *(parts[k] for parts in stacks)]
            params = {**eqn.params, "length": stop - start}
            self.emit(eqn.replace(invars=inputs, outvars=[*outs, *stacked], params=params), start)
            carry, made[k] = list(outs), stacked
        for var, last in zip(eqn.outvars[:carries], carry, strict=True):
            self.whole[var] = last
        for j, var in enumerate(eqn.outvars[carries:]):
            self.pieces[var] = _Pieces(tuple(made[k][j] for k, _ in spans), bounds)

    def in_pieces(self, eqn: JaxprEqn) -> bool:
        """Writes an equation once per piece of its operands, where each piece of its result is made of one of them."""
        found = [self.pieces[x] for x in eqn.invars if isinstance(x, Var) and x in self.pieces]
        if not found or isinstance(eqn.outvars[0], DropVar):
            return False
        if not _may_be_in_pieces(eqn):
            return False
        rule, bounds = rule_of(equation_of(eqn)), found[0].bounds
        first = next(i for i, x in enumerate(eqn.invars) if isinstance(x, Var) and x in self.pieces)
        dims = rule.operands[first]
        if not dims or len(dims[0]) != 1 or rule.sizes[dims[0][0]] != bounds[-1]:
            return False
        (name,) = dims[0]
        operands = _in_dim_0(rule, name)
        if operands is None:
            return False
        var = eqn.outvars[0]
        if rule.results[0] and rule.results[0][0] == (name,):
            self.pieces[var] = _Pieces(tuple(self.written(eqn, operands, bounds)), bounds)
            return True
        joins = _JOINS.get(REDUCTIONS.get(eqn.primitive.name, ""))
        if name not in rule.reduction or joins is None:
            return False
        parts = self.written(eqn, operands, bounds, is_reduced=True)
        self.whole[var] = functools.reduce(lambda one, other: self.made(joins, [one, other], eqn), parts)
        return True

    def written(
        self, eqn: JaxprEqn, operands: Collection[int], bounds: Bounds, *, is_reduced: bool = False
    ) -> list[Var]:
        """An equation once per piece.

        Args:
            operands: those of which it reads a piece each.
            is_reduced: whether the results are of whole shape, of which one is made.
        """
        parts = [
            self.cut(x, bounds, eqn) if i in operands else (self.plain(x, eqn),) * (len(bounds) - 1)
            for i, x in enumerate(eqn.invars)
        ]
        made = []
        for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
            inputs = [several[n] for several in parts]
            if is_reduced:
                made.append(Var(eqn.outvars[0].aval))
                self.emit(eqn.replace(invars=inputs, outvars=[made[-1]]), start)
            else:
                made.append(self.resized(eqn, inputs, stop - start, start))
        return made


def _may_be_in_pieces(eqn: JaxprEqn) -> bool:
    """Whether an equation of one result can be written for another length of dim 0."""
    if called_jaxpr(eqn) is not None or not has_rule(eqn) or len(eqn.outvars) != 1 or eqn.effects:
        return False
    known = _SHAPE.get(eqn.primitive.name)
    return not any(key in _TOLD_BY_SHAPE and key != known for key in eqn.params)


def _in_dim_0(rule: Rule, name: str) -> frozenset[int] | None:
    """The operands whose dim 0 is a factor; None if the factor is elsewhere too, or has to be whole."""
    if name in rule.need_replication | rule.permutation:
        return None
    tensors = (*rule.operands, *rule.results)
    if any(name in factors and factors != (name,) for dims in tensors for factors in dims):
        return None
    if any(name in factors for dims in tensors for factors in dims[1:]):
        return None
    return frozenset(i for i, dims in enumerate(rule.operands) if dims and dims[0] == (name,))
