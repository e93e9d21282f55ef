"""A value and who reads it in, whether its one reader writes a result over it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from autoshard.model.equations import is_computed
from autoshard.model.groups import Group
from autoshard.model.resharding_memory import ValueReader
from autoshard.model.xla.fusion import Fusion
from autoshard.primitives import FlopRule, facts_of
from autoshard.program import Equation, Value


def lies_in_columns(value: Value, producer: Equation) -> bool:
    """Whether an equation leaves a value as libraries of linear algebra do: columns of matrices one after another."""
    is_library = facts_of(producer.primitive).work in (FlopRule.FACTORIZATION, FlopRule.TRIANGULAR_SOLVE)
    if not is_library and producer.primitive not in ("geqp3", "ormqr"):
        return False
    return len(value.shape) == len(producer.inputs[0].shape)


def is_overwritten(
    value: Value,
    readers: Mapping[int, Sequence[ValueReader]],
    fusion: Fusion,
    results: Container[int] = (),
    in_columns: bool = False,
) -> bool:
    """Whether its one reader writes a result over a value; an elementwise one, over the first operand that it can.

    Args:
        readers: value id -> who reads it.
        fusion: the compiler's habit.
        results: ids of the program's results. Their rows lie one after another.
        in_columns: whether the columns of the value do (`lies_in_columns`). No result is written over it.
    """
    group = readers[value.id][0].group
    if len(readers[value.id]) > 1 or group is None:
        return False
    if group.is_recomputed:
        is_renamed = all(equation.primitive in ("reshape", "squeeze") for equation in group.equations)
        made = group.outputs[0].value
        return is_renamed and bool(readers[made.id]) and is_overwritten(made, readers, fusion, results, in_columns)
    if in_columns and any(one.value.id in results for one in group.outputs):
        return False
    if group.equations[0].primitive == "branch_join" and fusion.overwrites_operands:
        return value.bytes == group.outputs[0].value.bytes  # a branch makes its result where the step reads it
    if group.equations[0].primitive in fusion.overwritten_by:
        changed = (x for x in group.equations[0].inputs if is_computed(x))
        return next((x is value for x in changed if x.bytes == group.outputs[0].value.bytes), False)
    return fusion.overwrites_operands and group.fuses and value is _first_that_fits(group, readers)


def _first_that_fits(group: Group, readers: Mapping[int, Sequence[ValueReader]]) -> Value | None:
    """The first operand of a group that nothing else reads, and that is as large as what it makes."""
    made = {one.value.bytes for one in group.outputs}
    turned = _turned(group)
    operands = (use.value for use in group.uses if len(readers[use.value.id]) == 1 and use.value.id not in turned)
    return next((one for one in operands if not one.from_outside and one.bytes in made), None)


def _turned(group: Group) -> set[int]:
    """Ids of what a group reads in another order than it writes: elements would be written before they are read."""
    found: set[int] = set()
    for equation in reversed(group.equations):
        if _moves_elements(equation) or any(made.id in found for made in equation.outputs):
            found.update(value.id for value in equation.inputs if isinstance(value, Value))
    return found


def _moves_elements(equation: Equation) -> bool:
    """Whether it transposes dims of more than one element otherwise than a product does whose operands are swapped.

    XLA swaps these where a transposed product is wanted. Then the product leaves its batch dims first, and the dims of
    its other operand before those of the first.
    """
    if equation.primitive != "transpose":
        return False
    order = [dim for dim in equation.params["permutation"] if equation.inputs[0].shape[dim] > 1]
    while order and order[0] == min(order):
        order.pop(0)
    first = order.index(min(order)) if order else 0
    return order[first:] + order[:first] != sorted(order)
