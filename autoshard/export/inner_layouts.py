"""A program and its plan in, the table of its inner layouts out, as code: what `standalone.py` runs a step by."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import AxisType

from autoshard.export.containers import literal
from autoshard.export.operations_code import literal_spec, operations_code
from autoshard.layout import Layout, replicated, spec_text
from autoshard.lower.constraints import constraints_of
from autoshard.lower.on_shards import EquationSplit, local_params, may_run_on_shards, runs_on_shards, wants_of
from autoshard.mesh.resharding import stops
from autoshard.model.equations import folds_by_hand, is_lookup
from autoshard.operations.primitive import OPERATION
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.primitives import BOUNDARIES
from autoshard.program import Equation, Program, Value
from autoshard.program.signature import text_of_value
from autoshard.propagation.padded_windows import UNPADDED
from autoshard.propagation.rules.windows import STENCIL, WRAPS

Chain = tuple[Layout, ...]  # constraints, one after the other


@dataclass(frozen=True)
class InnerRow:
    """One row of the table; see `standalone.Inner`."""

    path: tuple[Any, ...]
    primitive: str = ""
    line: str = ""
    reads: Mapping[int, tuple[bool, Chain]] = field(default_factory=dict)
    makes: Mapping[int, Chain] = field(default_factory=dict)
    copies: Mapping[int, Chain] = field(default_factory=dict)
    lies: Mapping[int, tuple[Layout, Layout | None]] = field(default_factory=dict)
    on_shards: str = ""

    @property
    def says_something(self) -> bool:
        return bool(self.reads or self.makes or self.copies or self.lies or self.on_shards)

    def text(self) -> str:
        """As code: ``(3,): Inner("dot_general", makes={0: [P("data")]}),  # train.py:41``."""
        arguments = [literal(self.primitive)] if self.primitive else []
        if self.reads:
            arguments.append(
                _dict("reads", {i: f"({flag}, {_specs(chain)})" for i, (flag, chain) in self.reads.items()})
            )
        if self.makes:
            arguments.append(_dict("makes", {i: _specs(chain) for i, chain in self.makes.items()}))
        if self.copies:
            arguments.append(_dict("copies", {i: _specs(chain) for i, chain in self.copies.items()}))
        if self.lies:
            pairs = {i: f"({spec_text(home)}, {copy and spec_text(copy)})" for i, (home, copy) in self.lies.items()}
            arguments.append(_dict("lies", pairs))
        if self.on_shards:
            arguments.append(f"on_shards={self.on_shards}")
        return f"{literal(self.path)}: Inner({', '.join(arguments)}),{f'  # {self.line}' if self.line else ''}"


@dataclass(frozen=True)
class InnerLayouts:
    """What a plan says inside a step."""

    equations: int  # how many the step's own jaxpr has
    rows: tuple[InnerRow, ...]
    merged: Mapping[tuple, int]
    left_to_xla: tuple[str, ...]  # operations that the plan runs on shards, and the table does not
    reason_written_out: str = ""  # why the operations of the step are written out; "": JAX makes them of the step
    operations: str = ""  # their code
    modules: frozenset[str] = frozenset()  # that this code takes names from
    static: Mapping[str | int, str] = field(default_factory=dict)  # arguments that this code was made with, as texts
    weak: tuple[int, ...] | None = None  # arguments whose types were weak; None: the operations are written out
    types: str = ""  # code of the types of explicit mode

    def text(self) -> str:
        rows = "".join(f"            {row.text()}\n" for row in self.rows)
        merged = "".join(f"            {path!r}: {first},\n" for path, first in self.merged.items())
        written = ("        _operations(),\n" + f"        {literal(dict(self.static))},\n" * bool(self.static)) * bool(
            self.operations
        )
        weak = "" if self.weak is None else f"        weak={self.weak},\n"
        types = self.types and f"        types={self.types},\n"
        return (
            f"    return Table(\n        {self.equations},\n        {{\n{rows}        }},\n"
            f"        {{\n{merged}        }},\n{written}{weak}{types}    )\n"
        )


def reason_written_out(program: Program) -> str:
    """Why the jaxpr that was planned is not the one that JAX makes of the step; "" where it is."""
    if program.microbatches > 1:
        return "the step runs in microbatches"
    if program.departure:
        return program.departure
    if program.rewritten:
        return "the step was rewritten (rewrites=)"
    if program.shared_trips:
        return "devices share out the trips of its loops"
    if program.stacked:
        return "the step computes stacks of matrices where it was written matrix by matrix"
    if program.types is not None:
        return "the step is a program of explicit mode, and inside it axes are Auto"
    return ""


