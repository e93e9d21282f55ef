"""A few fixed layouts in, a layout for every value of the program out: GSPMD's propagation, as Shardy does it.

Every equation, by its rule, lets the layouts of its operands and results agree factor by factor. Where one tensor
splits a factor over some axes, all other tensors that have the factor may follow, as long as no axis then splits two
dims of one tensor. That goes on, in both directions, until nothing changes.

Five rounds, each to its own fixed point, make conflicts fall the way a person would have decided them (Shardy's
op-priority propagation):

1. operations that keep a tensor's dims, if nothing else reads their operands;
2. all operations that keep a tensor's dims;
3. factors that pass from operands to results of any operation, but of broadcasts from result to operand only;
4. all factors, also contracted ones, but the same of broadcasts;
5. everything.

In each round the operations stand on a stack, the first operations on top. An operation whose tensors have changed is
looked at again before the rest.

Within an equation the tensors follow as in Shardy's AggressiveFactorPropagation: each takes what it can, and where two
factors want one axis, the larger source wins. A factor may take a part of an axis where it has no room for more, and
the rest may go elsewhere. So axes come in prime parts here. A dim may end up with some parts of an axis only. Its
layout then ends before that axis, since no PartitionSpec can name a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import PartitionSpec

from autoshard.layout import Layout, MeshShape, evened, replicated, shards
from autoshard.program import Equation, Program, Value
from autoshard.propagation.operations import PropagatedOperation, PropagationGraph, StartingLayout
from autoshard.propagation.rule import Dims, Rule

_Part = tuple[str, int]  # a mesh axis, and which of its prime parts
Axes = tuple[_Part, ...]
PartLayout = tuple[Axes, ...]

_SPREAD_ROUNDS = 5  # of spreading; `Operation.direction` says which way layouts go in each


@dataclass(frozen=True)
class AxisOrigin:
    """Why a value is split over a mesh axis."""

    axis: str
    start: Value  # the value with a given spec from which the axis spread: an argument, or what a constraint makes
    equation: Equation | None  # through which it came to the value at hand; None if that is the start

    def __str__(self) -> str:
        start = f"{self.start} ({self.start.source})" if self.start.source else str(self.start)
        return f"{self.axis!r} from {start}" + (f" through {self.equation}" if self.equation else "")


@dataclass(frozen=True)
class PropagatedValue:
    """One value of a step and the sharding that propagation gave it."""

    value: Value
    spec: PartitionSpec
    equation: Equation | None  # that makes it; None for arguments
    origins: tuple[AxisOrigin, ...]  # one per axis in `spec`


@dataclass(frozen=True)
class Propagation:
    """What sharding propagation made of a step."""

    arguments: tuple[PartitionSpec, ...]  # per flat argument: those that were open are completed
    outputs: tuple[PartitionSpec, ...]  # per flat result
    values: tuple[PropagatedValue, ...]  # every argument and inner value


@dataclass(frozen=True)
class Layouts:
    """How everything in a program lies after propagation."""

    values: Mapping[int, Layout]  # value id -> layout
    results: tuple[Layout, ...]  # per flat result; only even splits, as XLA leaves results
    origins: Mapping[int, tuple[AxisOrigin, ...]]  # value id -> one per axis that splits it


def propagate_layouts(
    program: Program,
    rules: Sequence[Rule],
    mesh: MeshShape,
    fixed: Mapping[int, Layout],
    ends: Mapping[int, Layout] | None = None,
    order: Sequence[int] | None = None,
) -> Layouts:
    """The layout of every value, spread from those that are fixed and those that the program's constraints give.

    Args:
        program: values and equations.
        rules: one per equation.
        mesh: axis -> devices.
        fixed: value id -> layout; these stay as they are.
        ends: index of a result -> the layout in which it is returned, as `out_shardings` say. The value may lie
            otherwise before.
        order: indices of the equations, in the order in which Shardy goes through them; else that of the program.
    """
    parts = {axis: _parts(axis, devices) for axis, devices in mesh.items()}
    spread = _LayoutSpread(PropagationGraph(program, rules, fixed, ends or {}, order), parts)
    for round_ in range(_SPREAD_ROUNDS):
        spread.to_fixed_point(round_)
    spread.lay_out_constants()
    laid_as = {value.id: spread.operations.laid_as(value) for value in program.values}
    values = {id_: tuple(_joined(axes, parts) for axes in spread.layouts[laid]) for id_, laid in laid_as.items()}
    return Layouts(
        values=values,
        results=tuple(_result(x, spread, values, mesh) for x in program.results),
        origins={id_: spread.origins_of(laid, values[id_], program) for id_, laid in laid_as.items()},
    )


def _result(result: Value | np.ndarray, spread: _LayoutSpread, values: Mapping[int, Layout], mesh: MeshShape) -> Layout:
    if not isinstance(result, Value) or (seen := spread.operations.read_as(result)) is None:
        return replicated(len(result.shape))
    return evened(result.shape, values[seen], mesh)


def _parts(axis: str, devices: int) -> dict[_Part, int]:
    """The parts of a mesh axis that a factor may take, major to minor: one per prime factor of its devices."""
    primes, rest, prime = [], devices, 2
    while rest > 1:
        while rest % prime == 0:
            primes.append(prime)
            rest //= prime
        prime += 1
    return {(axis, i): size for i, size in enumerate(primes or [1])}


def _joined(axes: Axes, parts: Mapping[str, Mapping[_Part, int]]) -> tuple[str, ...]:
    """The whole axes that these parts begin with."""
    whole = []
    while axes:
        axis = axes[0][0]
        if axes[: len(parts[axis])] != tuple(parts[axis]):
            break
        whole.append(axis)
        axes = axes[len(parts[axis]) :]
    return tuple(whole)


class _LayoutSpread:
    """Layouts, in parts of axes, on their way to the fixed point."""

    def __init__(self, operations: PropagationGraph, parts: Mapping[str, Mapping[_Part, int]]):
        self.operations = operations
        self.mesh = {part: size for of_axis in parts.values() for part, size in of_axis.items()}
        self.layouts: dict[int, PartLayout] = {id_: ((),) * ndim for id_, ndim in operations.ndims.items()}
        self.origins: dict[tuple[int, _Part], tuple[int, Equation | None]] = {}  # -> the id it started from, through
        for id_, given in operations.given.items():
            self.layouts[id_] = tuple(tuple(part for axis in axes for part in parts[axis]) for axes in given.layout)
            self.origins |= {(id_, part): (given.start, None) for axes in self.layouts[id_] for part in axes}
        self.split = {id_ for id_ in operations.given if any(self.layouts[id_])}  # ids that some axis splits
        self.touching: dict[int, list[int]] = {}  # id -> operations to look at again, last first
        self.overlooking: dict[int, list[int]] = {}  # id -> operations that are looked at again last of all
        makers: dict[int, int] = {}
        for index, operation in reversed(list(enumerate(operations.spreading))):
            for id_ in dict.fromkeys(operation.ids[: operation.operands]):
                calls_for = self.overlooking if id_ in operation.overlooks else self.touching
                calls_for.setdefault(id_, []).append(index)
            makers |= dict.fromkeys(operation.ids[operation.operands :], index)
        for id_, index in makers.items():
            self.touching.setdefault(id_, []).insert(0, index)

    def to_fixed_point(self, round_: int) -> None:
        spreading = self.operations.spreading
        directions = [operation.direction(round_) for operation in spreading]
        waiting = [direction is not None for direction in directions]
        for end in self.operations.ends:
            self.agree(end, "both")
        stack = [index for index in reversed(range(len(waiting))) if waiting[index]]
        overlooked: set[int] = set()
        is_last = round_ == _SPREAD_ROUNDS - 1
        while stack or (overlooked and is_last):
            if not stack:
                stack, overlooked = sorted(overlooked, reverse=True), set()
            index = stack.pop()
            waiting[index] = False
            overlooked.discard(index)
            direction = directions[index]
            assert direction is not None, "no other operation waits"
            for changed in self.agree(spreading[index], direction):
                overlooked.update(other for other in self.overlooking.get(changed, ()) if other != index)
                for touched in self.touching.get(changed, ()):
                    if directions[touched] is not None and touched != index and not waiting[touched]:
                        waiting[touched] = True
                        stack.append(touched)

    def lay_out_constants(self) -> None:
        """Lets constants lie as their first reader reads them."""
        for operation in reversed(self.operations.constant):
            for id_ in operation.ids[operation.operands :]:
                if (copy := self.operations.first_copy.get(id_)) is not None:
                    self.layouts[id_] = self.layouts[copy]
                    self.split.add(id_)
                    parts = (part for axes in self.layouts[id_] for part in axes)
                    self.origins |= {(id_, part): self.origins[copy, part] for part in parts}
            self.agree(operation, "backward")

    def agree(self, operation: PropagatedOperation, direction: str) -> list[int]:
        """Lets the tensors of one operation agree; the ids of those that changed."""
        if self.split.isdisjoint(operation.ids):
            return []
        sizes = operation.sizes
        factors = operation.passing if direction == "passing" else sizes
        projections = [
            _Projection.of(dims, self.layouts[id_], sizes, self.mesh, self.operations.given.get(id_))
            for id_, dims in zip(operation.ids, operation.dims, strict=True)
        ]
        operands, results = projections[: operation.operands], projections[operation.operands :]
        sources, others = (results, operands) if direction == "backward" else (operands, results)
        one_way = direction in ("forward", "backward")
        wished = {factor: axes for factor in factors if (axes := _common_axes(factor, sources, others, one_way))}
        if not wished:
            return []
        in_order = _in_order(wished, projections, sizes, self.mesh, operation.elementwise)
        changed: dict[int, int] = {}  # tensor of the operation -> its id
        limits: list[Mapping[str, Axes]] = []
        # Results first: an operand of an elementwise operation is not split where the result cannot be.
        for tensor in (*range(operation.operands, len(projections)), *range(operation.operands)):
            projection = projections[tensor]
            axes_of = _grown(projection, wished, in_order, sizes, self.mesh, limits)
            if operation.elementwise and tensor >= operation.operands:
                limits.append(axes_of)
            if axes_of is projection.axes:
                continue
            layout = _layout(operation.dims[tensor], axes_of, projection.overflow, sizes, self.mesh)
            id_ = operation.ids[tensor]
            if layout != self.layouts[id_]:
                self.note_origins(operation, id_, axes_of, projections)
                self.layouts[id_] = layout
                self.split.add(id_)
                changed[tensor] = id_
        return [changed[tensor] for tensor in sorted(changed)]

    def note_origins(
        self, operation: PropagatedOperation, id_: int, axes_of: Mapping[str, Axes], projections: Sequence[_Projection]
    ) -> None:
        for factor, axes in axes_of.items():
            for part in axes:
                if (id_, part) in self.origins:
                    continue
                for other, projection in zip(operation.ids, projections, strict=True):
                    if part in projection.axes.get(factor, ()) and (other, part) in self.origins:
                        self.origins[id_, part] = self.origins[other, part][0], operation.equation
                        break

    def origins_of(self, id_: int, layout: Layout, program: Program) -> tuple[AxisOrigin, ...]:
        found = []
        for axis in (axis for axes in layout for axis in axes):
            start, equation = self.origins[id_, (axis, 0)]
            found.append(AxisOrigin(axis, program.values[start], equation))
        return tuple(found)


@dataclass(frozen=True)
class _Projection:
    """One tensor's layout, seen factor by factor."""

    axes: dict[str, Axes]  # every factor of the tensor -> the axes that split it
    overflow: dict[str, Axes]  # factor -> axes that would have to be cut to go on to the next factor
    closed: frozenset[str]  # factors that may not be split further
    major: frozenset[str]  # factors with a minor one beside them, which have to split evenly

    @classmethod
    def of(
        cls,
        dims: Dims,
        layout: PartLayout,
        sizes: Mapping[str, int],
        mesh: Mapping[_Part, int],
        given: StartingLayout | None,
    ) -> _Projection:
        axes_of: dict[str, Axes] = {}
        overflow: dict[str, Axes] = {}
        closed: set[str] = set()
        major: set[str] = set()
        for dim, axes in zip(dims, layout, strict=True):
            for factor in dim[:-1]:
                major.add(factor)
                taken, room = 0, sizes[factor]
                while taken < len(axes) and room % mesh[axes[taken]] == 0:
                    room //= mesh[axes[taken]]
                    taken += 1
                axes_of[factor], axes = axes[:taken], axes[taken:]
                if overflow.keys() & dim:
                    closed.add(factor)
                elif room > 1 and axes:
                    overflow[factor], axes = axes, ()
            if dim:
                axes_of[dim[-1]] = axes
                if overflow.keys() & dim:
                    closed.add(dim[-1])
        if given is not None:
            closed.update(factor for i, dim in enumerate(dims) if i not in given.open for factor in dim)
        return cls(axes_of, overflow, frozenset(closed), frozenset(major))


