"""Rules of products, held against their own numbers and against Shardy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rule_oracles import check_against_shardy, check_by_pieces, normal, only_equation

from autoshard.propagation import Rule, rule_of

PRODUCTS = [  # dimension numbers, shapes, factors
    ((((1,), (0,)), ((), ())), (4, 6), (6, 8), 3),
    ((((2,), (1,)), ((0,), (0,))), (2, 4, 6), (2, 6, 8), 4),
    ((((3,), (3,)), ((0, 2), (0, 1))), (2, 4, 6, 8), (2, 6, 2, 8), 5),
    ((((0, 1), (1, 0)), ((), ())), (4, 6, 2), (6, 4, 8), 4),
    ((((), ()), ((), ())), (4,), (6,), 2),
]


@pytest.mark.parametrize("numbers, left, right, factors", PRODUCTS)
def test_dot_general(numbers, left, right, factors):
    def fn(x, y):
        return lax.dot_general(x, y, numbers)

    check_by_pieces(fn, normal(*left), normal(*right), factors=factors)
    check_against_shardy(fn, normal(*left), normal(*right), op="stablehlo.dot_general")


def test_ragged_dot_keeps_groups_whole():
    operands = normal(8, 6), normal(4, 6, 10), jnp.array([2, 3, 0, 3], jnp.int32)
    rule = rule_of(only_equation(lax.ragged_dot, operands))
    assert str(rule) == "i l, j l k, m -> i k"
    assert rule.splittable == {"i", "k", "l"}
    # Rows are no pieces of the same operation: each device counts its own (`lower/on_shards.py`).
    shapes = (8, 6), (4, 6, 10), (4,), (8, 10)
    rows_whole = Rule.parse("i l, j l k, m -> i k", *shapes, reduction="l", need_replication="i j m")
    check_by_pieces(lax.ragged_dot, *operands, rule=rows_whole, factors=2)


def test_the_oracle_sees_a_wrong_product():
    wrong = Rule.parse("i k, k j -> i j", (4, 4), (4, 4), (4, 4), need_replication="k")
    check_by_pieces(jnp.dot, normal(4, 4), normal(4, 4), rule=wrong, factors=2)
    wrong = Rule.parse("i k, k j -> j i", (4, 4), (4, 4), (4, 4), reduction="k")
    with pytest.raises(AssertionError):
        check_by_pieces(jnp.dot, normal(4, 4), normal(4, 4), rule=wrong)
    with pytest.raises(AssertionError):
        check_by_pieces(jnp.dot, normal(4, 4), normal(4, 4), combine=np.maximum)
