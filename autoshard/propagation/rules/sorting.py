"""Operations that order elements along a dim, which stays whole."""

from __future__ import annotations

import math

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, dimwise, whole
from autoshard.propagation.rules.elementwise import shapes_of


@rule("approx_top_k")
def approx_top_k(equation: Equation) -> Rule:
    """`i j -> i k, i k`, j and k whole."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    along = equation.params["reduction_dimension"] % len(operands[0])
    for dim, size in enumerate(operands[0]):
        everywhere = [(tensor, dim) for tensor in range(len(results))]
        if dim == along:
            builder.factor(size, [(0, dim)], [], "need_replication")
            builder.factor(results[0][dim], [], everywhere, "need_replication")
        else:
            builder.factor(size, [(0, dim)], everywhere)
    return builder.build()


@rule("sort")
def sort(equation: Equation) -> Rule:
    """`i j, i j -> i j, i j`, j whole; a split of the only dim goes no further."""
    return _ordered(equation, equation.params["dimension"])


@rule("top_k")
def top_k(equation: Equation) -> Rule:
    """`i j -> i j, i j`, j whole: XLA sorts, and keeps the first ones."""
    return _ordered(equation, equation.params.get("axis", -1))


def _ordered(equation: Equation, along: int) -> Rule:
    operands, results = shapes_of(equation)
    along %= len(operands[0])
    if math.prod(operands[0]) == operands[0][along]:
        return whole(operands, results)
    return dimwise(operands, results, {along: "need_replication"}, sizes=operands[0])
