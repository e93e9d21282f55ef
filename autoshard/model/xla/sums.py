"""Partial sums: where XLA's compilers reduce what several sums, or the turns of a loop, add up.

TPU and GPU compilers add partial sums first and reduce the total once, of a loop after its last turn. The GPU compiler
computes what is summed over devices, and what nothing waits for, last of all. The TPU compiler runs loops
first: a product that is not summed over devices, as the gradient of a head, comes after all loops that do not wait for
it. Source: compiled programs.
`tests/end_to_end/test_what_xla_does.py` compiles loops that accumulate gradients for CPU, which does none of this;
`python benchmarks/prediction.py` compiles models for TPU and GPU. `tests/model/test_groups.py` has groups by hand.
`tests/model/xla/test_late_products.py` compiles a scanned stack with a head for TPU.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from autoshard.model.groups import Group
from autoshard.primitives import facts_of
from autoshard.program import Equation, Program, Value

_ADDED = frozenset({"conv_general_dilated", "dot_general", "reduce_sum", "scatter-add"})  # sums of what devices have
_ADDS = frozenset({"add", "add_any"})


@dataclass(frozen=True)
class Sums:
    """When partial sums are reduced."""

    hoists: bool = False  # partial sums that a loop adds up are reduced once, after the loop
    adds_first: bool = False  # partial sums that are only added up are added before they are reduced, once
    runs_last: bool = False  # what nothing waits for is computed last of all, if it is summed over devices
    loops_first: bool = False  # products that no loop waits for are, if they are summed over none (`late_products`)


def read_once(program: Program) -> set[int]:
    """The values that have one reader, and are no result."""
    results = {value.id for value in program.results if isinstance(value, Value)}
    return {value for value, count in program.reads.items() if count == 1} - results


def sums_in_loops(
    program: Program, once: Set[int], sliced: Set[int] = frozenset()
) -> Iterator[tuple[Equation, Equation, list[Equation]]]:
    """Of each sum that a loop only adds to: the carry, the equation that adds, and what makes that which it adds.

    The last of these is the first on the way back that is not linear.

    Args:
        once: the values that are read once.
        sliced: values that only slices read; those that are added are looked through.
    """
    for carry in (equation for equation in program.equations if equation.primitive == "scan_carry"):
        inside, _ = carry.outputs
        total = program.makers.get(carry.inputs[1].id) if isinstance(carry.inputs[1], Value) else None
        if total is None or total.primitive not in _ADDS or inside not in total.inputs:
            continue
        added = next((x for x in total.inputs if x is not inside), None)
        if inside.id not in once:
            continue
        chain = []
        while isinstance(added, Value) and added.id in program.makers and (added.id in once or added.id in sliced):
            maker = program.makers[added.id]
            chain.append(maker)
            cuts = maker.primitive == "slice" and isinstance(maker.inputs[0], Value) and maker.inputs[0].id in sliced
            if not facts_of(maker.primitive).is_linear and not cuts:
                break
            added = maker.inputs[0]
        if chain:
            yield carry, total, chain


def hoisted_sums(
    program: Program,
    once: Set[int],
    home: Mapping[int, Group],
    readers: Mapping[int, Sequence[tuple[Equation, int]]],
) -> dict[int, Value]:
    """Groups that make what a loop only adds up, or pass it on -> `Group.loop_total`.

    Args:
        once: the values that are read once.
        home: equation index -> its group.
        readers: value -> the equations that read it, as which operand.
    """
    sliced = {id for id, read_by in readers.items() if all(reader.primitive == "slice" for reader, _ in read_by)}
    chains = [(carry, makers) for carry, _, makers in sums_in_loops(program, once, sliced)]
    added = Counter(maker.index for _, makers in chains for maker in makers)
    found = {}
    for carry, makers in chains:
        parts = 1  # of what is made, each of which is added to a sum of its own
        for maker in makers:
            parts = max(parts, sum(len(readers[made.id]) for made in maker.outputs))
            if added[maker.index] < parts:
                break
            if maker.primitive == "slice" or facts_of(maker.primitive).is_linear or home[maker.index].reduction:
                found[home[maker.index].index] = carry.outputs[1]
    return found


def added_sums(program: Program, once: Set[int], home: Mapping[int, Group]) -> dict[int, tuple[int, int]]:
    """Sums that are added up with others and read by nobody else -> the value that is their total, and their number.

    These are gradients of what is used in several places: weights of layers that share them, both twins of a network,
    anything that a second derivative reads. They are `Group.accumulator` and `Group.summands`, by the group's index.

    Args:
        once: the values that are read once.
        home: equation index -> its group.
    """
    found: dict[int, tuple[int, int]] = {}
    summed: dict[int, list[Group]] = {}  # value -> the sums that it is the total of
    for equation in program.equations:
        if equation.primitive in _ADDED and home[equation.index].reduction:
            sums = [home[equation.index]]
        elif equation.primitive in _ADDS:
            parts = [summed.get(x.id) if isinstance(x, Value) else None for x in equation.inputs]
            if not all(parts):
                continue
            sums = list(itertools.chain(*filter(None, parts)))
            scatters = sum(map(_scatters, sums))
            if scatters and not scatters == len(sums) == 2:
                continue
            for one in sums:
                found[one.index] = equation.outputs[0].id, len(sums)
            if scatters:
                continue
        elif _only_reorders(equation) and isinstance(equation.inputs[0], Value):
            sums = summed.get(equation.inputs[0].id, [])
        else:
            continue
        if sums and equation.outputs[0].id in once:
            summed[equation.outputs[0].id] = sums
    return found


def late_products(groups: Sequence[Group], users: Sequence[Sequence[Group]]) -> list[bool]:
    """Per group, `Group.is_late`: products outside of loops that a loop comes after, and that no loop waits for.

    Args:
        users: per group, those that read it.
    """
    loops = {one.loop for group in groups for one in group.equations if one.loop}
    last_loop = max((end for _, end in loops), default=0)
    firsts = [group.equations[0].index for group in groups]
    is_inside = [any(start <= first < end for start, end in loops) for first in firsts]
    feeds_loop = list(is_inside)
    for group in reversed(groups):
        feeds_loop[group.index] |= any(feeds_loop[user.index] for user in users[group.index])
    return [
        group.contracts and not feeds and first < last_loop
        for group, feeds, first in zip(groups, feeds_loop, firsts, strict=True)
    ]


def _scatters(group: Group) -> bool:
    return any(equation.primitive == "scatter-add" for equation in group.equations)


def _only_reorders(equation: Equation) -> bool:
    """Whether its result has the elements of its operand in other dims. A sum over dims of one element has, too."""
    if facts_of(equation.primitive).is_view:
        return True
    if equation.primitive != "reduce_sum":
        return False
    (made,) = equation.outputs
    return math.prod(equation.inputs[0].shape) == math.prod(made.shape)
