"""A step's jaxpr and a rewrite in, the places where it applies out; and the jaxpr with some of these rewritten.

Places are counted in the order in which the bodies of the step are walked. The count is what a plan keeps of a place,
so it must not depend on anything but the jaxpr.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.errors import PlanError
from autoshard.jaxprs import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, aval_of
from autoshard.microbatches.inline_calls import opened
from autoshard.primitives import facts_of
from autoshard.program.program import RewrittenPlaces
from autoshard.program.user_code import source_of
from autoshard.remat.numbering import needed, variables
from autoshard.rewrites.graph import BodyGraph
from autoshard.rewrites.rewrite import Match, Rewrite, maker_of

_BODIES = {  # primitive -> the parameters that hold what it runs
    "checkpoint": ("jaxpr",),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("body_jaxpr",),
}


@dataclass(frozen=True, eq=False)
class Site:
    """Places that are alike: one choice is made for all of them."""

    rewrite: Rewrite
    places: tuple[int, ...]  # among those where the rewrite applies
    key: tuple[Any, ...]  # equal for sites that do the same, in steps that are rewritten differently elsewhere
    lines: tuple[str, ...]  # of the user, that are rewritten
    arguments: frozenset[int]  # of the step that are read there, through casts and views

    @property
    def rewritten_places(self) -> RewrittenPlaces:
        """What the program says of it, once it is rewritten."""
        return RewrittenPlaces(self.rewrite.name, self.rewrite.law, self.places, self.lines, self.arguments)


def sites(closed: ClosedJaxpr, rewrite: Rewrite, devices: int) -> list[Site]:
    """The places where a rewrite applies, those that are alike together.

    Args:
        closed: the jaxpr of a step.
        devices: of the mesh.
    """
    found = defaultdict[tuple[Any, ...], list[tuple[int, _MatchPlace]]](list)
    own = {var: frozenset([i]) for i, var in enumerate(closed.jaxpr.invars)}
    for number, place in enumerate(_SiteWalk(rewrite, devices).places(closed, 1, list(own.values()))):
        found[rewrite.name, place.match.form, place.match.types, place.turns].append((number, place))
    made = []
    for key, several in found.items():
        apart = _together(several)
        if not apart:
            continue
        makers = [maker_of(place.graph, place.match) for _, place in apart]
        lines = dict.fromkeys(str(source) for eqn in makers if (source := source_of(eqn)) is not None)
        arguments = frozenset[int]().union(*(place.arguments for _, place in apart))
        made.append(Site(rewrite, tuple(number for number, _ in apart), key, tuple(lines), arguments))
    return made


@dataclass(frozen=True, eq=False)
class _MatchPlace:
    """A match in a body of the step."""

    turns: int  # how often the body runs per step
    graph: BodyGraph
    match: Match
    origins: Mapping[Var, frozenset[int]]  # input of the body -> the arguments of the step that it is

    @property
    def arguments(self) -> frozenset[int]:
        """The arguments that the match reads."""
        return frozenset[int]().union(*(_origin(self.graph, atom, self.origins) for atom in self.match.inputs))


def _origin(graph: BodyGraph, atom: Any, origins: Mapping[Var, frozenset[int]]) -> frozenset[int]:
    """The arguments that an array is, through casts and views."""
    while isinstance(atom, Var) and atom not in origins:
        eqn = graph.maker(atom)
        if eqn is None or not (facts_of(eqn.primitive.name).is_view or eqn.primitive.name == "convert_element_type"):
            return frozenset()
        atom = eqn.invars[0]
    return origins[atom] if isinstance(atom, Var) else frozenset()


def _together(several: Sequence[tuple[int, _MatchPlace]]) -> list[tuple[int, _MatchPlace]]:
    """Those that can be rewritten at once."""
    bodies = defaultdict[int, list[_MatchPlace]](list)
    for _, place in several:
        bodies[id(place.graph)].append(place)
    kept = {
        id(match)
        for places in bodies.values()
        for match in _fitting(places[0].graph, [place.match for place in places])
    }
    return [(number, place) for number, place in several if id(place.match) in kept]


def forms(closed: ClosedJaxpr, rewrite: Rewrite, places: Collection[int], devices: int) -> list[Any]:
    """What is rewritten at these places, and where in their bodies they are, whatever the sizes of arrays."""
    walk = _SiteWalk(rewrite, devices).places(closed, 1, [frozenset[int]()] * len(closed.jaxpr.invars))
    found = [place for number, place in enumerate(walk) if number in places]
    return [(_index(one), one.match.form, [len(shape) for shape, _ in one.match.types]) for one in found]


def _index(place: _MatchPlace) -> int:
    """The index in its body of the equation that makes the first result."""
    maker = maker_of(place.graph, place.match)
    return next(i for i, eqn in enumerate(place.graph.jaxpr.eqns) if eqn is maker)


def rewritten(closed: ClosedJaxpr, rewrite: Rewrite, places: Collection[int], devices: int) -> ClosedJaxpr:
    """The jaxpr with these places rewritten, from the same arguments to the same results."""
    return _SiteWalk(rewrite, devices, frozenset(places)).body(closed)


class _SiteWalk:
    """A walk through the bodies of a step."""

    def __init__(self, rewrite: Rewrite, devices: int, wanted: frozenset[int] = frozenset()):
        self.rewrite, self.devices, self.wanted = rewrite, devices, wanted
        self.count = 0

    def places(self, closed: ClosedJaxpr, turns: int, origins: Sequence[frozenset[int]]) -> Iterator[_MatchPlace]:
        """All places.

        Args:
            turns: how often the body runs per step.
            origins: the arguments of the step that its inputs are.
        """
        graph = BodyGraph(opened(closed).jaxpr, self.devices)
        known = dict(zip(graph.jaxpr.invars, origins, strict=True))
        yield from (_MatchPlace(turns, graph, match, known) for match in self.rewrite.find(graph))
        for eqn in graph.jaxpr.eqns:
            given = [_origin(graph, atom, known) for atom in eqn.invars]
            for inner in _bodies_of(eqn):
                taken = given[len(given) - len(inner.jaxpr.invars) :]  # a `cond` has its index before
                if eqn.primitive.name == "while":
                    taken = given[eqn.params["cond_nconsts"] :]
                yield from self.places(inner, turns * eqn.params.get("length", 1), taken)

    def body(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        plain = opened(closed)
        graph = BodyGraph(plain.jaxpr, self.devices)
        chosen = []
        for match in self.rewrite.find(graph):
            if self.count in self.wanted:
                chosen.append(match)
            self.count += 1
        inner = {id(eqn): made for eqn in graph.jaxpr.eqns if (made := self.with_bodies(eqn)) is not eqn}
        if not chosen and not inner:
            return closed
        return ClosedJaxpr(_BodyBuilder(graph, inner).jaxpr(chosen), plain.consts)

    def with_bodies(self, eqn: JaxprEqn) -> JaxprEqn:
        params = dict(eqn.params)
        for name in _BODIES.get(eqn.primitive.name, ()):
            held = eqn.params[name]
            if isinstance(held, tuple):
                params[name] = tuple(map(self.body, held))
            elif isinstance(held, ClosedJaxpr):
                params[name] = self.body(held)
            elif not held.constvars:
                made = self.body(ClosedJaxpr(held, ()))
                params[name] = held if made.consts else made.jaxpr
        same = all(_is_same(params[name], held) for name, held in eqn.params.items())
        return eqn if same else eqn.replace(params=params)


def _is_same(made: Any, held: Any) -> bool:
    if isinstance(held, tuple) and isinstance(made, tuple):
        return all(a is b for a, b in zip(made, held, strict=True))
    return made is held


def _bodies_of(eqn: JaxprEqn) -> Iterator[ClosedJaxpr]:
    for name in _BODIES.get(eqn.primitive.name, ()):
        held = eqn.params[name]
        for one in held if isinstance(held, tuple) else (held,):
            if isinstance(one, ClosedJaxpr):
                yield one
            elif not one.constvars:
                yield ClosedJaxpr(one, ())


class _BodyBuilder:
    """A body whose equations are put in order again, once some are replaced."""

    def __init__(self, graph: BodyGraph, replaced: Mapping[int, JaxprEqn]):
        """
        Args:
            replaced: id of an equation -> the equation that takes its place.
        """
        self.graph, self.replaced = graph, replaced

    def jaxpr(self, matches: Sequence[Match]) -> Jaxpr:
        """The body with those of the places rewritten that can be at once."""
        order = _in_order(self.graph.jaxpr.eqns, _fitting(self.graph, matches))
        assert order is not None, "they fit"
        equations, named = list[JaxprEqn](), dict[Var, Any]()
        for one in order:
            if isinstance(one, Match):
                made, results = _block(self.graph, one)
                equations += made
                named.update(results)
            else:
                equations.append(one)

        def read(atom: Any) -> Any:
            while isinstance(atom, Var) and atom in named:
                atom = named[atom]
            return atom

        renamed = [eqn.replace(invars=list(map(read, eqn.invars))) for eqn in equations]
        renamed = [
            one if (other := self.replaced.get(id(eqn))) is None else other.replace(invars=one.invars)
            for one, eqn in zip(renamed, equations, strict=True)
        ]
        outvars = list(map(read, self.graph.jaxpr.outvars))
        jaxpr = self.graph.jaxpr
        return jaxpr.replace(eqns=needed(renamed, outvars), outvars=outvars, debug_info=jaxpr.debug_info)


def _fitting(graph: BodyGraph, matches: Sequence[Match]) -> list[Match]:
    """Those that can be rewritten at once: each that fits to those before it.

    They rewrite different variables, need no results of each other in a circle, and leave effects in their order.
    """
    kept, taken = list[Match](), set[Var]()
    for match in matches:
        if taken.isdisjoint(match.results) and _in_order(graph.jaxpr.eqns, [*kept, match]) is not None:
            kept.append(match)
            taken.update(match.results)
    return kept


def _in_order(equations: Sequence[JaxprEqn], matches: Sequence[Match]) -> list[JaxprEqn | Match] | None:
    """The equations and matches in the equations' order, but that each comes after what makes its operands.

    None if that cannot be, or would change the order of effects.
    """
    owner: dict[Var, JaxprEqn | Match] = {var: eqn for eqn in equations for var in eqn.outvars}
    owner |= {var: match for match in matches for var in match.results}
    done, open_ = set[int](), set[int]()
    made = list[JaxprEqn | Match]()
    for first in equations:
        wanted = list({id(owner[var]): owner[var] for var in first.outvars if owner[var] is not first}.values())
        if not wanted or any(owner[var] is first for var in first.outvars):
            wanted.append(first)
        for one in wanted:
            stack = [one]
            while stack:
                top = stack[-1]
                if id(top) in done:
                    stack.pop()
                    continue
                atoms = top.inputs if isinstance(top, Match) else top.invars
                needs = {id(owner[atom]): owner[atom] for atom in variables(atoms) if atom in owner}
                waits = [need for key, need in needs.items() if key not in done]
                if not waits:
                    stack.pop()
                    done.add(id(top))
                    made.append(top)
                    continue
                if id(top) in open_:
                    return None
                open_.add(id(top))
                stack.extend(waits)
    effects = [id(one) for one in made if isinstance(one, JaxprEqn) and one.effects]
    return made if effects == [id(eqn) for eqn in equations if eqn.effects] else None


def _block(graph: BodyGraph, match: Match) -> tuple[list[JaxprEqn], dict[Var, Any]]:
    """The equations of a match, on its inputs and at its line; and variable of the body -> what it becomes.

    Raises:
        PlanError: what a rewrite builds has other types than what it replaces, or arrays of its own.
    """
    eqn = maker_of(graph, match)
    structs = [jax.ShapeDtypeStruct(aval_of(a).shape, aval_of(a).dtype, weak_type=_is_weak(a)) for a in match.inputs]
    with jax.sharding.use_abstract_mesh(eqn.ctx.cur_abstract_mesh):
        closed = opened(jax.make_jaxpr(match.build)(*structs))
    built = [(one.shape, one.dtype) for one in closed.out_avals]
    wanted = [(aval_of(var).shape, aval_of(var).dtype) for var in match.results]
    if built != wanted or closed.consts:
        arrays = f" and closes over {len(closed.consts)} arrays" * bool(closed.consts)
        raise PlanError(
            f"a rewrite builds {built}{arrays} in the place of {wanted} at {source_of(eqn) or 'unknown line'}.\n"
            "It has to build arrays of the types that it replaces, of its inputs alone; make other arrays inside."
        )
    names: dict[Var, Any] = dict(zip(closed.jaxpr.invars, match.inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else names[atom]

    equations = []
    for one in closed.jaxpr.eqns:
        made = [var if isinstance(var, DropVar) else Var(var.aval) for var in one.outvars]
        inputs = list(map(read, one.invars))
        names.update((old, new) for old, new in zip(one.outvars, made, strict=True) if not isinstance(old, DropVar))
        equations.append(one.replace(invars=inputs, outvars=made, source_info=eqn.source_info))
    return equations, dict(zip(match.results, map(read, closed.jaxpr.outvars), strict=True))


def _is_weak(atom: Any) -> bool:
    return bool(getattr(aval_of(atom), "weak_type", False))
