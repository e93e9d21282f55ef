"""A solved problem in, a `Plan` out: what is sharded how, what that costs, and how it is written to disk.

Also the two ways to read a choice: `annotations_of` for lowering, `prediction_of` for people.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.errors import PlanError
from autoshard.jaxprs import HOST
from autoshard.layout import (
    Layout,
    axes_of,
    local_shape,
    spec_of,
    spec_text,
    with_auto_axes,
    with_axis_types,
    without_idle_axes,
)
from autoshard.mesh.collectives import Collective
from autoshard.model.formulation import Formulation
from autoshard.model.groups import Dims, Group
from autoshard.model.lifetimes import aliased
from autoshard.model.resharding_memory import Reader
from autoshard.model.strategies import ALL_REDUCE, REDUCE_SCATTER, Stages, Strategy
from autoshard.program import Program, Source, Value
from autoshard.solver.problem import Solution
from autoshard.trees import Tree

if TYPE_CHECKING:
    from autoshard.compiled.verification import Verification
    from autoshard.lower import Lowering

_FORMAT = 4
_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")  # of PRNG keys, those that JAX comes with


@dataclass(frozen=True)
class Prediction:
    """What one step costs each device."""

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float  # of communication: what does not run behind compute
    peak_bytes: int  # of the device's own memory
    collectives: tuple[Collective, ...]
    host_bytes: int = 0  # of arguments, and of results that replace none, that lie in the host's memory
    arrival_seconds: float = 0.0  # of compute: to write arguments that arrive anew, before the compiled program starts

    @property
    def program_seconds(self) -> float:
        """Seconds of the compiled program, which starts when its arguments are there."""
        return self.step_seconds - self.arrival_seconds


@dataclass(frozen=True)
class Placed:
    """One argument or result, and how it lies on the mesh."""

    name: str  # "state/params/w"
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    local_bytes: int  # per device
    on_host: bool = False  # whether it lies in the host's memory
    typed: bool = False  # whether its sharding is on the user's Explicit axes

    @property
    def type(self) -> str:
        """As jaxprs write it: ``float32<host>[64, 64]``."""
        return f"{self.dtype}{'<host>' * self.on_host}{list(self.shape)}"

    def sharding(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        return NamedSharding(mesh, self.spec, memory_kind=HOST if self.on_host else None)

    def typed_sharding(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        """As a type of explicit mode has it: with an entry per dim."""
        spec = PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in self.layout))
        return NamedSharding(mesh, spec, memory_kind=HOST if self.on_host else None)

    @property
    def spec(self) -> PartitionSpec:
        return spec_of(self.layout)


@dataclass(frozen=True)
class Scatter:
    """How partial sums become the sum, of which each device gets a slice."""

    dim: int  # of the result, which is sliced
    stages: Stages
    others: tuple[str, ...]  # over which the slices are all_reduced

    @classmethod
    def of(cls, group: Group, strategy: Strategy) -> Scatter | None:
        """How `lower` finishes a group; None where that is left to XLA."""
        stages = [finish for finish in strategy.finishes if finish.kind == REDUCE_SCATTER]
        if not stages or not group.sums_locally(strategy.axes):
            return None
        (layout,) = strategy.leaves
        return cls(
            dim=next(dim for dim, axes in enumerate(layout) if stages[0].axes[0] in axes),
            stages=tuple((stage.axes, stage.groups) for stage in stages),
            others=tuple(axis for finish in strategy.finishes if finish.kind == ALL_REDUCE for axis in finish.axes),
        )


@dataclass(frozen=True)
class Annotations:
    """The shardings of inner values: what `lower` writes into the program. Values and equations by index."""

    homes: Mapping[int, Layout]  # value -> the layout it is made in
    copies: Mapping[int, Layout]  # value -> the layout of the copy its readers share
    wants: Mapping[tuple[int, int], Layout]  # (equation, operand) -> the layout it is read in
    scatters: Mapping[int, Scatter] = field(default_factory=dict)  # equation -> how its partial sums are finished
    sums: Mapping[int, Layout] = field(default_factory=dict)  # value -> how its sum lies before XLA slices it
    implied: Collection[int] = frozenset()  # values that lie so without being told, from what they are made of


@dataclass(eq=False)
class Comparison:
    """What a plan is compared with: the figures of other ways to shard, found when they are first asked for."""

    find: Callable[[], Mapping[str, Prediction | str]] | None = None  # where there are none, why
    known: Mapping[str, Prediction | None] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)  # why there are none

    def __call__(self) -> Mapping[str, Prediction | None]:
        if self.find is not None:
            found, self.find = self.find(), None  # what it took to find them is big, and can go now
            self.reasons = {name: one for name, one in found.items() if isinstance(one, str)}
            self.known = {name: None if name in self.reasons else one for name, one in found.items()}
        return self.known or {}


@dataclass(frozen=True, eq=False)
class Plan:
    """How a step is sharded over a mesh, what that is predicted to cost, and how good it is proven to be."""

    name: str  # of the step
    mesh: Mesh | AbstractMesh  # axis types Auto
    fingerprint: str  # of the program it was made for
    arguments: tuple[Placed, ...]  # per flat argument
    results: tuple[Placed, ...]  # per flat result
    carried: Mapping[int, int]  # argument -> the result that takes its place in the next step
    predicted: Prediction
    status: str  # "optimal" or "feasible"
    bound: float  # proven: no plan of this program costs fewer seconds
    cost: float  # seconds per step, as solved
    memory: float | None  # the limit it was made for, bytes per device
    warnings: tuple[str, ...]
    annotations: Annotations = field(repr=False)
    argument_tree: Tree = field(repr=False)  # of (args, kwargs), static arguments left out
    result_tree: Tree = field(repr=False)
    comparison: Comparison = field(repr=False, default_factory=Comparison)
    axis_types: tuple[AxisType, ...] | None = None  # of the user's mesh, if the step is a program of explicit mode
    lowering: Lowering | None = field(repr=False, default=None)  # called, lowers the step; None: loaded, not yet bound

    @property
    def alternatives(self) -> Mapping[str, Prediction | None]:
        """What a step costs in data parallel, FSDP and tensor parallel form; None for what `absent` names.

        Found when first asked for, which takes seconds; empty if the plan was loaded and saved without them. What each
        of them means exactly: `autoshard.report.alternatives`.
        """
        return self.comparison()

    @property
    def absent(self) -> Mapping[str, str]:
        """Why some of `alternatives` have no figures: no such sharding exists, or none was found in time."""
        known = self.comparison()
        missing = (name for name, predicted in known.items() if predicted is None)
        return {name: self.comparison.reasons.get(name, "no such sharding") for name in missing}

    @property
    def gap(self) -> float:
        """How far the cost may be from the best, as a share of the cost."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0

    @cached_property
    def flat_in_shardings(self) -> tuple[NamedSharding, ...]:
        """One sharding per flat argument, in the order of `arguments`."""
        return tuple(map(self._sharding, self.arguments))

    @cached_property
    def flat_out_shardings(self) -> tuple[NamedSharding, ...]:
        """One sharding per flat result, in the order of `results`."""
        return tuple(map(self._sharding, self.results))

    def _sharding(self, placed: Placed) -> NamedSharding:
        return placed.typed_sharding(self.typed_mesh) if placed.typed else placed.sharding(self.mesh)

    @cached_property
    def typed_mesh(self) -> Mesh | AbstractMesh:
        """The mesh of arguments and results that have types of explicit mode."""
        return self.mesh if self.axis_types is None else with_axis_types(self.mesh, self.axis_types)

    @property
    def in_shardings(self) -> tuple:
        """A pytree of NamedSharding per positional argument, static arguments left out.

        Usable in `jax.jit(in_shardings=...)`, `jax.device_put` and orbax. Shardings of keyword arguments are in
        `keyword_shardings`.
        """
        return self.argument_tree.filled(self.flat_in_shardings)[0]

    @property
    def keyword_shardings(self) -> dict:
        """A pytree of NamedSharding per keyword argument."""
        return self.argument_tree.filled(self.flat_in_shardings)[1]

    @property
    def out_shardings(self) -> Any:
        """A pytree of NamedSharding that mirrors the step's result."""
        return self.result_tree.filled(self.flat_out_shardings)

    def abstract(self, argnum: int) -> Any:
        """An argument as ShapeDtypeStructs with shardings: what a checkpoint restores into.

        Args:
            argnum: position among the arguments that are not static.
        """
        structs = [
            jax.ShapeDtypeStruct(placed.shape, _dtype(placed.dtype), sharding=sharding)
            for placed, sharding in zip(self.arguments, self.flat_in_shardings, strict=True)
        ]
        return self.argument_tree.filled(structs)[0][argnum]

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, to be committed or loaded again."""
        Path(path).write_text(self.dumps())

    def dumps(self) -> str:
        """The plan as JSON: what `save` writes."""
        return json.dumps(_to_json(self), indent=1) + "\n"

    @classmethod
    def load(cls, path: str | Path, mesh: Mesh | AbstractMesh) -> Plan:
        """Reads a plan for `mesh`, whose axes are used as Auto axes.

        Containers that JSON knows nothing of (nnx modules, TrainState) come back as dicts with the same keys. Given to
        `autoshard(plan=...)`, the plan's trees are the step's own again.

        Raises:
            PlanError: the file is no plan, or one for another mesh.
        """
        try:
            return cls.loads(Path(path).read_text(), mesh, where=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(_unreadable(str(path), error)) from error

    @classmethod
    def loads(cls, text: str, mesh: Mesh | AbstractMesh, where: str = "the text") -> Plan:
        """The plan that `dumps` wrote; see `load`.

        Args:
            where: what messages call the text.
        """
        try:
            return _from_json(json.loads(text), mesh, where=where)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise PlanError(_unreadable(where, error)) from error

    def on(self, mesh: Mesh | AbstractMesh) -> Plan:
        """This plan on another mesh of the same axes: made for an AbstractMesh, say, and used on devices.

        Raises:
            PlanError: the mesh has other axes.
        """
        _check_mesh(dict(self.mesh.shape), mesh, f"the plan of {self.name}")
        return replace(self, mesh=with_auto_axes(mesh), lowering=None)

    def bound_to(self, program: Program) -> Plan:
        """This plan with the containers of `program`.

        Raises:
            PlanError: the plan was made for another program.
        """
        if self.fingerprint != program.fingerprint:
            raise PlanError(
                f"the plan was made for another program than {program.name}: {_difference(self, program)}.\n"
                "Plan the step anew, or use the code, options and argument shapes that the plan was made with."
            )
        return replace(self, argument_tree=program.in_tree, result_tree=program.out_tree)

    def verify(self, target: str | None = None) -> Verification:
        """Compiles the step and puts what XLA really does beside what is predicted: collectives and peak memory.

        Args:
            target: a machine by name, ``"v5e:4x4"`` or ``"h100:2x8"``, to compile for instead of the devices of the
                mesh. It need not be there: see `autoshard.mesh.targets`.

        Raises:
            PlanError: the plan was loaded and is not bound to a step.
            MeshError: the mesh has no devices to compile for, or the target or its compiler cannot be had.
        """
        from autoshard.compiled.verification import verify_plan

        return verify_plan(self, target)

    # Reports stand above plans; showing a plan is asking for a report of it.

    def __str__(self) -> str:
        from autoshard.report.text import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _unreadable(where: str, error: Exception) -> str:
    return f"{where} is not a plan that this version of autoshard can read: {error!r}.\nSave the plan anew."


def _dtype(name: str) -> Any:
    """
    >>> _dtype("bfloat16"), _dtype("key<fry>")
    (dtype(bfloat16), key<fry>)
    """
    if not name.startswith("key<"):
        return np.dtype(name)
    keys = (jax.eval_shape(partial(jax.random.key, impl=impl), 0).dtype for impl in _KEY_IMPLEMENTATIONS)
    known = {str(dtype): dtype for dtype in keys}
    if name not in known:
        raise PlanError(f"PRNG keys of type {name} are not among those that JAX comes with: {', '.join(known)}")
    return known[name]


def _check_mesh(planned: Mapping[str, int], mesh: Mesh | AbstractMesh, what: str) -> None:
    if list(planned.items()) != list(mesh.shape.items()):
        raise PlanError(
            f"{what} was made for the mesh {dict(planned)}, not for {dict(mesh.shape)}.\n"
            "Plan the step anew on this mesh, or use a mesh of the plan's axes."
        )


def _difference(plan: Plan, program: Program) -> str:
    ours = [f"{placed.name} {placed.type}" for placed in plan.arguments]
    theirs = [str(value) for value in program.arguments]
    for here, there in zip(ours, theirs, strict=False):
        if here != there:
            return f"{here} in the plan is {there} in the step"
    if len(ours) != len(theirs):
        return f"the plan has {len(ours)} arrays for arguments, the step {len(theirs)}"
    if plan.carried != program.carried:
        return "other results take the place of arguments (is donate_argnums the same?)"
    return "the arguments are the same, but not the operations on them, or not what is donated"


def make_plan(
    formulation: Formulation,
    solution: Solution,
    mesh: Mesh | AbstractMesh,
    warnings: tuple[str, ...] = (),
    comparison: Comparison | None = None,
) -> Plan:
    """The plan that `solution` describes."""
    program = formulation.program
    choice = _Choice(formulation, solution.choice)
    annotations = choice.annotations()
    return Plan(
        name=program.name,
        mesh=mesh,
        fingerprint=formulation.fingerprint,
        arguments=_typed(program, [choice.placed(value, value.name) for value in program.arguments], mesh, "arguments"),
        results=_typed(program, [choice.placed_result(i) for i in range(len(program.results))], mesh, "results"),
        carried=program.carried,
        predicted=choice.prediction(),
        status=solution.status,
        bound=solution.bound,
        cost=solution.cost,
        memory=formulation.problem.limit,
        warnings=warnings,
        annotations=annotations,
        argument_tree=program.in_tree,
        result_tree=program.out_tree,
        comparison=comparison or Comparison(),
        axis_types=program.types and program.types.mesh.axis_types,
    )


def _typed(
    program: Program, placed: Sequence[Placed], mesh: Mesh | AbstractMesh, side: Literal["arguments", "results"]
) -> tuple[Placed, ...]:
    """Arguments or results with the types that they have in explicit mode, axes of one device included."""
    if program.types is None:
        return tuple(placed)
    on_types = program.typed_arguments if side == "arguments" else program.typed_results
    several = {axis: size for axis, size in mesh.shape.items() if size > 1}

    def typed(one: Placed, layout: Layout | None) -> Placed:
        same = layout is not None and without_idle_axes(layout, several) == without_idle_axes(one.layout, several)
        return replace(one, typed=True, layout=layout if same else one.layout)

    pairs = zip(placed, getattr(program.types, side), strict=True)
    return tuple(typed(one, layout) if i in on_types else one for i, (one, layout) in enumerate(pairs))


def prediction_of(formulation: Formulation, choice: Sequence[int]) -> Prediction:
    """What a step costs under one option per node."""
    return _Choice(formulation, choice).prediction()


class _Choice:
    """One option per node, read in the words of the program."""

    def __init__(self, formulation: Formulation, choice: Sequence[int]):
        self.formulation, self.choice = formulation, choice
        self.program, self.prices = formulation.program, formulation.prices
        self.argument_of = {result: argument for argument, result in self.program.carried.items()}
        arguments = zip(self.program.arguments, formulation.arguments, strict=True)
        self.kept = {value.id: options[choice[i]] for i, (value, options) in enumerate(arguments)}
        self.homes: dict[int, Layout] = {value: kept.home for value, kept in self.kept.items()}
        self.copies: dict[int, Layout] = {
            value: kept.copy for value, kept in self.kept.items() if kept.copy != kept.home
        }
        self.homes |= {value.id: ((),) * len(value.shape) for value in self.program.constants}
        self.strategies = []
        for group, priced in zip(formulation.groups, formulation.priced, strict=True):
            strategy = priced.strategies[choice[formulation.group_node(group)]]
            self.strategies.append(strategy)
            self.homes |= {made.value.id: left for made, left in zip(group.made, strategy.leaves, strict=True)}
        for value, shared in formulation.shared.items():
            layout = shared.layouts[choice[shared.node]]
            if layout != self.homes[value]:
                self.copies[value] = layout

    @cached_property
    def scatters(self) -> list[Scatter | None]:
        """How `lower` finishes each group; None where that is left to XLA."""
        return list(map(Scatter.of, self.formulation.groups, self.strategies))

    def want(self, reader: Reader) -> Layout:
        return reader.wants[self.choice[reader.node]]

    def stays(self, group: Group) -> bool:
        """Whether what a loop adds up is added up in the layout it is made in, all the way."""
        if group.hoisted is None:
            return True
        readers = [(made.value, reader) for made in group.made for reader in self.formulation.readers[made.value.id]]
        return all(self.want(r) == self.homes[v.id] and (r.group is None or self.stays(r.group)) for v, r in readers)

    def annotations(self) -> Annotations:
        wants = {}
        for readers in self.formulation.readers.values():
            for reader in readers:
                if reader.use is not None:
                    for equation in reader.group.equations:
                        for operand, value in enumerate(equation.inputs):
                            dims = reader.group.operands[equation.index][operand]
                            if value is reader.use.value and dims == reader.use.dims:
                                wants[equation.index, operand] = self.want(reader)
        finished = zip(self.formulation.groups, self.scatters, strict=True)
        scatters = {group.equations[0].index: scatter for group, scatter in finished if scatter is not None}
        idle = {made.value.id for group in self.formulation.groups if group.is_idle for made in group.made}
        homes = {value: home for value, home in self.homes.items() if value not in idle}
        return Annotations(homes, self.copies, wants, scatters, dict(self.sums()), frozenset(self.implied()))

    def sums(self) -> Iterator[tuple[int, Layout]]:
        """Values whose partial sums XLA reduces and slices, and their layouts in between.

        XLA has to be told both: from the slices alone it would split what is summed as they are, and move it for that.
        """
        for group, strategy, scatter in zip(self.formulation.groups, self.strategies, self.scatters, strict=True):
            sliced = {axis for finish in strategy.finishes if finish.kind == REDUCE_SCATTER for axis in finish.axes}
            if sliced and scatter is None:
                (made,), (layout,) = group.made, strategy.leaves
                yield made.value.id, tuple(tuple(axis for axis in axes if axis not in sliced) for axes in layout)

    def implied(self) -> Iterator[int]:
        """Values to which propagation brings the planned layout, and no other.

        Every reader takes the value as it is, and its axes come from what it is made of; of what is made of numbers,
        from what a reader reads beside it. A constraint would only keep XLA from simplifying across it before it
        partitions the program; after a reduce_scatter by hand it says again what that has said.
        """
        loose: dict[int, Sequence[Reader]] = {}  # values whose axes do not come from what they are made of
        for group, strategy, scatter in zip(self.formulation.groups, self.strategies, self.scatters, strict=True):
            if group.is_boundary or group.hoisted is not None:
                continue
            for made in group.made:
                value, readers = made.value.id, self.formulation.readers[made.value.id]
                if not readers or any(self.want(reader) != self.homes[value] for reader in readers):
                    continue
                if self.may_be_split_unevenly(made.value):
                    continue
                brought = not strategy.finishes and self.is_split_by_others(group, made.dims)
                if brought or scatter:
                    yield value
                elif not strategy.finishes:
                    loose[value] = readers
        for value, readers in loose.items():
            if any(r.group and self.is_split_by_others(r.group, r.use.dims, loose) for r in readers):
                yield value

    def may_be_split_unevenly(self, value: Value) -> bool:
        """Whether propagation could split the value over axes that it is planned whole on, as no plan would.

        XLA splits dims that an axis does not divide where it splits what they come from: 257 tokens as 256 patches.
        """
        home, mesh = self.homes[value.id], self.prices.mesh
        idle = [n for axis, n in mesh.items() if axis not in axes_of(home)]
        return any(size > 1 and size % n for size in local_shape(value.shape, home, mesh) for n in idle)

    def is_split_by_others(self, group: Group, dims: Dims, apart_from: Container[int] = ()) -> bool:
        """Whether what a group reads, apart from these values, has all axes that split a tensor of these dims."""
        strategy = self.strategies[group.index]
        wants = zip(group.uses, strategy.wants, strict=True)
        reads = [zip(use.dims, want, strict=True) for use, want in wants if use.value.id not in apart_from]
        split = {factor for factors, axes in itertools.chain(*reads) if axes for factor in factors}
        return strategy.axes.keys() & set(itertools.chain(*dims)) <= split

    def placed(self, value: Value, name: str, layout: Layout | None = None) -> Placed:
        layout = self.homes[value.id] if layout is None else layout
        if 0 in value.shape:  # XLA keeps results without elements whole; JAX cannot read them under another sharding
            layout = ((),) * len(value.shape)
        size = self.prices.shard_bytes(value, layout)
        return Placed(name, value.shape, str(value.dtype), layout, size, value.on_host)

    def placed_result(self, index: int) -> Placed:
        value, name = self.program.results[index], self.program.result_names[index]
        if isinstance(value, np.ndarray):
            return Placed(name, value.shape, str(value.dtype), ((),) * value.ndim, value.nbytes)
        if index in self.argument_of:
            return self.placed(value, name, self.homes[self.program.arguments[self.argument_of[index]].id])
        return self.placed(value, name)

    def prediction(self) -> Prediction:
        arrival = self.arrival()
        compute, communication, hidden = arrival + self.resharded_memory(), 0.0, 0.0
        found: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])

        def note(kind: str, axes: tuple[str, ...], size: int, runs: int, source, why: str) -> None:
            tally = found[kind, axes, str(source or "unknown line"), why]
            tally[0] += size * runs
            tally[1] += runs

        choices = zip(self.formulation.groups, self.formulation.priced, self.strategies, strict=True)
        reduced_sums = set()
        for group, priced, strategy in choices:
            seconds = priced.seconds[self.choice[self.formulation.group_node(group)]]
            compute += seconds.compute
            communication += seconds.communication
            hidden += seconds.hidden
            for finish, size in zip(strategy.finishes, self.prices.finish_bytes(group, strategy), strict=True):
                if group.summed is not None and finish.kind == "all_reduce":
                    if (group.summed, finish.axes) in reduced_sums:
                        continue
                    reduced_sums.add((group.summed, finish.axes))
                reduced = group.equations[-1]
                runs = group.finish_trips(finish.kind) if self.stays(group) else group.trips
                what = "results" if group.picks else "sums"
                note(finish.kind, finish.axes, size, runs, reduced.source, f"partial {what} of {reduced.primitive}")
        for value, source, target, line, readers in self.reshardings():
            steps = self.prices.steps(value, source, target, readers)
            seconds = self.prices.resharding(value, source, target, readers) * value.trips
            if steps:
                communication += seconds
            else:  # a slice
                compute += seconds
            hidden += self.prices.hidden(value, source, target, readers) * value.trips
            size = self.prices.widths.moving(value, readers)
            smaller = f" in {8 * size} bits" if size < value.itemsize else ""
            for step in steps:
                why = f"{value}{smaller} from {spec_text(source)} to {spec_text(target)}"
                note(step.kind, step.axes, step.bytes, value.trips, line, why)
        collectives = tuple(
            Collective(kind, axes, size, count, source, why)
            for (kind, axes, source, why), (size, count) in found.items()
        )
        peak = self.formulation.peak_bytes(self.choice)
        exposed = communication - min(hidden, compute)
        return Prediction(
            step_seconds=compute + exposed,
            compute_seconds=compute,
            communication_seconds=communication,
            exposed_seconds=exposed,
            peak_bytes=peak,
            collectives=collectives,
            host_bytes=self.host_bytes(),
            arrival_seconds=arrival,
        )

    def arrival(self) -> float:
        """Seconds to write the arguments that no result of the step before has taken the place of."""
        arriving = (x for i, x in enumerate(self.program.arguments) if i not in self.program.carried)
        return sum(self.prices.writing(value, self.homes[value.id]) for value in arriving)

    def resharded_memory(self) -> float:
        """Seconds in which memory is written and read because values are resharded."""
        total = 0.0
        for id, readers in self.formulation.readers.items():
            value, home = self.program.values[id], self.homes[id]
            seen = self.copies.get(id, home)
            hops = [(home, seen), *((seen, want) for want in map(self.want, readers) if want != home)]
            total += sum(self.prices.memory_seconds(value, *hop) for hop in hops) * value.trips
        return total

    def host_bytes(self) -> int:
        replaced = aliased(self.program)
        results = (x for i, x in enumerate(self.program.results) if isinstance(x, Value) and i not in replaced)
        held = [x for x in (*self.program.arguments, *results) if x.on_host]
        return sum(self.prices.shard_bytes(value, self.homes[value.id]) for value in held)

    def reshardings(self) -> Iterator[tuple[Value, Layout, Layout, Source | None, list[Group]]]:
        """Every resharding of the step: (value, from, to, the line that asks for it, who reads the copy).

        Readers that ask for the same one get the same array: XLA merges equal collectives.
        """
        for id, readers in self.formulation.readers.items():
            value = self.program.values[id]
            home = self.homes[id]
            seen = self.copies.get(id, home)
            asked: dict[Layout, list[Reader]] = defaultdict(list)
            for reader in readers:
                asked[self.want(reader)].append(reader)
            if seen != home:  # read as it is, or copied on
                groups = [r.group for r in readers if r.group and self.want(r) != home]
                yield value, home, seen, _line(asked[seen], value), groups
            for want in (want for want in asked if want not in (home, seen)):
                yield value, seen, want, _line(asked[want], value), [r.group for r in asked[want] if r.group]


def _line(readers: Sequence[Reader], value: Value) -> Source | None:
    """The line of the first that uses a value, else that which makes it."""
    return next((reader.use.equation.source for reader in readers if reader.use), value.source)


# JSON.


def _to_json(plan: Plan) -> dict:
    annotations, known = plan.annotations, plan.comparison.known
    return {
        "format": _FORMAT,
        "name": plan.name,
        "fingerprint": plan.fingerprint,
        "mesh": dict(plan.mesh.shape),
        "axis_types": plan.axis_types and [one.name for one in plan.axis_types],
        "status": plan.status,
        "bound": plan.bound,
        "cost": plan.cost,
        "memory": plan.memory,
        "warnings": list(plan.warnings),
        "arguments": [_placed_to_json(placed) for placed in plan.arguments],
        "results": [_placed_to_json(placed) for placed in plan.results],
        "carried": list(plan.carried.items()),
        "predicted": asdict(plan.predicted),
        "alternatives": known and {name: predicted and asdict(predicted) for name, predicted in known.items()},
        "absent": dict(plan.comparison.reasons),
        "argument_slots": _tree_to_json(plan.argument_tree.plain(range(len(plan.arguments)))),
        "result_slots": _tree_to_json(plan.result_tree.plain(range(len(plan.results)))),
        "homes": {str(value): _words(layout) for value, layout in annotations.homes.items()},
        "copies": {str(value): _words(layout) for value, layout in annotations.copies.items()},
        "wants": {f"{e}/{operand}": _words(layout) for (e, operand), layout in annotations.wants.items()},
        "scatters": {str(equation): asdict(scatter) for equation, scatter in annotations.scatters.items()},
        "sums": {str(value): _words(layout) for value, layout in annotations.sums.items()},
        "implied": sorted(annotations.implied),
    }


def _from_json(content: dict, mesh: Mesh | AbstractMesh, where: str) -> Plan:
    if content["format"] != _FORMAT:
        raise PlanError(f"{where} has format {content['format']}; this version of autoshard reads {_FORMAT}")
    _check_mesh(content["mesh"], mesh, where)
    arguments = tuple(_placed_from_json(entry) for entry in content["arguments"])
    results = tuple(_placed_from_json(entry) for entry in content["results"])
    alternatives = content["alternatives"] and {
        name: predicted and _prediction_from_json(predicted) for name, predicted in content["alternatives"].items()
    }
    wants = {tuple(map(int, key.split("/"))): _layout(words) for key, words in content["wants"].items()}
    return Plan(
        name=content["name"],
        mesh=with_auto_axes(mesh),
        fingerprint=content["fingerprint"],
        arguments=arguments,
        results=results,
        carried=dict(content["carried"]),
        predicted=_prediction_from_json(content["predicted"]),
        status=content["status"],
        bound=content["bound"],
        cost=content["cost"],
        memory=content["memory"],
        warnings=tuple(content["warnings"]),
        annotations=Annotations(
            homes={int(value): _layout(words) for value, words in content["homes"].items()},
            copies={int(value): _layout(words) for value, words in content["copies"].items()},
            wants=wants,
            scatters={int(equation): _scatter_from_json(entry) for equation, entry in content["scatters"].items()},
            sums={int(value): _layout(words) for value, words in content["sums"].items()},
            implied=frozenset(content["implied"]),
        ),
        argument_tree=Tree.of_indices(_tree_from_json(content["argument_slots"])),
        result_tree=Tree.of_indices(_tree_from_json(content["result_slots"])),
        comparison=Comparison(known=alternatives, reasons=content.get("absent", {})),
        axis_types=_axis_types(content.get("axis_types")),
    )


def _axis_types(names: list[str] | None) -> tuple[AxisType, ...] | None:
    return None if names is None else tuple(AxisType[name] for name in names)


def _placed_to_json(placed: Placed) -> dict:
    return {
        "name": placed.name,
        "shape": list(placed.shape),
        "dtype": placed.dtype,
        "spec": _words(placed.layout),
        "local_bytes": placed.local_bytes,
        "on_host": placed.on_host,
        "typed": placed.typed,
    }


def _placed_from_json(entry: dict) -> Placed:
    return Placed(
        entry["name"],
        tuple(entry["shape"]),
        entry["dtype"],
        _layout(entry["spec"]),
        entry["local_bytes"],
        entry.get("on_host", False),
        entry.get("typed", False),
    )


def _prediction_from_json(entry: dict) -> Prediction:
    collectives = tuple(Collective(**one | {"axes": tuple(one["axes"])}) for one in entry["collectives"])
    return Prediction(**entry | {"collectives": collectives})


def _scatter_from_json(entry: dict) -> Scatter:
    stages = ((tuple(axes), groups and tuple(map(tuple, groups))) for axes, groups in entry["stages"])
    return Scatter(entry["dim"], tuple(stages), tuple(entry["others"]))


def _words(layout: Layout) -> list[str]:
    """One word per dim: "data", "data,model", or "" for a whole dim."""
    return [",".join(axes) for axes in layout]


def _layout(words: list[str]) -> Layout:
    return tuple(tuple(word.split(",")) if word else () for word in words)


def _tree_to_json(tree: Any) -> Any:
    """A tree of numbers in tuples, lists and dicts.

    >>> _tree_to_json((0, {"w": [1, None]}))
    {'tuple': [0, {'dict': [['w', {'list': [1, None]}]]}]}
    """
    if isinstance(tree, dict):
        return {"dict": [[key, _tree_to_json(child)] for key, child in tree.items()]}
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: list(map(_tree_to_json, tree))}
    return tree


def _tree_from_json(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, children),) = node.items()
    if kind == "dict":
        return {key: _tree_from_json(child) for key, child in children}
    return {"tuple": tuple, "list": list}[kind](map(_tree_from_json, children))
