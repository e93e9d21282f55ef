"""Rules of convolutions and poolings, held against their own numbers and against Shardy."""

import jax
import pytest
from jax import lax
from rule_oracles import check_against_shardy, check_by_pieces, normal, only_equation

from autoshard.propagation import Rule, rule_of

NHWC = ("NHWC", "HWIO", "NHWC")


def convolution(**keywords):
    keywords = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC} | keywords
    return lambda x, k: lax.conv_general_dilated(x, k, **keywords)


CONVOLUTIONS = [  # keywords, image, kernel, factors
    ({}, (4, 8, 8, 6), (3, 3, 6, 10), 3),
    ({"window_strides": (2, 2), "padding": "VALID"}, (4, 9, 9, 6), (3, 3, 6, 10), 3),
    ({"dimension_numbers": ("NCHW", "OIHW", "NCHW")}, (4, 6, 8, 8), (10, 6, 3, 3), 3),
    ({"lhs_dilation": (2, 2), "padding": ((1, 2), (1, 2))}, (4, 5, 5, 6), (3, 3, 6, 10), 3),
]
GROUPED = [
    ({"feature_group_count": 4}, (2, 8, 8, 8), (3, 3, 2, 24)),
    ({"feature_group_count": 8}, (2, 8, 8, 8), (3, 3, 1, 16)),
    ({"batch_group_count": 4}, (8, 8, 8, 6), (3, 3, 6, 24)),
]


@pytest.mark.parametrize("keywords, image, kernel, factors", CONVOLUTIONS)
def test_convolution(keywords, image, kernel, factors):
    fn = convolution(**keywords)
    check_by_pieces(fn, normal(*image), normal(*kernel), factors=factors)
    check_against_shardy(fn, normal(*image), normal(*kernel), op="stablehlo.convolution")


@pytest.mark.parametrize("keywords, image, kernel", GROUPED)
def test_grouped_convolution(keywords, image, kernel):
    fn = convolution(**keywords)
    operands = normal(*image), normal(*kernel)
    check_against_shardy(fn, *operands, op="stablehlo.convolution")
    rule = rule_of(only_equation(fn, operands))
    groups = next(iter(keywords.values()))
    (shared,) = [f for f in rule.splittable if rule.sizes[f] == groups and f in rule.results[0][3][:1]]
    assert shared == rule.operands[1][3][0]


def test_gradients_of_a_grouped_convolution():
    fn = convolution(feature_group_count=4)
    image, kernel = normal(2, 8, 8, 8), normal(3, 3, 2, 24)
    of_image = jax.linear_transpose(lambda x: fn(x, kernel), image)
    of_kernel = jax.linear_transpose(lambda k: fn(image, k), kernel)
    for gradient in (of_image, of_kernel):
        check_against_shardy_all(lambda y, gradient=gradient: gradient(y)[0], fn(image, kernel))


def check_against_shardy_all(fn, y):
    """Asserts that the convolution inside `fn` has Shardy's rule, whatever else is there."""
    from autoshard.program import trace

    equations = [e for e in trace(fn, (y,), {}).equations if e.primitive == "conv_general_dilated"]
    assert len(equations) == 1
    (equation,) = equations
    operands = [normal(*x.shape) for x in equation.inputs]
    check_against_shardy(
        lambda *xs: lax.conv_general_dilated_p.bind(*xs, **equation.params), *operands, op="stablehlo.convolution"
    )


X = normal(4, 8, 8, 6)
POOLINGS = [
    lambda x: lax.reduce_window(x, -jax.numpy.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
    lambda x: lax.reduce_window(x, jax.numpy.inf, lax.min, (1, 3, 1, 1), (1, 2, 1, 1), "VALID"),
]


@pytest.mark.parametrize("fn", POOLINGS)
def test_pooling(fn):
    check_by_pieces(fn, X)
    check_against_shardy(fn, X, op="stablehlo.reduce_window")


def test_gradient_of_max_pooling():
    from autoshard.program import trace

    equations = trace(jax.grad(lambda x: POOLINGS[0](x).sum()), (X,), {}).equations
    (scatter,) = [e for e in equations if e.primitive == "select_and_scatter_add"]
    operands = [normal(*x.shape, seed=i) for i, x in enumerate(scatter.inputs)]

    def fn(*xs):
        return jax.vjp(POOLINGS[0], xs[1])[1](xs[0])[0]

    rule = rule_of(scatter)
    assert rule.splittable == {"i", "n"}
    check_by_pieces(fn, *operands, rule=rule, factors=2)


def test_the_oracle_sees_a_missing_halo():
    free = Rule.parse("b h w c -> b h w c", X.shape, X.shape)
    with pytest.raises(AssertionError):
        check_by_pieces(POOLINGS[1], X, rule=free)