def reason_without_table(program: Program) -> str:
    """Why a program has no table; "" where it may have one."""
    if None in program.constant_places or (program.captured and reason_written_out(program)):
        return "calls inside the step close over large arrays; pass them as arguments"
    if program.changes is not None and not program.changes.keeps_graphs:
        return "the step adds variables to its nnx modules, or takes some away"
    if program.changes is not None and program.changes.static:
        return "its nnx modules hold, or the step returns, what is no array"
    if program.in_tree.static or (program.changes is not None and program.changes.takes_static):
        return "the step takes leaves that are no arrays; part them (eqx.partition), and plan a step of the arrays"
    return ""


def inner_layouts(program: Program, plan: PlanData, types_all: bool = False) -> InnerLayouts:
    """The table of a plan of a program that may have one.

    Args:
        types_all: whether all arguments and results of a step of explicit mode have types, those too that had none.

    Raises:
        UnwritableError: the operations have to be written out, and code cannot say one of them.
    """
    table = _Table(program, plan)
    rows = [row for row in table.rows() if row.says_something]
    why = reason_written_out(program)
    written, modules = operations_code(program.jaxpr, plan.mesh.shape) if why else ("", frozenset[str]())
    left = tuple(dict.fromkeys(table.left))
    static = {name: text_of_value(value) for name, value in program.static.items()} if why else {}
    count = len(program.jaxpr.jaxpr.eqns)
    weak = None if why else tuple(i for i, one in enumerate(program.jaxpr.in_avals) if one.weak_type)
    types = _types_text(program, plan, types_all)
    return InnerLayouts(count, tuple(rows), program.merged, left, why, written, modules, static, weak, types)


def types_text(plan: PlanData) -> str:
    """The kinds of axes of types of explicit mode, as code."""
    kinds = plan.axis_types or (AxisType.Explicit,) * len(plan.mesh.axis_names)
    return f"({', '.join(map(str, kinds))},)"


def spec_of_type(array: PlacedArray, axes: Collection[str] | None = None) -> str:
    """The PartitionSpec of a type, which has an entry per dim, as code.

    Args:
        axes: those that the type is on; None: all.
    """
    split = [tuple(axis for axis in dim if axes is None or axis in axes) for dim in array.layout]
    return f"P({', '.join(literal(dim if len(dim) > 1 else dim[0] if dim else None) for dim in split)})"


def _types_text(program: Program, plan: PlanData, types_all: bool) -> str:
    """The types of explicit mode as code; "" if the step has none."""
    if program.types is None or plan.axis_types is None:
        return ""
    kinds = zip(plan.mesh.axis_names, plan.axis_types, strict=True)
    axes = {axis for axis, kind in kinds if kind is AxisType.Explicit}
    given = {i: literal_spec(spec) for i, spec in enumerate(program.types.written) if spec is not None}
    made = {i: spec_of_type(one, axes) for i, one in enumerate(plan.results) if one.typed or types_all}
    return f"Types({types_text(plan)}, {_braced(given)}, {_braced(made)})"


