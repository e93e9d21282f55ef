"""Operations that leave the device: the host gets whole arrays, and sends whole arrays back."""

from __future__ import annotations

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, whole
from autoshard.propagation.rules.elementwise import shapes_of


@rule("debug_callback", "debug_print", "io_callback", "pure_callback")
def callback(equation: Equation) -> Rule:
    """`i j -> k`, all whole."""
    return whole(*shapes_of(equation))
