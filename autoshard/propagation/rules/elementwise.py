"""Operations that compute each element on its own: every dim is a factor that passes from operands to results."""

from __future__ import annotations

from functools import lru_cache

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, Shape, dimwise


def shapes_of(equation: Equation) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """The shapes of the operands and of the results."""
    return tuple(value.shape for value in equation.inputs), tuple(value.shape for value in equation.outputs)


PRIMITIVES = (
    "abs",
    "acos",
    "acosh",
    "add",
    "add_any",
    "and",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bessel_i0e",
    "bessel_i1e",
    "cbrt",
    "ceil",
    "clamp",
    "clz",
    "complex",
    "conj",
    "convert_element_type",
    "copy",
    "cos",
    "cosh",
    "digamma",
    "div",
    "eq",
    "eq_to",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "ge",
    "gt",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "imag",
    "integer_pow",
    "is_finite",
    "layout_constraint",
    "le",
    "le_to",
    "lgamma",
    "log",
    "log1p",
    "log2",
    "logistic",
    "lt",
    "lt_to",
    "max",
    "min",
    "mul",
    "mulhi",
    "name",
    "ne",
    "neg",
    "nextafter",
    "not",
    "one_minus_square",
    "or",
    "polygamma",
    "population_count",
    "pow",
    "pvary",
    "real",
    "reduce_precision",
    "regularized_incomplete_beta",
    "rem",
    "reshard",
    "round",
    "rsqrt",
    "select_n",
    "sharding_constraint",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
    "tan",
    "tanh",
    "xor",
    "zeros_like",
    "zeta",
)

_elementwise = lru_cache(maxsize=4096)(dimwise)


@rule(*PRIMITIVES)
def elementwise(equation: Equation) -> Rule:
    """`i j, i j -> i j`; a scalar operand (a literal, a predicate, a bound) goes with any split."""
    return _elementwise(*shapes_of(equation))


@rule("bitcast_convert_type")
def bitcast_convert_type(equation: Equation) -> Rule:
    """`i -> i`; a wider type shows as one more dim at the end, whose pieces are one element: it stays whole."""
    (operand,), (result,) = shapes_of(equation)
    builder = RuleBuilder([operand], [result])
    shared = min(len(operand), len(result))
    for dim in range(shared):
        builder.factor(result[dim], [(0, dim)], [(0, dim)])
    for dim in range(shared, len(operand)):
        builder.factor(operand[dim], [(0, dim)], [], "need_replication")
    for dim in range(shared, len(result)):
        builder.factor(result[dim], [], [(0, dim)], "need_replication")
    return builder.build()


@rule("device_put", "optimization_barrier")
def paired(equation: Equation) -> Rule:
    """`i j, k -> i j, k`: each operand passes to the result of its own number."""
    return _paired(shapes_of(equation)[0])


@lru_cache(maxsize=4096)
def _paired(shapes: tuple[Shape, ...]) -> Rule:
    builder = RuleBuilder(shapes, shapes)
    for tensor, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            builder.factor(size, [(tensor, dim)], [(tensor, dim)])
    return builder.build()
