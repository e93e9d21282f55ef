"""A boundary equation of a loop in, the operations that Shardy has in its place out.

What enters or leaves a `while`, or a function that is called, has one layout on both sides. Shardy keeps it in an
operation of its own, a data-flow edge. Ties fall by the order in which Shardy comes to these edges:

- The edges of a loop stand behind the loop. Those of a function's arguments stand at its begin, those of its results
  behind the call.
- An edge takes part in every round, in both directions.
- A change of what a body sees does not call for edges that read it, such as that of a slice. Shardy finds the change in
  its next round. It misses changes of the last round, which the compiled program takes, and so do we.

JAX calls a function for each slice that a `scan` takes and for each array that it stacks. Before 0.12 it also calls one
for the body of a `scan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.jaxprs import CALLS_SCAN_BODIES
from autoshard.program import Equation
from autoshard.propagation.rule import Dims

Tensor = tuple[int, Dims]  # an id, and which factors its dims are

LOOP_EDGE = "loop edge"  # between what is outside a loop and what its body sees or hands on
ARGUMENT_EDGE = "argument edge"  # of a function that is called in the body
RESULT_EDGE = "result edge"
BODY_ARGUMENT_EDGE = "body argument edge"  # of the function that is the body
BODY_RESULT_EDGE = "body result edge"
EDGES = frozenset({LOOP_EDGE, ARGUMENT_EDGE, RESULT_EDGE, BODY_ARGUMENT_EDGE, BODY_RESULT_EDGE})
_OF_WHILE = frozenset({"body", "flag", "test"})  # where equations of a `while` stand in its path
BOUNDARIES = frozenset({"scan_carry", "scan_const", "scan_slice", "scan_stack"})


@dataclass(frozen=True)
class LoopBody:
    """Where the body of a loop stands among the equations, and whether it is a function of its own."""

    first: int
    last: int
    is_called: bool


def loop_bodies(equations: Iterable[Equation]) -> dict[tuple[int, int] | None, LoopBody]:
    """First and past-the-last index of each loop -> its body."""
    equations = tuple(equations)
    starts = {equation.loop: equation.path[:-2] for equation in equations if equation.loop is not None}
    found: dict[tuple[int, int] | None, LoopBody] = {}
    for loop, path in starts.items():
        inside = [one for one in equations[slice(*loop)] if one.loop != loop]
        is_scan = _OF_WHILE.isdisjoint(itertools.chain(*(one.path[len(path) :][:1] for one in inside)))
        entries = [one.index for one in equations[slice(*loop)] if one.loop == loop and one.primitive != "scan_stack"]
        first, last = (inside[0].index, inside[-1].index) if inside else (max(entries, default=loop[0]),) * 2
        found[loop] = LoopBody(first, last, is_scan and CALLS_SCAN_BODIES)
    return found


def place_of_edge(kind: str, equation: Equation, body: LoopBody, places: Sequence[int]) -> tuple[int, ...]:
    """Where Shardy comes to an edge, to be sorted among the places of other operations, which are (place, 0)."""
    assert equation.loop is not None
    depth = len(equation.path)  # edges of loops that end together: those of inner loops come first
    if kind == BODY_ARGUMENT_EDGE:
        return places[body.first], -1, depth, 0, equation.index
    if kind == BODY_RESULT_EDGE:
        return places[body.last], 1, -depth, 0, equation.index
    if kind == LOOP_EDGE:
        slices_first = equation.primitive != "scan_slice"
        return max(places[slice(*equation.loop)]), 1, -depth, 1 + slices_first, equation.index
    return places[equation.index], 0


@dataclass(frozen=True)
class Boundary:
    """Adds the operations of one boundary equation.

    `add` takes operands, results, a kind, and as `overlooks` the ids whose change does not call for the operation.
    `new` makes a tensor whose dims are these factors.
    """

    equation: Equation
    body: LoopBody
    add: Callable[..., None]
    new: Callable[[Dims], Tensor]
    seen: frozenset[int]  # ids of operands that are what the body of a loop around sees

    def handed_on(self, tensor: Tensor) -> Tensor:
        """What the loop sees of a value that its body returns."""
        if not self.body.is_called:
            return tensor
        returned = self.new(tensor[1])
        self.add([tensor], [returned], BODY_RESULT_EDGE, overlooks=self.seen)
        return returned

    def connect(self, operands: list[Tensor], results: list[Tensor], kind: str, edges: Mapping[int, int]) -> None:
        """Adds the way from operands to results.

        Args:
            operands: those of the equation, by way of `handed_on` where the body returns them.
            results: those of the equation, a carry as the body sees it.
            kind: that of the operation which takes a slice or stacks one.
            edges: id of a carry as the body sees it -> id of the loop's edge, where these are two.
        """
        if not results:
            return
        if self.equation.primitive == "scan_stack":
            self._stack(operands, results, kind)
        elif self.equation.primitive == "scan_slice" and operands:
            self._slice(operands, results, kind)
        elif self.body.is_called:
            ((made, dims),) = results
            seen = (edges[made], dims) if made in edges else self.new(dims)
            self.add(operands, [seen], LOOP_EDGE, overlooks=self.seen)
            self.add([seen], results, BODY_ARGUMENT_EDGE, overlooks=frozenset({seen[0]}))
        else:
            self.add(operands, results, LOOP_EDGE, overlooks=self.seen)

    def _slice(self, operands: list[Tensor], results: list[Tensor], kind: str) -> None:
        (_, whole), (_, inner) = operands[0], results[0]
        seen, argument, cut, found = self.new(whole), self.new(whole), self.new(((), *inner)), self.new(inner)
        self.add(operands, [seen], LOOP_EDGE, overlooks=self.seen)
        self.add([seen], [argument], ARGUMENT_EDGE, overlooks=frozenset({seen[0]}))
        self.add([argument], [cut], kind)
        self.add([cut], [found], "keeps_dims")
        if self.body.is_called:
            sliced = self.new(inner)
            self.add([found], [sliced], RESULT_EDGE)
            self.add([sliced], results, BODY_ARGUMENT_EDGE)
        else:
            self.add([found], results, RESULT_EDGE)

    def _stack(self, operands: list[Tensor], results: list[Tensor], kind: str) -> None:
        (stacked, whole), pieces = results[0], []
        for operand in operands:
            argument, wide = self.new(operand[1]), self.new(((), *operand[1]))
            self.add([operand], [argument], ARGUMENT_EDGE, overlooks=self.seen)
            self.add([argument], [wide], "broadcast")
            pieces.append(wide)
        before, after, result = self.new(whole), self.new(whole), self.new(whole)
        self.add(results, [before], ARGUMENT_EDGE, overlooks=frozenset({stacked}))
        self.add([before, *pieces], [after], kind)
        self.add([after], [result], RESULT_EDGE)
        self.add([result], results, LOOP_EDGE)
