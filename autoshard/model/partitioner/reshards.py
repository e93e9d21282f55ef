"""A program and its propagated layouts in, the same program with the reshardings of XLA's partitioner written out.

`jax.jit` compiles a step in three moves: Shardy spreads layouts (`propagation/`), the partitioner decides how each
operation is split (`splits.py`), and whatever does not lie as its reader wants is resharded. A group of elementwise
operations has one strategy, so reshardings inside it are written as constraints, which end the group. So is what is
reduced in one layout and wanted in another. All others are left to the edges of the problem, where readers that want
the same share a copy. XLA shares less in two places, where readers get a view of their own first:

- Collectives within the pieces of a product are written otherwise than those for all of it.
- Where a backend reshards before a loop what the loop reads in every turn, each loop has its own copy.

Not modelled: XLA takes such a copy out of all loops round it. Here the copy for a loop in a loop is counted in every
turn of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoshard.layout import Layout, MeshShape, even_axes, evened
from autoshard.model.equations import contracts
from autoshard.model.partitioner.placed_equation import Split
from autoshard.model.partitioner.shifts import as_slices, with_shifts
from autoshard.model.partitioner.splits import split_of
from autoshard.model.partitioner.turns import turns_of
from autoshard.model.xla.convolutions import TURNS
from autoshard.primitives import facts_of
from autoshard.program import Equation, Program, Value
from autoshard.propagation import rule_of
from autoshard.propagation.projection import layout_of_factors
from autoshard.propagation.rule import Rule, dimwise

_RESHARDS = "sharding_constraint"
_INNER = ("inner",)  # collectives within the pieces of a product are written otherwise, and share no copy with others


@dataclass(frozen=True)
class PartitionedProgram:
    """A step as XLA's partitioner takes it."""

    program: Program
    rules: tuple[Rule, ...]  # one per equation
    layouts: Mapping[int, Layout]  # value id -> how it is left
    wants: Mapping[tuple[int, int], Layout]  # (equation, operand) -> how it is read


def partitioned(
    program: Program,
    rules: Sequence[Rule],
    layouts: Mapping[int, Layout],
    mesh: MeshShape,
    scatters: Callable[[tuple[str, ...], Any], bool],
    hoists: bool,
    turn_flops: float = 0.0,
) -> PartitionedProgram:
    """The program as it is partitioned under these layouts.

    Args:
        layouts: value id -> layout, as propagation leaves them.
        mesh: axis -> devices, of more than one.
        scatters: whether an all_reduce over axes, of numbers of a dtype, and a slice become a reduce_scatter.
        hoists: whether what every turn of a loop would reshard alike is resharded once before the loop.
        turn_flops: per byte that goes round, from which on convolutions are made in turns; 0: none is.
    """
    shapes = {value.id: value.shape for value in program.values}
    even = {id_: _in_order(shapes[id_], layout, mesh) for id_, layout in layouts.items()}
    hoisted: frozenset[tuple[int, Layout]] = frozenset()
    while True:  # once more if loops read what can be resharded before them
        rewriting = _ProgramBuilder(program, dict(even), mesh, scatters, hoisted, turn_flops)
        for equation, rule in zip(program.equations, rules, strict=True):
            rewriting.add(equation, rule)
        if not hoists or rewriting.invariant <= hoisted:
            return rewriting.finished()
        hoisted |= rewriting.invariant


def _in_order(shape: Sequence[int], layout: Layout, mesh: MeshShape) -> Layout:
    """The layout nearest to this one of those that plans have: even, axes in the order of the mesh."""
    several = (tuple(axis for axis in axes if axis in mesh) for axes in layout)
    even = evened(shape, tuple(several), mesh)
    return tuple(even_axes(size, axes, mesh) for size, axes in zip(shape, even, strict=True))


