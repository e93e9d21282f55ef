"""Operations that leave the device: the host gets whole arrays, and sends whole arrays back."""

from __future__ import annotations

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, dimwise, whole
from autoshard.propagation.rules.elementwise import shapes_of


@rule("debug_callback", "debug_print", "io_callback", "pure_callback")
def callback(equation: Equation) -> Rule:
    """`i j -> k`, all whole."""
    return whole(*shapes_of(equation))


@rule("inspect_sharding")
def inspection(equation: Equation) -> Rule:
    """`i j ->`: the host is told how an array lies, and gets nothing of it."""
    operands, results = shapes_of(equation)
    return dimwise(operands, results, sizes=operands[0])
