"""Operations that fold dims away, or run along one: a reduced dim leaves partial results where it is split."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import KEPT_RULES, Rule, RuleBuilder, Shape, dimwise
from autoshard.propagation.rules.elementwise import shapes_of


@rule("argmax", "argmin")
def arg_reduction(equation: Equation) -> Rule:
    """`i j -> i`, reduction j: devices fold (value, index) pairs as they would fold values."""
    operands, results = shapes_of(equation)
    return _reduction(operands, results, tuple(equation.params["axes"]), 1)


@rule("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
def cumulative(equation: Equation) -> Rule:
    """`i j -> i j`, j whole: an element depends on all before it."""
    operands, results = shapes_of(equation)
    return dimwise(operands, results, {equation.params["axis"]: "need_replication"})


@rule("pmax", "pmin", "psum")
def over_vmapped_axis(equation: Equation) -> Rule:
    """`i j, k j -> i, k`, each j reduced: over the axis of a `vmap`, which is a dim by now, of each operand alone."""
    operands, results = shapes_of(equation)
    reduced = {axis for axis in equation.params["axes"] if isinstance(axis, int)}
    builder = RuleBuilder(operands, results)
    for tensor, shape in enumerate(operands):
        to = 0
        for dim, size in enumerate(shape):
            if dim in reduced:
                builder.factor(size, [(tensor, dim)], [], "reduction")
            else:
                builder.factor(size, [(tensor, dim)], [(tensor, to)])
                to += 1
    return builder.build()


@rule("reduce")
def reduce(equation: Equation) -> Rule:
    """`i j, i j, ,  -> i, i`, reduction j: arrays first, then as many scalars to start from."""
    operands, results = shapes_of(equation)
    return _reduction(operands, results, tuple(equation.params["dimensions"]), len(results))


@rule("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor")
def reduction(equation: Equation) -> Rule:
    """`i j -> i`, reduction j."""
    operands, results = shapes_of(equation)
    return _reduction(operands, results, tuple(equation.params["axes"]), 1)


@lru_cache(maxsize=KEPT_RULES)
def _reduction(operands: tuple[Shape, ...], results: tuple[Shape, ...], reduced: Iterable[int], arrays: int) -> Rule:
    """The first `arrays` operands lose the `reduced` dims; the result keeps the others, in order."""
    builder = RuleBuilder(operands, results)
    to = 0
    for dim, size in enumerate(operands[0]):
        sources = [(tensor, dim) for tensor in range(arrays)]
        if dim in reduced:
            builder.factor(size, sources, [], "reduction")
        else:
            builder.factor(size, sources, [(tensor, to) for tensor in range(len(results))])
            to += 1
    return builder.build()
