"""What devices run on their own shards, priced like any program: calls of operations, and `shard_map`s of the user.

The body of a region is a jaxpr of one device. It is read as a program of its own and formulated on a mesh of one
device, so its seconds and its memory are counted as everywhere. Its collectives stand in the jaxpr. A collective that
no matrix product goes into can run behind those; of it the share of `Overlap` for gathers of weights is hidden.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, AxisType

from autoshard.jaxprs import ClosedJaxpr, JaxprEqn, called_jaxpr, inner_jaxprs, with_plain_names
from autoshard.layout import MeshShape, local_shape, ordered_axes, shards
from autoshard.mesh.topology import Topology
from autoshard.model.groups import Group
from autoshard.model.xla.backends import Backend
from autoshard.model.xla.scatters import scattered_alone
from autoshard.operations.call import Call
from autoshard.operations.primitive import OPERATION
from autoshard.operations.split import CallRun
from autoshard.primitives import FlopRule, facts_of
from autoshard.program import Equation, Program, Value
from autoshard.program.paths import Places
from autoshard.program.reader import JaxprReader
from autoshard.program.trees import Tree
from autoshard.propagation.registry import UnknownPrimitiveWarning, has_rule, rule_of
from autoshard.propagation.rule import Rule, whole

if TYPE_CHECKING:
    from autoshard.model.formulation import Formulation
    from autoshard.model.strategies import Strategy

SHARD_MAP = "shard_map"
REGIONS = frozenset({OPERATION, SHARD_MAP})
_KIND_OF_PRIMITIVE = {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "ppermute": "collective_permute",
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "ragged_all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
}
_PRIMITIVES_OF_REGIONS = frozenset({*_KIND_OF_PRIMITIVE, "axis_index", "pbroadcast", "pvary"})  # found nowhere else


@dataclass(frozen=True)
class RegionCollective:
    """One collective inside a region."""

    kind: str  # as of `Collective`
    axes: tuple[str, ...]
    bytes: int  # its result on one device, one run
    runs: int  # per run of the region
    is_ahead: bool  # whether no matrix product goes into it
    is_in_loop: bool = False
    devices: int | None = None  # of those along the axes, how many talk to each other; None: all
    shape: tuple[int, ...] = ()  # of one device's part of a sum that is scattered, whole
    last_operand: int = field(default=-1, compare=False)  # of the region, of those that it is made of; -1: of none


@dataclass(frozen=True)
class Region:
    """What one run of a region costs on each device."""

    compute: float  # s, collectives left out
    collectives: tuple[RegionCollective, ...]
    workspace: float  # bytes beside operands and results

    def after(self, forward: Region, operands: int, *, computes_again: bool) -> Region:
        """This region, of a backward pass, where the forward pass has done a part of its work.

        XLA merges equal collectives of the operands that both have: the first ones of these.

        Args:
            operands: of the forward pass, with which those of the backward pass begin.
            computes_again: whether it starts with all that the forward pass computes.
        """
        alike = [one for one in self.collectives if one.last_operand < operands and not one.is_in_loop]
        pairs = zip(alike, forward.collectives, strict=False)
        same = {id(one) for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)}
        rest = tuple(one for one in self.collectives if id(one) not in same)
        compute = self.compute - forward.compute if computes_again else self.compute
        return replace(self, compute=max(0.0, compute), collectives=rest)


class RegionPrices:
    """The regions of one program, each priced once."""

    def __init__(
        self,
        program: Program,
        mesh: MeshShape,
        topology: Topology,
        backend: Backend,
        formulate: Callable[..., Formulation],
    ):
        """
        Args:
            formulate: a program, its rules and a mesh to their problem, by `topology=` and `backend=`.
        """
        self.mesh, self.topology, self.backend = dict(mesh), topology, backend
        self.formulate = functools.partial(formulate, topology=topology, backend=backend)
        self.forward = dict(_forward_calls(program))
        self._known: dict[tuple, Region] = {}  # of what the user wrote as regions
        self._kept: list[Any] = []  # what is known by its id
        self.strategies: dict[int, list[Strategy]] = {}  # of calls, by their equations: all that the mesh allows

    @functools.cached_property
    def machine(self) -> str:
        """What prices depend on beside a call and how it is split."""
        return repr((self.topology, self.backend))

    def key(self, equation: Equation) -> tuple:
        """Equal for equations that run the same on shards; empty for what is no region."""
        params = equation.params
        if equation.primitive == OPERATION:
            call = params["static"], params["batched"], params["precision"]
            return id(params["operation"]), *call, equation.index in self.forward
        return (id(params["jaxpr"]),) if equation.primitive == SHARD_MAP else ()

    def of(self, group: Group, run: CallRun | None, *, shares: bool = True) -> Region:
        """What a group costs that is a region.

        Args:
            shares: whether the forward pass of a backward one runs the same way, so that XLA merges what both do.
        """
        (equation,) = group.equations
        if run is not None:
            region = self._of_call(equation, run, shares and equation.index in self.forward)
            sums = () if run.name else tuple(self._sums(run, equation))
            return self._as_compiled(replace(region, collectives=(*region.collectives, *sums)))
        key = self.key(equation)
        if key not in self._known:
            self._kept.append(equation.params["jaxpr"])
            self._known[key] = self._as_compiled(self._read([ClosedJaxpr(equation.params["jaxpr"], ())]))
        return self._known[key]

    def _as_compiled(self, region: Region) -> Region:
        """A region with the collectives that the compiler makes of those that it has no other way for."""
        found = itertools.chain.from_iterable(map(self._collectives_as_compiled, region.collectives))
        return replace(region, collectives=tuple(found))

    def _collectives_as_compiled(self, one: RegionCollective) -> Iterator[RegionCollective]:
        among = one.devices or shards(one.axes, self.mesh)
        if one.kind == "reduce_scatter":
            itemsize = one.bytes * among // max(1, math.prod(one.shape))
            sent = scattered_alone(one.axes, among, one.shape, itemsize, self.mesh, self.backend)
            if sent is None:
                yield replace(one, kind="all_reduce", bytes=one.bytes * among)
                return
            yield replace(one, bytes=sent.elements * itemsize)
            if sent.exchanged:
                yield replace(one, kind="collective_permute", bytes=sent.exchanged * itemsize)
            return
        everywhere = math.prod(self.mesh.values()) // self.backend.slices
        yield replace(one, kind=self.backend.gathers.sent_as(one.kind, among, everywhere, one.bytes))

    def _of_call(self, equation: Equation, run: CallRun, shares: bool) -> Region:
        """What the devices run of one call; without the sums of a split by the rule alone.

        It is found once for all axes that do the same. Those that split a factor beside the roles of an implementation
        are one to it, however many they are.
        """
        call = Call.of(equation, rule_of(equation))
        together, own = call.interchangeable(run), call.own_roles(run)
        in_order = sorted((role, axes) for role, axes in run.roles if run.name and role not in together)
        cuts = tuple(
            (role, tuple(self.mesh[axis] for axis in axes) if role in own else shards(axes, self.mesh))
            for role, axes in in_order
        )
        types = tuple(x.dtype for x in equation.inputs)
        sizes = self._sizes(call, run, together)
        key = call.static, call.batched, call.precision, shares, types, sizes, run.name, cuts, self.machine
        known = call.operation.priced
        if key not in known:
            known[key] = self._traced(call, run, equation, shares), in_order
        region, before = known[key]
        renamed: dict[str, tuple[str, ...]] = {}
        for (role, axes), (_, names) in zip(in_order, before, strict=True):
            renamed |= {name: (axes[i],) if role in own else axes for i, name in enumerate(names)}

        def over(one: RegionCollective) -> RegionCollective:
            axes = {axis for name in one.axes for axis in renamed[name]}
            return replace(one, axes=ordered_axes(axes, self.mesh))

        return replace(region, collectives=tuple(map(over, region.collectives)))

    def _sizes(self, call: Call, run: CallRun, together: Set[str]) -> tuple[tuple[str, int], ...]:
        """Factor -> its size on one device, of interchangeable ones the product: they say the shapes there."""
        assigned, sizes = call.assignment(run, self.mesh), call.rule.sizes
        local = {factor: size // shards(assigned.get(factor, ()), self.mesh) for factor, size in sizes.items()}
        product = math.prod(local.pop(factor) for factor in sorted(together))
        return *local.items(), ("", product)

    def _traced(self, call: Call, run: CallRun, equation: Equation, shares: bool) -> Region:
        """The same, traced."""
        reads, _ = call.layouts(run, self.mesh)
        pairs = zip(equation.inputs, reads, strict=True)
        structs = [jax.ShapeDtypeStruct(local_shape(x.shape, layout, self.mesh), x.dtype) for x, layout in pairs]
        before = 0  # arrays that the local function closes over: they come before the operands
        if not run.name:
            region = self._read([jax.make_jaxpr(call.local(run, self.mesh))(*structs)])
        else:
            bodies = list(_bodies(self._on_mesh(call, run, [x.shape for x in equation.inputs], structs)))
            before = max((len(body.jaxpr.invars) - len(structs) for body in bodies), default=0)
            implementation = call.operation.named(run.name)
            region = self._read(bodies, None if implementation is None else implementation.turns)
        if shares:
            forward = self.forward[equation.index]
            done = self._of_call(forward, run, shares=False)
            computes_again = not call.operation.is_written(run.name)
            region = region.after(done, before + len(forward.inputs), computes_again=computes_again)
        return self._said(call, run, region, structs)

    def _on_mesh(
        self, call: Call, run: CallRun, shapes: Sequence[tuple[int, ...]], types: Sequence[Any]
    ) -> ClosedJaxpr:
        mesh = AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh), axis_types=(AxisType.Auto,) * len(self.mesh))
        structs = [jax.ShapeDtypeStruct(shape, one.dtype) for shape, one in zip(shapes, types, strict=True)]
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.make_jaxpr(call.on_mesh(run, mesh))(*structs)

    def _said(self, call: Call, run: CallRun, region: Region, structs: Sequence[Any]) -> Region:
        """A region with what the user's formulas say of it."""
        implementation = call.operation.named(run.name)
        split, static = call.split(run, self.mesh), dict(call.static)
        seconds = call.operation.seconds if implementation is None else implementation.seconds
        if seconds is not None:
            region = replace(region, compute=float(seconds(split, self.topology, *structs, **static)))
        if implementation is not None and implementation.bytes is not None:
            region = replace(region, workspace=float(implementation.bytes(split, *structs, **static)))
        return region

    def _sums(self, run: CallRun, equation: Equation) -> Iterator[RegionCollective]:
        call = Call.of(equation, rule_of(equation))
        _, makes = call.layouts(run, self.mesh)
        for value, layout, axes in zip(equation.outputs, makes, call.partial(run, self.mesh), strict=True):
            if axes:
                elements = 1
                for size in local_shape(value.shape, layout, self.mesh):
                    elements *= size
                yield RegionCollective("all_reduce", axes, elements * value.itemsize, 1, is_ahead=False)

    def _read(self, jaxprs: Sequence[ClosedJaxpr], turns: int | None = None) -> Region:
        """What one device does that runs these jaxprs, one after the other.

        Args:
            turns: of loops of unknown length; None: as everywhere.
        """
        parts = [self._read_one(one, turns) for one in jaxprs]
        return Region(
            compute=sum(part.compute for part in parts),
            collectives=tuple(itertools.chain(*(part.collectives for part in parts))),
            workspace=max((part.workspace for part in parts), default=0.0),
        )

    def _read_one(self, jaxpr: ClosedJaxpr, turns: int | None) -> Region:
        program = program_of(jaxpr, turns)
        formulation = self.formulate(program, _rules(program), {})  # a mesh of one device
        choice = [0] * len(formulation.problem.costs)
        compute = sum(
            priced.seconds[0].compute
            for group, priced in zip(formulation.groups, formulation.priced, strict=True)
            if group.equations[0].primitive not in _PRIMITIVES_OF_REGIONS
        )
        ends = sum(value.bytes for value in program.arguments)
        ends += sum(x.bytes for x in program.results if isinstance(x, Value))
        collectives = tuple(_collectives(program, self.mesh))
        return Region(compute, collectives, max(0.0, float(formulation.peak_bytes(choice) - ends)))


