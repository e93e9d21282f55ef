"""When each value holds memory: the equations in program order in, stretches of program points out.

Program point `t` is the moment at which equation `t` runs. Each of these holds memory:

- An argument, all the time, in its home layout. A resharded copy of it, from its first to its last use.
- A donated argument a second time, from its first to its last use, if one of its uses need not come before the result
  that is written over it. XLA then works on a copy. An all_reduce of the gradient, combined with all others, does come
  after every use, and saves the copy.
- A result that takes no argument's place, all the time, since XLA reserves result buffers for the whole program.
- An argument of more than two dims a second time, transposed, if a matrix product or convolution reads it with its dims
  where XLA does not want them: from the start to its last use.
- On TPU, an argument a second time, as images lie, from its first to its last use by a convolution.
- What a product repeats of a smaller value, in full, until the reduction that the product is folded into.
- Every other value that is stored. It is held in the layout it is made in, from the equation that makes it to its first
  use; and in the layout it is used in, while it is used. If only a slice that elementwise readers take themselves is
  between the two layouts, the value stays in the first layout while it is used, too.
- A result that a reduction has yet to finish, until its first use, since XLA runs reductions together where none waits
  for another. Where there is no reduce_scatter, the whole result too, until its last use.
- On GPU, what a gradient that is summed over devices is made of, until the end of the program or of the loop around it,
  since XLA computes these gradients last. The same holds for what a loss is picked from, unless XLA sums the picks with
  the softmax.

Nothing more is held for two kinds of values:

- A donated argument that a loop carries on, and what the loop hands on by elementwise operations. The new value is
  written over the value before, if every use of the latter comes first.
- On GPU, an operand that an elementwise group writes its result over, if no other group reads the operand.

`memory_terms.py` counts what depends on the options that are chosen: slices and collectives. A value is not stored if
XLA computes it again inside each of its readers (`Group.is_recomputed`). Then what it is computed from is held until
the last reader. Values inside a group are never stored.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from autoshard.model.groups import Group, Use
from autoshard.program import Equation, Program, Value

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


def made_at(group: Group, equation: Equation, output: int) -> int:
    """The program point from which a result's buffer is taken."""
    if equation.primitive == "scan_stack":
        assert equation.loop is not None, "boundaries of loops know theirs"
        return equation.loop[0]
    if equation.primitive == "scan_carry" and output == 1:
        assert equation.loop is not None, "boundaries of loops know theirs"
        return equation.loop[1]
    return group.point


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
    start = made_at(group, producer, producer.outputs.index(value))
    if producer.primitive == "scan_carry" and value is producer.outputs[0]:
        return Lifetime(producer.loop, used, stored=False)  # the loop's own buffer, whoever reads it
    if producer.primitive in _SEEN_THROUGH or group.is_recomputed:
        return Lifetime(None, used, stored=False)
    if used and group.is_fill:
        return Lifetime(None, used, stored=True)
    is_start = bool(users) and all(_is_start(use) for _, use in users)
    return Lifetime((start, max(start, used[0]) if used else start + 1), used, stored=True, is_start=is_start)


def _is_start(use: Use) -> bool:
    """Whether an operand says where a slice begins."""
    first = {"dynamic_slice": 1, "dynamic_update_slice": 2}.get(use.equation.primitive)
    return first is not None and use.operand >= first


def aliased(program: Program) -> set[int]:
    """The results that are written into the buffer of the donated argument they replace."""
    return {result for argument, result in program.carried.items() if argument in program.donated}


def returned(program: Program) -> Counter[int]:
    """Value id -> how many results it is that take no argument's place: each has a buffer of its own."""
    written_over = aliased(program)
    results = (value for i, value in enumerate(program.results) if i not in written_over)
    return Counter(value.id for value in results if isinstance(value, Value))


def looped(program: Program) -> dict[int, int]:
    """The donated arguments that a loop carries on in their own buffer: value that it carries -> argument."""
    index = {program.arguments[a].id: a for a in program.carried if a in program.donated}
    found = {}
    for equation in program.equations:
        entering = equation.inputs[0] if equation.primitive == "scan_carry" else None
        if isinstance(entering, Value) and entering.id in index and program.reads[entering.id] == 1:
            argument = index[entering.id]
            if program.results[program.carried[argument]] is equation.outputs[1]:
                found[equation.outputs[0].id] = argument
    return found


