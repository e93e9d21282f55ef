"""Results that take arguments' places: which buffers they lie in, and what XLA copies for that.

A result that takes the place of a donated argument is written into that argument's buffer. Where the argument is not
donated, the result has a buffer of its own, in the argument's home layout. A value that is left in another layout than
that stands beside the buffer, until it is moved there (`resharding_memory.MoveToPlace`).

XLA copies a donated argument in three cases:

- Some use of it need not come before the result that is written over it.
- What makes the result reads the argument at other places than those it writes: a sort, a product, a transposition.
- The argument is a result itself, which takes another argument's place.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence

from autoshard.model.groups import Group, Use
from autoshard.model.xla.fusion import Fusion
from autoshard.model.xla.operations import OperationCosts
from autoshard.primitives import facts_of
from autoshard.program import Program, Value


def aliased(program: Program) -> set[int]:
    """The results that are written into the buffer of the donated argument they replace."""
    return {result for argument, result in program.carried.items() if argument in program.donated}


def taking_places(program: Program) -> dict[int, list[int]]:
    """Value id -> the arguments whose places it takes, donated or not. Arguments take none."""
    arguments, found = {value.id for value in program.arguments}, defaultdict(list)
    for argument, result in program.carried.items():
        value = program.results[result]
        if isinstance(value, Value) and value.id not in arguments:
            found[value.id].append(argument)
    return found


def returned(program: Program) -> Counter[int]:
    """Value id -> how many results it is that have a buffer of their own, in the layout in which it is left."""
    elsewhere = aliased(program)
    elsewhere |= {program.carried[argument] for taken in taking_places(program).values() for argument in taken}
    results = (value for i, value in enumerate(program.results) if i not in elsewhere)
    return Counter(value.id for value in results if isinstance(value, Value))


def copied_results(
    program: Program, groups: Sequence[Group], operations: OperationCosts
) -> dict[int, tuple[int, float]]:
    """Id of an argument -> how many results are copies of it that take time, and what each takes to start.

    On GPU a kernel makes each. A TPU copies beside other work. Where a step has none, one copy starts, and the others
    run beside it. Source: cycles of v5e programs that return their arguments, beside work and alone.
    """
    arguments = {value.id: value for value in program.arguments}
    copies = {id: count for id, count in returned(program).items() if id in arguments}
    if operations.are_kernels:
        return {id: (count, operations.least_seconds) for id, count in copies.items()}
    copies = {id: count for id, count in copies.items() if math.prod(arguments[id].shape) > 1}
    if not operations.least_seconds or any(map(operations.seconds, groups)):
        return {}
    return {id: (count, operations.least_seconds / sum(copies.values())) for id, count in copies.items()}


def copied_for_others(program: Program, *, copies_circles: bool) -> set[int]:
    """The donated arguments that XLA copies since they are results in the places of other donated arguments.

    XLA writes results in their order. Whose buffer an earlier result takes is copied before that. Source: the
    temporaries of compiled programs that swap, rotate and shift arguments.

    Args:
        copies_circles: whether all that change places in a circle are copied (`Backend`).
    """
    index = {value.id: a for a, value in enumerate(program.arguments)}
    source = {}  # argument -> the other argument that is written over it
    for argument, result in program.carried.items():
        value = program.results[result]
        if argument in program.donated and isinstance(value, Value) and index.get(value.id, argument) != argument:
            source[argument] = index[value.id]
    order = {argument: result for argument, result in program.carried.items() if argument in program.donated}
    copied = set()
    for argument, other in source.items():
        taken_before = other in order and order[other] < order[argument]
        circle, last = {argument}, other
        while last in source and last not in circle:
            circle.add(last)
            last = source[last]
        if taken_before or (copies_circles and last == argument):
            copied.add(other)
    return copied


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
    late = _used_in_any_order(program, groups, replaced, around_loops=False, before=_deciding(program))
    return {handed_on for taken, handed_on in replaced.items() if taken not in late}


def copied_when_donated(program: Program, groups: Sequence[Group]) -> dict[int, Group | None]:
    """The donated arguments that XLA copies: some use of them is no ancestor of the result that takes their place.

    With each the group whose all_reduce would save the copy, if there is one: it makes the argument's gradient.
    """
    maker, replaced = _makers(groups), _replaced(program)
    late = _used_in_any_order(
        program, groups, {old.id: new.id for old, (_, new) in replaced.items()}, around_loops=True
    )
    return {a: _gradient(maker.get(new.id), maker) for old, (a, new) in replaced.items() if old.id in late}


def donations_not_overwritten(program: Program, groups: Sequence[Group], fusion: Fusion) -> set[int]:
    """The donated arguments whose buffer is no place to make their results in.

    What makes the result reads the argument, at other places than those that it writes.
    """
    maker = _makers(groups)
    pairs = ((a, old, maker.get(new.id)) for old, (a, new) in _replaced(program).items())
    return {a for a, old, group in pairs if group and _cannot_be_overwritten(group, old.id, maker, fusion)}


def _replaced(program: Program) -> dict[Value, tuple[int, Value]]:
    """Donated arguments -> their indices, and the results that are written over them."""
    pairs = ((program.arguments[a], a, program.results[r]) for a, r in program.carried.items() if a in program.donated)
    return {old: (a, new) for old, a, new in pairs if isinstance(new, Value) and new is not old}


def _cannot_be_overwritten(group: Group, old: int, maker: Mapping[int, Group], fusion: Fusion) -> bool:
    """Whether what a group writes cannot go over a value, since it reads that at other places, itself or remade."""
    remade, queue = {group.index: group}, [group]
    while queue:
        for use in queue.pop().uses:
            again = maker.get(use.value.id)
            if again is not None and again.is_recomputed and again.index not in remade:
                remade[again.index] = again
                queue.append(again)
    elsewhere = {old: False}  # the value and what is remade of it -> whether that is at other places
    for _, one in sorted(remade.items()):
        uses = [use for use in one.uses if use.value.id in elsewhere]
        if uses:
            moves = any(elsewhere[use.value.id] or not _is_written_over(one, use, fusion) for use in uses)
            elsewhere.update((made.value.id, moves) for made in one.outputs)
    return any(elsewhere.get(made.value.id, False) for made in group.outputs)


def _is_written_over(group: Group, use: Use, fusion: Fusion) -> bool:
    """Whether a group writes each element of its result where it reads the same element of one operand."""
    (first, *_) = group.equations
    if first.primitive in fusion.overwritten_by - {"sort"}:  # XLA sorts a copy of an argument
        return use.operand == 0
    if facts_of(first.primitive).is_boundary:
        return first.primitive != "branch_join"
    made = group.outputs[0]
    moves = any(not (facts_of(e.primitive).is_pointwise or facts_of(e.primitive).relabels) for e in group.equations)
    return not moves and use.value.bytes == made.value.bytes and use.dims == made.dims


def _makers(groups: Sequence[Group]) -> dict[int, Group]:
    return {made.value.id: group for group in groups for made in group.outputs}


def _used_in_any_order(
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
