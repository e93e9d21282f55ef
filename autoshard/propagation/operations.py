"""A program and its rules in, what propagation goes through out: the operations that XLA has, not the equations.

The two differ:

- XLA broadcasts an operand's dim of size 1 by an operation of its own. The result is as large as the other operands and
  counts as such in a conflict. In the same way XLA adds the dim along which arrays are stacked.
- A gather that fills in for positions out of bounds is followed by the choice between what it found and the filling.
- Arrays that are cut out of one array are cut out one by one.
- A broadcast that adds nothing but dims of size 1 is a reshape.
- XLA makes constants, and what is made of nothing else, anew for every reader. It does the same with a scalar that is
  broadcast. No layout passes from one reader to another through such values.
- What enters a branch is the outer value itself.
- A constraint holds for the value before it as well, as long as no other constraint says anything of that value. Where
  a loop or branch hands the value over, its other readers read the constrained one instead. After several constraints
  in a row, readers further down read what the last constraint makes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from jax.lax import GatherScatterMode

from autoshard.jaxprs import CONSTRAINTS
from autoshard.layout import Layout
from autoshard.program import Equation, Program, Value
from autoshard.propagation.loop_edges import (
    BOUNDARIES,
    EDGES,
    Boundary,
    LoopBody,
    Tensor,
    loop_bodies,
    place_of_edge,
)
from autoshard.propagation.rule import Dims, Rule
from autoshard.propagation.rules.elementwise import PRIMITIVES as ELEMENTWISE

# Operations that keep the dims of a tensor. Those in _CUTS, which take out or put in a piece, count so forward only.
_KEEPS_DIMS = (
    frozenset(ELEMENTWISE)
    | CONSTRAINTS
    | {
        "branch_join",
        "optimization_barrier",
        "reshape",
        "scan_carry",
        "scan_const",
        "squeeze",
        "transpose",
    }
)
_CUTS = frozenset({"dynamic_slice", "dynamic_update_slice", "scan_slice", "scan_stack"})
_SPLITS = frozenset({"split", "unstack"})
_STACKS = frozenset({"scan_stack", "stack"})
_HANDS_OVER = frozenset({"branch_join", "optimization_barrier", "scan_carry", "scan_const", "scan_stack"})
_KEEPS_CONSTANT = frozenset(ELEMENTWISE) | {
    "branch_const",
    "broadcast_in_dim",
    "iota",
    "reshape",
    "slice",
    "squeeze",
}
# XLA has no operation of its own for these, and reads their operand more than once.
_READS_TWICE = frozenset({"erf", "erf_inv", "erfc", "integer_pow", "one_minus_square", "square"})


@dataclass(frozen=True)
class StartingLayout:
    """A layout that an id has from the start."""

    layout: Layout
    open: frozenset[int]  # the dims that may be split further
    start: int = field(compare=False)  # the argument or the result of the constraint that it was given to


@dataclass(frozen=True)
class PropagatedOperation:
    """An equation, or the broadcast before one, as propagation sees it."""

    equation: Equation | None  # None: a result that is returned in a layout of its own
    sizes: Mapping[str, int]  # factor -> size
    ids: tuple[int, ...]  # of the operands, then of the results; literals and scalars have no part
    dims: tuple[Dims, ...]  # of each of them
    operands: int  # how many of them are operands
    passing: tuple[str, ...]  # factors of no special kind
    kind: str  # "keeps_dims", "cuts", "broadcast", "" or one of EDGES
    alone: bool  # no operand is read twice
    elementwise: bool
    overlooks: frozenset[int] = frozenset()  # ids whose change does not call for it

    def direction(self, round_: int) -> str | None:
        """The way it takes part in a round: "both", "forward", "backward", by "passing" factors, or not (None)."""
        if self.kind in EDGES:
            return "both"
        if self.kind == "broadcast":
            return None if round_ < 2 else "backward" if round_ < 4 else "both"
        if round_ < 2 and not (self.alone or round_ == 1):
            return None
        if self.kind == "keeps_dims" or round_ > 2:
            return "both"
        if round_ < 2:
            return "forward" if self.kind == "cuts" else None
        return "passing"


class PropagationGraph:
    """A program as propagation sees it.

    A tensor is an id: the id of its value in the program, or a negative id for a tensor that only XLA has.
    """

    def __init__(
        self,
        program: Program,
        rules: Sequence[Rule],
        fixed: Mapping[int, Layout],
        ends: Mapping[int, Layout],
        order: Sequence[int] | None = None,
    ):
        self.spreading: list[PropagatedOperation] = []  # in the given order of equations, else that of the program
        self.constant: list[
            PropagatedOperation
        ] = []  # that make constants, in program order: they follow their readers
        self.given = {id_: StartingLayout(layout, frozenset(), id_) for id_, layout in fixed.items()}
        self.ndims = {value.id: len(value.shape) for value in program.values}
        self._outer: dict[int, int] = {}  # value in a branch -> the value outside that it is
        self._carries: dict[int, int] = {}  # what a loop ends with -> what its body sees, or an edge: they lie alike
        self._held: dict[int, int] = {}  # value -> what a constraint makes of it, which all others read instead
        self._chained: dict[int, Equation] = {}  # value -> the last constraint in a row, after which others read that
        self._copied: set[int] = set()  # constants and broadcast scalars
        self.first_copy: dict[int, int] = {}  # constant -> the copy that its first reader has
        self._bodies: Mapping[tuple[int, int] | None, LoopBody] = (
            {} if order is not None else loop_bodies(program.equations)
        )
        self._edges: dict[int, int] = {}  # carry, as a body sees it that is a function -> the edge of the loop
        self._in_xla = order is not None
        self._apply_annotations(program, rules)
        self._find_constants(program)
        reads = self._reads(program)
        for equation, rule in zip(program.equations, rules, strict=True):
            self._add(equation, rule, reads, program)
        places = list(range(len(program.equations) + 1))
        for place, index in enumerate(order or ()):
            places[index] = place
        self.spreading.sort(key=partial(self._place, places))
        returned = ((program.results[i], layout) for i, layout in ends.items())
        self.ends = [
            self._end(x, layout) for x, layout in returned if isinstance(x, Value) and self.read_as(x) is not None
        ]

    def laid_as(self, value: Value) -> int:
        """The id that has the layout of a value."""
        return self._laid_as(self.seen_as(value))

    def _laid_as(self, id_: int) -> int:
        return self._carries.get(id_, id_)

    def seen_as(self, value: Value) -> int:
        """The id of what a value is: of one in a branch, that outside."""
        return self._outer.get(value.id, value.id)

    def read_as(self, value: Value) -> int | None:
        """The id that is returned as a result; None for a constant, of which the result is a copy of its own."""
        id_ = self._read(value)
        return None if id_ in self._copied else id_

    def _read(self, value: Value, equation: Equation | None = None) -> int:
        """The id that an equation reads, or, without one, a result."""
        id_ = self.seen_as(value)
        if (last := self._chained.get(id_)) is not None:
            body, comes_later = ((), True) if equation is None else (equation.path[:-1], equation.index > last.index)
            if comes_later and body == last.path[:-1]:
                return last.outputs[0].id
        return self._held.get(id_, id_)

    def _apply_annotations(self, program: Program, rules: Sequence[Rule]) -> None:
        constrained: dict[int, list[StartingLayout]] = defaultdict(list)  # id -> what constraints say of it
        annotated = []
        for equation, rule in zip(program.equations, rules, strict=True):
            self._note_boundary(equation)
            if rule.given:
                for value, dims in _arrays(equation, rule):
                    constrained[self.seen_as(value)].append(_given(dims, rule, equation))
                annotated.append((equation, rule))
        for equation, rule in annotated:
            for value, dims in zip(equation.outputs, rule.results, strict=True):
                self.given.setdefault(value.id, _given(dims, rule, equation))
        for equation, rule in annotated:
            for value, dims in _arrays(equation, rule):
                self._give_operand(value, _given(dims, rule, equation), equation, program, constrained)
        self._find_chains(program, constrained)

    def _note_boundary(self, equation: Equation) -> None:
        """Notes which values of a branch or loop are values outside, or lie as another one of the loop."""
        if equation.primitive == "branch_const" and isinstance(equation.inputs[0], Value):
            outer = equation.inputs[0].id
            self._outer[equation.outputs[0].id] = self._outer.get(outer, outer)
        if equation.primitive == "scan_carry":
            seen, final = equation.outputs
            self._carries[final.id] = seen.id
            if (body := self._bodies.get(equation.loop)) is not None and body.is_called:
                self._edges[seen.id], _ = self._new(((),) * len(seen.shape))
                self._carries[final.id] = self._edges[seen.id]
                if final.id in self.given:
                    self.given[self._edges[seen.id]] = self.given[final.id]

    def _give_operand(
        self,
        value: Value,
        wanted: StartingLayout,
        equation: Equation,
        program: Program,
        constrained: Mapping[int, Sequence[StartingLayout]],
    ) -> None:
        """Gives an operand the layout in which a constraint reads it, if nothing else is said of the operand."""
        id_ = self.seen_as(value)
        if id_ in self.given or wanted.open or any(other != wanted for other in constrained[id_]):
            return
        hands_over = id_ in program.makers and program.makers[id_].primitive in _HANDS_OVER
        if hands_over and equation.primitive in CONSTRAINTS:
            self._held[id_] = equation.outputs[0].id
        else:
            self.given[self._laid_as(id_)] = wanted

    def _find_chains(self, program: Program, constrained: Mapping[int, Sequence[StartingLayout]]) -> None:
        constraints = [equation for equation in program.equations if equation.primitive in CONSTRAINTS]
        by_result: dict[int | None, Equation] = {equation.outputs[0].id: equation for equation in constraints}
        readers = program.reads + Counter(x.id for x in program.results if isinstance(x, Value))
        for last in constraints:
            first = last
            while (before := by_result.get(_id(first.inputs[0]))) is not None and readers[before.outputs[0].id] == 1:
                first = before
            start = first.inputs[0]
            if first is last or not isinstance(start, Value) or start.id in by_result:
                continue
            if not constrained.get(last.outputs[0].id) and len(constrained[self.seen_as(start)]) == 1:
                self._chained[self.seen_as(start)] = last

    def _find_constants(self, program: Program) -> None:
        constants: set[int] = set()
        for equation in program.equations:
            made = (output.id for output in equation.outputs)
            read = [value for value in equation.inputs if isinstance(value, Value)]
            if equation.primitive in _KEEPS_CONSTANT and all(value.id in constants for value in read):
                constants.update(made)
            elif equation.primitive == "broadcast_in_dim" and not equation.inputs[0].shape:
                self._copied.update(made)
        self._copied |= {id_ for id_ in constants if self.ndims[id_]}
        self._copied -= self.given.keys()
        self._constants = constants

    def _reads(self, program: Program) -> Counter[int]:
        reads = Counter(self._read(x) for x in program.results if isinstance(x, Value))
        for equation in program.equations:
            times = 2 if equation.primitive in _READS_TWICE else 1
            if equation.primitive != "branch_const":
                for value in equation.inputs:
                    if isinstance(value, Value):
                        reads[self._read(value, equation)] += times
        return reads

    def _end(self, value: Value, layout: Layout) -> PropagatedOperation:
        """What a result is returned by: it lies as said, whatever the value does."""
        factors = tuple(map(str, range(len(value.shape))))
        returned, dims = self._new(tuple((factor,) for factor in factors))
        self.given[returned] = StartingLayout(layout, frozenset(), value.id)
        return PropagatedOperation(
            equation=None,
            sizes=dict(zip(factors, value.shape, strict=True)),
            ids=(self._laid_as(self._read(value)), returned),
            dims=(dims, dims),
            operands=1,
            passing=factors,
            kind="keeps_dims",
            alone=False,
            elementwise=False,
        )

    def _new(self, dims: Dims) -> Tensor:
        id_ = -1 - len(self.ndims)
        self.ndims[id_] = len(dims)
        return id_, dims

    def _operand(self, value: Value, equation: Equation) -> int:
        id_ = self._read(value, equation)
        if equation.primitive in CONSTRAINTS and id_ == equation.outputs[0].id:
            return self.seen_as(value)
        if id_ in self._copied and not (equation.outputs and equation.outputs[0].id in self._constants):
            copy, _ = self._new(((),) * self.ndims[id_])
            self.first_copy.setdefault(id_, copy)
            return copy
        return id_

    def _add(self, equation: Equation, rule: Rule, reads: Counter[int], program: Program) -> None:
        if equation.primitive == "branch_const" or (rule.given and equation.primitive not in CONSTRAINTS):
            return
        made = zip(equation.outputs, rule.results, strict=True)
        results = [(value.id, dims) for value, dims in made if dims and value.id not in self._carries]
        constant = bool(results) and all(id_ in self._copied for id_, _ in results)
        add = partial(self._add_operation, self.constant if constant else self.spreading, equation, rule, reads)
        elementwise = equation.primitive in ELEMENTWISE
        boundary = None
        if equation.primitive in BOUNDARIES and (body := self._bodies.get(equation.loop)) is not None:
            read = (value for value in equation.inputs if isinstance(value, Value))
            seen = frozenset(self._read(value, equation) for value in read if self._is_seen_in_loop(value, program))
            boundary = Boundary(equation, body, add, self._new, seen)
        operands = []
        for position, (value, dims) in enumerate(zip(equation.inputs, rule.operands, strict=True)):
            if not dims or not isinstance(value, Value):
                continue
            tensor = self._operand(value, equation), dims
            if boundary is not None:
                returned = equation.primitive == "scan_stack" or (equation.primitive == "scan_carry" and position == 1)
                tensor = boundary.handed_on(tensor) if returned else tensor
            elif equation.primitive in _STACKS or (elementwise and value.shape != equation.outputs[0].shape):
                tensor, narrow = self._new(rule.results[0]), tensor
                as_reshape = equation.primitive in _STACKS and self._in_xla
                add([narrow], [tensor], "keeps_dims" if as_reshape else "broadcast")
            operands.append(tensor)
        kind = _kind(equation)
        if boundary is not None:
            boundary.connect(operands, results, kind, self._edges)
        elif equation.primitive in _SPLITS:
            for result in results:
                add(operands, [result], kind)
        elif equation.params.get("mode") == GatherScatterMode.FILL_OR_DROP and equation.primitive == "gather":
            found, valid = self._new(rule.results[0]), self._new(rule.results[0])
            add(operands, [found], kind)
            add(operands[1:], [valid], "broadcast")
            add([valid, found], results, "keeps_dims", elementwise=True)
        else:
            add(operands, results, kind, elementwise=elementwise)

    def _place(self, places: Sequence[int], operation: PropagatedOperation) -> tuple[int, ...]:
        """Where Shardy comes to an operation: what hands values to a loop and back stands behind the loop."""
        equation = operation.equation
        assert equation is not None, "results have no place"
        if operation.kind in EDGES:
            assert equation.loop is not None
            return place_of_edge(operation.kind, equation, self._bodies[equation.loop], places)
        if equation.primitive in ("scan_carry", "scan_const") and equation.loop is not None:
            return max(places[slice(*equation.loop)]), 1, places[equation.index]
        return places[equation.index], 0

    def _add_operation(
        self,
        into: list[PropagatedOperation],
        equation: Equation,
        rule: Rule,
        reads: Counter[int],
        operands: Sequence[Tensor],
        results: Sequence[Tensor],
        kind: str,
        elementwise: bool = False,
        overlooks: frozenset[int] = frozenset(),
    ) -> None:
        tensors = (*operands, *results)
        into.append(
            PropagatedOperation(
                equation=equation,
                sizes=rule.sizes,
                ids=tuple(self._laid_as(id_) for id_, _ in tensors),
                dims=tuple(dims for _, dims in tensors),
                operands=len(operands),
                passing=rule.passing,
                kind=kind,
                alone=all(reads[id_] <= 1 for id_, _ in operands),
                elementwise=elementwise,
                overlooks=frozenset(map(self._laid_as, overlooks)),
            )
        )

    def _is_seen_in_loop(self, value: Value, program: Program) -> bool:
        """Whether a value is what the body of a loop sees, and not by way of an edge of a function."""
        maker = program.makers.get(value.id)
        if maker is None or maker.primitive not in ("scan_carry", "scan_const") or value.id != maker.outputs[0].id:
            return False
        return maker.loop in self._bodies and not self._bodies[maker.loop].is_called


def _id(operand: Value | np.ndarray) -> int | None:
    return operand.id if isinstance(operand, Value) else None


def _arrays(equation: Equation, rule: Rule) -> Iterator[tuple[Value, Dims]]:
    """The operands that have dims, with the factors of these."""
    for value, dims in zip(equation.inputs, rule.operands, strict=True):
        if isinstance(value, Value) and dims:
            yield value, dims


def _given(dims: Dims, rule: Rule, equation: Equation) -> StartingLayout:
    """What a rule says of a tensor each of whose dims is one factor."""
    layout = tuple(rule.given.get(dim[0], ()) if dim else () for dim in dims)
    free = frozenset(
        i for i, dim in enumerate(dims) if dim and (dim[0] not in rule.given or (rule.open_axes and not layout[i]))
    )
    return StartingLayout(layout, free, equation.outputs[0].id)


def _kind(equation: Equation) -> str:
    primitive = equation.primitive
    if primitive == "broadcast_in_dim":
        same_size = math.prod(equation.inputs[0].shape) == math.prod(equation.outputs[0].shape)
        return "keeps_dims" if same_size else "broadcast"
    return "keeps_dims" if primitive in _KEEPS_DIMS else "cuts" if primitive in _CUTS else ""
