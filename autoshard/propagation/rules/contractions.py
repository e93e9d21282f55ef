"""Products of arrays: batch dims pass to the result, contracted dims are reduced, free dims come from one side."""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from typing import Any

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import KEPT_RULES, Rule, RuleBuilder, Shape
from autoshard.propagation.rules.elementwise import shapes_of


@rule("dot_general")
def dot_general(equation: Equation) -> Rule:
    """`b i k, b k j -> b i j`, reduction k."""
    operands, (result,) = shapes_of(equation)
    (contract_left, contract_right), (batch_left, batch_right) = equation.params["dimension_numbers"]
    contracting = (tuple(contract_left), tuple(contract_right))
    return _dot_general(operands, result, contracting, (tuple(batch_left), tuple(batch_right)))


_Pairs = tuple[tuple[int, ...], tuple[int, ...]]  # dims of the left operand, and those of the right that they meet


@lru_cache(maxsize=KEPT_RULES)
def _dot_general(operands: tuple[Shape, ...], result: Shape, contracting: _Pairs, batch: _Pairs) -> Rule:
    builder = RuleBuilder(operands, [result])
    _product_factors(builder, operands, contracting, batch)
    return builder.build()


def _product_factors(
    builder: RuleBuilder,
    operands: tuple[Shape, ...],
    contracting: _Pairs,
    batch: _Pairs,
    *,
    offset: int = 0,
    group_right: Container[int] = (),
    batched_sizes: int = 0,
) -> None:
    """The factors of a product whose result has `offset` dims before its batch dims.

    A ragged dim of the left operand is cut where `group_sizes` say at run time: each device counts what it has of each
    group. The group dims of the right operand, which are no dims of the result, stay whole. `group_sizes` may begin
    with some batch dims.
    """
    left, right = operands[0], operands[1]
    to = offset
    for dim, (dim_left, dim_right) in enumerate(zip(*batch, strict=True)):
        sides = [(0, dim_left), (1, dim_right)] + ([(2, dim)] if dim < batched_sizes else [])
        builder.factor(left[dim_left], sides, [(0, to)])
        to += 1
    for dim, size in enumerate(left):
        if dim not in contracting[0] and dim not in batch[0]:
            builder.factor(size, [(0, dim)], [(0, to)])
            to += 1
    for dim, size in enumerate(right):
        if dim in group_right:
            builder.factor(size, [(1, dim)], [], "need_replication")
        elif dim not in contracting[1] and dim not in batch[1]:
            builder.factor(size, [(1, dim)], [(0, to)])
            to += 1
    for dim_left, dim_right in zip(*contracting, strict=True):
        builder.factor(left[dim_left], [(0, dim_left), (1, dim_right)], [], "reduction")


@rule("ragged_dot_general")
def ragged_dot_general(equation: Equation) -> Rule:
    """`i k, g k j, g -> i j`, reduction k: rows of the left operand meet the matrix of their group."""
    operands, results = shapes_of(equation)
    numbers: Any = equation.params["ragged_dot_dimension_numbers"]
    (contract_left, contract_right), (batch_left, batch_right) = numbers.dot_dimension_numbers
    contracting = (tuple(contract_left), tuple(contract_right))
    ragged_left = tuple(numbers.lhs_ragged_dimensions)
    groups_in_result = set(ragged_left) & set(contracting[0])  # each group is contracted by itself
    sizes = operands[2]
    batched_sizes = min(len(sizes) - 1, len(batch_left))
    builder = RuleBuilder(operands, results)
    _product_factors(
        builder,
        operands,
        contracting,
        (tuple(batch_left), tuple(batch_right)),
        offset=1 if groups_in_result else 0,
        group_right=tuple(numbers.rhs_group_dimensions),
        batched_sizes=batched_sizes,
    )
    if groups_in_result:
        builder.factor(results[0][0], [], [(0, 0)], "need_replication")
    for dim in range(batched_sizes, len(sizes)):
        builder.factor(sizes[dim], [(2, dim)], [], "need_replication")
    return builder.build()


@rule("scaled_dot", "scaled_matmul", "scaled_matmul_wrapper")
def scaled_product(equation: Equation) -> Rule:
    """`b i k, b j k, b i k, b j k -> b i j`, k whole: the last two hold one scale per block of k."""
    operands, results = shapes_of(equation)
    numbers = equation.params.get("dimension_numbers", (((2,), (2,)), ((0,), (0,))))
    (contract_left, contract_right), (batch_left, batch_right) = numbers
    builder = RuleBuilder(operands, results)
    to = 0
    for dim_left, dim_right in zip(batch_left, batch_right, strict=True):
        sides = [(tensor, (dim_left, dim_right)[tensor % 2]) for tensor in range(len(operands))]
        builder.factor(operands[0][dim_left], sides, [(0, to)])
        to += 1
    for side, (contracted, batch) in enumerate(((contract_left, batch_left), (contract_right, batch_right))):
        for dim, size in enumerate(operands[side]):
            if dim not in contracted and dim not in batch:
                scales = [(side + 2, dim)] if len(operands) > side + 2 else []
                builder.factor(size, [(side, dim), *scales], [(0, to)])
                to += 1
    for dims in zip(contract_left, contract_right, strict=True):
        sides = [(tensor, dims[tensor % 2]) for tensor in range(len(operands))]
        builder.factor(operands[0][dims[0]], sides, [], "need_replication")
    return builder.build()