def _forward_calls(program: Program) -> Iterator[tuple[int, Equation]]:
    """Call of a backward operation -> the call whose work XLA shares with it.

    JAX computes the function again for its derivative. In one body, of the same operands, XLA computes it once.
    """
    calls: dict[tuple, Equation] = {}
    for equation in program.equations:
        if equation.primitive != OPERATION:
            continue
        operation, call = equation.params["operation"], (equation.params["static"], equation.params["precision"])
        scope, operands = program.scope(equation.path), [id(x) for x in equation.inputs]
        if operation.forward is not None:
            forward = operation.forward
            count = len(operands) - len(forward.made) - sum(forward.made)
            shared = calls.get((id(forward.operation), call, scope, *operands[:count]))
            if shared is not None:
                yield equation.index, shared
        calls[id(operation), call, scope, *operands] = equation


def program_of(traced: ClosedJaxpr, turns: int | None = None) -> Program:
    """What one device runs as a program of its own.

    Args:
        turns: of loops of unknown length; None: as everywhere.
    """
    closed = ClosedJaxpr(with_plain_names(traced.jaxpr), traced.consts)
    operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.in_avals]
    results = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.out_avals]
    in_tree, out_tree = Tree.of((tuple(operands), {})), Tree.of(results)
    places = Places(in_tree.array_paths, out_tree.array_paths, frozenset())
    trips = None if turns is None else {"*": turns}
    return JaxprReader(closed, has_rule=_is_known, trips=trips).program(in_tree, out_tree, places)


