"""Operations that compute each element on its own: every dim is a factor that passes from operands to results."""

from __future__ import annotations

from functools import lru_cache, partial

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import KEPT_RULES, Rule, RuleBuilder, Shape, dimwise


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
    "from_edtype",
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
    "max_contiguous",
    "mesh_cast",
    "min",
    "mul",
    "mulhi",
    "multiple_of",
    "name",
    "ne",
    "neg",
    "nextafter",
    "not",
    "one_minus_square",
    "or",
    "polygamma",
    "polynomial",
    "population_count",
    "pow",
    "real",
    "reciprocal",
    "reduce_precision",
    "regularized_incomplete_beta",
    "relayout",
    "rem",
    "remove_memory_space",
    "round",
    "rsqrt",
    "select_n",
    "shard_alike",
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
    "to_edtype",
    "with_memory_space_constraint",
    "xla_metadata_value",
    "xor",
    "zeros_like",
    "zeta",
)

_elementwise = lru_cache(maxsize=KEPT_RULES)(partial(dimwise, broadcasts=True))


@rule(*PRIMITIVES)
def elementwise(equation: Equation) -> Rule:
    """`i j, i j -> i j`; a scalar operand (a literal, a predicate, a bound) goes with any split."""
    return _elementwise(*shapes_of(equation))


@rule("bitcast", "bitcast_convert_type")
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


@rule("tie")
def tie(equation: Equation) -> Rule:
    """`k, i j -> i j`: the second operand, once the first is there."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    for dim, size in enumerate(operands[0]):
        builder.factor(size, [(0, dim)], [], "need_replication")
    for dim, size in enumerate(operands[1]):
        builder.factor(size, [(1, dim)], [(0, dim)])
    return builder.build()


@rule("device_put", "optimization_barrier", "program_order")
def paired(equation: Equation) -> Rule:
    """`i j, k -> i j, k`: each operand passes to the result of its own number."""
    return _paired(shapes_of(equation)[0])


@lru_cache(maxsize=KEPT_RULES)
def _paired(shapes: tuple[Shape, ...]) -> Rule:
    builder = RuleBuilder(shapes, shapes)
    for tensor, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            builder.factor(size, [(tensor, dim)], [(tensor, dim)])
    return builder.build()
