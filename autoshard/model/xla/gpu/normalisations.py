"""Normalisations on GPU: a softmax or a norm of rows is one kernel, whose result is stored even if one loop reads it.

XLA looks for diamonds: an array, a reduction of its rows, and elementwise work that reads the array and, repeated along
the rows, what was reduced. A chain of diamonds, as a softmax with its maximum and its sum, becomes one kernel
(xla/backends/gpu/transforms: `SoftmaxRewriterTriton`). So does elementwise work that alone reads what the chain makes.
Of chains that several read, XLA stores some and computes others again: they count as other elementwise work does.
`tests/model/xla/test_normalisations.py` compiles such programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from autoshard.model.groups import Group
from autoshard.program import Value, dtype_name

_REDUCTIONS = frozenset({"reduce_max", "reduce_min", "reduce_sum"})
_TYPES = frozenset({"bfloat16", "float16", "float32"})
_LONGEST_ROW = 2**14  # elements, above which there is no kernel. Source: compiled for H100, of 10,000 to 131,072


@dataclass(frozen=True)
class Normalisations:
    """The kernels of a program that normalise rows, by the indices of groups."""

    ends: frozenset[int] = frozenset()  # what they store
    inside: frozenset[int] = frozenset()  # what they compute on the way, which is not stored for it


def normalisations(groups: Sequence[Group], users: Sequence[Sequence[Group]]) -> Normalisations:
    """Those of a program.

    Args:
        groups: those of the program.
        users: per group, the groups that read what it makes.
    """
    readers = [tuple({user.index: user for user in found}.values()) for found in users]
    makers = {made.value.id: group for group in groups for made in group.outputs}
    found = [_Diamond(group.index, *parts) for group in groups if (parts := _parts(group, makers)) is not None]
    diamonds = [one for one in found if _only_in(one.reductions, one, readers)]
    ends, reduced, inside = set[int](), set[int](), set[int]()
    for one in diamonds:
        if any(one.end in later.wide and _only_in({one.end}, later, readers) for later in diamonds):
            continue  # another one begins with it
        *chain, last = _chain(groups[one.end], readers)
        if len(readers[last]) > 1:
            continue
        (reduced if _reduced_at_once(readers[last], readers) else ends).add(last)
        inside |= {*chain, *one.reductions, *one.wide}
    inside -= ends | reduced
    while outside := {
        index for index in inside if any(user.index not in inside | ends | reduced for user in readers[index])
    }:
        inside -= outside
    return Normalisations(frozenset(ends), frozenset(inside | reduced))


@dataclass(frozen=True)
class _Diamond:
    """By the indices of groups."""

    end: int
    reductions: Set[int]  # and what is made of the reduced rows
    wide: Set[int]  # what makes the arrays that the reductions and the end read


def _only_in(indices: Set[int], diamond: _Diamond, readers: Sequence[Sequence[Group]]) -> bool:
    """Whether nothing outside a diamond reads what some groups make."""
    return all(
        user.index == diamond.end or user.index in diamond.reductions or user.index in diamond.wide
        for index in indices
        for user in readers[index]
    )


def _chain(group: Group, readers: Sequence[Sequence[Group]]) -> Iterator[int]:
    """The group, and elementwise ones after it, each the only reader of the one before. In a loop a chain may close."""
    shape = group.outputs[0].value.shape
    seen = {group.index}
    yield group.index
    while len(readers[group.index]) == 1:
        (group,) = readers[group.index]
        if group.index in seen or not group.fuses or not group.outputs or group.outputs[0].value.shape != shape:
            return
        seen.add(group.index)
        yield group.index


def _reduced_at_once(users: Sequence[Group], readers: Sequence[Sequence[Group]]) -> bool:
    """Whether the one reader reduces rows, and not as a part of a sum of all elements, which XLA makes of two sums."""
    if len(users) != 1 or not _reduces_rows(users[0]):
        return False
    name = users[0].equations[0].primitive
    return not any(user.equations[0].primitive == name for user in readers[users[0].index])


def _parts(group: Group, makers: Mapping[int, Group]) -> tuple[Set[int], Set[int]] | None:
    """The reductions and the wide groups of the diamond that a group ends; None if it ends none."""
    if not group.fuses or not group.outputs:
        return None
    shape = group.outputs[0].value.shape
    ways = [_way(use.value, makers) for use in group.uses if use.value.shape == shape]
    narrow = [use.value for use in group.uses if math.prod(use.value.shape) < math.prod(shape)]
    read = {value for values, _ in ways for value in values}
    reductions, wide = set[int](), set[int]().union(*(passed for _, passed in ways))
    for reduction, between in _row_reductions(narrow, shape, makers) if ways else ():
        values, above = _way(reduction.uses[0].value, makers)
        if read & values:
            reductions |= {reduction.index} | between
            wide |= above
    return (reductions, wide) if reductions else None


def _way(value: Value, makers: Mapping[int, Group]) -> tuple[set[int], set[int]]:
    """The values of the same shape that a value is made of one after the other, itself first, and what makes them."""
    values, passed, shape = {value.id}, set[int](), value.shape
    while (maker := makers.get(value.id)) is not None and maker.fuses:
        wide = {use.value.id: use.value for use in maker.uses if use.value.shape == shape}
        passed.add(maker.index)
        if len(wide) != 1:
            break
        (value,) = wide.values()
        values.add(value.id)
    return values, passed


def _row_reductions(
    narrow: Sequence[Value], shape: tuple[int, ...], makers: Mapping[int, Group]
) -> Iterator[tuple[Group, Set[int]]]:
    """Reductions of the rows of arrays of a shape that some values are made of, and the groups between."""
    seen, stack, between = set[int](), list(narrow), set[int]()
    while stack:
        value = stack.pop()
        maker = makers.get(value.id)
        if maker is None or maker.index in seen:
            continue
        seen.add(maker.index)
        if maker.fuses:
            between.add(maker.index)
            stack += [use.value for use in maker.uses if math.prod(use.value.shape) < math.prod(shape)]
        elif _reduces_rows(maker) and maker.uses[0].value.shape == shape:
            yield maker, between


def _reduces_rows(group: Group) -> bool:
    (equation, *_) = group.equations
    if equation.primitive not in _REDUCTIONS or len(group.uses) != 1:
        return False
    (operand,) = (use.value for use in group.uses)
    is_row = tuple(equation.params["axes"]) == (len(operand.shape) - 1,) and operand.shape[-1] <= _LONGEST_ROW
    return is_row and dtype_name(operand.dtype) in _TYPES