def updated_in_loops(program: Program, groups: Sequence[Group]) -> set[int]:
    """The values that a loop hands on and that are written over what they replace: every use of that comes before."""
    maker = _makers(groups)
    replaced = {}
    for equation in program.equations:
        if equation.primitive == "scan_carry" and isinstance(equation.inputs[1], Value):
            taken, handed_on = equation.outputs[0].id, equation.inputs[1].id
            if handed_on != taken and handed_on in maker and maker[handed_on].fuses:
                replaced[taken] = handed_on
    late = _used_beside(program, groups, replaced, around_loops=False, before=_deciding(program))
    return {handed_on for taken, handed_on in replaced.items() if taken not in late}


def copied_when_donated(program: Program, groups: Sequence[Group]) -> dict[int, Group | None]:
    """The donated arguments that XLA copies: some use of them is no ancestor of the result that takes their place.

    With each the group whose all_reduce would save the copy, if there is one: it makes the argument's gradient.
    """
    maker = _makers(groups)
    pairs = ((program.arguments[a], a, program.results[r]) for a, r in program.carried.items() if a in program.donated)
    replaced = {old: (a, new) for old, a, new in pairs if isinstance(new, Value) and new is not old}
    late = _used_beside(program, groups, {old.id: new.id for old, (_, new) in replaced.items()}, around_loops=True)
    return {a: _gradient(maker.get(new.id), maker) for old, (a, new) in replaced.items() if old.id in late}


def _makers(groups: Sequence[Group]) -> dict[int, Group]:
    return {made.value.id: group for group in groups for made in group.outputs}


def _used_beside(
    program: Program,
    groups: Sequence[Group],
    replaced: Mapping[int, int],
    *,
    around_loops: bool,
    before: Container[int] = (),
) -> set[int]:
    """The values some use of which need not come before the value that is written over them.

    Args:
        replaced: value -> the value that is written over it.
        around_loops: whether what one run of a loop's body does comes before the next run.
        before: equations, by index, that come before what is written over values, whatever depends on them.
    """
    if not replaced:
        return set()
    home = {equation.index: group for group in groups for equation in group.equations}
    uses: dict[int, int] = defaultdict(int)  # value -> its using groups, one bit each
    own: dict[int, int] = defaultdict(int)  # group -> its bits
    bits = itertools.count()
    for group in groups:
        for use in group.uses:
            if use.value.id in replaced and use.equation.index not in before:
                bit = 1 << next(bits)
                own[group.index] |= bit
                uses[use.value.id] |= bit
    above: dict[int, int] = {}  # value -> bits of the groups it depends on
    loops = any(equation.loop for equation in program.equations)
    last = None
    while above != last:  # once more for each loop around a loop: what it hands on is defined after it is read
        last = dict(above)
        for equation in program.equations:
            masks = [above.get(value.id, 0) if isinstance(value, Value) else 0 for value in equation.inputs]
            for output in equation.outputs:
                starts = equation.primitive == "scan_carry" and output is equation.outputs[0] and not around_loops
                read = masks[:1] if starts else masks
                above[output.id] = functools.reduce(operator.or_, read, own[home[equation.index].index])
        if not loops:
            break
    return {value for value, mask in uses.items() if mask & ~above.get(replaced[value], 0)}


def _deciding(program: Program) -> set[int]:
    """The equations, by index, that only decide whether a loop goes on: they run before its body."""
    found: set[int] = set()
    others = {value.id for value in program.results if isinstance(value, Value)}  # what anything else reads
    for equation in program.equations:
        if equation.primitive == "scan_carry":  # it stands before the body whose results it reads
            others.update(value.id for value in equation.inputs if isinstance(value, Value))
    for equation in reversed(program.equations):
        in_loop = all(made.trips > 1 for made in equation.outputs)
        if in_loop and equation.loop is None and all(made.id not in others for made in equation.outputs):
            found.add(equation.index)
        else:
            others.update(value.id for value in equation.inputs if isinstance(value, Value))
    return found


def _gradient(update: Group | None, maker: dict[int, Group]) -> Group | None:
    """The largest reduction that ends in an update."""
    found: list[Group] = []
    queue = [update] if update is not None and update.feeds_only_results and update.fuses else []
    while queue:
        group = queue.pop()
        for producer in (maker.get(use.value.id) for use in group.uses):
            if producer is not None and producer.feeds_only_results:
                (queue if producer.fuses else found).append(producer)
    return max(found, key=lambda group: group.outputs[0].value.bytes, default=None)