def _in_order(
    wished: Mapping[str, Axes],
    projections: Sequence[_Projection],
    sizes: Mapping[str, int],
    mesh: Mapping[_Part, int],
    elementwise: bool,
) -> list[str]:
    """The factors to split; of two that want the same axis, the one that wins comes first.

    The largest tensor that is already split so decides, since the smaller tensor is the cheaper one to reshard. In
    elementwise operations the number of pieces decides next. Then the order of the tensors decides, and of the factors.
    """
    source: dict[str, tuple[int, int]] = dict.fromkeys(wished, (1, -1))  # (- elements, position)
    for position, projection in enumerate(projections):
        elements = math.prod(sizes[factor] for factor in projection.axes)
        for factor, axes in projection.axes.items():
            if factor in wished and axes[: len(wished[factor])] == wished[factor] and -elements < source[factor][0]:
                source[factor] = (-elements, position)
    order = {factor: index for index, factor in enumerate(sizes)}

    def key(factor: str) -> tuple[int, int, int, int]:
        elements, position = source[factor]
        return elements, -shards(wished[factor], mesh) if elementwise else 0, position, order[factor]

    return sorted(wished, key=key)


def _grown(
    projection: _Projection,
    wished: Mapping[str, Axes],
    in_order: Sequence[str],
    sizes: Mapping[str, int],
    mesh: Mapping[_Part, int],
    limits: Sequence[Mapping[str, Axes]] = (),
) -> dict[str, Axes]:
    """The axes of one tensor's factors, after each factor in order took what it wished for and may have.

    Args:
        limits: axes of other tensors' factors that may not be outgrown.
    """
    axes_of = projection.axes
    for factor in in_order:
        old = axes_of.get(factor)
        if old is None or len(wished[factor]) <= len(old):
            continue
        axes = _within_factor(factor, wished[factor], projection, sizes, mesh)
        taken = {axis for other, others in axes_of.items() if other != factor for axis in others}
        taken.update(axis for other, others in projection.overflow.items() if other != factor for axis in others)
        axes = _untaken_prefix(axes, taken)
        for limit in limits:
            if factor in limit and len(limit[factor]) < len(axes) and axes[: len(limit[factor])] == limit[factor]:
                axes = limit[factor]
        if len(axes) > len(old) and axes[: len(old)] == old:
            axes_of = axes_of | {factor: axes}
    return axes_of