@dataclass
class _ProgramBuilder:
    """The equations so far, and what has become of the values."""

    program: Program
    layouts: dict[int, Layout]
    mesh: MeshShape
    scatters: Callable[[tuple[str, ...], Any], bool]
    hoisted: frozenset[tuple[int, Layout]]  # what a loop reads in every turn, and a layout in which it enters as well
    turn_flops: float = 0.0  # per byte that goes round, from which on convolutions are made in turns
    invariant: set[tuple[int, Layout]] = field(default_factory=set)  # what could be hoisted so
    equations: list[Equation] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)  # those that are new
    wants: dict[tuple[int, int], Layout] = field(default_factory=dict)
    instead: dict[int, Value] = field(default_factory=dict)  # value -> what all its readers read
    copies: dict[tuple, Value] = field(default_factory=dict)  # (value, layout, barrier) -> the copy there
    places: list[int] = field(default_factory=list)  # equation of the program -> its place here

    def add(self, equation: Equation, rule: Rule) -> None:
        if equation.loop is not None and equation.index == equation.loop[0]:
            for entering in self.program.equations[slice(*equation.loop)]:
                if entering.loop == equation.loop:
                    for layout in self.hoisted_layouts(entering):
                        self.resharded_before_loop(entering, layout)
        self.places.append(len(self.equations))
        for one in as_slices(equation):
            self.add_operation(one, rule if one is equation else rule_of(one))

    def add_operation(self, equation: Equation, rule: Rule) -> None:
        inputs = [self.read(x, equation) if isinstance(x, Value) else x for x in equation.inputs]
        operands = [self.layouts.get(x.id) if isinstance(x, Value) else None for x in inputs]
        results = [self.layouts[made.id] for made in equation.outputs]
        rule = with_shifts(equation, rule, operands, results, self.mesh)
        settled = split_of(equation, rule, operands, results, self.mesh)
        split = settled.split
        wants = [self.layout(dims, split, rule) for dims in rule.operands]
        if self.turn_flops and equation.primitive == "conv_general_dilated":
            makes = [self.layout(dims, split, rule) for dims in rule.results]
            turns = turns_of(
                equation, self.program, [*operands, *results], [*wants, *makes], self.mesh, self.turn_flops
            )
            equation = equation if turns is None else replace(equation, params={**equation.params, TURNS: turns})
        fuses = _may_fuse(equation, rule)
        for i, (x, lies, want) in enumerate(zip(inputs, operands, wants, strict=True)):
            if not isinstance(x, Value) or lies is None or want is None or lies == want:
                continue
            moved = _moved_axes(lies, want)
            if moved and self.enters_a_loop(x):
                self.invariant.add((x.id, want))
            if moved and moved <= settled.inner_axes and (x.id, want) not in self.hoisted:
                x = inputs[i] = self.resharded(x, lies, equation, _INNER)
            if fuses or (x.id, want) in self.hoisted or (x.from_outside and _adds(want, lies) is None):
                inputs[i] = self.resharded(x, want, equation)
        read = {i: want for i, want in enumerate(wants) if want is not None and operands[i] is not None}
        self.wants |= {(len(self.equations), i): want for i, want in read.items()}
        self.append(replace(equation, inputs=tuple(inputs)), rule)
        for layout in self.hoisted_layouts(equation):
            self.enter(equation, rule, layout)
        if not facts_of(equation.primitive).is_boundary and not rule.given:
            for made, dims in zip(equation.outputs, rule.results, strict=True):
                self.finish(made, self.layout(dims, split, rule), rule, split, equation)

    def enters_a_loop(self, value: Value) -> bool:
        """Whether it is what a loop reads in every turn."""
        maker = self.program.makers.get(value.id)
        return maker is not None and maker.primitive == "scan_const" and isinstance(maker.inputs[0], Value)

    def hoisted_layouts(self, equation: Equation) -> list[Layout]:
        """The layouts in which what enters a loop by this equation enters as well."""
        made = {value.id for value in equation.outputs} if equation.primitive == "scan_const" else set()
        return sorted(layout for id_, layout in self.hoisted if id_ in made)

    def resharded_before_loop(self, equation: Equation, layout: Layout) -> Value:
        """What enters a loop by this equation, resharded for this loop alone."""
        (entering,) = equation.inputs
        assert isinstance(entering, Value), "only arrays with a layout are hoisted"
        outside = self.read(entering, equation)
        own = self.resharded(outside, self.layouts[outside.id], equation, (equation.loop,))
        return self.resharded(own, layout, equation)

    def enter(self, equation: Equation, rule: Rule, layout: Layout) -> None:
        """Lets what was resharded before a loop enter it, and stand for the copies that turns would make."""
        (inside,) = equation.outputs
        copy = self.resharded_before_loop(equation, layout)
        entered = self.new_value(inside, layout)
        self.copies[inside.id, layout, ()] = entered
        self.append(replace(equation, inputs=(copy,), outputs=(entered,)), rule)

    def read(self, value: Value, equation: Equation) -> Value:
        """What an equation reads of a value: what it was resharded to, and a copy of its own from behind a barrier."""
        value = self.instead.get(value.id, value)
        if value.id not in self.program.guarded:
            return value
        maker = self.program.makers.get(value.id)
        for end in range(1, len(equation.path)):
            barrier = equation.path[:end]
            if barrier in self.program.barriers and (maker is None or maker.path[:end] != barrier):
                value = self.resharded(value, self.layouts[value.id], equation, barrier)
        return value

    def layout(self, dims, split: Split, rule: Rule) -> Layout | None:
        return layout_of_factors(dims, split, rule.sizes, self.mesh)

    def finish(self, made: Value, left: Layout | None, rule: Rule, split: Split, equation: Equation) -> None:
        """Notes how a result is left, and reshards it if that is not how propagation has it."""
        wanted = self.layouts[made.id]
        if left is None or left == wanted:
            return
        reduced = tuple(axis for factor in rule.reduction if factor in split for axis in split[factor])
        added = _adds(left, wanted)
        if reduced and added == set(reduced) and self.scatters(reduced, made.dtype):
            return
        if contracts(equation) and added and added < set(reduced):  # slices first, which the other axes add up
            return
        self.layouts[made.id] = left
        self.instead[made.id] = self.resharded(made, wanted, equation)

    def resharded(self, value: Value, layout: Layout, near: Equation, barrier: tuple = ()) -> Value:
        """The copy of a value in a layout, made here if there is none; behind a barrier it is one of its own."""
        if (value.id, layout, barrier) not in self.copies:
            copy = self.new_value(replace(value, name="", source=near.source), layout)
            self.copies[value.id, layout, barrier] = copy
            rule = dimwise([value.shape], [value.shape])
            given = {factor: axes for dim, axes in zip(rule.results[0], layout, strict=True) for factor in dim}
            made = replace(near, primitive=_RESHARDS, params={}, inputs=(value,), outputs=(copy,), loop=None)
            self.append(made, replace(rule, given=given))
        return self.copies[value.id, layout, barrier]

    def new_value(self, like: Value, layout: Layout) -> Value:
        made = replace(like, id=len(self.program.values) + len(self.values))
        self.values.append(made)
        self.layouts[made.id] = layout
        return made

    def append(self, equation: Equation, rule: Rule) -> None:
        self.equations.append(replace(equation, index=len(self.equations)))
        self.rules.append(rule)

    def finished(self) -> PartitionedProgram:
        places = np.array([*self.places, len(self.equations)])
        equations = [
            replace(one, loop=(int(places[one.loop[0]]), int(places[one.loop[1]]))) if one.loop else one
            for one in self.equations
        ]
        results = tuple(self.instead.get(x.id, x) if isinstance(x, Value) else x for x in self.program.results)
        carries = {
            one.index: replace(
                one, inputs=tuple(self.instead.get(x.id, x) if isinstance(x, Value) else x for x in one.inputs)
            )
            for one in equations
            if one.primitive == "scan_carry"  # reads what is made later
        }
        program = replace(
            self.program,
            equations=tuple(carries.get(one.index, one) for one in equations),
            values=(*self.program.values, *self.values),
            results=results,
        )
        return PartitionedProgram(program, tuple(self.rules), self.layouts, self.wants)


def _may_fuse(equation: Equation, rule: Rule) -> bool:
    """Whether it may be one of a group of several, in which nothing is resharded."""
    facts = facts_of(equation.primitive)
    return not (facts.is_boundary or facts.never_fuses or rule.given or rule.reduction)


def _moved_axes(layout: Layout, other: Layout) -> set[str]:
    """The axes that split other dims, or none, in another layout."""
    return {axis for axes, kept in zip(layout, other, strict=True) for axis in axes if axis not in kept}


def _adds(layout: Layout, other: Layout) -> set[str] | None:
    """The axes by which another layout is finer; None if it is not only finer."""
    found: set[str] = set()
    for axes, finer in zip(layout, other, strict=True):
        if not set(axes) <= set(finer):
            return None
        found |= set(finer) - set(axes)
    return found
