"""A few fixed layouts in, a layout for every value of the program out: GSPMD's propagation, as Shardy does it.

Every equation, by its rule, lets the layouts of its operands and results agree factor by factor: where one tensor
splits a factor over some axes, all others that have the factor may follow, as long as no axis then splits two dims of
one tensor. That goes on, in both directions, until nothing changes.

Five rounds, each to its own fixed point, make conflicts fall the way a person would have decided them (Shardy's
op-priority propagation):

1. operations that keep a tensor's dims, if nothing else reads their operands;
2. all operations that keep a tensor's dims;
3. factors that pass from operands to results of any operation, but of broadcasts from result to operand only;
4. all factors, also contracted ones, but the same of broadcasts;
5. everything.

In each round the operations stand on a stack, first ones on top, and one whose tensors have changed is looked at again
before the rest.

Within an equation the tensors follow as in Shardy's AggressiveFactorPropagation: each takes what it can, and where two
factors want one axis, the larger source wins. Mesh axes are never cut into sub-axes, which no PartitionSpec could say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autoshard.layout import Layout, MeshShape, replicated, shards
from autoshard.program import Equation, Program, Value
from autoshard.propagation.rule import Dims, Rule
from autoshard.propagation.rules.elementwise import PRIMITIVES as ELEMENTWISE

Axes = tuple[str, ...]

# What keeps the dims of a tensor, and what cuts a piece out of one or puts it there: that, forward only, goes with it.
_KEEPS_DIMS = frozenset(ELEMENTWISE) | {
    "branch_const",
    "branch_join",
    "optimization_barrier",
    "reshape",
    "scan_carry",
    "scan_const",
    "squeeze",
    "transpose",
}
_CUTS = frozenset({"dynamic_slice", "dynamic_update_slice", "scan_slice", "scan_stack"})
# XLA has no operation of its own for these, and reads their operand more than once.
_READS_TWICE = frozenset({"erf", "erf_inv", "erfc", "integer_pow", "one_minus_square", "square"})
_ROUNDS = 5


@dataclass(frozen=True)
class PropagatedValue:
    """One value of a step and the sharding that propagation gave it."""

    value: Value
    spec: PartitionSpec
    equation: Equation | None  # that makes it; None for arguments


@dataclass(frozen=True)
class Propagated:
    """What sharding propagation made of a step."""

    outputs: tuple[PartitionSpec, ...]  # per flat result
    values: tuple[PropagatedValue, ...]  # every argument and inner value


def propagate_layouts(
    program: Program, rules: Sequence[Rule], mesh: MeshShape, fixed: Mapping[int, Layout]
) -> dict[int, Layout]:
    """The layout of every value, spread from those that are fixed.

    Args:
        program: values and equations.
        rules: one per equation.
        mesh: axis -> devices.
        fixed: value id -> layout; these stay as they are.
    """
    spread = _Spread(program, rules, mesh, fixed)
    for round_ in range(_ROUNDS):
        spread.to_fixed_point(round_)
    return {value.id: spread.layouts[value.id] for value in program.values}


@dataclass(frozen=True)
class _Operation:
    """An equation, or the broadcast before one, as propagation sees it."""

    sizes: Mapping[str, int]  # factor -> size
    ids: tuple[int, ...]  # of the operands, then of the results; literals and scalars have no part
    dims: tuple[Dims, ...]  # of each of them
    operands: int  # how many of them are operands
    passing: tuple[str, ...]  # factors of no special kind
    kind: str  # "keeps_dims", "cuts", "broadcast" or ""
    alone: bool  # no operand is read twice
    elementwise: bool

    def direction(self, round_: int) -> str | None:
        """How it takes part in a round: "both" ways, "forward", "backward", by "passing" factors, or not (None)."""
        if self.kind == "broadcast":
            return None if round_ < 2 else "backward" if round_ < 4 else "both"
        if round_ < 2 and not (self.alone or round_ == 1):
            return None
        if self.kind == "keeps_dims" or round_ > 2:
            return "both"
        if round_ < 2:
            return "forward" if self.kind == "cuts" else None
        return "passing"


def _operations(program: Program, rules: Sequence[Rule]) -> tuple[list[_Operation], dict[int, int]]:
    """What to propagate through, in program order, and the number of dims of ids that stand for no value.

    XLA broadcasts an operand's dim of size 1 by an operation of its own, whose result is as large as the others and
    counts as such in a conflict: that result gets a negative id here.
    """
    reads = Counter(value.id for value in program.results if isinstance(value, Value))
    for equation in program.equations:
        times = 2 if equation.primitive in _READS_TWICE else 1
        for value in equation.inputs:
            if isinstance(value, Value):
                reads[value.id] += times
    operations: list[_Operation] = []
    broadcast: dict[int, int] = {}
    for equation, rule in zip(program.equations, rules, strict=True):
        special = rule.reduction | rule.need_replication | rule.permutation
        passing = tuple(factor for factor in rule.sizes if factor not in special)
        elementwise = equation.primitive in ELEMENTWISE
        results = [(value.id, dims) for value, dims in zip(equation.outputs, rule.results, strict=True) if dims]
        operands = []
        for value, dims in zip(equation.inputs, rule.operands, strict=True):
            if not dims or not isinstance(value, Value):
                continue
            if elementwise and value.shape != equation.outputs[0].shape:
                made = -1 - len(broadcast)
                broadcast[made] = len(rule.results[0])
                ids, both = (value.id, made), (dims, rule.results[0])
                operations.append(_Operation(rule.sizes, ids, both, 1, passing, "broadcast", False, False))
                operands.append((made, rule.results[0]))
            else:
                operands.append((value.id, dims))
        operations.append(
            _Operation(
                sizes=rule.sizes,
                ids=tuple(id_ for id_, _ in operands + results),
                dims=tuple(dims for _, dims in operands + results),
                operands=len(operands),
                passing=passing,
                kind=_kind(equation.primitive),
                alone=all(reads[id_] <= 1 for id_, _ in operands),
                elementwise=elementwise,
            )
        )
    return operations, broadcast


def _kind(primitive: str) -> str:
    if primitive in _KEEPS_DIMS:
        return "keeps_dims"
    return "broadcast" if primitive == "broadcast_in_dim" else "cuts" if primitive in _CUTS else ""


class _Spread:
    """Layouts on their way to the fixed point."""

    def __init__(self, program: Program, rules: Sequence[Rule], mesh: MeshShape, fixed: Mapping[int, Layout]):
        self.mesh, self.fixed = mesh, fixed
        self.operations, broadcast = _operations(program, rules)
        self.layouts = {value.id: replicated(len(value.shape)) for value in program.values}
        self.layouts |= {id_: replicated(ndim) for id_, ndim in broadcast.items()}
        self.layouts |= fixed
        self.split = {id_ for id_, layout in fixed.items() if any(layout)}  # ids that some axis splits
        self.touching: dict[int, list[int]] = {}  # id -> operations to look at again, last first
        makers: dict[int, int] = {}
        for index in reversed(range(len(self.operations))):
            operation = self.operations[index]
            for id_ in dict.fromkeys(operation.ids[: operation.operands]):
                self.touching.setdefault(id_, []).append(index)
            makers |= dict.fromkeys(operation.ids[operation.operands :], index)
        for id_, index in makers.items():
            self.touching.setdefault(id_, []).insert(0, index)

    def to_fixed_point(self, round_: int) -> None:
        takes_part = [operation.direction(round_) is not None for operation in self.operations]
        waiting = list(takes_part)
        stack = [index for index in reversed(range(len(waiting))) if waiting[index]]
        while stack:
            index = stack.pop()
            waiting[index] = False
            for changed in self.operation(index, round_):
                for touched in self.touching[changed]:
                    if takes_part[touched] and touched != index and not waiting[touched]:
                        waiting[touched] = True
                        stack.append(touched)

    def operation(self, index: int, round_: int) -> list[int]:
        """Lets the tensors of one operation agree; the ids of those that changed."""
        operation = self.operations[index]
        if self.split.isdisjoint(operation.ids):
            return []
        sizes, direction = operation.sizes, operation.direction(round_)
        factors = operation.passing if direction == "passing" else sizes
        projections = [
            _Projection.of(dims, self.layouts[id_], sizes, self.mesh, id_ in self.fixed)
            for id_, dims in zip(operation.ids, operation.dims, strict=True)
        ]
        operands, results = projections[: operation.operands], projections[operation.operands :]
        sources, others = (results, operands) if direction == "backward" else (operands, results)
        one_way = direction in ("forward", "backward")
        wished = {factor: axes for factor in factors if (axes := _common_axes(factor, sources, others, one_way))}
        if not wished:
            return []
        in_order = _in_order(wished, projections, sizes, self.mesh, operation.elementwise)
        changed = []
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
                self.layouts[id_] = layout
                self.split.add(id_)
                changed.append(id_)
        return changed


@dataclass(frozen=True)
class _Projection:
    """One tensor's layout, seen factor by factor."""

    axes: dict[str, Axes]  # every factor of the tensor -> the axes that split it
    overflow: dict[str, Axes]  # factor -> axes that would have to be cut to go on to the next factor
    closed: frozenset[str]  # factors that may not be split further
    major: frozenset[str]  # factors with a minor one beside them, which have to split evenly

    @classmethod
    def of(cls, dims: Dims, layout: Layout, sizes: Mapping[str, int], mesh: MeshShape, is_fixed: bool) -> _Projection:
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
        return cls(axes_of, overflow, frozenset(axes_of) if is_fixed else frozenset(closed), frozenset(major))


