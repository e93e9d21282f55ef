"""A tree of bodies that is being changed: equations put in, values handed from one body to another, and the jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from autoshard.jaxprs import (
    ClosedJaxpr,
    DropVar,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    capturing_call,
    evaluated,
    jaxpr_of,
    scan_counts,
)
from autoshard.recognition.bodies import Atom, BodyTree, NestedBody
from autoshard.recognition.equations import UnavailableValue
from autoshard.remat.numbering import needed


@dataclass(eq=False)
class _BodyInterface:
    """What a body gets and gives beside what it did: pairs of a variable outside and one inside."""

    constants: list[tuple[Var, Var]] = field(default_factory=list)
    slices: list[tuple[Var, Var]] = field(default_factory=list)
    stacks: list[tuple[Var, Var]] = field(default_factory=list)  # what a scan stacks more

    def __bool__(self) -> bool:
        return bool(self.constants or self.slices or self.stacks)


@dataclass(eq=False)
class Editor:
    """One tree, changed in place."""

    tree: BodyTree
    handed: dict[NestedBody, _BodyInterface] = field(default_factory=dict)
    changed: set[NestedBody] = field(default_factory=set)
    _made: dict[tuple[Hashable, tuple], ClosedJaxpr] = field(default_factory=dict)  # of which kind, of which operands

    def here(self, origin: Var, body: NestedBody) -> Var:
        """The variable that a value has in a body; it is handed there if it has none.

        Raises:
            UnavailableValue: the value belongs to a body that is neither around this one nor a scan beside it.
        """
        origin = self.tree.origin(origin)
        if names := self.tree.names_in(origin, body):
            return names[0]
        home, _ = self.tree.homes.get(origin, (None, None))
        if home is None or body.parent is None or body.call is None:
            raise UnavailableValue
        if home.parent is body.parent and home is not body and self._turn_together(home, body):
            outside = self._stack(origin, home)
            return self._joins(body, origin, outside, self._handed(body).slices)
        outside = self.here(origin, body.parent)
        return self._joins(body, origin, outside, self._handed(body).constants)

    def _handed(self, body: NestedBody) -> _BodyInterface:
        return self.handed.setdefault(body, _BodyInterface())

    def _turn_together(self, first: NestedBody, second: NestedBody) -> bool:
        """Whether two scans have their turns in common: the second reads slices of what the first stacks."""
        calls = first.call, second.call
        if any(call is None or call.primitive.name != "scan" for call in calls):
            return False
        return any(self.tree.homes.get(self.tree.origin(var), (None, None))[0] is first for var in second.inputs)

    def _stack(self, origin: Var, home: NestedBody) -> Var:
        stacks = self._handed(home).stacks
        for outside, inside in stacks:
            if inside == origin:
                return outside
        assert home.call is not None, "it is a scan"
        aval = aval_of(origin)
        outside = Var(jax.core.ShapedArray((home.call.params["length"], *aval.shape), aval.dtype))
        stacks.append((outside, origin))
        self._mark(home)
        return outside

    def _joins(self, body: NestedBody, origin: Var, outside: Var, pairs: list[tuple[Var, Var]]) -> Var:
        inside = Var(aval_of(origin))
        self.tree.hand(inside, origin, body)
        pairs.append((outside, inside))
        self._mark(body)
        return inside

    def _mark(self, body: NestedBody | None) -> None:
        while body is not None:
            self.changed.add(body)
            body = body.parent

    def replace(
        self,
        body: NestedBody,
        gone: Sequence[JaxprEqn],
        function: Callable[..., Sequence[Any]],
        operands: Sequence[Var],
        results: Sequence[Var | None],
        kind: Hashable = None,
    ) -> list[Var]:
        """Equations make room for those of a function, on the line of the first of them.

        Args:
            results: the variables of the function's results; None for one that is new.
            kind: functions of one kind make the same equations of operands of the same types. So only the first of
                them is traced. None: it is like no other.

        Raises:
            UnavailableValue: the operands are made of what the function makes.
        """
        made = self._traced(kind, function, operands)
        names: dict[Var, Atom] = dict(zip(made.jaxpr.invars, operands, strict=True))
        found = []
        for atom, var in zip(made.jaxpr.outvars, results, strict=True):
            assert isinstance(atom, Var), "it is made of the operands"
            found.append(var or Var(aval_of(atom)))
            names[atom] = found[-1]
        new = []
        for eqn in made.jaxpr.eqns:
            read = [atom if isinstance(atom, Literal) else names[atom] for atom in eqn.invars]
            for var in eqn.outvars:
                if not isinstance(var, DropVar):
                    names.setdefault(var, Var(aval_of(var)))
            written = [var if isinstance(var, DropVar) else names[var] for var in eqn.outvars]
            new.append(eqn.replace(invars=read, outvars=written, source_info=gone[0].source_info))
        body.equations.exchange(gone, new)
        self.tree.homes |= {var: (body, eqn) for eqn in new for var in eqn.outvars if not isinstance(var, DropVar)}
        self._mark(body)
        return found

    def _traced(self, kind: Hashable, function: Callable[..., Sequence[Any]], operands: Sequence[Var]) -> ClosedJaxpr:
        types = tuple((aval_of(x).shape, aval_of(x).dtype) for x in operands)
        if kind is not None and (kind, types) in self._made:
            return self._made[kind, types]
        made = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types))
        assert not made.consts, "the function closes over no arrays"
        if kind is not None:
            self._made[kind, types] = made
        return made

    # The jaxpr.

    def jaxpr(self) -> ClosedJaxpr:
        """The step as it is now."""
        root, like = self.tree.root, self.tree.root.like
        equations = self._equations(root)
        jaxpr = like.jaxpr.replace(
            constvars=list(root.constants),
            invars=root.inputs,
            outvars=root.results,
            eqns=equations,
            debug_info=like.jaxpr.debug_info,
        )
        return ClosedJaxpr(jaxpr, list(root.constants.values()))

    def _equations(self, body: NestedBody) -> list[JaxprEqn]:
        found = []
        for eqn in body.equations:
            inner = body.inner.get(id(eqn))
            found.append(eqn if inner is None or inner not in self.changed else self._call(eqn, inner))
        return needed(found, body.results)

    def _call(self, eqn: JaxprEqn, body: NestedBody) -> JaxprEqn:
        """A scan or checkpoint of a changed body."""
        handed, equations = self._handed(body), self._equations(body)
        if eqn.primitive.name == "scan":
            return self._scan(eqn, body, handed, equations)
        for inside, array in body.constants.items():  # the jaxpr of a checkpoint has none
            assert body.parent is not None, "it is called"
            outside = Var(inside.aval)
            body.parent.constants[outside] = array
            handed.constants.append((outside, inside))
        inputs = [*(inside for _, inside in handed.constants), *body.inputs]
        called = jaxpr_of({}, inputs, body.results, equations)
        operands = [*(outside for outside, _ in handed.constants), *eqn.invars]
        return eqn.replace(params=capturing_call(eqn, called, len(handed.constants)), invars=operands)

    def _scan(self, eqn: JaxprEqn, body: NestedBody, handed: _BodyInterface, equations: list[JaxprEqn]) -> JaxprEqn:
        if not handed:
            return eqn.replace(
                params={**eqn.params, "jaxpr": jaxpr_of(body.constants, body.inputs, body.results, equations)}
            )
        consts, carries = scan_counts(eqn)
        inside = [
            *body.inputs[:consts],
            *(var for _, var in handed.constants),
            *body.inputs[consts:],
            *(var for _, var in handed.slices),
        ]
        operands = [
            *eqn.invars[:consts],
            *(var for var, _ in handed.constants),
            *eqn.invars[consts:],
            *(var for var, _ in handed.slices),
        ]
        results = [*body.results, *(var for _, var in handed.stacks)]
        outvars = [*eqn.outvars, *(var for var, _ in handed.stacks)]
        closed, whole = jaxpr_of(body.constants, inside, results, equations), consts + len(handed.constants)
        params = eqn.params

        def run(*arrays: Any) -> Any:
            def turn(carry: Any, sliced: Any) -> Any:
                made = _applied(closed, [*arrays[:whole], *carry, *sliced])
                # JAX would take what a turn hands on unchanged out of the scan, with its result.
                unchanged = set(map(id, (*carry, *sliced)))
                made = [jax.numpy.copy(one) if id(one) in unchanged else one for one in made]
                return made[:carries], made[carries:]

            return jax.lax.scan(
                turn,
                list(arrays[whole : whole + carries]),
                list(arrays[whole + carries :]),
                length=params["length"],
                reverse=params["reverse"],
                unroll=params["unroll"],
            )

        types = [
            jax.ShapeDtypeStruct(aval_of(x).shape, aval_of(x).dtype, weak_type=aval_of(x).weak_type) for x in operands
        ]
        made = jax.make_jaxpr(run)(*types)
        (scan,) = made.jaxpr.eqns
        places = dict(zip(made.jaxpr.invars, operands, strict=True))
        out = dict(zip(made.jaxpr.outvars, outvars, strict=True))
        return scan.replace(
            invars=[places[var] if isinstance(var, Var) else var for var in scan.invars],
            outvars=[out.get(var, var) for var in scan.outvars],
            source_info=eqn.source_info,
        )


def _applied(closed: ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    env = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*arrays, *closed.consts), strict=True))
    inner = [atom for atom in jaxpr.outvars if isinstance(atom, Var) and atom not in env]
    made = dict(zip(inner, evaluated(jaxpr.eqns, env, inner), strict=True)) | env
    return [
        made[atom] if isinstance(atom, Var) else jax.numpy.asarray(atom.val, aval_of(atom).dtype)
        for atom in jaxpr.outvars
    ]
