"""When each value holds memory: the equations in program order in, stretches of program points out.

Program point `t` is the moment at which equation `t` runs. Each of these holds memory:

- An argument, all the time, in its home layout. A resharded copy of it, from its first to its last use; on CPU from
  the start, since XLA runs first what waits for the least.
- A donated argument a second time, from its first to its last use, where XLA works on a copy (`heap/result_places.py`).
  An all_reduce of the gradient, combined with all others, does come after every use, and saves the copy.
- A result, unless a donated argument's buffer takes it, all the time, since XLA reserves result buffers for the whole
  program.
- An argument of more than two dims a second time, transposed, if a matrix product or convolution reads it with its dims
  where XLA does not want them: from the start to its last use.
- On TPU, an argument a second time, as images lie, from its first to its last use by a convolution.
- What a product repeats of a smaller value, in full, until the reduction that the product is folded into.
- On CPU, what no product has to be made for, as slices and wider copies of weights, from when it is ready
  (`xla/cpu/breadth_first.py`), and so are words of random bits and positions of poolings. What a backward pass computes
  again, from when the forward pass has run.
- Every other value that is stored. It is held in the layout it is made in, from the equation that makes it to its first
  use; and in the layout it is used in, while it is used. If only a slice that elementwise readers take themselves is
  between the two layouts, the value stays in the first layout while it is used, too.
- A result that a reduction has yet to finish, until its first use, since XLA runs reductions together where none waits
  for another. Where there is no reduce_scatter, the whole result too, until its last use.
- On GPU, what a gradient that is summed over devices is made of, until the end of the program or of the loop around it,
  since XLA computes these gradients last. The same holds for what a loss is picked from, unless XLA sums the picks with
  the softmax.
- On TPU, what a product outside of loops is made of that no loop waits for and that devices do not add up, until the
  end of the program, if a loop comes after it: XLA runs loops first.

Nothing more is held for two kinds of values:

- A donated argument that a loop carries on, and what the loop hands on by elementwise operations. The new value is
  written over the value before, if every use of the latter comes first.
- On GPU, an operand that an elementwise group writes its result over, if no other group reads the operand.

`memory_terms.py` counts what depends on the options that are chosen: slices and collectives. A value is not stored if
XLA computes it again inside each of its readers (`Group.lies_nowhere`). Then what it is computed from is held until
the last reader. Values inside a group are never stored.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoshard.model.groups import Group, Use
from autoshard.primitives import FlopRule, facts_of
from autoshard.program import Equation, Value

# Bytes of the heap per byte of temporaries: they lie in one heap, with gaps. A round figure, checked by the peaks that
# `python benchmarks/peaks_under_limits.py` prints.
HEAP_OVERHEAD = 1.05

Span = tuple[int, int]  # program points, half-open

_SEEN_THROUGH = frozenset({"scan_const", "branch_const"})  # their result is in the buffer of their operand


@dataclass(frozen=True)
class Lifetime:
    """When the buffers of one value stand in memory."""

    made: Span | None  # in the layout it is made in, until its first use; None: not stored
    used: Span | None  # from its first to past its last use; None: never used
    stored: bool  # whether it holds memory while it is used, even where it is used as it was made
    is_start: bool = False  # whether it only says where slices begin


class FirstWrite(NamedTuple):
    """When the buffer of a result is first written."""

    point: int
    made_of: int = 0  # the groups whose sums it is made of: no earlier than the last of these is reduced; one bit each


def use_span(group: Group, use: Use, last: int | None = None) -> Span:
    """The program points over which one use holds its operand.

    Args:
        last: the last point at which the group runs, if that is known better.
    """
    equation = use.equation
    if equation.loop is not None:
        start, end = equation.loop
        if equation.primitive in ("scan_const", "scan_slice"):
            return start, end
        if equation.primitive == "scan_carry":  # what goes in becomes the loop's own buffer
            return (end - 1, end) if use.operand == 1 else (start, start)
    return group.point, (group.last_point if last is None else last) + 1


def around(spans: Sequence[Span]) -> Span:
    """From the first start to the last end."""
    return min(start for start, _ in spans), max(end for _, end in spans)


def made_at(group: Group, equation: Equation, output: int) -> int:
    """The program point from which a result's buffer is taken."""
    if equation.primitive == "scan_stack":
        assert equation.loop is not None, "boundaries of loops know theirs"
        return equation.loop[0]
    if equation.primitive == "scan_carry" and output == 1:
        assert equation.loop is not None, "boundaries of loops know theirs"
        return equation.loop[1]
    return group.ready_at


def first_point_outside_loop(group: Group, value: Value) -> int:
    """The first program point at which what a loop ends with, or has stacked, is read outside of it; 0 of all else."""
    (first, *_) = group.equations
    ends = first.primitive == "scan_stack" or (first.primitive == "scan_carry" and value is first.outputs[1])
    return first.loop[1] if ends and first.loop else 0


def first_point_written(group: Group, value: Value) -> int:
    """The program point from which the buffer of a result is written. What a loop ends with is, from its start on."""
    producer = next(one for one in group.equations if value in one.outputs)
    if producer.loop and producer.primitive == "scan_carry":
        return producer.loop[0]
    point = made_at(group, producer, producer.outputs.index(value))
    is_copy = facts_of(producer.primitive).work is FlopRule.FACTORIZATION  # a library works beside it
    return max(0, point - 1) if is_copy else point


def results_written(groups: Sequence[Group]) -> dict[int, FirstWrite]:
    """Value id -> when it is written, if it is a result. Sums that may wait for others delay what is made of them."""
    found, made_of = dict[int, FirstWrite](), dict[int, int]()  # value -> groups of sums, its own among them
    for group in groups:
        before = functools.reduce(operator.or_, (made_of.get(use.value.id, 0) for use in group.uses), 0)
        for value in (made.value for made in group.outputs):
            found[value.id] = FirstWrite(first_point_written(group, value), before)
            if group.handed_on_at is not None:
                made_of[value.id] = before | 1 << group.index
    return found


def repeats(group: Group) -> list[Use]:
    """The operands that XLA writes out at the full size of the product, ahead of the reduction it is folded into."""
    if not group.is_folded:
        return []
    size = math.prod(group.outputs[0].value.shape)
    return [use for use in group.uses if 1 < math.prod(use.value.shape) < size]


def holding(value: Value, group: Group, users: list[tuple[Group, Use]]) -> Lifetime:
    """When a value that `group` makes and `users` read holds memory; results are the caller's business."""
    producer = next(equation for equation in group.equations if value in equation.outputs)
    spans = [use_span(user, use) for user, use in users]
    used = (min(start for start, _ in spans), max(end for _, end in spans)) if spans else None
    if used and group.lies_until:
        used = used[0], max(used[1], group.lies_until)
    start = made_at(group, producer, producer.outputs.index(value))
    if producer.primitive == "scan_carry" and value is producer.outputs[0]:
        return Lifetime(producer.loop, used, stored=False)  # the loop's own buffer, whoever reads it
    if producer.primitive in _SEEN_THROUGH or group.lies_nowhere:
        return Lifetime(None, used, stored=False)
    if used and group.is_fill:
        return Lifetime(None, used, stored=True)
    is_start = bool(users) and all(_is_start(use) for _, use in users)
    return Lifetime((start, max(start, used[0]) if used else start + 1), used, stored=True, is_start=is_start)


def _is_start(use: Use) -> bool:
    """Whether an operand says where a slice begins."""
    first = {"dynamic_slice": 1, "dynamic_update_slice": 2}.get(use.equation.primitive)
    return first is not None and use.operand >= first
