"""Operations that order elements along a dim, which stays whole."""

from __future__ import annotations

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, dimwise
from autoshard.propagation.rules.elementwise import shapes_of


@rule("approx_top_k")
def approx_top_k(equation: Equation) -> Rule:
    """As `top_k`."""
    return _selection(equation, equation.params["reduction_dimension"])


@rule("sort")
def sort(equation: Equation) -> Rule:
    """`i j, i j -> i j, i j`, j whole."""
    operands, results = shapes_of(equation)
    return dimwise(operands, results, {equation.params["dimension"]: "need_replication"})


@rule("top_k")
def top_k(equation: Equation) -> Rule:
    """`i j -> i k, i k`, j and k whole."""
    return _selection(equation, equation.params.get("axis", -1))


def _selection(equation: Equation, along: int) -> Rule:
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    along %= len(operands[0])
    for dim, size in enumerate(operands[0]):
        everywhere = [(tensor, dim) for tensor in range(len(results))]
        if dim == along:
            builder.factor(size, [(0, dim)], [], "need_replication")
            builder.factor(results[0][dim], [], everywhere, "need_replication")
        else:
            builder.factor(size, [(0, dim)], everywhere)
    return builder.build()
