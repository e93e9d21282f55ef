"""Partial sums: where XLA's compilers reduce what several products, or the turns of a loop, add up.

TPU and GPU compilers add partial sums first and reduce the total once, of a loop after its last turn. The GPU compiler
computes what is summed over devices, and what nothing waits for, last of all. Source: compiled programs.
`tests/end_to_end/test_what_xla_does.py` compiles loops that accumulate gradients for CPU, which does none of this;
`python benchmarks/prediction.py` compiles models for TPU and GPU. `tests/model/test_groups.py` has groups by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from autoshard.model.equations import is_matrix_product
from autoshard.model.groups import Group
from autoshard.primitives import facts_of
from autoshard.program import Equation, Program, Value


@dataclass(frozen=True)
class Sums:
    """When partial sums are reduced."""

    hoists: bool = False  # partial sums that a loop adds up are reduced once, after the loop
    adds_first: bool = False  # partial sums that are only added up are added before they are reduced, once
    runs_last: bool = False  # what nothing waits for is computed last of all, if it is summed over devices


def read_once(program: Program) -> set[int]:
    """The values that have one reader, and are no result."""
    results = {value.id for value in program.results if isinstance(value, Value)}
    return {value for value, count in program.reads.items() if count == 1} - results


def sums_in_loops(program: Program, once: Set[int]) -> Iterator[tuple[Equation, Equation, list[Equation]]]:
    """Of each sum that a loop only adds to: the carry, the equation that adds, and what makes that which it adds.

    The last of these is the first on the way back that is not linear.
    """
    for carry in (equation for equation in program.equations if equation.primitive == "scan_carry"):
        inside, _ = carry.outputs
        total = program.makers.get(carry.inputs[1].id) if isinstance(carry.inputs[1], Value) else None
        if total is None or total.primitive not in ("add", "add_any") or inside not in total.inputs:
            continue
        added = next((x for x in total.inputs if x is not inside), None)
        if inside.id not in once:
            continue
        chain = []
        while isinstance(added, Value) and added.id in program.makers and added.id in once:
            maker = program.makers[added.id]
            chain.append(maker)
            if not facts_of(maker.primitive).is_linear:
                break
            added = maker.inputs[0]
        if chain:
            yield carry, total, chain


def hoisted_sums(program: Program, once: Set[int], home: Mapping[int, Group]) -> dict[int, int]:
    """Groups that make what a loop only adds up, or pass it on -> `Group.hoisted_all_reduces`.

    Args:
        once: the values that are read once.
        home: equation index -> its group.
    """
    found = {}
    for carry, _, makers in sums_in_loops(program, once):
        for maker in makers:
            if facts_of(maker.primitive).is_linear or home[maker.index].reduction:
                found[home[maker.index].index] = carry.outputs[1].trips
    return found


def summed_products(program: Program, once: Set[int], home: Mapping[int, Group]) -> dict[int, tuple[int, int]]:
    """Products that are added up with others and read by nobody else -> the value that is their sum, and their number.

    These are `Group.accumulator` and `Group.summands`, by the group's index.

    Args:
        once: the values that are read once.
        home: equation index -> its group.
    """
    found: dict[int, tuple[int, int]] = {}
    summed: dict[int, list[Group]] = {}  # value -> the products that it is the sum of
    for equation in program.equations:
        product = is_matrix_product(equation)
        if not product and equation.primitive not in ("add", "add_any"):
            continue
        (made,) = equation.outputs
        products = [home[equation.index]]
        if not product:
            parts = [summed.get(x.id) if isinstance(x, Value) else None for x in equation.inputs]
            if not all(parts):
                continue
            products = list(itertools.chain(*filter(None, parts)))
            for one in products:
                found[one.index] = made.id, len(products)
        if made.id in once:
            summed[made.id] = products
    return found