def _in_order(
    wished: Mapping[str, Axes],
    projections: Sequence[_Projection],
    sizes: Mapping[str, int],
    mesh: MeshShape,
    elementwise: bool,
) -> list[str]:
    """The factors to split, those first that win where two want the same axis.

    The largest tensor that is split so already decides, as the smaller one is the cheaper to reshard; then, in
    elementwise operations, the number of pieces; then the order of the tensors, and of the factors.
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
    mesh: MeshShape,
    limits: Sequence[Mapping[str, Axes]] = (),
) -> dict[str, Axes]:
    """The axes of one tensor's factors after each, in order, took what it wished for and may have.

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
        axes = _until(axes, taken)
        for limit in limits:
            if factor in limit and len(limit[factor]) < len(axes) and axes[: len(limit[factor])] == limit[factor]:
                axes = limit[factor]
        if len(axes) > len(old) and axes[: len(old)] == old:
            axes_of = axes_of | {factor: axes}
    return axes_of


def _common_axes(
    factor: str, sources: Sequence[_Projection], others: Sequence[_Projection], one_way: bool
) -> Axes:
    """The longest axes that every tensor's are a prefix of, up to the first disagreement.

    Args:
        factor: the factor whose axes to compare.
        sources: tensors that may make the axes longer.
        others: the remaining ones, which may so too, unless it goes `one_way`.
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
    factor: str, axes: Axes, projection: _Projection, sizes: Mapping[str, int], mesh: MeshShape
) -> Axes:
    """The prefix of `axes` that this tensor's factor has already or can take."""
    there = projection.axes[factor]
    if factor in projection.closed or factor in projection.overflow:
        return _until(axes, set(axes) - set(there))
    if factor not in projection.major:
        return axes
    pieces = 1
    for position, axis in enumerate(axes):
        pieces *= mesh[axis]
        if axis not in there and sizes[factor] % pieces:
            return axes[:position]
    return axes


def _until(axes: Axes, taken: set[str]) -> Axes:
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
    mesh: MeshShape,
) -> Layout:
    """The layout that splits the factors so; minor factors of a dim stay whole where a major one is not used up."""
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
