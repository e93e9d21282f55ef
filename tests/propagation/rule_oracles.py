"""Two oracles for the rule of an operation: its own numbers, computed piece by piece, and Shardy's rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from shardy import rule_of_op

from autoshard.program import Equation, Value, trace
from autoshard.propagation import rule_of
from autoshard.propagation.rule import Dims, Rule


def only_equation(fn: Callable, args: Sequence) -> Equation:
    """The one equation that `fn` is."""
    equations = trace(fn, tuple(args), {}).equations
    assert len(equations) == 1, [equation.primitive for equation in equations]
    return equations[0]


def check_by_pieces(
    fn: Callable,
    *args,
    rule: Rule | None = None,
    combine: Callable = np.add,
    once: Sequence[int] = (),
    factors: int | None = None,
) -> None:
    """Asserts that `fn` on either half of each splittable factor makes the halves, or parts, of the whole result.

    Args:
        fn: one equation, and at home with any sizes of its operands.
        args: its operands, of even sizes.
        rule: by default that of the equation.
        combine: how partial results make the whole one.
        once: operands that the result starts from; partial results but one start from zeros.
        factors: how many splittable factors there have to be.
    """
    if rule is None:
        equation = only_equation(fn, args)
        rule = rule_of(equation)
        operands = [d for x, d in zip(equation.inputs, rule.operands, strict=True) if isinstance(x, Value)]
    else:
        operands = list(rule.operands)
    assert factors is None or len(rule.splittable) == factors, (rule, sorted(rule.splittable))
    whole = jax.tree.leaves(fn(*args))
    assert len(whole) == len(rule.results)
    for factor in rule.splittable:
        parts = []
        for half in (0, 1):
            pieces = [_half(x, dims, factor, half, rule) for x, dims in zip(args, operands, strict=True)]
            reduced = factor in rule.reduction
            pieces = [x * 0 if half and reduced and i in once else x for i, x in enumerate(pieces)]
            parts.append([np.asarray(x) for x in jax.tree.leaves(fn(*pieces))])
        for result, dims, first, second in zip(whole, rule.results, *parts, strict=True):
            if any(factor in dim for dim in dims):
                found = _joined(first, second, dims, factor, rule)
            elif factor in rule.reduction:
                found = combine(first, second)
            else:
                found = first
                np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(found, result, rtol=1e-5, atol=1e-5, err_msg=f"{factor} of {rule}")


def _around(shape: Sequence[int], dims: Dims, factor: str, rule: Rule) -> tuple[list[int], int, int]:
    """`shape` with the factor as a dim of its own, where that dim stands, and the dim it came from."""
    dim = next(d for d, factors in enumerate(dims) if factor in factors)
    before = dims[dim][: dims[dim].index(factor)]
    major = math.prod(rule.sizes[name] for name in before)
    minor = math.prod(rule.sizes[name] for name in dims[dim][len(before) + 1 :])
    size = shape[dim] // (major * minor)
    return [*shape[:dim], major, size, minor, *shape[dim + 1 :]], dim + 1, dim


def _half(x, dims: Dims, factor: str, half: int, rule: Rule):
    if not any(factor in dim for dim in dims):
        return x
    shape, place, dim = _around(x.shape, dims, factor, rule)
    size = shape[place] // 2
    piece = jax.lax.slice_in_dim(x.reshape(shape), half * size, (half + 1) * size, axis=place)
    return piece.reshape([*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1 :]])


def _joined(first, second, dims: Dims, factor: str, rule: Rule) -> np.ndarray:
    shape, place, dim = _around(first.shape, dims, factor, rule)
    joined = np.concatenate([x.reshape(shape) for x in (first, second)], axis=place)
    return joined.reshape([*first.shape[:dim], first.shape[dim] * 2, *first.shape[dim + 1 :]])


def check_against_shardy(fn: Callable, *args, op: str, rule: Rule | None = None) -> None:
    """Asserts that Shardy joins the same dims for the operation `op` that the one equation `fn` lowers to."""
    rule = rule or rule_of(only_equation(fn, args))
    theirs = rule_of_op(fn, args, op)
    operands = len(rule.operands)  # Shardy may have more: padding and initial values are operands there
    blocked = theirs.special.get("blocked_propagation", frozenset())
    assert _joins(rule.operands, rule.results, rule.sizes) == _joins(
        theirs.operands[:operands], theirs.results, theirs.sizes, blocked
    ), f"{rule} {rule.sizes}, Shardy: {theirs}"


def _joins(
    operands: tuple[Dims, ...],
    results: tuple[Dims, ...],
    sizes: dict[str, int],
    blocked: frozenset[str] = frozenset(),
) -> list:
    """What a rule says whatever its names: per factor its places and size; none of size 1, blocked or alone."""
    places: dict[str, list] = {}
    for side, tensors in (("operand", operands), ("result", results)):
        for tensor, dims in enumerate(tensors):
            for dim, factors in enumerate(dims):
                inside = [factor for factor in factors if sizes[factor] > 1]
                for position, factor in enumerate(inside):
                    places.setdefault(factor, []).append((side, tensor, dim, position, len(inside)))
    return sorted(
        (places[factor], sizes[factor])
        for factor in places
        if factor not in blocked and (len(places[factor]) > 1 or places[factor][0][-1] > 1)
    )


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Random numbers, the same each time."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))
