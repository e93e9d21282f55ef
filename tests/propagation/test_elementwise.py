"""Rules of elementwise operations, held against their own numbers and against Shardy."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from rule_oracles import check_against_shardy, check_by_pieces, normal, only_equation

from autoshard.propagation import Rule, rule_of

X, Y = normal(4, 6), normal(4, 6, seed=1)
BIG = abs(X) + 1

UNARY = [
    lax.abs, lax.cbrt, lax.ceil, lax.cos, lax.erf, lax.erf_inv, lax.exp, lax.floor, lax.is_finite, lax.log1p,
    lax.logistic, lax.neg, lax.round, lax.sign, lax.sin, lax.square, lax.tan, lax.tanh,
    lambda x: lax.convert_element_type(x, jnp.int32), lambda x: lax.integer_pow(x, 3),
    lambda x: lax.reduce_precision(x, 5, 5),
    lax.stop_gradient, lambda x: lax.optimization_barrier(x), lambda x: lax.mul(x, 2.0), lambda x: jnp.copy(x),
]  # fmt: skip


@pytest.mark.parametrize("fn", UNARY)
def test_unary(fn):
    if fn is lax.stop_gradient:
        check_by_pieces(fn, X, rule=Rule.parse("i j -> i j", X.shape, X.shape), factors=2)
    else:
        check_by_pieces(fn, X, factors=2)


OTHERS = [  # function, operands
    (lax.add, (X, Y)),
    (lax.atan2, (X, Y)),
    (lax.clamp, (jnp.float32(-0.5), X, jnp.float32(0.5))),
    (lax.clamp, (X - 1, Y, X + 1)),
    (lax.complex, (X, Y)),
    (lax.igamma, (BIG, BIG + 1)),
    (lax.lt, (X, Y)),
    (lax.max, (X, Y)),
    (lax.nextafter, (X, Y)),
    (lax.pow, (BIG, Y)),
    (lax.select_n, (X > 0, X, Y)),
    (lax.select_n, (jnp.bool_(True), X, Y)),
    (lambda x, y: lax.add_p.bind(x, y), (X, Y[:1])),
]


@pytest.mark.parametrize("fn, operands", OTHERS)
def test_several_operands(fn, operands):
    check_by_pieces(fn, *operands, factors=2)


@pytest.mark.parametrize(
    "fn, operands, op",
    [
        (lax.add, (X, Y), "stablehlo.add"),
        (lax.select_n, (X > 0, X, Y), "stablehlo.select"),
        (lax.clamp, (X - 1, Y, X + 1), "stablehlo.clamp"),
        (lambda x: lax.bitcast_convert_type(x, jnp.int16), (X,), "stablehlo.bitcast_convert"),
        (lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,), "stablehlo.bitcast_convert"),
    ],
)
def test_as_in_shardy(fn, operands, op):
    check_against_shardy(fn, *operands, op=op)


def test_bitcast_keeps_the_pieces_of_an_element_together():
    wide = rule_of(only_equation(lambda x: lax.bitcast_convert_type(x, jnp.int16), (X,)))
    assert str(wide) == "i j -> i j k"
    assert wide.need_replication == {"k"}
    check_by_pieces(lambda x: lax.bitcast_convert_type(x, jnp.int16), X, factors=2)


def test_a_barrier_pairs_operands_and_results():
    check_by_pieces(lambda x, y: lax.optimization_barrier((x, y)), X, normal(8), factors=3)


def test_the_oracle_sees_a_wrong_rule():
    transposed = Rule.parse("i j, i j -> j i", (4, 4), (4, 4), (4, 4))
    square = normal(4, 4), normal(4, 4, seed=1)
    with pytest.raises(AssertionError):
        check_by_pieces(lax.add, *square, rule=transposed)
    with pytest.raises(AssertionError):
        check_against_shardy(lax.add, *square, op="stablehlo.add", rule=transposed)


def test_a_constraint_passes_its_layout_through():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rule = rule_of(only_equation(lambda x: lax.with_sharding_constraint(x, sharding), (X,)))
    assert str(rule) == "i j -> i j"
