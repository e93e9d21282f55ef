"""The equations that `trace` puts between the body of a loop or branch and its surroundings (see program.py)."""

from __future__ import annotations

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, dimwise
from autoshard.propagation.rules.elementwise import shapes_of


@rule("branch_const", "branch_join", "scan_carry", "scan_const")
def identity(equation: Equation) -> Rule:
    """`i j, i j -> i j, i j`: all are one value, at different times or in different branches."""
    return dimwise(*shapes_of(equation))


@rule("idle")
def idle(equation: Equation) -> Rule:
    """`-> `: a branch for another platform computes nothing."""
    return RuleBuilder([], shapes_of(equation)[1]).build()


@rule("scan_slice")
def scan_slice(equation: Equation) -> Rule:
    """`t i -> i`, t whole: one step after the other runs on all devices."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    builder.factor(operands[0][0], [(0, 0)], [], "need_replication")
    for dim, size in enumerate(results[0]):
        builder.factor(size, [(0, dim + 1)], [(0, dim)])
    return builder.build()


@rule("scan_stack")
def scan_stack(equation: Equation) -> Rule:
    """`i -> t i`, t whole."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    builder.factor(results[0][0], [], [(0, 0)], "need_replication")
    for dim, size in enumerate(operands[0]):
        builder.factor(size, [(0, dim)], [(0, dim + 1)])
    return builder.build()