class _Table:
    def __init__(self, program: Program, plan: PlanData):
        self.program, self.plan, self.mesh = program, plan, dict(plan.mesh.shape)
        self.annotations = plan.annotations
        self.pins = constraints_of(program, plan.annotations)
        self.has_modules = program.changes is not None  # `nnx.jit` gets no shardings, so the table has all of them
        self.left: list[str] = []

    def rows(self) -> Iterator[InnerRow]:
        for i, (value, placed) in enumerate(zip(self.program.own_arguments, self.plan.arguments, strict=True)):
            constraints = self.made([value])
            if self.has_modules and placed.layout:
                constraints["makes"] = {0: (placed.layout,)}
            yield InnerRow(("argument", i), "", value.name, **constraints)
        large = self.program.arguments[len(self.program.own_arguments) :]
        for place, value in zip(self.program.constant_places, large, strict=True):
            home = self.home(value)
            row = self.made([value])
            yield InnerRow(("constant", place), "", value.name, **{**row, "makes": {0: (home,)} if home else {}})
        others = (i for i in itertools.count() if i not in self.program.constant_places)
        for place, value in zip(others, self.program.constants, strict=False):
            yield InnerRow(("constant", place), **self.made([value]))
        for equation in self.program.equations:
            yield self.row(equation)
        for i, (result, placed) in enumerate(zip(self.program.results, self.plan.results, strict=True)):
            home = self.home(result)
            if home and (home != placed.layout or self.has_modules):
                chain = self.chain(home, placed.layout) if home != placed.layout else (home,)
                yield InnerRow(("result", i), "", placed.name, reads={0: (False, chain)})

    def row(self, equation: Equation) -> InnerRow:
        line, name = str(equation.source or ""), equation.primitive
        if name in BOUNDARIES:
            return InnerRow(equation.path, "", line, reads=self.reads(equation), **self.made(equation.outputs))
        if name == STENCIL:  # its operands are those of equations before it
            self.left.append(f"a stencil at {line}")
            made = self.made(equation.outputs)
            place = {0: equation.params["output"]}
            moved: dict[str, Any] = {
                kind: {place[i]: one for i, one in by_place.items()} for kind, by_place in made.items()
            }
            return InnerRow(equation.path, "", line, **moved)
        if UNPADDED in equation.params or WRAPS in equation.params:  # as the code has it, the array is padded
            self.left.append(f"a convolution over a padded array at {line}")
            return InnerRow(equation.path, "", line, **self.made(equation.outputs if WRAPS in equation.params else ()))
        if name == OPERATION:  # which may stand for a plain transform
            name = ""
        on_shards, reads = self.on_shards(equation), self.reads(equation)
        if on_shards is None:
            whole = [self.reading(value, replicated(len(value.shape))) for value in equation.inputs]
            reads = {i: one for i, one in enumerate(whole) if one is not None}
        return InnerRow(
            equation.path, name, line, reads=reads, **self.made(equation.outputs), on_shards=on_shards or ""
        )

    # Arrays.

    def chain(self, source: Layout | None, target: Layout | None) -> Chain:
        """The constraints from one layout to another; none where there are no dims, or no plan."""
        if not target:
            return ()
        between = tuple(stops(source, target, self.mesh)) if source else ()
        return (*between, target)

    def made(self, values: Sequence[Value]) -> dict[str, Any]:
        makes, copies, lies = {}, {}, {}
        annotations = self.annotations
        for i, value in enumerate(values):
            home, summed, copy = (
                kind.get(value.id) for kind in (annotations.homes, annotations.sums, annotations.copies)
            )
            if chain := ((summed,) if summed else ()) + self.chain(summed, self.pins.get(value.id)):
                makes[i] = chain
            if copy is not None:
                copies[i] = self.chain(home, copy)
            if value.id in self.program.guarded and home:
                lies[i] = home, copy or None
        return {"makes": makes, "copies": copies, "lies": lies}

    def reads(self, equation: Equation) -> dict[int, tuple[bool, Chain]]:
        found = {}
        for operand, value in enumerate(equation.inputs):
            want = self.annotations.wants.get((equation.index, operand))
            read = None if want is None else self.reading(value, want)
            if read is not None:
                found[operand] = read
        return found

    def home(self, value: Value | np.ndarray) -> Layout | None:
        return self.annotations.homes.get(value.id) if isinstance(value, Value) else None

    def reading(self, value: Value | np.ndarray, want: Layout) -> tuple[bool, Chain] | None:
        """Whether a value is read from its copy, and the constraints from there; None where it is read as it lies."""
        home = self.home(value)
        copy = self.annotations.copies.get(value.id) if isinstance(value, Value) else None
        if want == home:
            return None
        if copy is None:
            return (False, chain) if (chain := self.chain(home, want)) else None
        return True, () if want == copy else self.chain(copy, want)

    # Equations on shards.

    def on_shards(self, equation: Equation) -> str | None:
        """How each device runs an equation on its shards: "" if XLA splits it, None if the table has it run whole."""
        if (run := self.annotations.runs.get(equation.index)) is not None:
            self.left.append(f"{run} of the operation at {equation.source}, which XLA splits")
            return ""
        homes = [self.annotations.homes.get(value.id) for value in equation.outputs]
        scatter = self.annotations.scatters.get(equation.index)
        if None in homes or (scatter is None and not may_run_on_shards(equation)):
            return ""
        wants = wants_of(equation, self.annotations)
        split = EquationSplit.of(equation, wants, self.mesh)
        if scatter is None and not runs_on_shards(equation, split):
            return ""
        if equation.primitive == "ragged_dot_general" or (folds_by_hand(equation) and split.reduced):
            self.left.append(f"{equation.primitive} at {equation.source}, which runs whole")
            return None
        if any(split.axes.get(factor) for factor in split.rule.exchanged):
            self.left.append(f"halos of {equation.primitive} at {equation.source}")
            return ""
        how = [_specs(wants), _specs([home or () for home in homes]), literal(local_params(equation, split))]
        if is_lookup(equation) and split.reduced:
            how.append(f"looked_up={literal(split.looked_up)}")
        if scatter is not None:
            how.append(f"scatter={literal((scatter.dim, scatter.stages, scatter.others))}")
        elif split.reduced:
            how.append(f"summed={literal(split.reduced)}")
        return f"OnShards({', '.join(how)})"


def _specs(layouts: Sequence[Layout]) -> str:
    return f"[{', '.join(map(spec_text, layouts))}]"


def _dict(name: str, items: Mapping[int, str]) -> str:
    return f"{name}={_braced(items)}"


def _braced(items: Mapping[int, str]) -> str:
    return f"{{{', '.join(f'{key}: {text}' for key, text in items.items())}}}"
