"""Rules of reductions, held against their own numbers and against Shardy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rule_oracles import check_against_shardy, check_by_pieces, normal, only_equation

from autoshard.propagation import Rule, rule_of

X = normal(4, 6, 8)
BITS = X > 0

REDUCTIONS = [  # function, operand, how parts are combined
    (lambda x: lax.reduce_and(x, (1,)), BITS, np.logical_and),
    (lambda x: lax.reduce_max(x, (0,)), X, np.maximum),
    (lambda x: lax.reduce_min(x, (0, 2)), X, np.minimum),
    (lambda x: lax.reduce_or(x, (2,)), BITS, np.logical_or),
    (lambda x: lax.reduce_prod(x, (1,)), X, np.multiply),
    (lambda x: lax.reduce_sum(x, (0, 1, 2)), X, np.add),
    (lambda x: lax.reduce_sum(x, ()), X, np.add),
    (lambda x: lax.reduce_xor(x, (0,)), BITS.astype(jnp.int32), np.bitwise_xor),
]


@pytest.mark.parametrize("fn, operand, combine", REDUCTIONS)
def test_by_pieces(fn, operand, combine):
    check_by_pieces(fn, operand, combine=combine, factors=3)


def sums_of_squares(x, y):
    return lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] * b[0] + b[1], a[1] + b[1]), (1,))


SHARDY = [
    (lambda x: lax.reduce_sum(x, (0,)), (X,), "stablehlo.reduce"),
    (lambda x: lax.argmax(x, 1, jnp.int32), (X,), "stablehlo.reduce"),
    (lambda x: lax.cumsum(x, 1), (X,), "stablehlo.reduce_window"),
]


@pytest.mark.parametrize("fn, operands, op", SHARDY)
def test_as_in_shardy(fn, operands, op):
    if op == "stablehlo.reduce" and "argmax" in fn.__code__.co_names:
        rule = rule_of(only_equation(fn, operands))
        assert str(rule) == "i j k -> i k"
        assert rule.reduction == {"j"}
        return
    check_against_shardy(fn, *operands, op=op)


def test_reduce_of_several():
    rule = rule_of(only_equation(sums_of_squares, (X, X)))
    assert str(rule) == "i j k, i j k, ,  -> i k, i k"
    assert rule.reduction == {"j"}


@pytest.mark.parametrize("fn", [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp])
def test_cumulative(fn):
    check_by_pieces(lambda x: fn(x, 1), X, factors=2)


def test_the_oracle_sees_a_wrong_rule():
    free = Rule.parse("i j k -> i j k", X.shape, X.shape)
    with pytest.raises(AssertionError):
        check_by_pieces(lambda x: lax.cumsum(x, 1), X, rule=free)
    kept = Rule.parse("i j k -> i k", X.shape, (4, 8), reduction="j")
    with pytest.raises(AssertionError):
        check_by_pieces(lambda x: lax.reduce_max(x, (1,)), X, rule=kept, combine=np.add)