def _is_known(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _PRIMITIVES_OF_REGIONS or has_rule(eqn)


def _rules(program: Program) -> list[Rule]:
    """On one device nothing is split: a primitive without a rule is as good as any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownPrimitiveWarning)
        return [
            whole([x.shape for x in one.inputs], [x.shape for x in one.outputs])
            if one.primitive in _PRIMITIVES_OF_REGIONS
            else rule_of(one)
            for one in program.equations
        ]


def _bodies(closed: ClosedJaxpr) -> Iterator[ClosedJaxpr]:
    """The bodies of all `shard_map`s in a jaxpr, calls opened."""
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == SHARD_MAP:
            yield ClosedJaxpr(eqn.params["jaxpr"], ())
        elif (called := called_jaxpr(eqn)) is not None:
            yield from _bodies(called)
        else:
            for inner in inner_jaxprs(eqn):
                yield from _bodies(inner)


def _collectives(program: Program, mesh: MeshShape) -> Iterator[RegionCollective]:
    after, last = _after_products(program), _last_operands(program)
    for equation in program.equations:
        kind = _KIND_OF_PRIMITIVE.get(equation.primitive)
        axes = _axes(equation.params, mesh) if kind else ()
        if kind is None or not axes:
            continue
        is_ahead = not any(isinstance(x, Value) and x.id in after for x in equation.inputs)
        is_in_loop = program.scope(equation.path) != ()
        for made in equation.outputs:
            of = last.get(made.id, -1)
            groups = equation.params.get("axis_index_groups")
            devices = len(groups[0]) if groups else None
            shape = equation.inputs[0].shape if kind == "reduce_scatter" else ()
            yield RegionCollective(
                kind, axes, made.bytes, equation.trips, is_ahead, is_in_loop, devices, shape, last_operand=of
            )


def _last_operands(program: Program) -> dict[int, int]:
    """Value -> the last argument that goes into it. What is carried round a loop counts as of its start."""
    found = {value.id: i for i, value in enumerate(program.arguments)}
    for equation in program.equations:
        last = max((found.get(x.id, -1) for x in equation.inputs if isinstance(x, Value)), default=-1)
        found |= {made.id: last for made in equation.outputs}
    return found


def _axes(params: Mapping[str, Any], mesh: MeshShape) -> tuple[str, ...]:
    """The axes of more than one device that a collective runs over, in mesh order."""
    named = params.get("axes", params.get("axis_name", ()))
    names = {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}
    return ordered_axes(names, mesh)


def _after_products(program: Program) -> set[int]:
    """The values that some matrix product goes into."""
    found: set[int] = set()
    for _ in range(2):  # what a loop hands on stands behind its start
        for equation in program.equations:
            product = facts_of(equation.primitive).work is FlopRule.CONTRACTION or equation.primitive == OPERATION
            if product or any(isinstance(x, Value) and x.id in found for x in equation.inputs):
                found |= {made.id for made in equation.outputs}
    return found
