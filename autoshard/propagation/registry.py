"""Equations in, their sharding rules out; and where rules are registered.

A rule function takes an equation and returns its `Rule`; writing it under `@rule("primitive", ...)` registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from autoshard.errors import ArgumentError, RuleError, warn
from autoshard.errors.kinds import checks_kinds
from autoshard.jaxprs import JaxprEqn, call_name
from autoshard.program import Equation
from autoshard.propagation.rule import KEPT_RULES, Rule, Shape, names_of, whole

_RULES: dict[str, Callable[[Equation], Rule]] = {}
_NAMED = frozenset({"ffi_call", "pallas_call"})  # one primitive for many things, each with a name of its own


class UnknownPrimitiveWarning(UserWarning):
    """A primitive has no sharding rule, so its operands and results are kept whole on every device."""


def rule(*primitives: str) -> Callable[[Callable[[Equation], Rule]], Callable[[Equation], Rule]]:
    """Registers the decorated function as the rule of these primitives.

    Raises:
        RuleError: one of them has a rule already.
    """

    def register(rule_of_equation: Callable[[Equation], Rule]) -> Callable[[Equation], Rule]:
        for primitive in primitives:
            if primitive in _RULES:
                raise RuleError(f"primitive {primitive!r} already has a sharding rule; a second one is a mistake")
            _RULES[primitive] = rule_of_equation
        return rule_of_equation

    return register


def has_rule(equation: Equation | JaxprEqn | str) -> bool:
    """Whether an equation, or a primitive by name, has a sharding rule."""
    if isinstance(equation, str):
        return equation in _RULES
    return _known(equation) is not None


def has_rule_in_jit(equation: JaxprEqn) -> bool:
    """The same under a plain `jax.jit`, where the partitioner sees what is inside an operation."""
    return equation.primitive.name != "operation" and has_rule(equation)


@checks_kinds()
def register_rule(
    primitive: Any,
    notation: str,
    *,
    reduction: str | Iterable[str] = "",
    need_replication: str | Iterable[str] = "",
    permutation: str | Iterable[str] = "",
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Tells autoshard how a primitive of your own may be split.

    Args:
        primitive: a JAX primitive, or its name; for one kernel or one foreign function, its own name after a colon, as
            in ``"pallas_call:my_kernel"`` and ``"ffi_call:my_target"``.
        notation: which dims belong together, as in `jax.experimental.custom_partitioning`.
        reduction: factors whose split leaves partial results, to be summed (or maximised, ...).
        need_replication: factors that have to be whole on every device.
        permutation: factors whose split would make the op itself communicate; they are never split.
        sizes: sizes of factors that occur in compound dims only.

    Raises:
        RuleError: the notation is wrong, or the primitive has a rule already.

    >>> register_rule("fused_mlp", "b i, i j, j k -> b k", reduction="j", need_replication="i")
    """
    keywords: dict[str, Any] = {
        "reduction": names_of(reduction),
        "need_replication": names_of(need_replication),
        "permutation": names_of(permutation),
        "sizes": dict(sizes or {}),
    }

    @lru_cache(maxsize=KEPT_RULES)
    def parsed(shapes: tuple[Shape, ...]) -> Rule:
        return Rule.parse(notation, *shapes, **keywords)

    def rule_of_equation(equation: Equation) -> Rule:
        try:
            return parsed(tuple(tuple(value.shape) for value in (*equation.inputs, *equation.outputs)))
        except RuleError as error:
            raise RuleError(f"the rule registered for {equation}: {error}") from error

    name = getattr(primitive, "name", primitive)
    if not isinstance(name, str):
        raise ArgumentError(f"primitive={primitive!r}; a JAX primitive or its name is needed")
    Rule.check_notation(notation, **keywords)
    rule(name)(rule_of_equation)


def rule_of(equation: Equation) -> Rule:
    """The sharding rule of one equation; an equation whose primitive has no rule is kept whole, with a warning."""
    known = _known(equation)
    if known is None:
        _warn_of_unknown(equation)
        return _kept_whole(equation)
    return known(equation)


def rules_for(program: Any) -> tuple[Rule, ...]:
    """One rule per equation of `program`; each primitive without a rule is warned of once."""
    warned: set[str] = set()
    rules = []
    for equation in program.equations:
        known = _known(equation)
        if known is None and equation.primitive not in warned:
            _warn_of_unknown(equation)
            warned.add(equation.primitive)
        rules.append(_kept_whole(equation) if known is None else known(equation))
    return tuple(rules)


def _known(equation: Equation | JaxprEqn) -> Callable[[Equation], Rule] | None:
    primitive = equation.primitive if isinstance(equation, Equation) else equation.primitive.name
    if primitive in _NAMED and (name := call_name(equation.params)):
        named = _RULES.get(f"{primitive}:{name}")
        if named is not None:
            return named
    return _RULES.get(primitive)


def _kept_whole(equation: Equation) -> Rule:
    return whole([value.shape for value in equation.inputs], [value.shape for value in equation.outputs])


def _warn_of_unknown(equation: Equation) -> None:
    operands, results = len(equation.inputs), len(equation.outputs)
    dims = [f"...{number}" for number in range(1, operands + results + 1)]  # of shapes of any rank
    notation = f"{', '.join(dims[:operands])} -> {', '.join(dims[operands:])}"
    code = f'autoshard.register_rule("{equation.primitive}", "{notation}", need_replication="{" ".join(dims)}"'
    warn(
        f"no sharding rule for primitive {equation.primitive!r} ({equation.source or 'unknown line'}): its operands "
        "and results are kept whole on every device.\nTo let it be split, give the dims that belong together one "
        f"name ('...1' stands for all leading dims), and drop them from need_replication, in\n    {code})",
        UnknownPrimitiveWarning,
    )
