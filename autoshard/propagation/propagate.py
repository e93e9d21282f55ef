"""A few fixed layouts in, a layout for every value of the program out: GSPMD's propagation, as Shardy does it.

Every equation, by its rule, lets the layouts of its operands and results agree factor by factor: where one tensor
splits a factor over some axes, all others that have the factor may follow, as long as no axis then splits two dims of
one tensor. That goes on, in both directions, until nothing changes.

Three rounds, each to its own fixed point, make conflicts fall the way a person would have decided them (Shardy's
op-priority propagation): first only operations that keep a tensor's dims, then factors that pass from operands to
results of any operation, then all factors, also contracted ones. In each round the equations stand on a stack, first
ones on top, and one whose tensors have changed is looked at again before the rest.

Within an equation, `_agreed_axes` follows Shardy's AggressiveFactorPropagation. Mesh axes are never cut into
sub-axes, which a PartitionSpec could not say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.layout import Layout, MeshShape, replicated, shards
from autoshard.program import Equation, Program, Value
from autoshard.propagation.rule import Dims, Rule
from autoshard.propagation.rules.elementwise import PRIMITIVES as ELEMENTWISE

Axes = tuple[str, ...]

# First round: operations that keep the dims of a tensor, and (towards their results only) those that cut pieces.
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
    for round_ in range(3):
        spread.to_fixed_point(round_)
    return spread.layouts


class _Spread:
    """Layouts on their way to the fixed point."""

    def __init__(self, program: Program, rules: Sequence[Rule], mesh: MeshShape, fixed: Mapping[int, Layout]):
        self.mesh, self.fixed = mesh, fixed
        self.layouts = {value.id: replicated(len(value.shape)) for value in program.values} | dict(fixed)
        self.split = {value for value, layout in fixed.items() if any(layout)}  # ids of values that some axis splits
        self.equations = program.equations
        self.tensors = [_Tensors.of(equation, rule) for equation, rule in zip(program.equations, rules, strict=True)]
        self.touching: dict[int, list[int]] = {}  # value id -> equations to look at again when it changes
        for index, equation in enumerate(program.equations):
            for value in equation.inputs:
                if isinstance(value, Value):
                    self.touching.setdefault(value.id, []).append(index)
        for users in self.touching.values():
            users.reverse()  # so that the first user comes to lie on top of the stack
        for index, equation in enumerate(program.equations):
            for value in equation.outputs:
                self.touching.setdefault(value.id, []).insert(0, index)

    def to_fixed_point(self, round_: int) -> None:
        waiting = [direction_of(equation, round_) is not None for equation in self.equations]
        takes_part = list(waiting)
        stack = [index for index in reversed(range(len(self.equations))) if waiting[index]]
        while stack:
            index = stack.pop()
            waiting[index] = False
            for value in self.equation(index, round_):
                for touched in self.touching[value]:
                    if takes_part[touched] and touched != index and not waiting[touched]:
                        waiting[touched] = True
                        stack.append(touched)

    def equation(self, index: int, round_: int) -> list[int]:
        """Lets the tensors of one equation agree; the ids of those that changed."""
        tensors = self.tensors[index]
        if self.split.isdisjoint(tensors.ids):
            return []
        equation = self.equations[index]
        direction = direction_of(equation, round_)
        if direction == "both" and equation.primitive in _KEEPS_DIMS and round_ == 0:
            tensors = tensors.unbroadcast
        rule = tensors.rule
        passing = rule.factors if round_ == 2 or direction != "passing" else tensors.passing
        projections = [
            _Projection.of(dims, self.layouts[value], rule.sizes, self.mesh, value in self.fixed)
            for value, dims in zip(tensors.ids, tensors.dims, strict=True)
        ]
        forward_only = tensors.operands if direction == "forward" else None
        wished = {factor: axes for factor in passing if (axes := _common_axes(factor, projections, forward_only))}
        if not wished:
            return []
        elementwise = equation.primitive in ELEMENTWISE
        in_order = _in_order(wished, projections, rule.sizes, self.mesh, elementwise)
        changed = []
        limits: list[Mapping[str, Axes]] = []
        # Results first: an operand of an elementwise operation is not split where the result cannot be.
        for tensor in (*range(tensors.operands, len(projections)), *range(tensors.operands)):
            projection = projections[tensor]
            axes_of = _grown(projection, wished, in_order, rule.sizes, self.mesh, limits)
            if elementwise and tensor >= tensors.operands:
                limits.append(axes_of)
            if axes_of is projection.axes:
                continue
            layout = _layout(tensors.dims[tensor], axes_of, projection.overflow, rule.sizes, self.mesh)
            value = tensors.ids[tensor]
            if layout != self.layouts[value]:
                self.layouts[value] = layout
                self.split.add(value)
                changed.append(value)
        return changed


def direction_of(equation: Equation, round_: int) -> str | None:
    """How an equation takes part in a round: "both" ways, "forward", only by "passing" factors, or not (None)."""
    if equation.primitive in _KEEPS_DIMS or round_ == 2:
        return "both"
    if round_ == 0:
        return "forward" if equation.primitive in _CUTS else None
    return "passing"


@dataclass(frozen=True)
class _Tensors:
    """The operands and results of an equation that are values, with their dims in its rule."""

    rule: Rule
    ids: tuple[int, ...]
    dims: tuple[Dims, ...]
    operands: int  # how many of them are operands: they come first
    passing: frozenset[str]  # factors of no special kind
    unbroadcast: _Tensors | None = field(default=None, repr=False)  # without operands that are broadcast on the way

    @classmethod
    def of(cls, equation: Equation, rule: Rule) -> _Tensors:
        passing = frozenset(rule.sizes) - rule.reduction - rule.need_replication - rule.permutation
        operands = [
            (value, dims)
            for value, dims in zip(equation.inputs, rule.operands, strict=True)
            if dims and isinstance(value, Value)
        ]
        results = [(value, dims) for value, dims in zip(equation.outputs, rule.results, strict=True) if dims]

        def made(operands: list, unbroadcast: _Tensors | None = None) -> _Tensors:
            both = operands + results
            ids = tuple(value.id for value, _ in both)
            return cls(rule, ids, tuple(dims for _, dims in both), len(operands), passing, unbroadcast)

        if equation.primitive not in _KEEPS_DIMS:
            return made(operands)
        # XLA broadcasts a dim of size 1 by an operation of its own, which is not one that keeps dims.
        alike = operands
        if equation.primitive in ELEMENTWISE:
            alike = [(value, dims) for value, dims in operands if value.shape == equation.outputs[0].shape]
        return made(operands, made(alike))


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


def _common_axes(factor: str, projections: Sequence[_Projection], forward_only: int | None) -> Axes:
    """The longest axes that every tensor's are a prefix of, up to the first disagreement."""
    common: Axes = ()
    may_grow = True
    for position, projection in enumerate(projections):
        if position == forward_only:
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
