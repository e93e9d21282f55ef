"""When each value holds memory: the equations in program order in, stretches of program points out.

Program point `t` is the moment equation `t` runs. What holds memory:

* an argument, all the time, in its home layout; and a resharded copy of it from its first to its last use;
* a result that takes no argument's place, all the time, as XLA reserves result buffers for the whole program;
* every other value that is stored: from the equation that makes it to its first use in the layout it is made in, and
  while it is used in the layout it is used in.

A value is not stored if XLA fuses it away: one between an elementwise group and the one reduction that reads it, and
one that only repeats a smaller value for elementwise groups. Values inside a group are never stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.program import Equation, Program, Value
from autoshard.solver.groups import Group, Use

Span = tuple[int, int]  # program points, half-open

_SEEN_THROUGH = frozenset({"scan_const", "branch_const"})  # what they make is the operand's own buffer


@dataclass(frozen=True)
class Holding:
    """When the buffers of one value stand in memory."""

    made: Span | None  # in the layout it is made in, until its first use; None: not stored
    used: Span | None  # from its first to past its last use, in the layout of its shared copy; None: never used


def use_span(use: Use) -> Span:
    """The program points over which one use holds its operand."""
    equation = use.equation
    if equation.loop is not None:
        start, end = equation.loop
        if equation.primitive in ("scan_const", "scan_slice"):
            return start, end
        if equation.primitive == "scan_carry" and use.operand == 1:
            return end - 1, end
    return equation.index, equation.index + 1


def made_at(equation: Equation, output: int) -> int:
    """The program point from which a result's buffer is taken."""
    if equation.primitive == "scan_stack":
        return equation.loop[0]
    if equation.primitive == "scan_carry" and output == 1:
        return equation.loop[1]
    return equation.index


def holding(value: Value, group: Group, users: list[tuple[Group, Use]]) -> Holding:
    """When a value that `group` makes and `users` read holds memory; results are the caller's business."""
    producer = next(equation for equation in group.equations if value in equation.outputs)
    spans = [use_span(use) for _, use in users]
    used = (min(start for start, _ in spans), max(end for _, end in spans)) if spans else None
    start = made_at(producer, producer.outputs.index(value))
    if producer.primitive == "scan_carry" and value is producer.outputs[0]:
        return Holding(producer.loop, None)  # the loop's own buffer, whoever reads it
    if producer.primitive in _SEEN_THROUGH or _fused_away(group, users):
        return Holding(None, None)
    return Holding((start, used[0] if used else start + 1), used)


def _fused_away(group: Group, users: list[tuple[Group, Use]]) -> bool:
    if not group.fuses or not users:
        return False
    if group.only_moves and sum(use.value.bytes for use in group.uses) * 2 <= sum(m.value.bytes for m in group.made):
        return all(user.fuses or _reduces(user) for user, _ in users)
    return len({id(user) for user, _ in users}) == 1 and _reduces(users[0][0])


def _reduces(group: Group) -> bool:
    return group.equations[0].primitive.startswith(("reduce_", "argm"))


def aliased(program: Program) -> set[int]:
    """The results that are written into the buffer of the donated argument they replace."""
    return {result for argument, result in program.carried.items() if argument in program.donated}
