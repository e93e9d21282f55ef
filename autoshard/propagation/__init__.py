"""Sharding rules of equations, and the spread of layouts through a program by them."""

from autoshard.propagation import rules  # registers every rule
from autoshard.propagation.propagate import AxisOrigin, Layouts, PropagatedValue, Propagation, propagate_layouts
from autoshard.propagation.registry import UnknownPrimitiveWarning, register_rule, rule_of, rules_for
from autoshard.propagation.rule import Rule

__all__ = [
    "AxisOrigin",
    "Layouts",
    "PropagatedValue",
    "Propagation",
    "Rule",
    "UnknownPrimitiveWarning",
    "propagate_layouts",
    "register_rule",
    "rule_of",
    "rules",
    "rules_for",
]
