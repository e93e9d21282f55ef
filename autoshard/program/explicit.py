"""Jaxprs of JAX's explicit mode in, the same for Auto axes out, with what their types order as constraints.

On Explicit axes the type of an array says how it lies. Three kinds of types are orders:

- What the user wrote, `reshard` and `out_sharding=`, becomes a `sharding_constraint` where it stands.
- The types of arguments that have one become `ExplicitTypes.arguments`.
- The types of results become a `sharding_constraint` at the end of the jaxpr.

All other types follow from these by JAX's rules, and are dropped: the plan decides. These are open, too:

- An argument without a type: a NumPy array, a `ShapeDtypeStruct` without a sharding, an array on Auto axes. So is each
  whole dim of a result that such an argument goes into: the dim is whole only because the argument counts as whole.
- A whole value in a backward pass, and a constant: JAX wrote down how these lie, not the user.
- What a type on a mesh of several kinds of axes does not split: Auto axes may split it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.errors import ConflictError
from autoshard.jaxprs import (
    CONSTRAINTS,
    HOST,
    NO_MESH,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    call_of,
    called_jaxpr,
    constraint_like,
    context_like,
    equations_of,
    is_array,
    on_host,
)
from autoshard.layout import Layout, layout_of

_UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
_NO_DEVICES = Mesh(np.empty((), dtype=object), ())
# Parameters that say how the result of an equation lies.
_RESULT_SHARDINGS = ("out_sharding", "sharding")


@dataclass(frozen=True)
class ExplicitTypes:
    """What explicit mode says of a step's arguments and results: the layout in the type; None for one that is open."""

    mesh: AbstractMesh  # of the types: some axes Explicit
    arguments: tuple[Layout | None, ...]  # per flat argument
    results: tuple[Layout | None, ...]  # per flat result
    reached: frozenset[int]  # results that an open argument goes into, other than through a `reshard`
    on_auto: frozenset[int]  # results that the step has put on Auto axes
    written: tuple[PartitionSpec | None, ...]  # per flat argument, what its type says, whether it counts or not


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Whether types say how arrays lie along some axis of the mesh."""
    return AxisType.Explicit in (mesh.axis_types or ())


def is_by_hand() -> bool:
    """Whether the caller runs on each device's shards, in a `shard_map` or `pmap`: nothing can be split there."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def type_sharding(aval: Any) -> NamedSharding | None:
    """The sharding in a type; None if the type says nothing of how an array lies."""
    sharding = getattr(aval, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and is_explicit(sharding.mesh) else None


def types_of(closed: ClosedJaxpr, context: AbstractMesh, *, obey: bool) -> ExplicitTypes | None:
    """The types of a jaxpr that was traced under `context`; None if it is no program of explicit mode.

    Args:
        obey: whether they count; all are open otherwise.

    Raises:
        ConflictError: an argument or result is, or was, a sum of which each device has a part.
    """
    ends = [*closed.in_avals, *closed.out_avals]
    # Types are on meshes without devices.
    meshes = [cast(AbstractMesh, sharding.mesh) for sharding in map(type_sharding, ends) if sharding is not None]
    if not meshes and not is_explicit(context):
        return None
    layouts = [_layout_in(aval) if obey else None for aval in ends]
    arguments, results = layouts[: len(closed.in_avals)], layouts[len(closed.in_avals) :]
    reached = _reached_by_open(closed, arguments)
    for i in reached:
        if (layout := results[i]) is not None and not any(layout):  # whole only because the argument counts as whole
            results[i] = None
    on_auto = frozenset(i for i, aval in enumerate(closed.out_avals) if _is_on_auto(aval))
    written = tuple(None if (one := type_sharding(aval)) is None else _bare(one.spec) for aval in closed.in_avals)
    return ExplicitTypes(meshes[0] if meshes else context, tuple(arguments), tuple(results), reached, on_auto, written)


def _is_on_auto(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return isinstance(sharding, NamedSharding) and not sharding.mesh.empty and not is_explicit(sharding.mesh)


def _layout_in(aval: Any) -> Layout | None:
    sharding = type_sharding(aval)
    if sharding is None:
        return None
    if getattr(sharding.spec, "unreduced", None) or getattr(sharding.spec, "reduced", None):
        raise ConflictError(
            f"an argument or result has the type {aval.str_short()}, of a sum of which each device has or had a part; "
            "a plan has no layout for that.\n"
            "Pass and return jax.sharding.reshard(x, P(...)) without unreduced= and reduced=; inside the step they may "
            "stay."
        )
    order = sharding.mesh.axis_names.index  # layouts of plans have axes in the order of the mesh
    return tuple(tuple(sorted(axes, key=order)) for axes in layout_of(_bare(sharding.spec), aval.ndim))


def on_auto_axes(
    closed: ClosedJaxpr, types: ExplicitTypes | None, *, obey: bool, settled: Sequence[int] = ()
) -> ClosedJaxpr:
    """The jaxpr with no types of explicit mode in it, and their orders as constraints.

    Args:
        types: its types, if it is a program of explicit mode.
        obey: whether what the user says of layouts is kept; otherwise it is left out, constraints on Auto axes too.
        settled: results that need no constraint at the end.
    """
    if obey and types is None and not _mentions_types(closed):
        return closed
    rewriter = _Rewriter(obey)
    rewritten = rewriter.closed(closed)
    if types is None or not obey:
        return rewritten
    jaxpr, equations, ends = rewritten.jaxpr, list(rewritten.jaxpr.eqns), list(rewritten.jaxpr.outvars)
    makers = {var: eqn for eqn in equations for var in eqn.outvars}
    for i, (var, end) in enumerate(zip(closed.jaxpr.outvars, ends, strict=True)):
        sharding = type_sharding(var.aval)
        if types.results[i] is None or sharding is None or isinstance(end, Literal) or i in settled:
            continue
        order = _order(sharding, var.aval.ndim, whole_is_open=i in types.reached)
        if order is None or _says(makers.get(end), order):
            continue
        equations.append(constraint_like(end, Var(end.aval), order, makers.get(end)))
        ends[i] = equations[-1].outvars[0]
    jaxpr = jaxpr.replace(eqns=equations, outvars=ends, debug_info=jaxpr.debug_info)
    return ClosedJaxpr(jaxpr, rewritten.consts)


def _says(eqn: JaxprEqn | None, order: NamedSharding) -> bool:
    """Whether the equation is a constraint that says as much."""
    if eqn is None or eqn.primitive.name not in CONSTRAINTS:
        return False
    entries = _entries(eqn.params["sharding"].spec, len(order.spec))
    pairs = ((_axes(ours), _axes(theirs), ours) for ours, theirs in zip(order.spec, entries, strict=True))
    return all(ours is _UNCONSTRAINED or wanted == found[: len(wanted)] for wanted, found, ours in pairs)


def _mentions_types(closed: ClosedJaxpr) -> bool:
    """Whether a type of explicit mode occurs anywhere: in a program for Auto axes, inside `explicit_axes`."""
    seen: set[int] = set()

    def mentions(jaxpr: Jaxpr) -> bool:
        if id(jaxpr) in seen:
            return False
        seen.add(id(jaxpr))
        if any(type_sharding(var.aval) for var in (*jaxpr.invars, *jaxpr.constvars)):
            return True
        return any(
            any(type_sharding(var.aval) for var in eqn.outvars) or any(map(mentions, _held(eqn.params)))
            for eqn in jaxpr.eqns
        )

    return mentions(closed.jaxpr)


def _held(params: Mapping[str, Any]) -> list[Jaxpr]:
    values = [one for value in params.values() for one in (value if isinstance(value, tuple | list) else (value,))]
    return [x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in values if isinstance(x, Jaxpr | ClosedJaxpr)]


def _reached_by_open(closed: ClosedJaxpr, arguments: Sequence[Layout | None]) -> frozenset[int]:
    """The results that an argument without a type goes into, other than through a `reshard`."""
    reached = {
        var
        for var, layout in zip(closed.jaxpr.invars, arguments, strict=True)
        if layout is None and bool(getattr(var.aval, "ndim", 0))
    }
    for eqn in closed.jaxpr.eqns:
        ordered = eqn.primitive.name == "reshard" and type_sharding(eqn.outvars[0].aval) is not None
        if not ordered and any(isinstance(atom, Var) and atom in reached for atom in eqn.invars):
            reached.update(eqn.outvars)
    ends = enumerate(closed.jaxpr.outvars)
    return frozenset(i for i, atom in ends if isinstance(atom, Var) and atom in reached)


def _order(sharding: NamedSharding, ndim: int, *, whole_is_open: bool = False) -> NamedSharding | None:
    """What a type orders, as a sharding for Auto axes; None if it leaves everything open."""
    mesh = sharding.mesh
    if not ndim or not is_explicit(mesh) or AxisType.Manual in mesh.axis_types:
        return None
    whole = _UNCONSTRAINED if whole_is_open else None
    entries = [entry or whole for entry in _entries(sharding.spec, ndim)]
    if all(entry is _UNCONSTRAINED for entry in entries):
        return None
    # On Explicit axes alone no dim can be left open, on Auto ones none can be said to be closed.
    return NamedSharding(mesh if open_axes(mesh) else _auto(mesh), PartitionSpec(*entries))


def open_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """The axes that types on this mesh leave open; none if it has no others."""
    types = zip(mesh.axis_names, mesh.axis_types or (), strict=False)
    return frozenset(name for name, kind in types if kind is AxisType.Auto) if is_explicit(mesh) else frozenset()


def _entries(spec: PartitionSpec, ndim: int) -> tuple:
    """One entry per dim; a spec that says of a sum that it is one cannot be iterated over."""
    entries = tuple(getattr(spec, "partitions", spec))
    return (*entries, *[None] * (ndim - len(entries)))


def _bare(spec: PartitionSpec) -> PartitionSpec:
    """What a spec says of dims alone."""
    return PartitionSpec(*_entries(spec, 0))


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is _UNCONSTRAINED or entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _auto(mesh: Any) -> Any:
    """A mesh of types with Auto axes in the place of Explicit ones."""
    types = tuple(AxisType.Auto if one is AxisType.Explicit else one for one in mesh.axis_types)
    if isinstance(mesh, AbstractMesh):
        return mesh.update(axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def _untyped_mesh(mesh: AbstractMesh) -> AbstractMesh:
    """Where a type was on `mesh`, what is on Auto axes: no mesh, as when none is set, unless some axes are Manual."""
    return _auto(mesh) if AxisType.Manual in mesh.axis_types else NO_MESH


class _Rewriter:
    """One walk over a jaxpr and those that it holds; what is shared stays shared."""

    def __init__(self, obey: bool):
        self.obey = obey
        # Address of a jaxpr -> the jaxpr, kept so that no other gets its address, and its rewritten form.
        self.known: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def closed(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        jaxpr, consts = self.jaxpr(closed.jaxpr), list(map(_const, closed.consts))
        return ClosedJaxpr(jaxpr, consts)

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in self.known:
            self.known[id(jaxpr)] = jaxpr, self.rewritten(jaxpr)
        return self.known[id(jaxpr)][1]

    def rewritten(self, jaxpr: Jaxpr) -> Jaxpr:
        env: dict[Var, Var | Literal] = {}

        def bound(var: Var) -> Var:
            aval = self.aval(var.aval)
            if aval is var.aval:
                return var
            made = DropVar(aval) if isinstance(var, DropVar) else Var(aval)
            env[var] = made
            return made

        def read(atom: Var | Literal) -> Var | Literal:
            if not isinstance(atom, Literal):
                return env.get(atom, atom)
            aval = self.aval(atom.aval)
            return atom if aval is atom.aval else Literal(atom.val, aval)

        constvars, invars = list(map(bound, jaxpr.constvars)), list(map(bound, jaxpr.invars))
        equations: list[JaxprEqn] = []
        for eqn in equations_of(jaxpr):
            inputs = list(map(read, eqn.invars))
            if eqn.primitive.name in CONSTRAINTS and not self.stays(eqn):
                env[eqn.outvars[0]] = inputs[0]
            else:
                equations += self.equations(eqn, inputs, bound)
        outvars = list(map(read, jaxpr.outvars))
        return jaxpr.replace(
            constvars=constvars, invars=invars, outvars=outvars, eqns=equations, debug_info=jaxpr.debug_info
        )

    def stays(self, eqn: JaxprEqn) -> bool:
        """Whether a constraint says anything that counts."""
        (operand,), (result,) = eqn.invars, eqn.outvars
        if on_host(operand.aval) != on_host(result.aval):
            return True
        if not self.obey:
            return False
        return eqn.primitive.name != "reshard" or self.ordered(eqn) is not None

    def ordered(self, eqn: JaxprEqn) -> NamedSharding | None:
        """What the user, as far as one can tell, says of the result of an equation."""
        aval: Any = eqn.outvars[0].aval
        sharding = type_sharding(aval)
        if not self.obey or sharding is None:
            return None
        is_constant = eqn.primitive.name not in CONSTRAINTS and not any(getattr(x.aval, "ndim", 0) for x in eqn.invars)
        is_whole = not any(_entries(sharding.spec, aval.ndim))
        if is_whole and (is_constant or "transpose(" in str(eqn.source_info.name_stack)):
            return None
        return _order(sharding, aval.ndim)

    def equations(self, eqn: JaxprEqn, inputs: list, bound: Callable[[Var], Var]) -> list[JaxprEqn]:
        """What an equation becomes: itself, and a constraint if its type was ordered."""
        outputs, order = list(map(bound, eqn.outvars)), None
        if eqn.primitive.name in CONSTRAINTS:
            return [constraint_like(inputs[0], outputs[0], self.constraint(eqn), eqn)]
        params = dict(eqn.params)
        for name in _RESULT_SHARDINGS:
            if _is_typed(params.get(name)):
                order, params[name] = self.ordered(eqn) if len(outputs) == 1 else None, None
        if eqn.primitive.name == "call_hi_primitive":  # its function is traced when the primitive is bound
            with jax.sharding.use_abstract_mesh(eqn.ctx.cur_abstract_mesh):
                if (called := called_jaxpr(eqn)) is not None:
                    return [call_of(eqn, self.closed(called), inputs, outputs)]
        params = {name: self.param(name, value) for name, value in params.items()}
        context = context_like(eqn, self.context_mesh(eqn.ctx.cur_abstract_mesh))
        if order is None:
            return [eqn.replace(invars=inputs, outvars=outputs, params=params, ctx=context)]
        (result,) = outputs
        made = Var(result.aval)
        first = eqn.replace(invars=inputs, outvars=[made], params=params, ctx=context)
        return [first, constraint_like(made, result, order, eqn)]

    def constraint(self, eqn: JaxprEqn) -> NamedSharding:
        """What a constraint says, on Auto axes: of the axes that are Explicit, what the type says."""
        (result,) = eqn.outvars
        aval: Any = result.aval
        sharding = self.ordered(eqn) if eqn.primitive.name == "reshard" else eqn.params["sharding"]
        memory_kind = sharding.memory_kind if sharding is not None else None
        if sharding is None or not self.obey:
            memory_kind = memory_kind or (HOST if on_host(result.aval) else "device")
            mesh = sharding.mesh if sharding is not None else _auto(eqn.params["dst_sharding"].mesh)
            return NamedSharding(_auto(mesh), PartitionSpec(*[_UNCONSTRAINED] * aval.ndim), memory_kind=memory_kind)
        typed = type_sharding(aval)
        if eqn.primitive.name == "reshard" or typed is None:
            return sharding
        both = (_entries(one.spec, aval.ndim) for one in (typed, sharding))
        entries = itertools.starmap(_joined, zip(*both, strict=True))
        return NamedSharding(_auto(sharding.mesh), PartitionSpec(*entries), memory_kind=memory_kind)

    def context_mesh(self, mesh: AbstractMesh) -> AbstractMesh:
        return _untyped_mesh(mesh) if is_explicit(mesh) else mesh

    def aval(self, aval: Any) -> Any:
        if (inner := getattr(aval, "inner_aval", None)) is not None:  # a reference
            untyped = self.aval(inner)
            return aval if untyped is inner else aval.update(inner_aval=untyped)
        sharding = type_sharding(aval)
        if sharding is None or not is_array(aval):
            return aval
        mesh = _untyped_mesh(cast(AbstractMesh, sharding.mesh))
        if mesh is NO_MESH:
            return aval.update(sharding=jax.core.ShapedArray(aval.shape, aval.dtype).sharding)
        return aval.update(sharding=NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim)))

    def param(self, name: str, value: Any) -> Any:
        """A parameter without types: other objects, and functions, stay as they are."""
        if isinstance(value, ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, Jaxpr):
            return self.jaxpr(value)
        if isinstance(value, Mesh | AbstractMesh):
            return value if not is_explicit(value) else _NO_DEVICES if name == "ctx_mesh" else _auto(value)
        if isinstance(value, NamedSharding):
            return NamedSharding(_auto(value.mesh), _bare(value.spec)) if is_explicit(value.mesh) else value
        if is_array(value):
            return self.aval(value)
        if isinstance(value, PartitionSpec):
            return value
        if isinstance(value, tuple):
            parts = [self.param(name, one) for one in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, list):
            return [self.param(name, one) for one in value]
        return value


def _is_typed(value: Any) -> bool:
    """Whether a parameter holds a sharding on Explicit axes."""
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(one, NamedSharding) and is_explicit(one.mesh) for one in values)


def _joined(typed: Any, written: Any) -> Any:
    """One dim of a constraint: the axes of its type, then those that the constraint names."""
    if written is _UNCONSTRAINED:
        return typed or _UNCONSTRAINED
    return tuple(dict.fromkeys((*_axes(typed), *_axes(written)))) or None


def _const(const: Any) -> Any:
    """A constant on Auto axes, its memory shared; a tracer is left to `lower`."""
    if isinstance(const, jax.core.Tracer) or not isinstance(const, jax.Array):
        return const
    sharding = const.sharding
    if not isinstance(sharding, NamedSharding) or not is_explicit(sharding.mesh):
        return const
    untyped = NamedSharding(_auto(sharding.mesh), _bare(sharding.spec), memory_kind=sharding.memory_kind)
    with jax.ensure_compile_time_eval():
        return jax.device_put(const, untyped)