def _common_axes(factor: str, sources: Sequence[_Projection], others: Sequence[_Projection], one_way: bool) -> Axes:
    """The longest axes that every tensor's are a prefix of, up to the first disagreement.

    Args:
        factor: the factor whose axes to compare.
        sources: tensors that may make the axes longer.
        others: the remaining tensors, which may make the axes longer too, unless propagation goes `one_way`.
    """
    common: Axes = ()
    may_grow = True
    for position, projection in enumerate((*sources, *others)):
        if one_way and position == len(sources):
            may_grow = False
        axes = projection.axes.get(factor)
        if axes is None:
            continue
        shared = min(len(common), len(axes))
        if common[:shared] != axes[:shared]:
            agreeing = next(i for i in range(shared) if common[i] != axes[i])
            common, may_grow = common[:agreeing], False
        elif may_grow and len(axes) > len(common):
            common = axes
    return common


def _within_factor(
    factor: str, axes: Axes, projection: _Projection, sizes: Mapping[str, int], mesh: Mapping[_Part, int]
) -> Axes:
    """The prefix of `axes` that the factor of this tensor already has or can take."""
    there = projection.axes[factor]
    if factor in projection.closed or factor in projection.overflow:
        return _untaken_prefix(axes, set(axes) - set(there))
    if factor not in projection.major:
        return axes
    pieces = 1
    for position, axis in enumerate(axes):
        pieces *= mesh[axis]
        if axis not in there and sizes[factor] % pieces:
            return axes[:position]
    return axes


def _untaken_prefix(axes: Axes, taken: set[_Part]) -> Axes:
    """`axes` up to the first that is taken."""
    for position, axis in enumerate(axes):
        if axis in taken:
            return axes[:position]
    return axes


def _layout(
    dims: Dims,
    axes_of: Mapping[str, Axes],
    overflow: Mapping[str, Axes],
    sizes: Mapping[str, int],
    mesh: Mapping[_Part, int],
) -> PartLayout:
    """The layout that splits the factors so; minor factors of a dim stay whole unless the major factor is used up."""
    layout = []
    for dim in dims:
        split: Axes = ()
        for factor in dim:
            axes = axes_of[factor]
            split += axes
            pieces = 1
            for axis in axes:
                pieces *= mesh[axis]
            if factor in overflow:
                split += overflow[factor]
                break
            if pieces < sizes[factor]:
                break
        layout.append(split)
    return tuple(layout)
